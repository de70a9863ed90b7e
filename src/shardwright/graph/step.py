"""From a model, a loss function and a batch to the graph that is planned."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from shardwright.graph.capture import capture
from shardwright.graph.ir import Capture
from shardwright.graph.pins import apply_pins
from shardwright.graph.rewrite import rewrite
from shardwright.graph.tracing.trace import LossFunction

StepKind = Literal["training", "evaluation", "predict"]


def outputs_alone(predict_fn: LossFunction) -> LossFunction:
    """A loss function that returns what ``predict_fn(model, batch)`` does beside no loss, captured as "predict"."""

    @functools.wraps(predict_fn, updated=())
    def beside_no_loss(model: Any, batch: Any) -> Any:
        return torch.zeros(()), predict_fn(model, batch)

    return beside_no_loss


def captured_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    pins: Mapping[str, Any],
    kind: StepKind = "training",
    batch_norm: Literal["global", "per-replica"] = "global",
) -> Capture:
    """The graph of a step, rewritten and pinned. Raises as `capture` and `apply_pins` do."""
    captured = capture(model, loss_fn, batch, training=kind == "training", predict=kind == "predict")
    return apply_pins(rewrite(captured, batch_norm=batch_norm), pins)
