"""Elimination finds the minimum: against trying everything, and against integer programming."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from shardwright.errors import PlanError
from shardwright.plan.exact import Factor, TooWide, minimise


@st.composite
def problems(draw):
    domains = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scopes = draw(
        st.lists(st.lists(st.integers(0, len(domains) - 1), max_size=3, unique=True).map(tuple), min_size=1, max_size=8)
    )
    return domains, [Factor(s, random.integers(0, 20, [domains[v] for v in s]).astype(float)) for s in scopes]


def cost(factors, assignment):
    return sum(float(f.table[tuple(assignment[v] for v in f.scope)]) for f in factors)


@given(problems())
def test_the_minimum_over_all_assignments(problem):
    domains, factors = problem
    best = min(cost(factors, x) for x in itertools.product(*map(range, domains)))
    found, assignment = minimise(domains, factors)
    assert found == best
    assert cost(factors, assignment) == best


def test_variables_without_a_choice_widen_no_table():
    """As many as a table has dims at most, and more: what every operator is on one device."""
    ring = [Factor((v, (v + 1) % 90), np.array([[1.0]])) for v in range(90)]
    chords = [Factor((v, (v + k) % 90), np.array([[1.0]])) for v in range(90) for k in range(2, 45)]
    assert minimise([1] * 90, ring + chords) == (90.0 * 44, [0] * 90)
    tail = Factor((90, 3, 91), np.array([[[5.0, 2.0]], [[7.0, 4.0]]]))
    assert minimise([1] * 90 + [2, 2], [*ring, *chords, tail]) == (90.0 * 44 + 2, [0] * 91 + [1])


def integer_program(domains, factors):
    """The same minimum by HiGHS: a binary per variable's value and per table's entry, marginals tied together."""
    columns = [(v, i) for v, n in enumerate(domains) for i in range(n)]
    column = {key: at for at, key in enumerate(columns)}
    costs = [0.0] * len(columns)
    entries = {}
    for number, factor in enumerate(factors):
        for index in np.ndindex(factor.table.shape):
            entries[number, index] = len(costs)
            costs.append(float(factor.table[index]))
    rows, low, high = [], [], []

    def add(terms, value):
        row = np.zeros(len(costs))
        for at, coefficient in terms:
            row[at] += coefficient
        rows.append(row)
        low.append(value)
        high.append(value)

    for v, n in enumerate(domains):
        add([(column[v, i], 1) for i in range(n)], 1)
    for number, factor in enumerate(factors):
        for axis, v in enumerate(factor.scope):
            for i in range(domains[v]):
                same = [(entries[number, index], 1) for index in np.ndindex(factor.table.shape) if index[axis] == i]
                add([*same, (column[v, i], -1)], 0)
        if not factor.scope:
            add([(entries[number, ()], 1)], 1)
    solution = milp(
        costs, constraints=LinearConstraint(np.array(rows), low, high), integrality=np.ones(len(costs)), bounds=(0, 1)
    )
    return solution.fun


@pytest.mark.parametrize("seed", range(10))
def test_integer_programming_agrees(seed):
    random = np.random.default_rng(seed)
    domains = [3, 4, 2, 3, 4, 3]
    scopes = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 2), (1, 4, 5), (3,)]
    factors = [Factor(s, random.random([domains[v] for v in s])) for s in scopes]
    assert minimise(domains, factors)[0] == pytest.approx(integer_program(domains, factors), abs=1e-7)


def test_a_long_chain_is_linear():
    random = np.random.default_rng(0)
    factors = [Factor((v, v + 1), random.random((20, 20))) for v in range(2000)]
    found, assignment = minimise([20] * 2001, factors, limit=400)
    assert found == pytest.approx(cost(factors, assignment))


def test_what_is_forbidden_is_not_chosen():
    table = np.array([[np.inf, 5.0], [1.0, np.inf]])
    assert minimise([2, 2], [Factor((0, 1), table)]) == (1.0, [1, 0])
    with pytest.raises(PlanError, match="every combination is forbidden"):
        minimise([2], [Factor((0,), np.array([np.inf, np.inf]))])


def test_too_wide_is_said_not_approximated():
    factors = [Factor((a, b), np.ones((10, 10))) for a, b in itertools.combinations(range(6), 2)]
    with pytest.raises(TooWide, match="1,000,000 entries"):
        minimise([10] * 6, factors, limit=1000)
