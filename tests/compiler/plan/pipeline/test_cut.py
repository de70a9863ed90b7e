"""The cut into stages is the best of all."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.plan.pipeline.cut import Limit, cut, slowest

SECONDS = st.integers(0, 20).map(float)


def waiting(costs, before, behind):
    return costs + (before + behind) / 2


def taken(costs, crossing, starts, join=waiting):
    """The time of the slowest stage, and what crosses."""
    ends = [*starts[1:], len(costs)]
    border = [0.0, *crossing[1:], 0.0]
    stages = [join(sum(costs[a:b]), border[a], border[b]) for a, b in zip(starts, ends, strict=True)]
    return max(stages), sum(border[a] for a in starts)


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_no_cut_has_a_quicker_slowest_stage_or_crosses_less(data, count, operators):
    costs, crossing = (data.draw(st.lists(SECONDS, min_size=operators, max_size=operators)) for _ in range(2))
    for overlapped, join in ((False, waiting), (True, max)):
        found = taken(costs, crossing, cut(costs, crossing, count, overlapped=overlapped), join)
        every = (taken(costs, crossing, [0, *starts], join) for starts in combinations(range(1, operators), count - 1))
        assert found == pytest.approx(min(every))
        assert overlapped or slowest(costs, crossing, count) == pytest.approx(found[0])


@given(st.data(), st.integers(1, 4), st.integers(4, 9))
def test_no_cut_that_keeps_limits_is_better(data, count, operators):
    def numbers():
        return data.draw(st.lists(SECONDS, min_size=operators, max_size=operators))

    costs, crossing = numbers(), numbers()
    limits = [[Limit(numbers(), data.draw(st.integers(-5, 120))) for _ in range(2)] for _ in range(count)]

    def keeps(starts):
        ends = [*starts[1:], operators]
        stages = zip(starts, ends, limits, strict=True)
        return all(sum(each.weights[a:b]) <= each.most for a, b, of in stages for each in of)

    cuts = ([0, *starts] for starts in combinations(range(1, operators), count - 1))
    every = [taken(costs, crossing, starts) for starts in cuts if keeps(starts)]
    found = cut(costs, crossing, count, limits)
    assert (found is None) == (not every)
    if found is not None:
        assert keeps(found)
        assert taken(costs, crossing, found) == pytest.approx(min(every))


def test_fewer_operators_than_stages_are_refused():
    with pytest.raises(ValueError, match="2 operators are no 3 stages"):
        cut([1.0, 1.0], [0.0, 0.0], 3)
