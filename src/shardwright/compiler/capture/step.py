"""From a model, a loss function and a batch to the graph that is planned."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from shardwright.compiler.capture.capture import Capturing, StepKind, capture
from shardwright.compiler.capture.casts import with_shared_casts
from shardwright.compiler.capture.ir import Capture, Filled
from shardwright.compiler.capture.pins import apply_pins
from shardwright.compiler.capture.reached import with_gradients_of_loss
from shardwright.compiler.capture.read_first import with_read_first
from shardwright.compiler.capture.reduced import with_reduction_dtypes
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.capture.tracing.trace import LossFunction


def outputs_alone(predict_fn: LossFunction) -> LossFunction:
    """A loss function that returns what ``predict_fn(model, batch)`` does beside no loss, captured as "predict"."""

    @functools.wraps(predict_fn, updated=())
    def beside_no_loss(model: Any, batch: Any) -> Any:
        return torch.zeros((), device="cpu"), predict_fn(model, batch)

    return beside_no_loss


def captured_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    pins: Mapping[str, Any],
    kind: StepKind = "training",
    batch_norm: Literal["global", "per-replica"] = "global",
    device: torch.device | None = None,
    reduce_dtype: torch.dtype | None = None,
    filled: Collection[Filled] = (),
) -> Capture:
    """The graph of a step, rewritten and pinned, for batches that are ``filled`` so.

    Raises as `capture` and `apply_pins` do.
    """
    captured = capture(model, loss_fn, batch, kind, device=device)
    return _finished(captured, pins, batch_norm, reduce_dtype, filled)


def _finished(
    captured: Capture,
    pins: Mapping[str, Any],
    batch_norm: Literal["global", "per-replica"],
    reduce_dtype: torch.dtype | None,
    filled: Collection[Filled],
) -> Capture:
    pinned = apply_pins(rewrite(captured, batch_norm=batch_norm, filled=filled), pins)
    return with_read_first(with_reduction_dtypes(with_shared_casts(with_gradients_of_loss(pinned)), reduce_dtype))


class OpenStep:
    """A step that is captured once for batches that differ in the sizes of some dims, rewritten and pinned for each.

    Args:
        open_dims: these dims, of every tensor of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        pins: Mapping[str, Any],
        kind: StepKind,
        batch_norm: Literal["global", "per-replica"],
        open_dims: Sequence[Collection[int]],
        device: torch.device | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._capturing = Capturing(model, loss_fn, batch, kind, open_dims=open_dims, device=device)
        self._pins: Mapping[str, Any] = pins
        self._batch_norm: Literal["global", "per-replica"] = batch_norm
        self._reduce_dtype = reduce_dtype

    def at(self, shapes: Sequence[Sequence[int]], filled: Collection[Filled] = ()) -> Capture:
        """The graph for a batch of these shapes that is ``filled`` so. Raises as `Capturing.at` does."""
        return _finished(self._capturing.at(shapes), self._pins, self._batch_norm, self._reduce_dtype, filled)
