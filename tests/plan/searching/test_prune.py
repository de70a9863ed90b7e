"""Values that are left out are needed by no least assignment; what is too wide as it is becomes narrow."""

import itertools

import numpy as np
import pytest

from shardwright.plan.searching.exact import Table, TooWide, minimise
from shardwright.plan.searching.prune import needed


def problem(seed, forbidden=0.0, values=6):
    """Small whole numbers, so that there are ties and equal rows, over a graph that is no tree."""
    draw = np.random.default_rng(seed)
    domains = [values] * 5
    tables = [Table((v,), draw.integers(0, 12, values).astype(float)) for v in range(5)]
    for scope in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (1, 3, 4)]:
        costs = draw.integers(0, 4, [values] * len(scope)).astype(float)
        tables.append(Table(scope, np.where(draw.random(costs.shape) < forbidden, np.inf, costs)))
    return domains, tables


def total(domains, tables):
    """What every assignment costs, as one array."""
    found = np.zeros(domains)
    for table in tables:
        found += table.costs.reshape([n if v in table.scope else 1 for v, n in enumerate(domains)])
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_the_minimum_stays(seed, forbidden):
    domains, tables = problem(seed, forbidden)
    every = total(domains, tables)
    smaller, left = needed(tables, dict(enumerate(domains)))
    kept = every[np.ix_(*(left[v] for v in range(5)))]
    assert kept.min() == every.min()
    assert np.array_equal(kept, total([len(left[v]) for v in range(5)], smaller))
    if np.isfinite(every.min()):
        least, chosen = minimise(domains, tables, wide=1)
        assert (least, every[tuple(chosen)]) == (every.min(), every.min())


def test_what_is_left_out():
    """A dominated value, one of two equal ones, an impossible one, and one that is dominated when another has gone."""
    rows = np.array([[1.0, 2.0, 0.0], [2.0, 2.0, 1.0], [1.0, 2.0, 0.0], [np.inf] * 3, [5.0, 0.0, 5.0]])
    alone = np.array([0.0, 9.0, 9.0])
    _, left = needed([Table((0, 1), rows), Table((1,), alone)], {0: 5, 1: 3})
    assert left[0].tolist() == [0]  # 4 is better where the second variable is 1, which is never worth its 9
    assert left[1].tolist() == [0]


def test_what_two_tables_say_together_counts():
    """Alone each table has a choice where the value is worse; together they have none."""
    first, second = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 2.0]])
    tables = [Table((0, 1), first), Table((0, 1), second), Table((1,), np.array([3.0, 0.0]))]
    assert needed(tables, {0: 2, 1: 2})[1][0].tolist() == [0]


def test_equal_layers_are_pruned_once(monkeypatch):
    from shardwright.plan.searching import prune

    asked = []
    one = prune._undominated
    monkeypatch.setattr(prune, "_undominated", lambda *given: asked.append(given) or one(*given))
    between = np.random.default_rng(0).random((8, 8))
    tables = [Table((v, v + 1), between) for v in range(400)]
    needed(tables, dict.fromkeys(range(401), 8))
    assert len(asked) < 100


def test_a_clique_that_is_too_wide_becomes_narrow():
    """Costs of single values that outweigh what they mean for others leave a few of them."""
    draw = np.random.default_rng(1)
    tables = [Table((a, b), draw.random((20, 20))) for a, b in itertools.combinations(range(7), 2)]
    tables += [Table((v,), 3.0 * np.arange(20.0)) for v in range(7)]
    least, _ = minimise([20] * 7, tables, limit=20**4)
    few, small = [4] * 7, [Table(t.scope, t.costs[(slice(4),) * len(t.scope)]) for t in tables]
    assert least == pytest.approx(total(few, small).min())
    with pytest.raises(TooWide, match="entries"):
        minimise([20] * 7, tables[:21], limit=20**3)
