"""The plan: a layout for every value and a strategy for every operator, as one frozen value.

A plan stores decisions alone: the strategy of every operator and the layouts of the leaves (parameters, buffers,
inputs, constants) and of the outputs. Everything else follows from them: `Plan.layout` of a result from the rule of
its operator, and `transfers`, the redistributions, from the layouts on both ends of an edge. The costs that a search
minimises and the program that runs are both derived from `transfers`, so that nothing is priced that is not run,
and nothing run that is not priced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.errors import PlanError
from shardwright.graph.ir import Capture, Node
from shardwright.mesh.layout import Layout, Split
from shardwright.mesh.mesh import Axis, Link, Mesh
from shardwright.mesh.redistribute import Collective, Step, redistribute
from shardwright.plan.ruled import RuledGraph
from shardwright.rules.notation import Strategy
from shardwright.whole_file import write_whole

FORMAT = 1


@dataclass(frozen=True)
class Target:
    """What a consumer needs of a value: a layout, and the axes over which the gradient that it returns is partial."""

    layout: Layout
    gradient_partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """A value on its way to one target, shared by every consumer with that target.

    ``consumers`` are (node name, operand index), or ("", i) for the i-th output of the graph. ``gradient`` says whether
    one comes back: not to a value that has none, nor from an output other than the loss.
    """

    value: str
    target: Target
    steps: tuple[Step, ...]
    consumers: tuple[tuple[str, int], ...]
    gradient: bool


@dataclass(frozen=True)
class Priced:
    """One collective of the plan: where it comes from, in which direction of the step, and what it moves."""

    cause: str  # the label of the value or the name of the operator
    scope: str
    direction: str  # "forward" or "backward"
    collective: Collective
    bytes: float  # sent by each device


@dataclass(frozen=True)
class Plan:
    """Who computes what. ``mesh`` is the atomic mesh; ``named`` the mesh as the user wrote it.

    ``leaves`` and ``outputs`` map value names to layouts; ``strategies`` maps node names to strategies. An output
    appears in ``outputs`` with the layout in which it leaves the program (the loss, auxiliary outputs, new buffers).
    """

    graph: RuledGraph = field(repr=False)
    mesh: Mesh
    named: Mesh
    mode: str
    search: str
    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]

    @property
    def capture(self) -> Capture:
        return self.graph.capture

    def __str__(self) -> str:
        from shardwright.plan.explain import explain  # explain reads plans; a plan only prints by it

        return explain(self)

    def layout(self, value: str) -> Layout:
        """How a value is laid out where it is made (or stored)."""
        if value in self.leaves:
            return self.leaves[value]
        node, index = self.graph.producers[value]
        layout = self.graph.rules[node.name].result_layout(index, self.strategies[node.name], self.mesh)
        return layout.normalised(self.capture.values[value].shape, self.mesh)

    def batch_rows(self, rank: int, rows: int) -> tuple[int, int]:
        """The rows [start, stop) of a global batch of ``rows`` that ``rank`` is to be given."""
        split = next((self.leaves[v.name].dims[0] for v in self.capture.of_kind("input") if v.shape), Split())
        return split.bounds(rows, self.mesh, self.mesh.coordinates(rank))

    def target(self, node: Node, index: int) -> Target:
        """What operand ``index`` of ``node`` must be before the node can run on local parts."""
        return target_of(self.graph, node, index, self.strategies[node.name], self.mesh)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every edge of the graph, one per value and target, in order of execution; many have no steps.

        Raises:
            PlanError: where no sequence of collectives leads from one layout to the other.
        """
        found: dict[tuple[str, Target], list[tuple[str, int]]] = {}
        for node in self.capture.nodes:
            for index, value in enumerate(node.operands):
                found.setdefault((value, self.target(node, index)), []).append((node.name, index))
        for i, (value, layout) in enumerate(self.outputs.items()):
            found.setdefault((value, Target(layout)), []).append(("", i))
        return tuple(
            Transfer(value, target, self._steps(value, target), tuple(uses), self._gradient(value, uses))
            for (value, target), uses in found.items()
        )

    def _gradient(self, value: str, uses: Sequence[tuple[str, int]]) -> bool:
        differentiated = value == self.capture.loss or any(node for node, _ in uses)
        return differentiated and self.capture.values[value].needs_gradient

    def _steps(self, value: str, target: Target) -> tuple[Step, ...]:
        shape = self.capture.values[value].shape
        return redistribute(self.layout(value), target.layout, target.gradient_partial, shape, self.mesh)

    def collectives(self) -> Iterator[Priced]:
        """Every collective of one step, before the gradients of replicated parameters are joined into buckets."""
        for transfer in self.transfers:
            yield from self._transfer_collectives(transfer)
        for node in self.capture.nodes:
            directions = self.graph.collectives_inside(node, self.strategies[node.name], self.mesh)
            for direction, collectives in zip(("forward", "backward"), directions, strict=True):
                for c in collectives:
                    yield Priced(node.name, node.scope, direction, c, c.sent_bytes(self.mesh))

    def _transfer_collectives(self, transfer: Transfer) -> Iterator[Priced]:
        value = self.capture.values[transfer.value]
        producer = self.graph.producers.get(transfer.value)
        scope = producer[0].scope if producer else ""
        for step in transfer.steps:
            forward, backward = step.collectives(value.shape, value.dtype.itemsize, self.mesh)
            if forward:
                yield Priced(value.label, scope, "forward", forward, forward.sent_bytes(self.mesh))
            if backward and transfer.gradient:
                yield Priced(value.label, scope, "backward", backward, backward.sent_bytes(self.mesh))

    def moved_bytes(self) -> float:
        """Bytes that each device sends in one step, forward, backward and gradients."""
        return sum(priced.bytes for priced in self.collectives())

    def held_bytes(self, kind: str = "parameter") -> int:
        """Bytes of the leaves of one kind that rank 0 holds, which no rank exceeds."""
        total = 0
        for value in self.capture.values.values():
            if value.kind == kind:
                shape = self.leaves[value.name].local_shape(value.shape, self.mesh, 0)
                total += value.dtype.itemsize * _numel(shape)
        return total

    def in_strategy(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """The number of slices per dim of every operand, as users write it in `shard`."""
        rule, strategy = self.graph.rules[node.name], self.strategies[node.name]
        return tuple(rule.operand_layout(i, strategy).slices(self.mesh) for i in range(len(node.operands)))

    def out_strategy(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """The number of slices per dim of every result."""
        rule, strategy = self.graph.rules[node.name], self.strategies[node.name]
        return tuple(rule.result_layout(i, strategy, self.mesh).slices(self.mesh) for i in range(len(node.results)))

    def for_capture(self, capture: Capture) -> Plan:
        """The same decisions for the same graph with other sizes or dtypes, such as a last batch that is smaller.

        Raises:
            PlanError: where the graph has other operators, or a strategy of this plan is impossible at those sizes.
        """
        graph = RuledGraph.of(capture)
        _refuse_other_graph(
            {"operators": _fingerprint(self.capture)["operators"]}, {"operators": _fingerprint(capture)["operators"]}
        )
        for node in capture.nodes:
            before, after = self.graph.rules[node.name], graph.rules[node.name]
            allowed = {after.factors[i].name for i in after.splittable}
            used = {f.name for f, axes in zip(before.factors, self.strategies[node.name].axes, strict=True) if axes}
            if [f.name for f in before.factors] != [f.name for f in after.factors] or not used <= allowed:
                raise PlanError(f"the strategy of {node.name} is impossible at the sizes {after}")
        return replace(self, graph=graph)

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` reads it back for the same graph."""
        document = {
            "format": FORMAT,
            "mode": self.mode,
            "search": self.search,
            "named_mesh": _mesh_to_json(self.named),
            "mesh": _mesh_to_json(self.mesh),
            "graph": _fingerprint(self.capture),
            "strategies": {
                name: {"axes": [list(a) for a in strategy.axes], "partial": list(strategy.partial)}
                for name, strategy in self.strategies.items()
            },
            "leaves": {name: _layout_to_json(layout) for name, layout in self.leaves.items()},
            "outputs": {name: _layout_to_json(layout) for name, layout in self.outputs.items()},
        }
        return json.dumps(document, indent=1)

    @staticmethod
    def from_json(text: str, graph: RuledGraph) -> Plan:
        """Read a plan for this graph.

        Raises:
            PlanError: where the text is no plan, or was made for another graph; says what differs.
        """
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise PlanError(f"the plan has format {document['format']}, this release reads {FORMAT}; plan again")
            _refuse_other_graph(document["graph"], _fingerprint(graph.capture))
            plan = Plan(
                graph,
                _mesh_from_json(document["mesh"]),
                _mesh_from_json(document["named_mesh"]),
                document["mode"],
                document["search"],
                {
                    name: Strategy(tuple(tuple(a) for a in s["axes"]), tuple(s["partial"]))
                    for name, s in document["strategies"].items()
                },
                {name: _layout_from_json(layout) for name, layout in document["leaves"].items()},
                {name: _layout_from_json(layout) for name, layout in document["outputs"].items()},
            )
            _refuse_incomplete(plan)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan as Plan.to_json writes it: {error!r}") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanError: where it cannot be written.
        """
        try:
            write_whole(Path(path), lambda draft: draft.write_text(self.to_json() + "\n"))
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}: {error.strerror}") from error

    @staticmethod
    def load(path: str | Path, graph: RuledGraph) -> Plan:
        """Read a plan from a file; raises as `from_json` does."""
        try:
            return Plan.from_json(Path(path).read_text(), graph)
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def target_of(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Target:
    """What operand ``index`` of ``node`` must be under a strategy, units normalised."""
    rule = graph.rules[node.name]
    value = graph.capture.values[node.operands[index]]
    layout = rule.operand_layout(index, strategy).normalised(value.shape, mesh)
    partial = rule.operand_gradient_partial(index, strategy, mesh) if value.needs_gradient else ()
    return Target(layout, partial)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _mesh_to_json(mesh: Mesh) -> list[list[Any]]:
    """Every axis as name, size and, where its link is known, latency and bandwidth."""
    return [[a.name, a.size, *([a.link.latency_s, a.link.bandwidth] if a.link else [])] for a in mesh.axes]


def _mesh_from_json(axes: list[list[Any]]) -> Mesh:
    return Mesh(tuple(Axis(name, size, Link(*link) if link else None) for name, size, *link in axes))


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {"dims": [[list(dim.axes), dim.unit] for dim in layout.dims], "partial": list(layout.partial)}


def _layout_from_json(document: dict[str, Any]) -> Layout:
    return Layout(tuple(Split(tuple(axes), unit) for axes, unit in document["dims"]), tuple(document["partial"]))


def _fingerprint(capture: Capture) -> dict[str, list[str]]:
    """What a plan depends on, in words that can be compared line by line."""
    values = capture.values
    return {
        "values": [f"{v.kind} {v.name} {v.label} {list(v.shape)} {v.dtype}" for v in values.values()],
        "operators": [f"{n.op}({', '.join(n.operands)}) -> {', '.join(n.results)}" for n in capture.nodes],
    }


def _refuse_other_graph(theirs: dict[str, list[str]], ours: dict[str, list[str]]) -> None:
    for kind, mine in ours.items():
        if len(theirs[kind]) != len(mine):
            raise PlanError(f"the plan was made for {len(theirs[kind])} {kind}, the model has {len(mine)}; plan again")
        for planned, actual in zip(theirs[kind], mine, strict=True):
            if planned != actual:
                raise PlanError(f"the plan was made for another model: it has {planned!r}, the model {actual!r}")


def _refuse_incomplete(plan: Plan) -> None:
    """A file that was edited by hand may lack a decision, or name an axis that there is not."""
    decided = {
        "strategies": (set(plan.strategies), {node.name for node in plan.capture.nodes}),
        "leaves": (set(plan.leaves), {v.name for v in plan.capture.values.values() if v.kind != "result"}),
    }
    for kind, (found, needed) in decided.items():
        if found != needed:
            raise PlanError(f"the {kind} of the plan lack or add {', '.join(sorted(found ^ needed)[:5])}; plan again")
    layouts = [*plan.leaves.values(), *plan.outputs.values()]
    splits = [split.axes for layout in layouts for split in layout.dims] + [layout.partial for layout in layouts]
    splits += [axes for strategy in plan.strategies.values() for axes in (*strategy.axes, strategy.partial)]
    unknown = sorted({axis for axes in splits for axis in axes} - set(plan.mesh.names))
    if unknown:
        raise PlanError(f"the plan splits over {', '.join(unknown)}, which its mesh ({plan.mesh}) has not; plan again")
