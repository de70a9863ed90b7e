"""Learning rates over a run, counted in optimizer steps: torch's `LambdaLR` with the curves that people use.

A curve is a factor of each parameter group's own rate. The trainer steps it once per optimizer step, so neither
gradient accumulation nor the number of ranks changes it. All of them may begin with a linear warm-up, which reaches the
whole rate at its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.errors import UsageError

Curve = Callable[[int], float]


def constant_schedule(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """The optimizer's own rate throughout, after the warm-up."""
    return _after_warmup(optimizer, warmup_steps, lambda step: 1.0)


def cosine_schedule(optimizer: Optimizer, *, steps: int, warmup_steps: int = 0, floor: float = 0.0) -> LambdaLR:
    """Half a cosine from the rate down to ``floor`` times the rate at step ``steps``, and that from there on."""
    left = _steps_after_warmup(steps, warmup_steps)
    return _after_warmup(
        optimizer, warmup_steps, lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step / left, 1))) / 2
    )


def polynomial_schedule(
    optimizer: Optimizer, *, steps: int, power: float = 1.0, warmup_steps: int = 0, floor: float = 0.0
) -> LambdaLR:
    """(1 - progress) ** ``power``, from the rate down to ``floor`` times the rate at step ``steps``."""
    left = _steps_after_warmup(steps, warmup_steps)
    return _after_warmup(optimizer, warmup_steps, lambda step: floor + (1 - floor) * (1 - min(step / left, 1)) ** power)


def step_schedule(optimizer: Optimizer, *, every_steps: int, factor: float = 0.1, warmup_steps: int = 0) -> LambdaLR:
    """The rate times ``factor`` after every ``every_steps`` steps, counted from the end of the warm-up."""
    if every_steps < 1:
        raise UsageError(f"expected every_steps of at least 1, got {every_steps}")
    return _after_warmup(optimizer, warmup_steps, lambda step: factor ** (step // every_steps))


def _steps_after_warmup(steps: int, warmup_steps: int) -> int:
    if steps <= warmup_steps:
        raise UsageError(
            f"the schedule has {steps} steps and its warm-up {warmup_steps}: expected fewer in the warm-up; "
            "train longer or lower the warm-up"
        )
    return steps - warmup_steps


def _after_warmup(optimizer: Optimizer, warmup_steps: int, curve: Curve) -> LambdaLR:
    """A linear warm-up, then ``curve``, which counts from 0 at the end of the warm-up."""
    if warmup_steps < 0:
        raise UsageError(f"expected warmup_steps of at least 0, got {warmup_steps}")
    return LambdaLR(
        optimizer,
        lambda step: (step + 1) / warmup_steps if step < warmup_steps else curve(step - warmup_steps),
    )
