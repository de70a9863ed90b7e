"""From a model, a loss function and a batch to the graph that is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from shardwright.graph.capture import capture
from shardwright.graph.ir import Capture
from shardwright.graph.pins import apply_pins
from shardwright.graph.rewrite import rewrite
from shardwright.graph.tracing.trace import LossFunction

StepKind = Literal["training", "evaluation", "predict"]


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
