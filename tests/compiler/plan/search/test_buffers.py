"""The largest buffer of a collective is part of what a budget counts: the search finds the least of both together."""

import itertools
import math

import numpy as np
import pytest

from rows import slow
from shardwright.compiler.plan.search.buffers import WORTH, LargestBuffers, by_buffers
from shardwright.compiler.plan.search.exact import Table, cost_at, minimise

SCOPES = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1,), (4,)]


@pytest.mark.parametrize("seed", [*range(15), *slow(*range(15, 40))])
def test_the_least_of_a_sum_and_the_largest_buffer(seed):
    """Against every assignment: the bound is none above it, and what is found is near it."""
    random = np.random.default_rng(seed)
    domains = random.integers(2, 5, 5).tolist()
    costs = [Table(s, random.random([domains[v] for v in s])) for s in SCOPES]
    buffers = LargestBuffers(Table(s, random.integers(0, 1000, [domains[v] for v in s]).astype(float)) for s in SCOPES)
    price = float(10 ** random.uniform(-4, -1))

    def both(x):
        return cost_at(costs, x) + price * buffers.of(x)

    def solve(more):
        found, x = minimise(domains, [*costs, *more])
        return tuple(x), found, x

    [found, *others], bound = by_buffers(solve, buffers, price)
    optimum = min(map(both, itertools.product(*map(range, domains))))
    assert both(found) == min(map(both, [found, *others]))
    assert bound <= optimum + 1e-9
    # What lies between a buffer and the half of it counts with the half: no more than that is lost.
    assert optimum - 1e-9 <= both(found) <= optimum * (1 + WORTH) + price * buffers.of(found) / 2 + 1e-9
    assert math.isclose(bound, optimum) or bound >= optimum * (1 - WORTH) - price * 500
    for enough in (0.9 * optimum, bound):
        less = by_buffers(solve, buffers, price, enough=enough)[1]
        assert min(enough, optimum * (1 - WORTH) - price * 500) - 1e-9 <= less <= optimum + 1e-9
