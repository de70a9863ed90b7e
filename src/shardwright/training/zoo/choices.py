"""The losses, optimizers and schedules that a configuration names: their options, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.training.schedules import constant_schedule, cosine_schedule, polynomial_schedule, step_schedule
from shardwright.training.zoo.rows import (
    Decay,
    LossFunction,
    LossOptions,
    OptimizerOptions,
    RunLength,
    ScheduleOptions,
    between,
    more_than,
)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(LossOptions):
    """The cross entropy of the classes, or of the next character; its metric is the accuracy."""

    label_smoothing: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(LossOptions):
    """The mean squared error of numbers; it has no metric."""


def make_cross_entropy(options: CrossEntropy, dtype: torch.dtype) -> LossFunction:
    """The labels are smoothed in training only; logits have the classes along their last dim."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = model(x.to(dtype) if x.is_floating_point() else x)
        if logits.ndim > 2:
            logits, y = logits.flatten(0, -2), y.flatten()
        loss = F.cross_entropy(logits, y, label_smoothing=options.label_smoothing if model.training else 0.0)
        return loss if model.training else (loss, {"accuracy": (logits.argmax(-1) == y).double().mean()})

    return loss_fn


def make_mean_squared_error(options: MeanSquaredError, dtype: torch.dtype) -> LossFunction:
    """The loss is the same in training and in evaluation, where it has no metric beside it."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x.to(dtype)), y.to(dtype))

    return loss_fn


@dataclass(frozen=True, kw_only=True)
class Sgd(OptimizerOptions):
    """The options of `torch.optim.SGD`."""

    momentum: float = between(0, 1, 0.0)
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerOptions):
    """The options of `torch.optim.AdamW`."""

    lr: float = more_than(0, 1e-3)
    betas: tuple[float, ...] = between(0, 1, (0.9, 0.999))
    eps: float = more_than(0, 1e-8)


Groups = Iterable[dict[str, Any]]

# Which parameters the weight decay acts on; the others are trained without.
DECAYS: Mapping[Decay, Callable[[nn.Parameter], bool]] = {
    "all": lambda parameter: True,
    "matrices": lambda parameter: parameter.ndim >= 2,
}


def groups_of(options: OptimizerOptions, parameters: Iterable[nn.Parameter]) -> Groups:
    """The parameters that are trained, in two groups where the weight decay spares some of them."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decays = DECAYS[options.decay]
    decaying, spared = ([p for p in trained if decays(p) is wanted] for wanted in (True, False))
    return [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decaying, options.weight_decay), (spared, 0.0))
        if members
    ]


def make_sgd(options: Sgd, groups: Groups, lr: float) -> Optimizer:
    """Return the SGD that the options describe."""
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, nesterov=options.nesterov)


def sgd_problems(options: Sgd) -> list[str]:
    """Refuses Nesterov's step, which looks ahead along the momentum, without a momentum."""
    if options.nesterov and not options.momentum:
        return ["optimizer.nesterov: true needs a momentum; type -o optimizer.momentum=0.9"]
    return []


def make_adamw(options: AdamW, groups: Groups, lr: float) -> Optimizer:
    """Return the AdamW that the options describe."""
    first, second = options.betas
    return torch.optim.AdamW(groups, lr=lr, betas=(first, second), eps=options.eps)


def adamw_problems(options: AdamW) -> list[str]:
    """Refuses other than two betas: one for the mean of gradients, one for the mean of their squares."""
    return [] if len(options.betas) == 2 else [f"optimizer.betas: expected two numbers, got {len(options.betas)}"]


@dataclass(frozen=True, kw_only=True)
class Constant(ScheduleOptions):
    """The options of a rate that stays the same."""


@dataclass(frozen=True, kw_only=True)
class Cosine(ScheduleOptions):
    """The options of half a cosine down to ``floor`` times the rate at the last step."""

    floor: float = between(0, 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class StepDecay(ScheduleOptions):
    """The options of a rate that is multiplied by ``factor`` after every so many epochs."""

    every_epochs: float = more_than(0, 30.0)
    factor: float = between(0, 1, 0.1)


@dataclass(frozen=True, kw_only=True)
class Polynomial(ScheduleOptions):
    """The options of (1 - progress) ** ``power``, down to ``floor`` times the rate."""

    power: float = more_than(0, 1.0)
    floor: float = between(0, 1, 0.0)


def make_constant(options: Constant, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    """Return the schedule of a rate that stays the same after the warmup."""
    return constant_schedule(optimizer, warmup_steps=length.warmup_steps)


def make_cosine(options: Cosine, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    """Return the schedule of a rate that falls as half a cosine after the warmup."""
    return cosine_schedule(optimizer, steps=length.steps, warmup_steps=length.warmup_steps, floor=options.floor)


def make_steps(options: StepDecay, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    """Return the schedule of a rate that falls by a factor after every so many epochs."""
    every = max(1, round(options.every_epochs * length.steps_per_epoch))
    return step_schedule(optimizer, every_steps=every, factor=options.factor, warmup_steps=length.warmup_steps)


def make_polynomial(options: Polynomial, optimizer: Optimizer, length: RunLength) -> LambdaLR:
    """Return the schedule of a rate that falls as a polynomial after the warmup."""
    return polynomial_schedule(
        optimizer, steps=length.steps, power=options.power, warmup_steps=length.warmup_steps, floor=options.floor
    )
