"""The search for a plan: first what costs, then what stands beside it.

Rotary tables, masks and position ids are read by every layer, and would tie all layers to each other. They have no
gradient, and whole on every rank they are in every layout by local slices. What makes them stands *beside* the rest: it
is left out at first, as if it cost nothing, and decided when the rest is. The first minimum, with what these operators
cost at least, is a lower bound of every plan's cost; how far the final cost is above it is the gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from shardwright.errors import PlanError
from shardwright.mesh.layout import Layout
from shardwright.plan.pricing.cost import Objective
from shardwright.plan.searching.exact import TooWide
from shardwright.plan.searching.known import Known
from shardwright.plan.searching.problem import Problem
from shardwright.plan.searching.space import Choice, Space
from shardwright.rules.notation import Strategy

# A value from the batch that one operator reads ties nothing together.
MANY_READERS = 2


def search(space: Space, objective: Objective) -> Choice:
    """The choice with the least cost.

    Raises:
        PlanError: where the search would be too large, or nothing is possible.
    """
    beside = operators_beside(space)
    known = Known(space.graph, objective, space.mesh)
    others = {node.name for node in space.graph.capture.nodes} - beside
    cost, strategies, leaves = Problem(space, known, others).solved()
    if not beside:
        return Choice(strategies, leaves, cost, cost)
    bound = cost
    try:
        more, of_beside, their_leaves = _beside(beside, space, known, strategies, leaves).solved()
    except TooWide:
        raise
    except PlanError:  # the rest demands partial sums, which what stands beside it cannot make
        problem = Problem(space, known, others)
        problem.demand_no_sums(beside)
        cost, strategies, leaves = problem.solved()
        more, of_beside, their_leaves = _beside(beside, space, known, strategies, leaves).solved()
    least = sum(
        float(known.operator(node, [space.graph.rules[node.name].replicated(), *space.strategies[node.name]]).min())
        for node in space.graph.capture.nodes
        if node.name in beside
    )
    return Choice(strategies | of_beside, leaves | their_leaves, cost + more, bound + min(least, more))


def _beside(
    beside: Set[str], space: Space, known: Known, decided: Mapping[str, Strategy], leaves: Mapping[str, Layout]
) -> Problem:
    """What is left to decide when all but the operators ``beside`` the rest is: these follow who reads them."""
    graph = space.graph
    nodes = graph.capture.nodes
    made = {name for node in nodes if node.name in beside for name in (*node.operands, *node.results)}
    readers = {use.node.name for name in made for use in graph.uses[name]} - beside
    strategies: dict[str, Sequence[Strategy]] = {name: (decided[name],) for name in readers}
    for name in beside:
        strategies[name] = tuple(dict.fromkeys([graph.rules[name].replicated(), *space.strategies[name]]))
    taken = {name for node in nodes if node.name not in beside for name in node.operands}
    free = {name: space.leaves[name] if name not in taken else (leaves[name],) for name in space.leaves if name in made}
    within = replace(space, strategies=strategies, leaves=free)
    return Problem(within, known, beside | readers, priced=beside, values=made)


def operators_beside(space: Space) -> frozenset[str]:
    """The names of the operators that compute, without a gradient, from nothing but numbers, buffers and inputs.

    Of those that are connected either all are beside the rest or none: none where they read an input that is split
    and make nothing that many read.
    """
    capture = space.graph.capture
    group: dict[str, set[str]] = {}  # value -> the operators that it is connected with
    for node in capture.nodes:
        made = [group.get(name) for name in node.operands]
        leaves = [capture.values[name] for name, of in zip(node.operands, made, strict=True) if of is None]
        fits = not space.graph.needs_gradient(node) and node.pin is None
        if fits and all(leaf.kind in ("input", "buffer", "constant") for leaf in leaves):
            joined = {node.name}.union(*(of for of in made if of is not None))
            names = [name for name, of in group.items() if of & joined]
            group.update(dict.fromkeys([*names, *node.results], joined))
    groups = {id(joined): joined for joined in group.values()}.values()
    return frozenset().union(*(joined for joined in groups if _stands_beside(joined, space)))


def _stands_beside(group: set[str], space: Space) -> bool:
    graph = space.graph
    nodes = [node for node in graph.capture.nodes if node.name in group]
    leaves = {name for node in nodes for name in node.operands if name in space.leaves}
    if all(layout.is_replicated for name in leaves for layout in space.leaves[name]):
        return True
    readers = ({use.node.name for use in graph.uses[name]} - group for node in nodes for name in node.results)
    return any(len(names) >= MANY_READERS for names in readers)
