"""The choices of a search on one mesh: strategies of operators, layouts of free leaves, and what is given beforehand.

A pin names numbers of slices, a strategy names axes. The factors of the operator, in the order in which its operands
name them, take the leading free axes of the mesh whose sizes multiply to the number of slices: under
``((2, 4), (4, 1))`` on eight devices, rows take the first atom and columns the other two, so that the parts of a row
lie on neighbouring ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from shardwright.common.stages import in_stage
from shardwright.compiler.capture.ir import Capture, Node, Pin, Value
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.graph import RuledGraph, targets_of
from shardwright.compiler.plan.pricing.links import cuts
from shardwright.compiler.plan.pricing.memory import Block, Blocks, local_bytes
from shardwright.compiler.plan.request import Inputs, PlanRequest
from shardwright.compiler.plan.search.choices import Space
from shardwright.compiler.plan.searches import Search
from shardwright.compiler.rules.notation import Dims, OpRule, Strategy
from shardwright.errors import StrategyError, UsageError


def fixed_leaves(
    capture: Capture, mesh: Mesh, inputs: Inputs, storage: Mapping[str, Layout], *, every_rank: bool
) -> dict[str, Sequence[Layout]]:
    """The leaves whose layout is given: inputs as asked for, buffers and constants replicated, stored parameters."""
    found: dict[str, Sequence[Layout]] = {}
    alone: dict[Layout, Sequence[Layout]] = {}  # equal ones are one object
    for value in capture.values.values():
        if value.kind in ("buffer", "constant"):
            layout = Layout.replicated(len(value.shape))
        elif value.kind == "input":
            layout = _input_layout(value, capture, mesh, inputs, every_rank)
        elif value.kind == "parameter" and value.name in storage:
            layout = storage[value.name]
        else:
            continue
        found[value.name] = alone.setdefault(layout, (layout,))
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
    if inputs == "split" and value.shape and value.shape[0] == capture.rows:
        return Layout.split(ndim, {0: mesh.names if every_rank else _axes_for(value.shape[0], mesh)})
    return Layout.replicated(ndim)


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


def output_layouts(capture: Capture, mesh: Mesh, leaves: Mapping[str, Sequence[Layout]]) -> dict[str, Layout]:
    """Return how values leave the program: loss and new buffers whole, of auxiliary outputs a rank's rows."""
    rows = next((leaves[v.name][0].dims[0] for v in capture.of_kind("input") if v.shape), Split())
    found = {capture.loss: Layout.replicated(0)} if capture.loss else {}
    for name in capture.aux:
        shape = capture.values[name].shape
        by_rows = name in capture.returned and bool(shape) and shape[0] == capture.rows
        found[name] = Layout((rows if by_rows else Split(), *[Split()] * (len(shape) - 1)) if shape else ())
    for name in capture.mutations.values():
        found[name] = Layout.replicated(len(capture.values[name].shape))
    return found


