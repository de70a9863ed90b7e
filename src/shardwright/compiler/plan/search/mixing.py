"""Plans whose first layers are as one plan has them, and all others as another one.

At any weights of what is hidden (`hidden.py`) layers that are alike are decided alike. Where communication that may be
hidden takes about as long as the computing beside it, the plan whose step takes least lies between two of those that
are found: as many layers are as in the one as computing hides, and the others as in the other one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations

from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.cost import PerDirection
from shardwright.compiler.plan.pricing.memory import Blocks
from shardwright.compiler.plan.search.choices import Choice
from shardwright.errors import PlanError

MOST_TRIED = 10  # plans between two others
WORTH = 1e-3  # what a step may take less, as a share, that is worth these
FAR = 5e-2  # how much longer, as a share, one takes at first from which these hardly come to less


@dataclass(frozen=True)
class Weighed:
    """A plan, what it costs as if nothing were hidden, and P, P', C and C' of `Seconds`."""

    plan: Decisions
    cost: float
    overlapping_s: PerDirection
    beside_s: PerDirection

    def plane(self, hides: float) -> tuple[float, float, float]:
        """Return the cost of the plan at weights of 0, and by how much it rises with each of both."""
        slopes = (hides * (beside - of) for of, beside in zip(self.overlapping_s, self.beside_s, strict=True))
        return self.cost - hides * sum(self.beside_s), *slopes  # type: ignore[return-value]

    def at(self, weights: PerDirection, hides: float) -> float:
        """Return the cost of the plan at weights."""
        least, forward, backward = self.plane(hides)
        return least + weights.forward * forward + weights.backward * backward

    def between(self, other: Weighed, share: float, hides: float) -> float:
        """Return what a step takes if so much of it is as in another plan, and all is hidden that may be."""
        total = self.cost + share * (other.cost - self.cost)
        for mine, theirs in zip(self._sides, other._sides, strict=True):
            total -= hides * min(a + share * (b - a) for a, b in zip(mine, theirs, strict=True))
        return total

    @property
    def _sides(self) -> Sequence[tuple[float, float]]:
        """Return what may overlap and the computing beside it, forward and backward."""
        return [*zip(self.overlapping_s, self.beside_s, strict=True)]


def cheapest_between(
    plans: Sequence[Weighed], hides: float, below_s: float, step_s: Callable[[Choice], float]
) -> Choice | None:
    """Return the plan between two others on their mesh whose step takes least; None where none was found.

    Args:
        plans: those between which it may be.
        hides: the share of the shorter of communicating and computing that the hardware hides.
        below_s: what a step takes that is to be beaten.
        step_s: what a step takes under a choice; it raises `PlanError` where it is impossible, or does not fit.
    """
    layers = _layers_of(plans[0].plan)
    count, at_s = max(layers.values(), default=0) + 1, dict[_Layers, float]()
    guesses = {
        (one, other, at): plans[one].between(plans[other], 1 - at / count, hides)
        for one, other in combinations(range(len(plans)), 2)
        for at in range(1, count)
    }
    if min(guesses.values(), default=math.inf) >= below_s * (1 - WORTH):
        return None
    one, other, at = min(guesses, key=guesses.__getitem__)

    def choice_of(chosen: _Layers) -> Choice:
        return _layers_as(plans[one].plan, plans[other].plan, chosen, layers)

    def tried(chosen: _Layers) -> float:
        if chosen not in at_s:
            at_s[chosen] = math.inf
            with suppress(PlanError):
                at_s[chosen] = step_s(choice_of(chosen))
        return at_s[chosen]

    way = min((partial(way, count) for way in (_first, _last, _spread)), key=lambda way: tried(way(at)))
    by = max(1, count // 8) if tried(way(at)) < below_s * (1 + FAR) else 0
    while by and len(at_s) < MOST_TRIED:
        best = min([of for of in (at, at - by, at + by) if 0 < of < count], key=lambda of: tried(way(of)))
        at, by = best, by if best != at else by // 2
    return choice_of(way(at)) if tried(way(at)) < below_s else None


_Layers = frozenset[int]


def _first(count: int, at: int) -> _Layers:
    return frozenset(range(at))


def _last(count: int, at: int) -> _Layers:
    return frozenset(range(count - at, count))


def _spread(count: int, at: int) -> _Layers:
    return frozenset(i for i in range(count) if (i + 1) * at // count > i * at // count)


def _layers_of(plan: Decisions) -> Mapping[str, int]:
    """Return the number of the layer of each operator; what comes before the first, or behind the last, is theirs."""
    begins = {block.nodes[0].name for block in plan.graph.once(Blocks).repeated()}
    numbers = accumulate(int(node.name in begins) for node in plan.capture.nodes)
    return {node.name: max(0, number - 1) for node, number in zip(plan.capture.nodes, numbers, strict=True)}


def _layers_as(one: Decisions, other: Decisions, chosen: _Layers, layers: Mapping[str, int]) -> Choice:
    """Return the choice in which some layers are as in one plan, and all others as in another."""
    nodes = one.capture.nodes
    of = {node.name: one if layers[node.name] in chosen else other for node in nodes}
    reading = {name: of[node.name] for node in reversed(nodes) for name in node.operands}  # the first that reads it
    blocks = {block.name: of[block.nodes[0].name] for plan in (one, other) for block in plan.blocks}
    return Choice(
        {node.name: of[node.name].strategies[node.name] for node in nodes},
        {name: reading.get(name, other).leaves[name] for name in one.leaves},
        recomputed=frozenset(name for name, plan in blocks.items() if name in plan.recomputed),
        again=frozenset(name for name in one.again | other.again if name in reading.get(name, other).again),
    )
