"""Where elimination is too wide, values are left out by their bounds: the minimum, or a choice near it and a bound."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.compiler.plan.search import exact, narrow
from shardwright.compiler.plan.search.bounds import Bounds, WarmStart
from shardwright.compiler.plan.search.exact import Minimum, Table, TooWide, cost_at, minimise
from shardwright.compiler.plan.search.narrow import NothingBelow, least
from shardwright.errors import PlanError


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


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(3, 8), st.integers(2, 4), st.integers(2, 3))
@example(895587, 3, 3, 3)
def test_the_bound_is_below_the_least_and_the_choice_costs_what_it_says(seed, length, size, common):
    domains, tables = chain_with_common(seed, length, size, common)
    exact, _ = minimise(domains, tables)
    found = least(domains, tables, limit=size, work=0)
    assert found.bound <= exact + 1e-9
    assert found.cost >= exact - 1e-9
    assert found.cost == pytest.approx(cost_at(tables, found.picked))


def problem(seed, forbidden=0.0, values=6):
    """Small whole numbers, so that there are ties and equal rows, over a graph that is no tree."""
    draw = np.random.default_rng(seed)
    domains = [values] * 5
    tables = [Table((v,), draw.integers(0, 12, values).astype(float)) for v in range(5)]
    for scope in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (1, 3, 4)]:
        costs = draw.integers(0, 4, [values] * len(scope)).astype(float)
        tables.append(Table(scope, np.where(draw.random(costs.shape) < forbidden, np.inf, costs)))
    return domains, tables


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_what_is_left_out_is_in_no_least_assignment(seed, forbidden):
    """Every bound of a value is true, by all assignments; a limit that grows until all that is left fits is exact."""
    domains, tables = problem(seed, forbidden)
    every = np.zeros(domains)
    for table in tables:
        every += table.costs.reshape([n if v in table.scope else 1 for v, n in enumerate(domains)])
    if not np.isfinite(every.min()):
        with pytest.raises(PlanError, match="no assignment is possible"):
            least(domains, tables, limit=1, work=0)
        return
    bounds = Bounds(domains, tables)
    bounds.sweep()
    bounds.leave_out_above(every.min())
    bounds.sweep()
    kept = every[np.ix_(*bounds._left)]
    assert kept.min() == every.min()
    for v in range(5):
        assert (bounds._of_value[v] <= kept.min(axis=tuple(i for i in range(5) if i != v)) + 1e-9).all()
    found = least(domains, tables, limit=50, work=300)
    assert (found.cost, cost_at(tables, found.picked)) == (pytest.approx(every.min()), pytest.approx(every.min()))


def test_where_little_is_near_the_least_it_is_the_minimum():
    """Costs of single values that outweigh what they mean for others leave a few of them, though all are tied."""
    draw = np.random.default_rng(1)
    tables = [Table((a, b), draw.random((20, 20))) for a, b in itertools.combinations(range(7), 2)]
    tables += [Table((v,), 3.0 * np.arange(20.0)) for v in range(7)]
    with pytest.raises(TooWide, match="a table of"):
        minimise([20] * 7, tables, limit=20**4)
    found = least([20] * 7, tables, limit=20**3, work=20**4)
    few = [Table(t.scope, t.costs[(slice(4),) * len(t.scope)]) for t in tables]
    assert found.cost == found.bound == pytest.approx(minimise([4] * 7, few)[0])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_to_be_beaten_is_beaten_or_nothing_is_below_it(seed):
    domains, tables = problem(seed)
    best, _ = minimise(domains, tables)
    assert least(domains, tables, limit=50, work=300, below=best + 0.5).cost == pytest.approx(best)
    with pytest.raises(NothingBelow) as nothing:
        least(domains, tables, limit=50, work=300, below=best - 0.5)
    assert best - 1 < nothing.value.bound <= best


@pytest.mark.parametrize("seed", range(4))
def test_what_a_search_has_learned_is_true_for_the_next(seed):
    """At other costs that are bounds of the same: values that are out stay out, and messages are a beginning."""
    domains, tables = problem(seed)
    best, _ = minimise(domains, tables)
    learned, lower = WarmStart.nothing(domains), [Table(t.scope, t.costs * 0.99) for t in tables]
    first = Bounds(domains, tables, learned)
    first.sweep()
    first.leave_messages()
    assert Bounds(domains, lower).bound < Bounds(domains, lower, learned).bound <= 0.99 * best + 1e-9
    assert least(domains, tables, limit=50, work=300, below=best + 0.5, learned=learned).cost == pytest.approx(best)
    assert sum(map(len, learned.left)) < sum(domains)
    found = least(domains, lower, limit=50, work=300, learned=learned)
    assert found.cost == pytest.approx(0.99 * best)
    assert cost_at(tables, found.picked) == pytest.approx(best)


@pytest.mark.parametrize("seed", [0, 2, 4, 7])
def test_messages_of_values_that_were_left_out_are_a_beginning_too(seed):
    """For a search that looks at them, too."""
    domains, tables = problem(seed)
    best, _ = minimise(domains, tables)
    learned = WarmStart.nothing(domains)
    bounds = Bounds(domains, tables, learned)
    bounds.sweep()
    bounds.leave_out_above(best)
    bounds.sweep()
    bounds.leave_messages()
    assert sum(map(len, bounds._left)) < sum(domains)
    assert Bounds(domains, tables, learned).bound > Bounds(domains, tables).bound


@pytest.mark.parametrize("seed", range(4))
def test_what_is_eliminated_first_is_no_less_true(seed, monkeypatch):
    """A chain, which small tables decide, beside what these do not; also where another search has looked at it all."""
    domains, tables = problem(seed)
    draw = np.random.default_rng(seed)
    domains += [6, 6]
    tables += [Table((4, 5), draw.random((6, 6))), Table((5, 6), draw.random((6, 6)))]
    best, _ = minimise(domains, tables)
    learned = WarmStart.nothing(domains)
    for early in (36, 1):
        monkeypatch.setattr(narrow, "EARLY", early)
        found = least(domains, tables, limit=36, work=300, below=best + 0.5, learned=learned)
        assert found.cost == pytest.approx(cost_at(tables, found.picked), rel=1e-12)
        assert found.cost == pytest.approx(best, rel=1e-12)


def test_what_is_tied_too_much_has_a_bound():
    size, count = 3, 12
    draw = np.random.default_rng(0)
    everyone = [Table((a, b), draw.random((size, size))) for a in range(count) for b in range(a)]
    found = least([size] * count, everyone, limit=size**3, work=0)
    assert 0 < found.bound < found.cost == pytest.approx(cost_at(everyone, found.picked))
    assert least([size], [Table((0,), np.array([2.0, 1.0, 3.0]))]) == Minimum(1.0, 1.0, [1])


def test_equal_layers_are_heard_once():
    """Along a chain of equal layers messages are soon the same: most of them are looked up."""
    between = np.random.default_rng(0).random((8, 8))
    bounds = Bounds([8] * 400, [Table((v, v + 1), between) for v in range(399)])
    bounds.sweep()
    assert len(bounds._known) < 500  # of 1596


def test_what_is_possible_is_found_where_little_is(monkeypatch):
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
    for rounds in (narrow.ROUNDS, 0):  # without, one variable is settled after the other
        monkeypatch.setattr(narrow, "ROUNDS", rounds)
        found = least(domains, tables, limit=size, work=0)
        assert found.picked == only.tolist()
        assert found.cost == pytest.approx(minimise(domains, tables)[0])
    with pytest.raises(PlanError, match="no assignment is possible"):
        least(domains, [*tables, Table((0, 2), np.full((size, size), np.inf))], limit=size)


def layers(count, seed=0):
    """Equal layers that are tied within and to the next: each has the arrays of the others."""
    draw = np.random.default_rng(seed)
    within, to_next, alone = draw.random((7, 7, 7)), draw.random((7, 7)), draw.random(7)
    tables = []
    for first in range(0, 3 * count, 3):
        tables += [Table((first + i,), alone) for i in range(3)]
        tables.append(Table((first, first + 1, first + 2), within))
        tables += [Table((first + 2, first + 3), to_next)] if first + 3 < 3 * count else []
    return [7] * 3 * count, tables


def test_equal_layers_keep_their_tables_in_common_while_values_are_left_out():
    domains, tables = layers(12)
    least_cost, _ = minimise(domains, tables, 10**9)
    bounds = Bounds(domains, tables)
    arrays = len({id(table.costs) for table in bounds._tables})
    bounds.leave_out_above(least_cost * 1.01)
    for _ in range(4):
        bounds.sweep()
        assert bounds.bound <= least_cost * (1 + 1e-9)
    assert sum(map(len, bounds._left)) < sum(domains)
    assert len({id(table.costs) for table in bounds._tables}) <= arrays + 8  # the first and the last layer have others
    assert bounds.least(10**9).cost == pytest.approx(least_cost, rel=1e-12)


def test_what_elimination_takes_is_told_with_equal_layers_once():
    def told(count, whose=id):
        domains, tables = layers(count)
        return exact.work(domains, tables, [whose(table.costs) for table in tables])

    domains, tables = layers(6)
    with mock.patch.object(exact, "min_sum", side_effect=exact.min_sum) as made:
        minimise(domains, tables, 10**9)
    shapes = (np.broadcast_shapes(*(of.shape for of in call.args[0])) for call in made.call_args_list)
    assert sum(map(math.prod, shapes)) == told(6)
    others = itertools.count()
    assert 3 * told(48) < told(48, lambda costs: next(others))
