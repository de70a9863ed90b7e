"""Module, loss function and sample batch -> `Capture`: the forward graph with the loss, as one frozen value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from shardwright.common import trees
from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.convert import convert
from shardwright.compiler.capture.ir import Capture, CaptureKey
from shardwright.compiler.capture.pins import module_pins, pin_module
from shardwright.compiler.capture.rewriting.experts import with_experts
from shardwright.compiler.capture.tracing.in_place import refuse_shared_memory
from shardwright.compiler.capture.tracing.trace import LossFunction, Trace, capture_device, trace
from shardwright.errors import CaptureError

StepKind = Literal["training", "fine-tuning", "evaluation", "predict"]
"""The purpose of a step. Fine-tuning is training in evaluation mode: nothing is dropped, and statistics stay."""


def capture(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    sample_batch: Any,
    kind: StepKind = "training",
    *,
    device: torch.device | None = None,
) -> Capture:
    """Capture ``loss_fn(model, batch)`` for batches like ``sample_batch``.

    The model and the batch may be real, fake or on the meta device: only shapes, dtypes and devices are looked at,
    and nothing of the model is changed. Modules keep the flags they have if the model is in the mode that the kind of
    step wants, or are put into it. Where the step trains, the loss needs gradients. To predict, the outputs are what
    the loss function returns beside the loss: ``loss`` is then ``""``. ``device`` is where the model is to run, which
    may not hold it yet; by default where it is.

    Raises:
        CaptureError: where the step is not one graph of known shapes; names the user's line and the remedy.
    """
    return Capturing(model, loss_fn, sample_batch, kind, device=device).capture()


class Capturing:
    """The key of a capture: one batch, or batches that differ in the sizes of some dims."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        sample_batch: Any,
        kind: StepKind = "training",
        *,
        open_dims: Sequence[Collection[int]] = (),
        device: torch.device | None = None,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        leaves, spec = trees.tree_flatten(sample_batch)
        self._labels = [path or "batch" for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._kind, self._train = kind, kind in ("training", "fine-tuning")
        self._key = _key(kind, capture_device(model, device), leaves)
        self._traced = trace(
            model, loss_fn, [leaf for _, leaf in leaves], spec, train=self._train, in_training=kind == "training",
            open_dims=open_dims, device=device,
        )  # fmt: skip

    def capture(self) -> Capture:
        """The graph for the sample batch. Raises as the function of that name does."""
        captured = self._converted(self._traced)
        self._traced.reading.warn()
        return captured

    def at(self, shapes: Sequence[Sequence[int]]) -> Capture:
        """The graph for a batch whose tensors have these shapes.

        Raises:
            CaptureError: where something that the trace decided by sizes is another for these, or not known.
        """
        sizes = self._traced.open_sizes.bind(shapes, self._labels)
        return self._converted(replace(self._traced, sizes=sizes))

    def _converted(self, traced: Trace) -> Capture:
        captured = convert(traced, self._labels, self._key, train=self._train, predict=self._kind == "predict")
        outside = traced.reading.places_of(captured.constants)
        captured = replace(captured, frozen=traced.reading.places, outside=outside)
        if self._kind == "training" and not captured.values[captured.loss].needs_gradient:
            raise CaptureError(
                "the loss does not depend on any parameter that requires a gradient\n"
                "Compute it from the output of the model that the loss function is given, outside torch.no_grad()."
            )
        self._refuse_shared_memory(captured)
        captured = with_experts(captured)  # of which a module of experts may be pinned
        for scope, request in module_pins(self._model).items():
            captured = pin_module(captured, scope, request)
        return check(captured)

    def _refuse_shared_memory(self, captured: Capture) -> None:
        model = self._model
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        beside = {str(captured.outside.get(name, name)): tensor for name, tensor in captured.constants.items()}
        written = [captured.values[buffer].label for buffer in captured.mutations]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **beside}
        refuse_shared_memory(tensors, (*trained, *written))


def flatten_batch(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order of the inputs of its capture."""
    return [leaf for _, leaf in trees.tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _key(kind: StepKind, device: torch.device, leaves: list[tuple[str, Any]]) -> CaptureKey:
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else ""
    beside = [f"{path}={leaf!r}" for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return CaptureKey(kind, str(dtype).removeprefix("torch."), tuple(beside))
