"""Schedules of pipelines end, hold as many microbatches as theory says, and wait as long."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.plan.pricing.schedule import (
    Action,
    StageSeconds,
    least_seconds,
    read_schedule,
    schedule,
    seconds_of_cuts,
    simulate,
    turns,
)
from shardwright.errors import UsageError

GROUPS, MICROBATCHES = range(1, 9), range(1, 17)
FORWARD, BACKWARD = 1.0, 2.0


def equal(stages, parts=1):
    return [StageSeconds(FORWARD / parts, BACKWARD / parts)] * stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_bubble_lasts_for_as_many_microbatches_as_there_are_other_stages(name):
    for groups, microbatches in itertools.product(GROUPS, MICROBATCHES):
        run = simulate(schedule(name, groups, microbatches), equal(groups))
        assert run.seconds == (microbatches + groups - 1) * (FORWARD + BACKWARD)
        held = [microbatches if name == "gpipe" else min(microbatches, groups - group) for group in range(groups)]
        assert list(run.held) == held


def test_interleaved_stages_wait_a_fraction_of_the_time():
    for groups, rounds, each in itertools.product(range(2, 9), range(1, 5), (2, 3, 4)):
        microbatches = groups * rounds
        run = simulate(schedule("interleaved", groups, microbatches, groups * each), equal(groups * each, each))
        whole = (microbatches + (groups - 1) / each) * (FORWARD + BACKWARD)
        assert run.seconds == pytest.approx(whole)
        behind = [2 * (groups - 1 - group) + (each - 1) * groups + 1 for group in range(groups)]
        assert list(run.held) == [min(microbatches * each, held) for held in behind]


@pytest.mark.parametrize("weights", [1.0, 0.75])
def test_gradients_of_weights_fill_the_time_in_which_others_wait(weights):
    for groups, microbatches in itertools.product(GROUPS, MICROBATCHES):
        run = simulate(schedule("zb-h1", groups, microbatches), [StageSeconds(1.0, 1.25, 0.0, weights)] * groups)
        if microbatches >= groups:
            assert run.seconds == microbatches * (2.25 + weights) + (groups - 1) * (2.25 - weights)
        assert list(run.held) == [min(microbatches, groups)] * groups


@pytest.mark.parametrize(("name", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1)])
def test_every_microbatch_goes_through_every_stage_once_forward_and_backward(name, each):
    table = schedule(name, 4, 8, 4 * each)
    found = sorted(action for row in table for action in row)
    stages = range(4 * each)
    kinds = ("forward", "backward", *["weights"] * (name == "zb-h1"))
    assert found == sorted(Action(*a) for a in itertools.product(kinds, stages, range(8)))
    assert all(action.stage % 4 == group for group, row in enumerate(table) for action in row)


def test_groups_that_would_wait_for_each_other_forever_are_found_out():
    backward_first = tuple(reversed(schedule("1f1b", 2, 2)[0])), schedule("1f1b", 2, 2)[1]
    with pytest.raises(AssertionError, match="wait for each other forever, before B1@0"):
        simulate(backward_first, equal(2))


def test_messages_that_are_taken_in_another_order_are_found_out():
    first, second = schedule("gpipe", 2, 2)
    with pytest.raises(AssertionError, match="group 1 takes what group 0 sends in another order"):
        simulate((first, (second[1], second[0], *second[2:])), equal(2))


def test_the_slowest_stage_sets_the_pace_and_messages_are_waited_for():
    stages = [StageSeconds(1.0, 0.0, 0.5), StageSeconds(3.0, 0.0, 0.5), StageSeconds(1.0, 0.0)]
    run = simulate(schedule("gpipe", 3, 4), stages)
    assert max(end for action, end in run.ends.items() if action.kind == "forward") == 1 + 0.5 + 4 * 3 + 0.5 + 1


def test_messages_go_one_after_the_other():
    run = simulate(schedule("gpipe", 2, 4), [StageSeconds(1.0, 1.0, 3.0), StageSeconds(1.0, 1.0)])
    there = 1 + 4 * 3 + 1  # the first forward, its message and three more, the last forward
    assert run.ends[Action("forward", 1, 3)] == there
    assert run.seconds == there + 1 + 4 * 3 + 1


def test_a_message_on_demand_is_waited_for():
    run = simulate(schedule("gpipe", 2, 4), [StageSeconds(1.0, 1.0, 3.0, on_demand=True), StageSeconds(1.0, 1.0)])
    there = 1 + 4 * (3 + 1)  # the first forward, then of each microbatch a message and a forward
    assert run.ends[Action("forward", 1, 3)] == there
    assert run.seconds == there + 1 + 4 * (3 + 1)


@pytest.mark.parametrize("given", ["pipedream", "1f1b:2", "interleaved:1", "interleaved:x", 3])
def test_other_schedules_are_refused(given):
    names = "'gpipe', '1f1b', 'interleaved', 'zb-h1'"
    with pytest.raises(UsageError, match=f"expected one of {names}, or as 'interleaved:4'"):
        read_schedule(given)


def test_interleaved_stages_need_microbatches_that_the_groups_divide():
    with pytest.raises(UsageError, match=r"that 4 groups of ranks divide, and there are 6; type microbatches=4"):
        schedule("interleaved", 4, 6, 8)


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_no_schedule_ends_before_the_least_seconds(data, groups, rounds, on_demand):
    for name, each in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), *[("interleaved", 2)] * (groups > 1)):
        times = st.floats(0, 3, width=16)
        drawn = data.draw(
            st.lists(st.tuples(times, times, times, times), min_size=groups * each, max_size=groups * each)
        )
        stages = [StageSeconds(f, b, m, w * (name == "zb-h1"), on_demand) for f, b, m, w in drawn]
        run = simulate(schedule(name, groups, groups * rounds, groups * each), stages)
        waits = [on_demand * stage.message for stage in stages[:-1]]
        ahead = [stage.forward + wait for stage, wait in zip(stages, [0, *waits], strict=True)]
        back = [stage.backward + stage.weights + wait for stage, wait in zip(stages, [*waits, 0], strict=True)]
        slowest_s = max(
            (groups * rounds - 1) * (there + here) - (groups - 1) * there
            for there, here in zip(ahead, back, strict=True)
        )
        least_s = least_seconds(sum(ahead) + sum(back), name, groups, groups * rounds, slowest_s)
        assert least_s <= run.seconds * (1 + 1e-9)


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_several_cuts_take_what_each_takes(data, groups, microbatches, on_demand):
    times = st.floats(0, 3, width=16)
    cuts = data.draw(st.lists(st.lists(st.tuples(times, times, times), min_size=groups, max_size=groups), min_size=1))
    for name in ("gpipe", "1f1b", "zb-h1"):
        table = schedule(name, groups, microbatches)
        each = [simulate(table, [StageSeconds(*times, on_demand=on_demand) for times in cut]).seconds for cut in cuts]
        took = np.moveaxis(np.array(cuts), 0, 2).swapaxes(0, 1)
        assert seconds_of_cuts(turns(table, groups), *took, on_demand=on_demand) == pytest.approx(each)