def pinned_strategies(node: Node, rule: OpRule, mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategies of ``node`` that fulfil its pin: one, unless the pin leaves operands open.

    Raises:
        StrategyError: where none does; names the operator, the source line and the valid choices.
    """
    pin = node.pin
    assert pin is not None
    try:
        slices = _slices_of_factors(pin, rule)
        axes = _axes_of_factors(slices, rule, mesh)
    except StrategyError as error:
        raise StrategyError(
            f"the strategy {_text(pin)} of {node.op} cannot be: {error}\n"
            f"  operator {node.name} in {node.scope or 'the loss function'}, {node.source}\n"
            f"  {pin}\n"
            f"  rule: {rule}\n"
            f"  valid on {mesh.size} devices: {_choices(rule, mesh)}"
        ) from None
    decided = {name: axes[name] for name in slices}
    if all(strategy is not None for strategy in pin.operands):
        return (rule.strategy(decided),)
    positions = {factor.name: i for i, factor in enumerate(rule.factors)}
    return tuple(
        strategy
        for strategy in rule.strategies(mesh, partial=False)
        if all(strategy.axes[positions[name]] == cut for name, cut in decided.items())
    )


def _slices_of_factors(pin: Pin, rule: OpRule) -> dict[str, int]:
    """Factor name -> slices, from every tensor that the pin speaks of."""
    found: dict[str, int] = {}
    allowed = {rule.factors[i].name for i in rule.splittable}
    tensors = [*zip(pin.operands, rule.operands, strict=True), *zip(pin.results, rule.results, strict=True)]
    for slices, dims in tensors:
        if slices is None:
            continue
        if len(slices) != len(dims):
            raise StrategyError(f"{slices} has {len(slices)} numbers for a tensor of {len(dims)} dims")
        for at, (number, dim) in enumerate(zip(slices, dims, strict=True)):
            name = dim[0] if dim else ""
            if number > 1 and name not in allowed:
                raise StrategyError(f"dim {at} of {slices} may not be split" + (f" (factor {name})" if name else ""))
            if name and found.setdefault(name, number) != number:
                raise StrategyError(f"factor {name} is cut into {found[name]} in one tensor and {number} in another")
    return found


def _axes_of_factors(slices: dict[str, int], rule: OpRule, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    along = {rule.factors[at].name: rule.factors[at] for at in rule.along}
    alone = {name: number for name, number in slices.items() if name not in along}
    needed = math.prod(alone.values())
    if needed > mesh.size:
        raise StrategyError(
            f"it needs {' x '.join(map(str, alone.values()))} = {needed} devices, there are {mesh.size}"
        )
    free = list(mesh.names)
    taken: dict[str, tuple[str, ...]] = {}
    for name, number in slices.items():
        if rule.sizes[name] % number:
            raise StrategyError(f"a dim of {rule.sizes[name]} rows does not divide into {number} slices")
        if name in alone:
            taken[name] = _leading_axes(free, number, mesh)
            free = [axis for axis in free if axis not in taken[name]]
    for name, number in slices.items():
        if name in along:
            others = free if along[name].kind == "sum" else ()
            taken[name] = mesh.ordered(_leading_axes((*taken.get(along[name].along, ()), *others), number, mesh))
            free = [axis for axis in free if axis not in taken[name]]
    return taken


def _leading_axes(free: Sequence[str], number: int, mesh: Mesh) -> tuple[str, ...]:
    """The first of the shortest subsets of the free axes whose sizes multiply to ``number``."""
    for count in range(len(free) + 1):
        for axes in itertools.combinations(free, count):
            if mesh.extent(axes) == number:
                return axes
    sizes = " x ".join(str(mesh.sizes[axis]) for axis in free) or "none"
    raise StrategyError(f"{number} slices cannot be made of the axes of the mesh that may be used for them ({sizes})")


def _choices(rule: OpRule, mesh: Mesh, limit: int = 12) -> str:
    """Strategies that would do, those that use most devices first."""
    found = dict.fromkeys(
        (-math.prod(mesh.sizes[a] for a in s.used), tuple(_slices(dims, rule, s, mesh) for dims in rule.operands))
        for s in rule.strategies(mesh, partial=False)
    )
    texts = [str(operands) for _, operands in sorted(found)]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def _slices(dims: Dims, rule: OpRule, strategy: Strategy, mesh: Mesh) -> tuple[int, ...]:
    axes = {factor.name: cut for factor, cut in zip(rule.factors, strategy.axes, strict=True)}
    return tuple(mesh.extent(axes[dim[0]]) if dim else 1 for dim in dims)


def _text(pin: Pin) -> str:
    return f"{pin.operands}" + (f" -> {pin.results}" if any(r is not None for r in pin.results) else "")


@in_stage("spaces")
def space_of(graph: RuledGraph, mesh: Mesh, request: PlanRequest, row: Search) -> Space:
    """Everything that the search may choose on ``mesh``."""
    leaves = fixed_leaves(graph.capture, mesh, request.inputs, request.storage, every_rank=False)
    outputs = output_layouts(graph.capture, mesh, leaves)
    alike: dict[int, tuple[Strategy, ...]] = {}  # by rule, which operators that are alike share
    strategies: dict[str, tuple[Strategy, ...]] = {}
    storing: dict[str, tuple[Strategy, ...]] = {}
    unpinned: dict[tuple[int, tuple[Strategy, ...]], tuple[Strategy, ...]] = {}  # equal layers share these, too
    parameters = {value.name for value in graph.capture.of_kind("parameter")}
    for node in graph.capture.nodes:
        rule = graph.rules[node.name]
        if node.pin is not None:
            pinned = pinned_strategies(node, rule, mesh)
            strategies[node.name] = storing[node.name] = pinned
            if not parameters.isdisjoint(node.operands):  # a pin says how these are used, not how they are stored
                key = id(rule), pinned
                if key not in unpinned:
                    unpinned[key] = (*pinned, *choices_of(rule, mesh, row))
                storing[node.name] = unpinned[key]
        else:
            if id(rule) not in alike:
                alike[id(rule)] = choices_of(rule, mesh, row)
            strategies[node.name] = storing[node.name] = alike[id(rule)]
    leaves = with_parameters(graph, mesh, storing, leaves)
    return Space(graph, mesh, strategies, leaves, outputs, *blocks_for(graph, request))


def blocks_for(graph: RuledGraph, request: PlanRequest) -> tuple[tuple[Block, ...], frozenset[str]]:
    """The blocks that the backward may compute again, which a budget asks for, and the names of those that it must.

    Raises:
        UsageError: where the request names modules that there are not. Of a later plan it may, as for predictions.
    """
    if request.memory is None and not request.recompute:
        return (), frozenset()
    known = graph.once(Blocks)
    demanded = known.matching(request.recompute, demanded=request.axes is None)
    taken = frozenset().union(*(block.names for block in demanded))
    free = known.repeated() if request.memory is not None else ()
    blocks = (*demanded, *(block for block in free if not block.names & taken))
    return blocks, frozenset(block.name for block in demanded)


def choices_of(rule: OpRule, mesh: Mesh, row: Search) -> tuple[Strategy, ...]:
    """The strategies that the search may choose for an operator that is not pinned."""
    # Partial sums pass through what sums nothing itself; products that took them too would add a strategy per axis.
    partial = not any(factor.kind == "sum" for factor in rule.factors) or not rule.splittable
    return tuple(s for s in rule.strategies(mesh, partial=partial) if row.keeps(s, rule, mesh))


def with_parameters(
    graph: RuledGraph,
    mesh: Mesh,
    strategies: Mapping[str, Sequence[Strategy]],
    fixed: Mapping[str, Sequence[Layout]],
) -> dict[str, Sequence[Layout]]:
    """Parameters may be stored in any layout in which one of the strategies of a consumer takes them, replicated first.

    Strategies cut evenly. A matrix that none of them cuts over all devices may be stored so in uneven parts.
    """
    found = dict(fixed)
    demanded: dict[Hashable, tuple[Layout, ...]] = {}  # by what it follows from: equal layers ask once
    options: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}  # equal ones are one object
    for value in graph.capture.of_kind("parameter"):
        if value.name not in found:
            layouts = [Layout.replicated(len(value.shape))]
            for use in graph.uses[value.name]:
                of = strategies[use.node.name]
                key = id(graph.rules[use.node.name]), id(of), use.index
                if key not in demanded:
                    targets = targets_of(graph, use.node, use.index, of, mesh)
                    demanded[key] = tuple(dict.fromkeys(target.layout.whole() for target in targets))
                layouts += demanded[key]
            if len(value.shape) > 1 and not any(layout.split_axes == set(mesh.names) for layout in layouts):
                layouts.append(in_parts(value, mesh))
            free = tuple(dict.fromkeys(layouts))
            found[value.name] = options.setdefault(free, free)
    return found


@in_stage("spaces")
def meshes_for(graph: RuledGraph, request: PlanRequest, most_axes: int) -> tuple[Mesh, ...]:
    """The meshes to search, as coarse as serves; finer ones where pins need them."""
    atoms = request.mesh.atomic()
    for count in range(most_axes, max(most_axes, len(atoms.axes)) + 1):
        coarse = [mesh for mesh in cuts(request.mesh, request.hardware.ranks_per_host, count) if _serves(mesh, graph)]
        if coarse:
            return tuple(coarse)
    return (atoms,)


def _serves(mesh: Mesh, graph: RuledGraph) -> bool:
    try:
        for node in graph.capture.nodes:
            if node.pin is not None:
                pinned_strategies(node, graph.rules[node.name], mesh)
    except StrategyError:
        return False
    return True


@in_stage("spaces")
def tensor_space(graph: RuledGraph, mesh: Mesh, following: Mapping[str, Strategy], leaves_of: Space) -> Space:
    """The choices of tensor parallelism: weights split over the last axis of the mesh, the batch over the others.

    Over the last axis every operator that has a matrix of weights splits it where it can, the others follow, and the
    batch is whole.

    Args:
        following: the strategies that follow the batch.
        leaves_of: what else is asked for: the layouts of the leaves that are settled, and of the outputs.
    """
    # Equal choices are one object, which a search asks for.
    alike: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    strategies = {}
    for node in graph.capture.nodes:
        found = tuple(_over_weights(node, graph, following[node.name], mesh))
        strategies[node.name] = alike.setdefault(found, found)
    leaves = with_parameters(graph, mesh, strategies, leaves_of.leaves)
    return Space(graph, mesh, strategies, leaves, leaves_of.outputs)


def in_parts(value: Value, mesh: Mesh) -> Layout:
    """Cut the dim of whose parts the largest is least, the first of several; whole where all dims are too short."""
    dims = len(value.shape)
    cut = [Layout.split(dims, {dim: mesh.names}) for dim, size in enumerate(value.shape) if size >= mesh.size]
    return min(cut, key=lambda layout: local_bytes(value, layout, mesh), default=Layout.replicated(dims))


def _over_weights(node: Node, graph: RuledGraph, following: Strategy, mesh: Mesh) -> Iterator[Strategy]:
    """The batch over all axes but the last; over the last the weights, where there are any, else what there is."""
    rule = graph.rules[node.name]
    *others, last = mesh.names
    batch = {factor.name: tuple(others) for factor, axes in zip(rule.factors, following.axes, strict=True) if axes}
    summed = tuple(others) if following.partial else ()
    free = [rule.factors[i].name for i in rule.splittable if rule.divides(i, [last], mesh)]
    free = [name for name in free if name not in batch]
    weights = [name for name in free if name in _of_weights(node, graph, rule)]
    if not weights:
        yield rule.strategy(batch, summed)
        if rule.linear_operands and not any(factor.kind == "sum" for factor in rule.factors):
            yield rule.strategy(batch, (*summed, last))
    for name in weights or free:
        yield rule.strategy(batch | {name: (last,)}, summed)


def _of_weights(node: Node, graph: RuledGraph, rule: OpRule) -> set[str]:
    """The factors that are dims of a matrix of parameters which the operator reads."""
    values = [graph.capture.values[name] for name in node.operands]
    matrices = [dims for value, dims in zip(values, rule.operands, strict=True) if value.kind == "parameter"]
    return {dim[0] for dims in matrices if len(dims) > 1 for dim in dims if dim}
