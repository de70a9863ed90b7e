"""The graphs of a model's steps, which rank 0 makes: captured, or following from a capture that left sizes open.

A capture with open sizes decides by the sizes of one batch, as every capture does, and notes each decision. A batch for
which all of them come out alike has a graph that follows by arithmetic; any other batch is captured. Since Python could
also ask for the type of a size, or print it, an open capture is used only once it has given the very graphs that were
captured for two batches of different sizes.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shardwright.common import trees
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture, Filled
from shardwright.compiler.capture.step import OpenStep, captured_step
from shardwright.compiler.capture.tracing.outside.values import exactly
from shardwright.compiler.capture.tracing.trace import LossFunction, capture_device
from shardwright.errors import CaptureError
from shardwright.runtime.graphs.dynamic import (
    Dynamic,
    Shapes,
    changed_dims,
    changes,
    labels_and_shapes,
    open_dims,
    written,
)
from shardwright.runtime.graphs.equal import same_bits
from shardwright.runtime.graphs.unchanged import Remembered

MOST_OPEN = 3  # open captures of one kind of step, each for the sizes by which everything is decided alike
MANY_SHAPES = 4  # captured ones of one kind of step, when what can be done about it is said
SLOW_S = 5.0  # a capture that takes longer is told of


class NewShape(UserWarning):
    """A batch of another shape was captured, which takes time."""


@dataclass
class _Open:
    """A capture with open sizes, and whether it has given the graphs of two batches."""

    step: OpenStep
    remembered: Remembered
    confirmed: bool = False


_Alone = tuple[Shapes, Capture, Remembered, frozenset[Filled]]
"""A graph that was captured for batches of these shapes that are filled so, and follows from no open capture."""
_OTHER_GRAPH = "the graph that follows from open sizes is not the one that is captured"


@dataclass
class _Known:
    """The captures of steps that differ in the shapes of their batches alone."""

    shapes: list[Shapes] = field(default_factory=list)
    alone: _Alone | None = None
    open: list[_Open] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""  # why the graph of a batch did not follow from an open capture


@dataclass(frozen=True)
class Captures:
    """The captures of a model's steps until now, and how further ones are made.

    Args:
        predict_fn: gives outputs beside no loss, as `outputs_alone` makes it; by default the loss function is called.
        dynamic: which sizes are left open; see `dynamic.py`.
        device: where the model runs, or will when its tensors have been brought there; by default where it is.
        reduce_dtype: in which gradients are summed over ranks, by default that of each parameter.
    """

    module: nn.Module
    loss_fn: LossFunction
    pins: Mapping[str, Any]
    batch_norm: Literal["global", "per-replica"] = "global"
    predict_fn: LossFunction | None = None
    dynamic: Dynamic = False
    device: torch.device | None = None
    reduce_dtype: torch.dtype | None = None
    _known: dict[str, _Known] = field(default_factory=dict, init=False, repr=False)
    """Cached by `key`; what is made of open sizes is compared with captures before it serves."""

    def function(self, kind: StepKind) -> LossFunction:
        """Return what a step of this kind calls."""
        return self.predict_fn if kind == "predict" and self.predict_fn is not None else self.loss_fn

    def key(self, kind: StepKind, batch: Any) -> str:
        """Return what the graph of a step depends on beside the model and the sizes of the batch.

        Cached by it are graphs and programs: it names the kind of step, the structure of the batch with every key and
        each leaf that is no tensor, exactly (`exactly`), of tensors dtype and number of dims, and of torch's state what
        a trace asks: autocast, the default dtype, and which parameters have gradients. What a step reads of Python is
        compared beside it (`Remembered`), sizes too (`Step.of`), and modules or parameters that were replaced are
        refused (`Structure`).
        """
        leaves, spec = trees.tree_flatten(batch)
        tensors = [(str(leaf.dtype), leaf.ndim) for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [exactly(leaf) for _, leaf in leaves if not isinstance(leaf, torch.Tensor)]
        structure = exactly(trees.structure_of(spec))
        device = capture_device(self.module, self.device).type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        trained = "".join("1" if p.requires_grad else "0" for p in self.module.parameters())
        return json.dumps([kind, tensors, others, structure, autocast, str(torch.get_default_dtype()), trained])

    def of(self, kind: StepKind, batch: Any, filled: frozenset[Filled] = frozenset()) -> Capture:
        """The graph of a step on a whole batch, whose tensors need no numbers, but are known to be ``filled`` so.

        Raises:
            CaptureError: where the step cannot be captured.
        """
        labels, shapes = labels_and_shapes(batch)
        known = self._known.setdefault(self.key(kind, batch), _Known())
        following = self._following(known, shapes, filled)
        for of, capture in following:
            if of.confirmed:
                return capture
        start = time.perf_counter()
        options = self.batch_norm, self.device, self.reduce_dtype
        captured = captured_step(self.module, self.function(kind), batch, self.pins, kind, *options, filled)
        if self.dynamic:
            self._learn(known, following, captured, kind, batch, filled)
        if shapes not in known.shapes:  # else something else has changed
            known.shapes.append(shapes)
            _tell(known, kind, labels, time.perf_counter() - start, asked=bool(self.dynamic))
        return captured

    def _following(self, known: _Known, shapes: Shapes, filled: frozenset[Filled]) -> list[tuple[_Open, Capture]]:
        """The graphs for these shapes that follow from open captures."""
        found = []
        for open_capture in known.open:
            if open_capture.remembered.holds():
                try:
                    found.append((open_capture, open_capture.step.at(shapes, filled)))
                except CaptureError as error:
                    known.reason = str(error)
        return found

    def _learn(
        self, known: _Known, following: list[tuple[_Open, Capture]], captured: Capture, kind: StepKind, batch: Any,
        filled: frozenset[Filled],
    ) -> None:  # fmt: skip
        """Compare what was captured with what follows; the second time that nothing does, make an open capture."""
        for of, capture in following:
            of.confirmed = _same(capture, captured)
            if not of.confirmed:
                known.open.remove(of)
                known.reason = _OTHER_GRAPH
        if following:
            return
        before, shapes = known.alone, labels_and_shapes(batch)[1]
        known.alone = shapes, captured, Remembered(captured, self.module, self.function(kind)), filled
        if before is not None and before[2].holds():
            known.open = [of for of in known.open if of.remembered.holds()]
            if len(known.open) < MOST_OPEN:
                try:
                    self._leave_open(known, before, kind, batch)
                except CaptureError as error:
                    known.reason = str(error)

    def _leave_open(self, known: _Known, before: _Alone, kind: StepKind, batch: Any) -> None:
        """Make an open capture, and compare what follows from it with the graphs of this batch and the one before."""
        assert known.alone is not None
        shapes, captured, remembered, filled = known.alone
        dims = open_dims(self.dynamic, labels_and_shapes(batch)[0], [*known.shapes, shapes])
        if not any(dims):
            return
        options = self.batch_norm, dims, self.device, self.reduce_dtype
        step = OpenStep(self.module, self.function(kind), batch, self.pins, kind, *options)
        if not _same(step.at(shapes, filled), captured):
            known.reason = _OTHER_GRAPH
            return
        known.open.append(made := _Open(step, remembered))
        made.confirmed = _same(step.at(before[0], before[3]), before[1])
        known.alone = None


def _same(a: Capture, b: Capture) -> bool:
    """Return whether two captures are one in everything, also in what they hold of Python."""
    same_values = a.constants.keys() == b.constants.keys() and all(
        same_bits(tensor, b.constants[name]) for name, tensor in a.constants.items()
    )
    rest = (a.digest, a.aux_spec, a.tied, a.outside) == (b.digest, b.aux_spec, b.tied, b.outside)
    return rest and same_values


def _tell(known: _Known, kind: StepKind, labels: Sequence[str], seconds: float, *, asked: bool) -> None:
    """Say what the capture of another shape has cost, and once what can be done about it."""
    known.seconds += seconds
    count = len(known.shapes)
    if count == 1 or count > MANY_SHAPES or (count < MANY_SHAPES and seconds < SLOW_S):
        return
    text = f"captured a batch of another shape ({changes(labels, *known.shapes[-2:])}) in {seconds:.1f} s"
    text += f", graph {count} of {kind} steps"
    if count == MANY_SHAPES:
        text += f", {known.seconds:.1f} s for all; "
        if asked:
            text += f"not every graph follows from one with open sizes, as dynamic= asks: {known.reason}"
        else:
            found = written(labels, changed_dims(known.shapes))
            text += f"sw.parallelize(..., dynamic={found}) makes them of one capture"
    warnings.warn(NewShape(text), stacklevel=2)
