"""What a search may choose for a graph: meshes, strategies of operators, and layouts of the leaves that are free."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.boundary import fixed_leaves, output_layouts
from shardwright.compiler.plan.pins import pinned_strategies
from shardwright.compiler.plan.pricing.blocks import Block, Blocks
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.pricing.meshes import cuts
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.plan.pricing.targets import targets_of
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import Search
from shardwright.compiler.plan.searching.space import Space
from shardwright.compiler.rules.notation import OpRule, Strategy
from shardwright.errors import StrategyError


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


def meshes_for(graph: RuledGraph, request: PlanRequest, most_axes: int) -> tuple[Mesh, ...]:
    """The meshes to search, as coarse as serves; finer ones where pins need them."""
    atoms = request.mesh.atomic()
    for count in range(most_axes, max(most_axes, len(atoms.axes)) + 1):
        coarse = [mesh for mesh in cuts(request.mesh, request.hardware.ranks_per_host, count) if _serves(mesh, graph)]
        if coarse:
            return tuple(coarse)
    return (atoms,)


def _serves(mesh: Mesh, graph: RuledGraph) -> bool:
    """Whether the mesh has the axes that pins need."""
    try:
        for node in graph.capture.nodes:
            if node.pin is not None:
                pinned_strategies(node, graph.rules[node.name], mesh)
    except StrategyError:
        return False
    return True


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
    splittable = [rule.factors[i].name for i in rule.splittable]
    free = [name for name in splittable if name not in batch and rule.sizes[name] % mesh.sizes[last] == 0]
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
