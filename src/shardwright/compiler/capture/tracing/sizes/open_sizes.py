"""Sizes of the batch that a trace leaves open, and what the trace has decided by the sizes that it was shown.

A trace is made for one batch. Whatever asks for a size there, a branch in Python or an operator of torch, is answered
by this batch, and the question is noted. For sizes that give the same answers the trace would have been the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from traceback import FrameSummary
from typing import Any

import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing import sources
from shardwright.errors import CaptureError

Sizes = Mapping[Any, Any]
"""The number that each open size has in a batch, by its sympy symbol."""


def in_batch(label: str) -> str:
    """Return how a tensor of the batch is written in Python.

    >>> in_batch("1"), in_batch("1.mask"), in_batch("batch")
    ('batch[1]', "batch[1]['mask']", 'batch')
    """
    if label == "batch":
        return label
    return "batch" + "".join(f"[{step}]" if step.isdigit() else f"[{step!r}]" for step in label.split("."))


class OpenSizes:
    """The open sizes of a program that was exported with ``inputs`` in place of the tensors of the batch."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        shapes: list[list[Any]] = [list(tensor.shape) for tensor in inputs]
        self._shapes = [[torch_private.symbol_of(size) for size in shape] for shape in shapes]
        self._open = [size for size in chain(*shapes) if isinstance(size, torch.SymInt)]
        if self._open:
            torch_private.note_further(self._open[0])

    def bind(self, shapes: Sequence[Sequence[int]], labels: Sequence[str]) -> Sizes:
        """Return what the open sizes are for a batch of these shapes, whose tensors are labelled so.

        Raises:
            CaptureError: where the trace would have been another one; names the user's line where it asked for a size.
        """
        if [len(sizes) for sizes in self._shapes] != [len(shape) for shape in shapes]:
            raise CaptureError("the tensors have other numbers of dims")
        import sympy  # a quarter of a second, and needed where sizes are open alone

        sizes: dict[Any, Any] = {}
        for ours, given in zip(chain(*self._shapes), chain(*shapes), strict=True):
            if not isinstance(ours, int):
                sizes[ours] = sympy.Integer(given)
            elif ours != given:
                raise CaptureError("sizes differ that are not open")
        for condition, frame in torch_private.decided(self._open[0]) if self._open else ():
            if condition.xreplace(sizes) != True:  # noqa: E712  # sympy's true, and no other expression
                raise CaptureError(f"another one holds only for {self._written(condition, labels)}{_at(frame)}")
        return sizes

    def _written(self, condition: Any, labels: Sequence[str]) -> str:
        """A condition in terms of the batch."""
        names = {
            str(size): f"{in_batch(label)}.shape[{dim}]"
            for label, sizes in zip(labels, self._shapes, strict=True)
            for dim, size in enumerate(sizes)
        }
        written = {symbol: type(symbol)(names.get(str(symbol), str(symbol))) for symbol in condition.free_symbols}
        condition = condition.xreplace(written)
        if condition.is_Relational:
            return f"{condition.lhs} {condition.rel_op} {condition.rhs}"
        return str(condition)


def _at(frame: FrameSummary | None) -> str:
    """Return where in the user's code something was asked for."""
    if frame is None or not sources.is_users(frame.filename):
        return ""
    return f", at {sources.describe(frame.filename, frame.lineno or 0, frame.name)}"
