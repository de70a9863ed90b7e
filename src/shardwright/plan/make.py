"""From a capture and a mesh to a plan: the modes and the searches.

single            one device, the reference
data              the batch is split over every axis, everything else follows it or is replicated
semi-auto, auto   with search="propagation": every operator uses every axis that a factor of it admits; among those
                  choices the fewest bytes. With search="exact": the least seconds over all choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.errors import PlanError, StrategyError, UsageError
from shardwright.graph.ir import Capture, Node, Value
from shardwright.mesh.layout import Layout, Split
from shardwright.mesh.mesh import Mesh
from shardwright.plan.cost import Bytes, Objective, Seconds
from shardwright.plan.data import data_parallel
from shardwright.plan.exact import TooWide
from shardwright.plan.hardware import Hardware
from shardwright.plan.pins import pinned_strategies
from shardwright.plan.plan import Plan, target_of
from shardwright.plan.request import SEARCHES, Inputs, Mode, PlanRequest
from shardwright.plan.ruled import RuledGraph
from shardwright.plan.search import Choice, Space, search
from shardwright.rules.notation import OpRule, Strategy


def make_plan(capture: Capture, request: PlanRequest) -> Plan:
    """Decide the layout of every value and the strategy of every operator.

    Raises:
        UsageError: where the inputs do not fit the batch or the mesh.
        StrategyError: where a pin cannot be fulfilled.
        PlanError: where no plan exists.
    """
    mode, inputs, storage = request.mode, request.inputs, request.storage
    method = "none" if mode in ("single", "data") else request.search or SEARCHES[mode]
    graph = RuledGraph.of(capture)
    given = "whole" if mode == "single" else inputs
    most_axes = MOST_AXES[method]
    while True:
        atoms = request.axes or _planning_mesh(graph, request.mesh, mode, most_axes, inputs)
        leaves = _fixed_leaves(capture, atoms, given, storage, every_rank=mode == "data")
        outputs = _outputs(capture, atoms, leaves)
        try:
            choice = _choice(graph, atoms, method, leaves, outputs, request.hardware)
        except TooWide as error:
            # Fewer axes serve as well, unless what is given needs as many.
            if most_axes == 1 or len(atoms.axes) > most_axes or storage or isinstance(inputs, Mapping):
                raise _no_plan(atoms, error) from None
            most_axes -= 1
            continue
        return Plan(graph, atoms, request.mesh, mode, method, choice.strategies, choice.leaves, outputs)


# Strategies grow with the power of the axes: 216 for a linear layer on three axes, where exactness costs half a minute.
MOST_AXES = {"exact": 2, "propagation": 3, "none": 1}


def _planning_mesh(graph: RuledGraph, mesh: Mesh, mode: Mode, most_axes: int, inputs: Inputs) -> Mesh:
    """The axes that a plan speaks of: as few as serve, unless pins need finer ones.

    Data parallelism takes one axis, which cuts a batch that does not divide as loaders do: ceil-sized parts first;
    unless the slices of the inputs are given, which may need several.
    """
    atoms = mesh.atomic()
    if mode in ("single", "data"):
        return atoms if isinstance(inputs, Mapping) else Mesh.of(ranks=mesh.size).without_ones()
    pinned = [node for node in graph.capture.nodes if node.pin is not None]
    for count in range(most_axes, len(atoms.axes)):
        coarse = mesh.grouped(count)
        try:
            for node in pinned:
                pinned_strategies(node, graph.rules[node.name], coarse)
            return coarse
        except StrategyError:
            continue
    return atoms


def _choice(
    graph: RuledGraph,
    mesh: Mesh,
    method: str,
    leaves: Mapping[str, Sequence[Layout]],
    outputs: Mapping[str, Layout],
    hardware: Hardware,
) -> Choice:
    """What ``method`` chooses on ``mesh``."""
    if method == "none":
        return data_parallel(graph, mesh, leaves, outputs)
    everything = method == "exact"
    strategies = {n.name: _choices(n, graph.rules[n.name], mesh, everything) for n in graph.capture.nodes}
    space = Space(graph, mesh, strategies, _with_parameters(graph, mesh, strategies, leaves), outputs)
    objective: Objective = Seconds(hardware) if everything else Bytes()
    try:
        return search(space, objective)
    except TooWide:
        raise
    except PlanError as error:
        raise _no_plan(mesh, error) from None


def _no_plan(mesh: Mesh, error: PlanError) -> PlanError:
    return PlanError(f"no plan was found on the mesh {mesh}: {error}; try fewer axes, as in mesh='dp=4,tp=2'")


def _fixed_leaves(
    capture: Capture, mesh: Mesh, inputs: Inputs, storage: Mapping[str, Layout], *, every_rank: bool
) -> dict[str, Sequence[Layout]]:
    """The leaves whose layout is given: inputs as asked for, buffers and constants replicated, stored parameters."""
    found: dict[str, Sequence[Layout]] = {}
    for value in capture.values.values():
        if value.kind in ("buffer", "constant"):
            found[value.name] = (Layout.replicated(len(value.shape)),)
        elif value.kind == "input":
            found[value.name] = (_input_layout(value, capture, mesh, inputs, every_rank),)
        elif value.kind == "parameter" and value.name in storage:
            found[value.name] = (storage[value.name],)
    if isinstance(inputs, Mapping):
        labels = [value.label for value in capture.of_kind("input")]
        unknown = sorted(set(inputs) - set(labels))
        if unknown:
            raise UsageError(f"inputs names {unknown}, the batch has {labels}")
    return found


def _input_layout(value: Value, capture: Capture, mesh: Mesh, inputs: Inputs, every_rank: bool) -> Layout:
    ndim = len(value.shape)
    if isinstance(inputs, Mapping):
        if value.label not in inputs:
            return Layout.replicated(ndim)
        return _layout_of_slices(value, tuple(inputs[value.label]), mesh)
    if inputs == "split" and value.shape and value.shape[0] == batch_size(capture):
        return Layout.split(ndim, {0: mesh.names if every_rank else _axes_for(value.shape[0], mesh)})
    return Layout.replicated(ndim)


def batch_size(capture: Capture) -> int:
    """The number of rows of the global batch: the first dim of the first input that has one; 0 without any."""
    return next((value.shape[0] for value in capture.of_kind("input") if value.shape), 0)


def _axes_for(rows: int, mesh: Mesh) -> tuple[str, ...]:
    """The leading axes over which every rank gets at least a row."""
    axes: list[str] = []
    for axis in mesh.names:
        if mesh.extent([*axes, axis]) <= rows:
            axes.append(axis)
    return tuple(axes)


def _layout_of_slices(value: Value, slices: tuple[int, ...], mesh: Mesh) -> Layout:
    if len(slices) != len(value.shape):
        raise UsageError(f"inputs[{value.label!r}] = {slices} needs one number per dim of {value.shape}")
    free = list(mesh.names)
    dims = []
    for number in slices:
        axes: list[str] = []
        while mesh.extent(axes) < number and free:
            axes.append(free.pop(0))
        if mesh.extent(axes) != number:
            raise UsageError(f"inputs[{value.label!r}] = {slices} does not fit the mesh {mesh}")
        dims.append(Split(tuple(axes)))
    return Layout(tuple(dims))


def _outputs(capture: Capture, mesh: Mesh, leaves: Mapping[str, Sequence[Layout]]) -> dict[str, Layout]:
    """How values leave the program: the loss and new buffers whole, of auxiliary outputs a rank's rows of the batch."""
    rows = next((leaves[v.name][0].dims[0] for v in capture.of_kind("input") if v.shape), Split())
    found = {capture.loss: Layout.replicated(0)} if capture.loss else {}
    for name in capture.aux:
        shape = capture.values[name].shape
        by_rows = bool(shape) and shape[0] == batch_size(capture)
        found[name] = Layout((rows if by_rows else Split(), *[Split()] * (len(shape) - 1)) if shape else ())
    for name in capture.mutations.values():
        found[name] = Layout.replicated(len(capture.values[name].shape))
    return found


