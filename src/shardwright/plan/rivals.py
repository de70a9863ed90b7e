"""The plans that are known by name, and those of other searches, beside what a search found: the best is taken.

An exact search leaves a gap where a budget of bytes binds, or where what ties everything together is decided by cases.
Another way to plan may then be better by chance, unless each was looked at. The bound stays that of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from shardwright.errors import PlanError
from shardwright.graph.ir import Node, Value
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.plan.decisions import Decisions
from shardwright.plan.pricing.cost import Objective
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.plan.searches import SEARCHES, Search
from shardwright.plan.searching.budget import Budget
from shardwright.plan.searching.data import data_parallel
from shardwright.plan.searching.known import Known
from shardwright.plan.searching.problem import Problem
from shardwright.plan.searching.recursive import recursive
from shardwright.plan.searching.search import search
from shardwright.plan.searching.space import Choice, Space
from shardwright.plan.spaces import space_of, with_parameters
from shardwright.rules.notation import OpRule, Strategy

EQUAL = 1e-9  # a gap of such a share is none


def or_known(choice: Choice, space: Space, row: Search, request: PlanRequest, budget: Budget | None) -> Choice:
    """The choice, or the best of the others that may be taken, where a gap is left and one of them costs less."""
    if choice.cost is None or choice.bound is None or choice.bound >= choice.cost * (1 - EQUAL):
        return choice
    best, objective = choice, row.objective(request.hardware)
    known = Known(space.graph, objective, space.mesh)
    for other in _others(space, row, request, budget):
        if not _allowed(other, space, request):
            continue
        try:
            cost = _cost(other, space, known)
        except PlanError:  # impossible on this mesh
            continue
        if cost < (best.cost or 0.0) and (budget is None or budget.weigh(other) <= budget.limit_bytes):
            best = replace(other, cost=cost, bound=choice.bound)
    return best


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
    """Cut the first dim that gives every device as much, else the first that gives every device something."""
    fits = [dim for dim, size in enumerate(value.shape) if size % mesh.size == 0]
    fits += [dim for dim, size in enumerate(value.shape) if size >= mesh.size]
    return Layout.split(len(value.shape), dict.fromkeys(fits[:1], mesh.names))


def _others(space: Space, row: Search, request: PlanRequest, budget: Budget | None) -> Iterator[Choice]:
    """Data parallel, fully sharded without and with a second gathering, tensor parallel, and other searches."""
    graph, mesh, objective = space.graph, space.mesh, row.objective(request.hardware)
    data = data_parallel(graph, mesh, space.leaves, space.outputs)
    yield data
    parts = {v.name: in_parts(v, mesh) for v in graph.capture.of_kind("parameter") if v.name not in request.storage}
    yield replace(data, leaves={**data.leaves, **parts})
    yield replace(data, leaves={**data.leaves, **parts}, again=frozenset(parts))
    settled = {name: of for name, of in space.leaves.items() if name not in parts}
    tensor = tensor_space(graph, mesh, data.strategies, replace(space, leaves=settled))
    searches: list[Callable[[], Choice]] = [partial(search, tensor, objective, budget)]
    if not row.by_axes:
        searches.append(partial(recursive, space, objective, budget))
    if (other := SEARCHES["propagation"]) is not row:
        searches.append(
            lambda: search(space_of(graph, mesh, request, other), other.objective(request.hardware), budget)
        )
    for find in searches:
        try:
            found = find()
        except PlanError:
            continue
        yield found


def _allowed(other: Choice, space: Space, request: PlanRequest) -> bool:
    """Whether pins, parts and what is stored already admit a choice."""
    values = space.graph.capture.values
    if any(strategy not in space.strategies[name] for name, strategy in other.strategies.items()):
        return False
    return all(
        layout in space.leaves[name] or (values[name].kind == "parameter" and name not in request.storage)
        for name, layout in other.leaves.items()
    )


def _cost(other: Choice, space: Space, known: Known) -> float:
    """What a choice costs, with what the backward gathers again."""
    only = replace(
        space,
        strategies={name: (strategy,) for name, strategy in other.strategies.items()},
        leaves={name: (layout,) for name, layout in other.leaves.items()},
    )
    cost = Problem(only, known, set(other.strategies)).solved()[0]
    return cost + (_gathered_again(other, space, known.objective) if other.again else 0.0)


def _gathered_again(other: Choice, space: Space, objective: Objective) -> float:
    values, mesh = space.graph.capture.values, space.mesh
    decided = (other.strategies, other.leaves, space.outputs)
    plan = Decisions(space.graph, mesh, mesh, "auto", "none", *decided, again=other.again)
    again = [(transfer, plan.gathers_again(transfer)) for transfer in plan.transfers if transfer.value in other.again]
    return sum(
        times * objective.transfer(replace(values[transfer.value], needs_gradient=False), transfer.steps, mesh)
        for transfer, times in again
        if times
    )


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
