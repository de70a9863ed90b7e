"""What choices on a mesh hold and cost, all of it, and the search among them within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

from shardwright.common.words import in_bytes, typed_bytes
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.decided.decisions import Transfer
from shardwright.compiler.plan.decided.prices import gathered_again, repeated_costs
from shardwright.compiler.plan.explain import holds
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import Search
from shardwright.compiler.plan.searching.budget import Budget, OverBudget
from shardwright.compiler.plan.searching.known import Known
from shardwright.compiler.plan.searching.recursive import recursive
from shardwright.compiler.plan.searching.search import Built, least_cost, search
from shardwright.compiler.plan.searching.space import Choice, Space

LAST = 8  # plans whose decisions may be asked about again


class Weighing:
    """What choices hold and cost on a mesh, all of it."""

    def __init__(self, mesh: Mesh, request: PlanRequest, space: Space, objective: Objective) -> None:
        self.mesh, self.request, self.space, self._objective = mesh, request, space, objective
        self._last: list[Plan] = []
        self._last_repeated: list[tuple[Sequence[Transfer], Mapping[str, float]]] = []
        self._sizes: dict[Hashable, int] = {}  # Cached by shape, dtype and layout, which on one mesh say all
        self.price = 0.0
        """Of a byte, at which the plan was found that is to be beaten; 0 where there is none."""

    @cached_property
    def least(self) -> float:
        """What the operators alone cost at least.

        Cached, as all of this class: the request, the space and the objective stay the same; `forget` drops what is
        large.
        """
        return least_cost(self.space, self.known)

    @cached_property
    def built(self) -> Built:
        """What a search of all choices is made of, for others of the same."""
        return Built(self.space, self._objective, self.known)

    @cached_property
    def known(self) -> Known:
        """What searches have worked out here, for those that follow."""
        return Known(self.space.graph, self._objective, self.mesh)

    def forget(self) -> None:
        """Leave what was worked out for searches, which takes more memory than all else, once these were made."""
        self._last, self._last_repeated = [], []
        for made in ("built", "known"):
            self.__dict__.pop(made, None)

    def budget(self) -> Budget | None:
        """What a device may hold; None where that is not limited."""
        request = self.request
        if request.memory is None:
            return None
        return Budget(
            request.memory,
            request.optimizer,
            lambda choice: self.plan(choice).held.total,
            lambda choice, bound: self.refusal([choice], bound),
            self.settle,
            self.fewest,
            self.price,
            once=bool(self.price),
        )

    def first(self, row: Search, below: float = math.inf, beside: Callable[[Choice], Choice] | None = None) -> Choice:
        """What the search finds; where a budget leaves a gap it looks closer, by what is ``beside`` if that is given.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
            PlanError: where there is none at all, or none that fits.
        """
        budget, below = self.budget(), math.inf if row.by_axes else below
        budget = budget and replace(budget, beside=beside)
        if row.by_axes:
            choice = recursive(self.space, self._objective, budget, below, self.known)
        else:
            choice = search(self.space, self._objective, budget, below, self.known, self.built)
        return choice if budget else self.settle(choice)

    def refusal(self, choices: Sequence[Choice], bound: float) -> OverBudget:
        """What is raised where none of these fits, not even with all blocks computed again."""
        plans = [self.plan(choice) for choice in choices]
        plans += [self._everything_again(plan) for plan in plans]
        least = min(plans, key=lambda plan: plan.held.total)
        return OverBudget(_too_much(least), least.held.total, bound)

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice; what follows from decisions is worked out once for those that were asked for last."""
        for plan in self._last:
            if (plan.leaves, plan.strategies) == (choice.leaves, choice.strategies):
                same = (plan.again, plan.recomputed) == (choice.again, choice.recomputed)
                found = plan if same else plan.computing_again(choice.recomputed, choice.again)
                return found.costing(choice.cost, choice.bound)
        found = _plan(self.space.graph, self.mesh, self.request, choice, self.space.outputs)
        self._last = [found, *self._last[: LAST - 1]]
        return found

    def settle(self, choice: Choice) -> Choice:
        """The same with the blocks that the request names computed again, and with all that the backward does again."""
        choice = replace(choice, recomputed=choice.recomputed | self.space.demanded)
        if choice.cost is None or not (choice.recomputed or choice.again):
            return choice
        plan = self.plan(choice)
        costs = self._repeated_costs(plan) if choice.recomputed else {}
        repeated = sum(costs[name] for name in sorted(choice.recomputed))
        return replace(choice, cost=choice.cost + repeated + gathered_again(plan, self._objective))

    def _repeated_costs(self, plan: Plan) -> Mapping[str, float]:
        """What it costs to compute each block again, by its name: for each by itself, whichever others are."""
        known = [costs for of, costs in self._last_repeated if of is plan.transfers]
        if known:
            return known[0]
        found = repeated_costs(self._everything_again(plan), self._objective)
        self._last_repeated = [(plan.transfers, found), *self._last_repeated[: LAST - 1]]
        return found

    def _everything_again(self, plan: Plan) -> Plan:
        return plan.computing_again({block.name for block in self.space.blocks})

    def within(self, choice: Choice) -> Choice | None:
        """The same where it fits, with as few more blocks computed again as that takes; None where it never does."""
        limit = self.request.memory
        if limit is not None and self._of_leaves(choice) > limit:
            return None
        choice = self.settle(choice)
        if limit is None or self.plan(choice).held.total <= limit:
            return choice
        return self.fewest(choice, limit)

    def _of_leaves(self, choice: Choice) -> int:
        """What is held of leaves, gradients and states, which is no more than all that is held."""
        total, values = 0, self.space.graph.capture.values
        for name, layout in choice.leaves.items():
            key = values[name].shape, values[name].dtype, layout
            if key not in self._sizes:
                self._sizes[key] = local_bytes(values[name], layout, self.mesh)
            size = self._sizes[key]
            trained = values[name].kind == "parameter" and values[name].needs_gradient
            total += 2 * size + self.request.optimizer.bytes_for(size) if trained else size
        return total

    def fewest(self, choice: Choice, limit: int) -> Choice | None:
        """The same with the fewest blocks computed again with which it holds no more; None where it always does.

        Those that save most come first.
        """
        if self._of_leaves(choice) > limit:
            return None
        demanded = self.space.demanded
        everything = self._everything_again(self.plan(choice))
        costs, sizes = self._repeated_costs(everything), everything.holding.remade(everything)
        names = [name for name in costs if name not in demanded and sizes[name]]
        names.sort(key=lambda name: costs[name] / sizes[name])

        @cache
        def held(count: int) -> int:
            """Return what is held where so many blocks are computed again.

            Cached for this call alone, in which all but the count stays the same.
            """
            return everything.computing_again(demanded.union(names[:count])).held.total

        if held(len(names)) > limit:
            return None
        count = _first_within(limit, held, [sizes[name] for name in names])
        recomputed = demanded.union(names[:count])
        once = (choice.cost or 0.0) - sum(costs[name] for name in choice.recomputed)
        once -= gathered_again(self.plan(choice), self._objective)
        again = gathered_again(everything.computing_again(recomputed), self._objective)
        return replace(choice, recomputed=recomputed, cost=once + sum(costs[name] for name in recomputed) + again)


