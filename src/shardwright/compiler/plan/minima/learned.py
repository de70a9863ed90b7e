"""What searches for minima leave for those that follow, at other costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.plan.minima.tables import Costs, Indices


@dataclass(frozen=True)
class Learned:
    """What searches leave for later ones over the same variables, at other costs.

    Messages, by the scope of the table and the variable, are a beginning. The values of every variable that are not
    among those ``left`` are in no assignment below what is to be beaten, which is of use where all costs are bounds of
    one thing.
    """

    domains: tuple[int, ...]
    left: list[Indices]
    messages: dict[tuple[tuple[int, ...], int], Costs] = field(default_factory=dict)

    @staticmethod
    def nothing(domains: Sequence[int]) -> Learned:
        """What there is before the first search."""
        return Learned((*domains,), [np.arange(size) for size in domains])

    def copied(self) -> Learned:
        """The same, to which a search may add what is not true for others."""
        return Learned(self.domains, list(self.left), dict(self.messages))

    @contextmanager
    def without(self, variables: Iterable[int]) -> Iterator[Learned]:
        """Inside, the same for a search that these variables are none of, which have one value there."""
        domains, left = list(self.domains), list(self.left)
        for v in variables:
            domains[v], left[v] = 1, np.zeros(1, dtype=np.intp)
        found = Learned(tuple(domains), left, self.messages)
        try:
            yield found
        finally:
            self.left[:] = [mine if size == 1 else of for mine, of, size in zip(self.left, left, domains, strict=True)]

    def message(self, scope: tuple[int, ...], v: int) -> Costs:
        """What a table tells of one of its variables, by the values that are left."""
        found = self.messages.get((scope, v))
        return np.zeros(len(self.left[v])) if found is None else found[self.left[v]]
