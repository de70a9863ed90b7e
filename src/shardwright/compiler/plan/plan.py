"""The plan: a layout for every value and a strategy for every operator, as one frozen value.

A plan is its `Decisions` as people and jobs meet them: printed as tables (`plan.text`), written to a file and read
back for the same graph, applied to that graph at other sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.common.schema import SchemaError, checked, from_json
from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import write_whole
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import MICROBATCHES, Axis, Link, Mesh, Stages, TriedStages
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.device_memory import DeviceMemory, MemoryModel
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware, read_hardware
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates
from shardwright.compiler.plan.pricing.schedule import SCHEDULES
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, Space, casting_shards
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError, UsageError

_MOST_DEVICES = 1 << 24


def refuse_impossible(plan: Decisions) -> None:
    """Raise `PlanError` where a decision is lacking, is no one of this graph, or contradicts another."""
    _refuse_numbers(plan)
    _refuse_incomplete(plan)
    for name, axes in _axes(plan):
        _refuse_axes(plan, name, axes)
    for name, layout in (*plan.leaves.items(), *plan.outputs.items()):
        _refuse_layout(plan, name, layout)
    _refuse_recomputed(plan)
    _refuse_stages(plan)


def _refuse_numbers(plan: Decisions) -> None:
    """Refuse figures that none of the planner's can be: whatever goes through all devices would not end."""
    if plan.mesh.size > _MOST_DEVICES or plan.devices.size != plan.named.size:
        sizes = " and ".join(str(mesh) for mesh in (plan.devices, plan.named))
        raise PlanError(f"the plan has the meshes {sizes[:200]}, which are not of the same devices; plan again")
    figures = {"cost": plan.cost, "bound": plan.bound, "memory": plan.memory}
    figures |= {"per_entry": plan.optimizer.per_entry, "per_parameter_bytes": plan.optimizer.per_parameter_bytes}
    for name, figure in figures.items():
        if figure is not None and not (math.isfinite(figure) and figure >= 0):
            raise PlanError(f"{name} of the plan is {figure}, expected a number from 0 on; plan again")
    for link in (axis.link for axis in (*plan.mesh.axes, *plan.named.axes)):
        if link is not None and not (math.isfinite(link.latency_s) and 0 < link.bandwidth < math.inf):
            raise PlanError(f"the mesh of the plan has a {link}, expected seconds and bytes per second; plan again")


def _refuse_incomplete(plan: Decisions) -> None:
    """Refuse a plan that lacks a decision of its graph, or has one of another."""
    capture = plan.capture
    decided: dict[str, tuple[Collection[str], Collection[str]]] = {
        "strategies": (plan.strategies, {node.name for node in capture.nodes}),
        "leaves": (plan.leaves, {value.name for value in capture.values.values() if value.kind != "result"}),
        "outputs": (plan.outputs, {capture.loss, *capture.aux, *capture.mutations.values()}),
        "values": ({*plan.again, *capture.values}, capture.values),
    }
    for kind, (found, needed) in decided.items():
        if differing := sorted(set(found) ^ set(needed)):
            raise PlanError(f"the {kind} of the plan lack or add {', '.join(differing[:5])}; plan again")
    for node in capture.nodes:
        rule, axes = plan.graph.rules[node.name], plan.strategies[node.name].axes
        if len(axes) != len(rule.factors) or not {i for i, cut in enumerate(axes) if cut} <= set(rule.splittable):
            raise PlanError(f"the plan was made with another rule of {node.op} than {rule}; plan again")
        for at, other in rule.along.items():
            if rule.factors[at].kind != "sum" and not set(axes[at]) <= set(axes[other]):
                here, there = rule.factors[at].name, rule.factors[other].name
                raise PlanError(
                    f"the plan splits {here} of {node.name} over {', '.join(axes[at])}, and {there}, which it is split "
                    f"along with, over {', '.join(axes[other]) or 'nothing'}; plan again"
                )


def _axes(plan: Decisions) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, layout in (*plan.leaves.items(), *plan.outputs.items()):
        yield name, (*(axis for split in layout.dims for axis in split.axes), *layout.partial)
    for name, strategy in plan.strategies.items():
        rule = plan.graph.rules[name]
        cuts = ((axis, rule.shared(at, strategy)) for at, axes in enumerate(strategy.axes) for axis in axes)
        yield name, (*(axis for axis, shared in cuts if axis not in shared), *strategy.partial)


def _refuse_axes(plan: Decisions, name: str, axes: tuple[str, ...]) -> None:
    if unknown := sorted(set(axes) - set(plan.mesh.names)):
        raise PlanError(f"the plan splits over {', '.join(unknown)}, which its mesh ({plan.mesh}) has not; plan again")
    if len(set(axes)) < len(axes):
        raise PlanError(f"the plan splits {name} over an axis more than once ({', '.join(axes)}); plan again")