def _choices(node: Node, rule: OpRule, mesh: Mesh, everything: bool) -> tuple[Strategy, ...]:
    """The strategies that the search may choose for an operator."""
    if node.pin is not None:
        return pinned_strategies(node, rule, mesh)
    partial = not any(factor.kind == "sum" for factor in rule.factors) or not rule.splittable
    found = tuple(rule.strategies(mesh, partial=partial))
    return found if everything else tuple(s for s in found if _uses_every_axis(s, rule, mesh))


def _uses_every_axis(strategy: Strategy, rule: OpRule, mesh: Mesh) -> bool:
    """Whether no axis is left that some factor would admit."""
    for axis in set(mesh.names) - strategy.used:
        for i in rule.splittable:
            if rule.factors[i].size % mesh.extent([*strategy.axes[i], axis]) == 0:
                return False
    return True


def _with_parameters(
    graph: RuledGraph,
    mesh: Mesh,
    strategies: Mapping[str, Sequence[Strategy]],
    fixed: Mapping[str, Sequence[Layout]],
) -> dict[str, Sequence[Layout]]:
    """Parameters may be stored in any layout in which some strategy of a consumer takes them, replicated first."""
    found = dict(fixed)
    for value in graph.capture.of_kind("parameter"):
        if value.name not in found:
            demanded = [
                target_of(graph, use.node, use.index, strategy, mesh).layout.whole()
                for use in graph.uses[value.name]
                for strategy in strategies[use.node.name]
            ]
            found[value.name] = tuple(dict.fromkeys([Layout.replicated(len(value.shape)), *demanded]))
    return found
