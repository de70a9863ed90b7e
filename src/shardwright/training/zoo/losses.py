"""The losses that a configuration names, and the metrics that come with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.training.zoo.ranges import between
from shardwright.training.zoo.rows import LossFunction, LossOptions


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