def _refuse_layout(plan: Decisions, name: str, layout: Layout) -> None:
    shape = plan.capture.values[name].shape
    if len(layout.dims) != len(shape):
        raise PlanError(
            f"the plan has {len(layout.dims)} dims of {name}, which has the shape {list(shape)}; plan again"
        )
    if any(split.unit < 1 or size % split.unit for split, size in zip(layout.dims, shape, strict=True)):
        raise PlanError(f"the plan cuts {name} of the shape {list(shape)} into other units ({layout}); plan again")
    if layout.partial and name in plan.leaves:
        raise PlanError(f"the plan stores {name} as a sum over {', '.join(layout.partial)}; plan again")


def _refuse_recomputed(plan: Decisions) -> None:
    if len(plan.block_of) < sum(len(block.nodes) for block in plan.blocks):
        raise PlanError("the plan computes modules again that lie in one another; plan again")
    if without := sorted(plan.recomputed - {block.name for block in plan.blocks}):
        raise PlanError(f"the plan computes {', '.join(without[:5])} again, of which nothing is kept; plan again")


def _refuse_stages(plan: Decisions) -> None:
    stages = plan.stages
    if stages is None:
        return
    unknown = sorted(set(stages.of) - {node.name for node in plan.capture.nodes})
    if unknown or not set(stages.of.values()) <= set(range(stages.total)):
        raise PlanError(f"the stages of the plan are not those of its operators ({', '.join(unknown[:5])}); plan again")
    parameters = {value.name: len(value.shape) for value in plan.capture.of_kind("parameter")}
    for name, holder in stages.holders.items():
        if name not in parameters or (holder is not None and not (parameters[name] and 0 <= holder < stages.count)):
            raise PlanError(f"the plan has {name} held by stage {holder} of {stages.count}; plan again")
    if stages.schedule not in SCHEDULES or stages.each < 1:
        raise PlanError(f"the plan has the schedule {stages.schedule!r}, which this release does not know; plan again")
    if stages.microbatches != plan.mesh.sizes.get(MICROBATCHES, 1):
        raise PlanError(f"the plan has {stages.microbatches} microbatches, and its mesh is {plan.mesh}; plan again")


FORMAT = 1


@dataclass(frozen=True)
class Plan(Decisions):
    """The decisions of a plan with their forms: tables, explanations, JSON, and the same plan for other sizes."""

    def __str__(self) -> str:
        from shardwright.compiler.plan.text import plan_text  # loaded where a plan is shown

        return plan_text(self)

    @cached_property
    def held(self) -> DeviceMemory:
        """The bytes that each device holds, by kind."""
        return self.memory_model.held(self, self.optimizer)

    @cached_property
    def memory_model(self) -> MemoryModel:
        """The memory of each device under these decisions, whichever modules are recomputed."""
        return MemoryModel(self)

    _of_any_recomputed = (*Decisions._of_any_recomputed, "memory_model")

    def explain(self, name: str, hardware: Hardware | str | None = None) -> str:
        """Explain what the plan does with a module, an operator or a parameter, what that costs, and why.

        Args:
            name: as ``model.named_modules()`` and ``model.named_parameters()`` have it, or of an operator, as
                ``print(plan)`` shows it.
            hardware: whose seconds; by default those of what the plan was priced with, which tell the truth about why.

        Raises:
            UsageError: where nothing has that name, with the names that are near; where the plan has pipeline stages.
        """
        if self.stages is not None:
            raise UsageError(
                f"this plan has {self.stages.total} pipeline stages: save it, and type shardwright plan FILE.py:build "
                f"--load plan.json --explain {name}"
            )
        from shardwright.compiler.plan.explain import Explainer  # searches for alternatives, and loads the searches

        return Explainer(self, read_hardware(hardware or self.hardware or "cpu")).answer(name)

    def diff(self, other: Plan) -> str:
        """Return the differences to another plan of the same graph, equal layers once.

        Raises:
            PlanError: where it is a plan of another graph.
        """
        from shardwright.compiler.plan.text import difference

        _refuse_other_graph(_fingerprint(other.capture), _fingerprint(self.capture))
        return difference(self, other)

    def for_capture(self, capture: Capture) -> Plan:
        """Return the decisions for the graph with other sizes or dtypes, such as a last batch that is smaller.

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
            "stages": self.stages and asdict(self.stages),
            "considered": list(self.considered),
            "tried": [asdict(each) for each in self.tried],
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
    def from_json(text: str | bytes, graph: RuledGraph) -> Plan:
        """Read a plan for this graph.

        Raises:
            PlanError: where the text is no plan, or was made for another graph; says what differs.
        """
        document = _read(text)
        _refuse_other_graph(asdict(document.graph), _fingerprint(graph.capture))
        try:
            plan = Plan(
                graph,
                _mesh_from_json(document.mesh),
                _mesh_from_json(document.named_mesh),
                document.mode,
                document.search,
                document.strategies,
                {name: _layout_from_json(layout) for name, layout in document.leaves.items()},
                {name: _layout_from_json(layout) for name, layout in document.outputs.items()},
                document.cost,
                document.bound,
                document.optimizer,
                document.memory,
                document.again,
                document.considered,
                _hardware_from_json(document.hardware),
                document.recomputed,
                document.stages,
                document.tried,
            )
        except UsageError as error:
            raise PlanError(f"this is not a plan as Plan.to_json writes it: {error}") from None
        refuse_impossible(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanError: where it cannot be written.
        """
        try:
            write_whole(Path(path), lambda draft: draft.write_text(self.to_json() + "\n"))
        except OSError as error:
            raise PlanError(f"cannot write the plan {in_words(error, path)}") from error

    @staticmethod
    def load(path: str | Path, graph: RuledGraph) -> Plan:
        """Read a plan from a file; raises as `from_json` does."""
        try:
            return Plan.from_json(Path(path).read_bytes(), graph)
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def plan_of(space: Space, request: PlanRequest, choice: Choice) -> Plan:
    """Return the plan of a choice of a space."""
    return Plan(
        space.graph,
        space.mesh,
        request.mesh,
        request.mode,
        request.searched or "none",
        casting_shards(space.graph, space.mesh, choice.strategies, choice.leaves),
        choice.leaves,
        space.outputs,
        choice.cost,
        choice.bound,
        request.optimizer,
        request.memory,
        choice.again,
        hardware=request.hardware,
        recomputed=choice.recomputed,
    )