def _first_within(limit: int, held: Callable[[int], int], sizes: Sequence[int]) -> int:
    """How many blocks are computed again at least where no more than the limit is held, as it is with all of them.

    Each of them saves nearly its size: so it is looked for near where these say that it is, then ever farther.
    """
    low, high, step = 0, len(sizes), 1
    spare, at = limit - held(high), high
    while at and sizes[at - 1] <= spare:
        at -= 1
        spare -= sizes[at]
    while low < high:
        if not low <= at < high:
            at = (low + high) // 2
        if held(at) <= limit:
            high, at = at, at - step
        else:
            low, at = at + 1, at + step
        step *= 2
    return high


def _plan(graph: RuledGraph, mesh: Mesh, request: PlanRequest, choice: Choice, outputs: Mapping[str, Layout]) -> Plan:
    method = request.searched or "none"
    return Plan(
        graph,
        mesh,
        request.mesh,
        request.mode,
        method,
        choice.strategies,
        choice.leaves,
        outputs,
        choice.cost,
        choice.bound,
        request.optimizer,
        request.memory,
        choice.again,
        hardware=request.hardware,
        recomputed=choice.recomputed,
    )


def _too_much(plan: Plan) -> str:
    """What is said of a plan that holds more than it may, none that was found holding less."""
    enough = typed_bytes(plan.held.total)
    return (
        f"no plan was found under which a device holds {in_bytes(plan.memory or 0)} or less: on the mesh {plan.mesh}, "
        f"mode {plan.mode}, the one that holds least holds {holds(plan, plan.held)}; type memory='{enough}' "
        f"(--memory {enough}) or more, more devices, a smaller batch, or an optimizer that keeps less"
    )
