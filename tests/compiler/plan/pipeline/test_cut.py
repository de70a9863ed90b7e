"""The cut into stages is the best of all."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.plan.pipeline.cut import cut

SECONDS = st.integers(0, 20).map(float)


def taken(costs, crossing, starts):
    """The time of the slowest stage, and what crosses."""
    ends = [*starts[1:], len(costs)]
    border = [0.0, *crossing[1:], 0.0]
    stages = [sum(costs[a:b]) + border[a] + border[b] for a, b in zip(starts, ends, strict=True)]
    return max(stages), sum(border[a] for a in starts)


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_no_cut_has_a_quicker_slowest_stage_or_crosses_less(data, count, operators):
    costs, crossing = (data.draw(st.lists(SECONDS, min_size=operators, max_size=operators)) for _ in range(2))
    found = taken(costs, crossing, cut(costs, crossing, count))
    every = (taken(costs, crossing, [0, *starts]) for starts in combinations(range(1, operators), count - 1))
    assert found == pytest.approx(min(every))


def test_fewer_operators_than_stages_are_refused():
    with pytest.raises(ValueError, match="2 operators are no 3 stages"):
        cut([1.0, 1.0], [0.0, 0.0], 3)
