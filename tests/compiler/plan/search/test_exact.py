"""Elimination finds the minimum: against trying everything (and in test_never_worse against integer programming)."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.plan.search import exact, min_sum
from shardwright.compiler.plan.search.exact import Table, TooWide, cost_at, minimise, without_narrow
from shardwright.errors import PlanError


@st.composite
def problems(draw):
    domains = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scopes = draw(
        st.lists(st.lists(st.integers(0, len(domains) - 1), max_size=3, unique=True).map(tuple), min_size=1, max_size=8)
    )
    return domains, [Table(s, random.integers(0, 20, [domains[v] for v in s]).astype(float)) for s in scopes]


@given(problems(), st.sampled_from([(1, 1), (1, 10**6), (7, 10**6), (min_sum.SLAB, min_sum.MANY)]))
def test_the_minimum_over_all_assignments(problem, sizes):
    """Also where tables are made in slabs, and by several threads."""
    domains, tables = problem
    best = min(cost_at(tables, x) for x in itertools.product(*map(range, domains)))
    slab, many = sizes
    with mock.patch.multiple(min_sum, FEW=slab, SLAB=slab, MANY=many):
        found, assignment = minimise(domains, tables)
    assert found == best
    assert cost_at(tables, assignment) == best


@st.composite
def loose_problems(draw):
    """A value that several read, each of which pays less where it demands what is shared; some readers are tied."""
    made, shared = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    domains, tables = [made, shared], [Table((0, 1), random.integers(0, 9, (made, shared)).astype(float))]
    for reader in range(2, 2 + draw(st.integers(1, 4))):
        size = draw(st.integers(2, 6))
        usual = random.choice([*range(20), np.inf], (made, size, 1))
        less = np.where(random.random((made, size, shared)) < 0.5, random.integers(0, 20, (made, size, shared)), usual)
        demands = random.integers(0, shared + 2, size)[:, None] == np.arange(shared)
        costs = np.where(demands, np.minimum(less, usual), usual)
        domains.append(size)
        tables.append(Table((0, reader, 1), costs, loose=(reader, 1)))
    for one, other in itertools.combinations(range(2, len(domains)), 2):
        if draw(st.booleans()):
            tables.append(Table((one, other), random.integers(0, 20, (domains[one], domains[other])).astype(float)))
    return domains, tables


@given(loose_problems())
def test_the_minimum_where_tables_hardly_vary_with_a_variable(problem):
    domains, tables = problem
    best = min(cost_at(tables, x) for x in itertools.product(*map(range, domains)))
    with mock.patch.multiple(min_sum, FEW=1):
        if best == np.inf:
            with pytest.raises(PlanError, match="forbidden"):
                minimise(domains, tables)
            return
        found, assignment = minimise(domains, tables)
    assert found == best == cost_at(tables, assignment)


@pytest.mark.parametrize("first", [0, 1])
def test_what_hardly_varies_is_added_up_by_few_pairs(first):
    """Over the reader and over what is shared, as many numbers as a plain sum has."""
    random = np.random.default_rng(0)
    usual = random.random((40, 1, 30)) if first else random.random((1, 40, 30))
    costs = np.broadcast_to(usual, (40, 40, 30)).copy()
    costs[range(40), range(40)] /= 2
    summands = [costs.reshape(40, 40, 30, 1), random.random((40, 1, 1, 50))]
    with mock.patch.multiple(min_sum, FEW=1):
        with mock.patch.object(min_sum, "_work_out", side_effect=min_sum._work_out) as added:
            found = min_sum.min_sum(summands, (0, 1))
        assert sum(
            math.prod(np.broadcast_shapes(*(of.shape for of in call.args[0]))) for call in added.call_args_list
        ) < 40 * 30 * 50 * (40 / 5)
        assert np.array_equal(found, min_sum.min_sum(summands))


@given(problems(), st.sampled_from([1, 4, 30]))
def test_what_small_tables_decide_is_eliminated_and_follows_from_the_rest(problem, limit):
    domains, tables = problem
    rest = without_narrow(domains, tables, limit)
    gone = {step.variable for step in rest.steps}
    assert all(gone.isdisjoint(table.scope) for table in rest.tables)
    assert all(step.entries <= limit for step in rest.steps)
    found, assignment = minimise(domains, [*rest.tables, Table((), np.array(rest.total))])
    assert found == minimise(domains, tables)[0] == cost_at(tables, rest.completed(assignment))


def test_variables_without_a_choice_widen_no_table():
    """As many as a table has dims at most, and more: what every operator is on one device."""
    ring = [Table((v, (v + 1) % 90), np.array([[1.0]])) for v in range(90)]
    chords = [Table((v, (v + k) % 90), np.array([[1.0]])) for v in range(90) for k in range(2, 45)]
    assert minimise([1] * 90, ring + chords) == (90.0 * 44, [0] * 90)
    tail = Table((90, 3, 91), np.array([[[5.0, 2.0]], [[7.0, 4.0]]]))
    assert minimise([1] * 90 + [2, 2], [*ring, *chords, tail]) == (90.0 * 44 + 2, [0] * 91 + [1])


def test_a_long_chain_is_linear():
    random = np.random.default_rng(0)
    tables = [Table((v, v + 1), random.random((20, 20))) for v in range(2000)]
    found, assignment = minimise([20] * 2001, tables, limit=400)
    assert found == pytest.approx(cost_at(tables, assignment))


def test_what_is_forbidden_is_not_chosen():
    table = np.array([[np.inf, 5.0], [1.0, np.inf]])
    assert minimise([2, 2], [Table((0, 1), table)]) == (1.0, [1, 0])
    with pytest.raises(PlanError, match="every combination is forbidden"):
        minimise([2], [Table((0,), np.array([np.inf, np.inf]))])


def test_too_wide_is_said_not_approximated():
    random = np.random.default_rng(0)
    tables = [Table((a, b), random.random((10, 10))) for a, b in itertools.combinations(range(6), 2)]
    with pytest.raises(TooWide, match="1,000,000 entries"):
        minimise([10] * 6, tables, limit=1000)


@settings(max_examples=100)
@given(problems(), st.sampled_from([1, 4, 30]))
def test_variables_are_settled_until_no_table_is_larger(problem, limit):
    """And none where none is."""
    domains, tables = problem
    scopes, sizes, settled = tuple(table.scope for table in tables), [*domains], []
    first = exact.widest(sizes, scopes)[0]
    while exact.widest(sizes, scopes, limit)[0] > limit:
        settled += (found := list(exact.settling(sizes, scopes, limit)))
        sizes = [1 if v in found else size for v, size in enumerate(sizes)]
    assert len(set(settled)) == len(settled)
    assert bool(settled) == (first > limit)
    assert all(domains[v] > 1 for v in settled)
