"""Where a few variables tie all others together, the choice that is found is near the least, and its bound is true."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.plan.searching.cases import Minimum, least
from shardwright.plan.searching.exact import Table, TooWide, minimise


def chain_with_common(seed, length, size, common):
    """A chain whose every variable reads all the common ones, two of which cost something together."""
    random = np.random.default_rng(seed)
    domains = [size] * (common + length)
    tables = [Table((v,), random.random(size)) for v in range(common)]
    tables += [Table((v, v + 1), random.random((size, size))) for v in range(common, common + length - 1)]
    members = range(common, common + length)
    tables += [Table((c, v), random.random((size, size))) for v in members for c in range(common)]
    tables.append(Table((0, 1), random.random((size, size))))
    forbidden = random.random((size, size)) < 0.2
    forbidden[0, 0] = False  # something is possible
    tables.append(Table((common, common + 1), np.where(forbidden, np.inf, 0.0)))
    return domains, tables


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 8), st.integers(2, 4), st.integers(2, 3))
@example(895587, 3, 3, 3)
def test_the_bound_is_below_the_least_and_the_choice_costs_what_it_says(seed, length, size, common):
    domains, tables = chain_with_common(seed, length, size, common)
    exact, _ = minimise(domains, tables)
    found = least(domains, tables, limit=size**2)
    assert found.bound <= exact + 1e-9
    assert found.cost >= exact - 1e-9
    costs = (table.costs[tuple(found.picked[v] for v in table.scope)] for table in tables)
    assert found.cost == pytest.approx(sum(costs))


def test_where_all_choose_alike_it_is_the_minimum():
    domains, tables = chain_with_common(0, 6, 3, 2)
    dear = np.array([0.0, 9.0, 9.0])
    found = least(domains, [*tables, Table((0,), dear), Table((1,), dear)], limit=9)
    exact, picked = minimise(domains, [*tables, Table((0,), dear), Table((1,), dear)])
    assert found.picked == picked
    assert found.cost == pytest.approx(exact)
    assert found.bound == pytest.approx(exact)


def test_what_few_variables_do_not_tie_is_too_wide_still():
    size, count = 3, 40
    draw = np.random.default_rng(0)
    everyone = [Table((a, b), draw.random((size, size))) for a in range(count) for b in range(a)]
    with pytest.raises(TooWide, match="the search would need a table of"):
        least([size] * count, everyone, limit=size**3)
    assert least([size], [Table((0,), np.array([2.0, 1.0, 3.0]))]) == Minimum(1.0, 1.0, [1])


def test_what_is_possible_is_found_where_little_is():
    """One value of each variable is possible, and none of them is the one that most tables would choose."""
    size, members = 4, range(3, 9)
    draw = np.random.default_rng(0)
    domains, only = [size] * 9, draw.integers(1, size, 9)
    tables = [Table((c, v), draw.random((size, size))) for v in members for c in range(3)]
    for a, b in [(0, 1), (1, 2), (0, 3), (1, 5), (2, 8), *((v, v + 1) for v in range(3, 8))]:
        costs = np.full((size, size), np.inf)
        costs[0, (only[b] + 1) % size] = 0.0  # alone, it is possible
        costs[only[a], only[b]] = 1.0
        tables.append(Table((a, b), costs))
    found = least(domains, tables, limit=size**3)
    assert found.picked == only.tolist()
    assert found.cost == pytest.approx(minimise(domains, tables)[0])
    with pytest.raises(PlanError, match="no assignment is possible"):
        least(domains, [*tables, Table((0, 2), np.full((size, size), np.inf))], limit=size**3)