_Axis = tuple[str, int] | tuple[str, int, float, float]


@dataclass(frozen=True)
class _LayoutInFile:
    dims: tuple[tuple[tuple[str, ...], int], ...]
    partial: tuple[str, ...]


@dataclass(frozen=True)
class _Graph:
    """The graph that a plan was made for; see `_fingerprint`."""

    values: list[str]
    operators: list[str]


@dataclass(frozen=True)
class _Document:
    """The JSON that `Plan.to_json` writes; plans of earlier releases lack what has a default."""

    format: int
    mode: str
    search: str
    mesh: tuple[_Axis, ...]
    named_mesh: tuple[_Axis, ...]
    graph: _Graph
    strategies: dict[str, Strategy]
    leaves: dict[str, _LayoutInFile]
    outputs: dict[str, _LayoutInFile]
    cost: float | None = None
    bound: float | None = None
    optimizer: OptimizerStates = ADAMW
    memory: int | None = None
    again: frozenset[str] = frozenset()
    considered: tuple[str, ...] = ()
    hardware: dict[str, Any] | None = None
    recomputed: frozenset[str] = frozenset()
    stages: Stages | None = None
    tried: tuple[TriedStages, ...] = ()


def _read(text: str | bytes) -> _Document:
    try:
        found = from_json(text, dict[str, Any])
        if isinstance(number := found.get("format"), int) and number != FORMAT:
            raise PlanError(f"the plan has format {number}, this release reads {FORMAT}; plan again")
        return checked(found, _Document)
    except SchemaError as error:
        raise PlanError(f"this is not a plan as Plan.to_json writes it: {error}; plan again") from None


def _fingerprint(capture: Capture) -> dict[str, list[str]]:
    """Return the graph that a plan depends on, as lines that can be compared."""
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


def _mesh_to_json(mesh: Mesh) -> list[list[Any]]:
    """Every axis as name, size and, where its link is known, latency and bandwidth."""
    return [[a.name, a.size, *([a.link.latency_s, a.link.bandwidth] if a.link else [])] for a in mesh.axes]


def _mesh_from_json(axes: tuple[_Axis, ...]) -> Mesh:
    return Mesh(tuple(Axis(name, size, Link(*link) if link else None) for name, size, *link in axes))


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {"dims": [[list(dim.axes), dim.unit] for dim in layout.dims], "partial": list(layout.partial)}


def _layout_from_json(layout: _LayoutInFile) -> Layout:
    return Layout(tuple(Split(axes, unit) for axes, unit in layout.dims), layout.partial)


def _hardware_from_json(document: dict[str, Any] | None) -> Hardware | None:
    """Return what the plan was priced with; plans of earlier releases do not say."""
    return None if document is None else Hardware.from_json(json.dumps(document), "the hardware of the plan")
