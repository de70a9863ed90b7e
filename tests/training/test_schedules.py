"""Learning rates by optimizer step, against the formulas."""

import math

import pytest
import torch

import shardwright as sw
from shardwright.errors import UsageError


def rates(make, count, **options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = make(optimizer, **options)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_constant_after_a_warm_up_that_ends_at_the_whole_rate():
    assert rates(sw.constant_schedule, 6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_cosine_falls_to_its_floor_at_the_last_step_and_stays():
    found = rates(sw.cosine_schedule, 12, steps=10, warmup_steps=2, floor=0.1)
    expected = [1.0, 2.0] + [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(t / 8, 1))) / 2) for t in range(10)]
    assert found == pytest.approx(expected)
    assert found[10] == pytest.approx(0.2)


def test_steps_and_polynomials():
    assert rates(sw.step_schedule, 5, every_steps=2, factor=0.5) == pytest.approx([2, 2, 1, 1, 0.5])
    assert rates(sw.polynomial_schedule, 5, steps=4, power=2.0) == pytest.approx([2, 1.125, 0.5, 0.125, 0])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(UsageError, match="the schedule has 5 steps and its warm-up 5: expected fewer in the warm-up"):
        rates(sw.cosine_schedule, 1, steps=5, warmup_steps=5)
