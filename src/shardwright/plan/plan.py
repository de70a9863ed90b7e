"""The plan: a layout for every value and a strategy for every operator, as one frozen value.

A plan is its decisions (`decided/decisions.py`) as people and jobs meet them: printed as tables (`explain.py`), written
to a file and read back for the same graph, taken over for that graph at other sizes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.errors import PlanError, UsageError
from shardwright.graph.ir import Capture
from shardwright.mesh.layout import Layout, Split
from shardwright.mesh.mesh import Axis, Link, Mesh
from shardwright.plan.decided.decisions import Decisions
from shardwright.plan.decided.difference import difference
from shardwright.plan.decided.holding import Held, Memory
from shardwright.plan.explain import explain
from shardwright.plan.pricing.hardware import Hardware, read_hardware
from shardwright.plan.pricing.optimizers import ADAMW, OptimizerStates
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.why import Why
from shardwright.rules.notation import Strategy
from shardwright.whole_file import write_whole

FORMAT = 1


@dataclass(frozen=True)
class Plan(Decisions):
    """Who computes what; prints itself, goes to a file as JSON, and fits other sizes."""

    def __str__(self) -> str:
        return explain(self)

    @cached_property
    def held(self) -> Held:
        """The bytes that each device holds, by kind."""
        return self.holding.held(self, self.optimizer)

    @cached_property
    def holding(self) -> Memory:
        """What each device holds under these decisions, whichever modules are computed again."""
        return Memory(self)

    _of_any_recomputed = (*Decisions._of_any_recomputed, "holding")

    def explain(self, name: str, hardware: Hardware | str | None = None) -> str:
        """What the plan does with a module, an operator or a parameter, what that costs, and why it is so.

        Args:
            name: as ``model.named_modules()`` and ``model.named_parameters()`` have it, or of an operator, as
                ``print(plan)`` shows it.
            hardware: whose seconds; by default those of what the plan was priced with, which tell the truth about why.

        Raises:
            UsageError: where nothing has that name, with the names that are near.
        """
        return Why(self, read_hardware(hardware or self.hardware or "cpu")).answer(name)

    def diff(self, other: Plan) -> str:
        """What another plan of the same graph does otherwise, equal layers once.

        Raises:
            PlanError: where it is a plan of another graph.
        """
        _refuse_other_graph(_fingerprint(other.capture), _fingerprint(self.capture))
        return difference(self, other)

    def for_capture(self, capture: Capture) -> Plan:
        """The same decisions for the same graph with other sizes or dtypes, such as a last batch that is smaller.

        Raises:
            PlanError: where the graph has other operators, or a strategy of this plan is impossible at those sizes.
        """
        graph = RuledGraph.of(capture)
        theirs, ours = (_fingerprint(of)["operators"] for of in (self.capture, capture))
        _refuse_other_graph({"operators": theirs}, {"operators": ours})
        for node in capture.nodes:
            before, after = self.graph.rules[node.name], graph.rules[node.name]
            allowed = {after.factors[i].name for i in after.splittable}
            used = {f.name for f, axes in zip(before.factors, self.strategies[node.name].axes, strict=True) if axes}
            if [f.name for f in before.factors] != [f.name for f in after.factors] or not used <= allowed:
                raise PlanError(f"the strategy of {node.name} is impossible at the sizes {after}")
        return replace(self, graph=graph, cost=None, bound=None)

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` reads it back for the same graph."""
        document = {
            "format": FORMAT,
            "mode": self.mode,
            "search": self.search,
            "cost": self.cost,
            "bound": self.bound,
            "optimizer": asdict(self.optimizer),
            "memory": self.memory,
            "again": sorted(self.again),
            "recomputed": sorted(self.recomputed),
            "considered": list(self.considered),
            "hardware": self.hardware and json.loads(self.hardware.to_json()),
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
                document.get("cost"),
                document.get("bound"),
                OptimizerStates(**document["optimizer"]) if "optimizer" in document else ADAMW,
                document.get("memory"),
                frozenset(document.get("again", ())),
                tuple(document.get("considered", ())),
                _hardware_from_json(document.get("hardware")),
                frozenset(document.get("recomputed", ())),
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
    if len(plan.block_of) < sum(len(block.nodes) for block in plan.blocks):
        raise PlanError("the plan computes modules again that lie in one another; plan again")
    if without := sorted(plan.recomputed - {block.name for block in plan.blocks}):
        raise PlanError(f"the plan computes {', '.join(without[:5])} again, of which nothing is kept; plan again")
    for node in plan.capture.nodes:
        rule, axes = plan.graph.rules[node.name], plan.strategies[node.name].axes
        if len(axes) != len(rule.factors) or not {i for i, cut in enumerate(axes) if cut} <= set(rule.splittable):
            raise PlanError(f"the plan was made with another rule of {node.op} than {rule}; plan again")
    layouts = [*plan.leaves.values(), *plan.outputs.values()]
    splits = [split.axes for layout in layouts for split in layout.dims] + [layout.partial for layout in layouts]
    splits += [axes for strategy in plan.strategies.values() for axes in (*strategy.axes, strategy.partial)]
    unknown = sorted({axis for axes in splits for axis in axes} - set(plan.mesh.names))
    if unknown:
        raise PlanError(f"the plan splits over {', '.join(unknown)}, which its mesh ({plan.mesh}) has not; plan again")


def _mesh_to_json(mesh: Mesh) -> list[list[Any]]:
    """Every axis as name, size and, where its link is known, latency and bandwidth."""
    return [[a.name, a.size, *([a.link.latency_s, a.link.bandwidth] if a.link else [])] for a in mesh.axes]


def _mesh_from_json(axes: list[list[Any]]) -> Mesh:
    return Mesh(tuple(Axis(name, size, Link(*link) if link else None) for name, size, *link in axes))


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {"dims": [[list(dim.axes), dim.unit] for dim in layout.dims], "partial": list(layout.partial)}


def _layout_from_json(document: dict[str, Any]) -> Layout:
    return Layout(tuple(Split(tuple(axes), unit) for axes, unit in document["dims"]), tuple(document["partial"]))


def _hardware_from_json(document: dict[str, Any] | None) -> Hardware | None:
    """What the plan was priced with; plans of earlier releases do not say."""
    try:
        return None if document is None else Hardware.from_json(json.dumps(document), "the hardware of the plan")
    except UsageError as error:
        raise PlanError(str(error)) from None
