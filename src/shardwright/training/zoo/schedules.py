"""The schedules that a configuration names: options for the curves of `shardwright.training.schedules`."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.training.schedules import constant_schedule, cosine_schedule, polynomial_schedule, step_schedule
from shardwright.training.zoo.ranges import between, more_than
from shardwright.training.zoo.rows import RunLength, ScheduleOptions


@dataclass(frozen=True, kw_only=True)
class Constant(ScheduleOptions):
    """The options of a rate that stays the same."""


@dataclass(frozen=True, kw_only=True)
class Cosine(ScheduleOptions):
    """The options of half a cosine down to ``floor`` times the rate at the last step."""

    floor: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class Steps(ScheduleOptions):
    """The options of a rate that is multiplied by ``factor`` after every so many epochs."""

    every_epochs: float = more_than(0, 30.0)
    factor: float = between(0, 1, 0.1)


@dataclass(frozen=True, kw_only=True)
class Polynomial(ScheduleOptions):
    """The options of (1 - progress) ** ``power``, down to ``floor`` times the rate."""

    power: float = more_than(0, 1.0)
    floor: float = between(0, 1, 0.0)


def make_constant(options: Constant, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    return constant_schedule(optimizer, warmup_steps=length.warmup_steps)


def make_cosine(options: Cosine, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    return cosine_schedule(optimizer, steps=length.steps, warmup_steps=length.warmup_steps, floor=options.floor)


def make_steps(options: Steps, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    every = max(1, round(options.every_epochs * length.steps_per_epoch))
    return step_schedule(optimizer, every_steps=every, factor=options.factor, warmup_steps=length.warmup_steps)


def make_polynomial(options: Polynomial, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    return polynomial_schedule(
        optimizer, steps=length.steps, power=options.power, warmup_steps=length.warmup_steps, floor=options.floor
    )
