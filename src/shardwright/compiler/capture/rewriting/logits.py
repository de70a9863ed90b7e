"""Losses over large vocabularies take their logits in half precision, and cast them to float32 part by part.

Models and autocast cast logits to float32 before the loss, which for 128,000 classes are gigabytes: `cross_entropy_sum`
computes in float32, too, and holds some rows of them at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Node, Value, without_unused
from shardwright.compiler.capture.operators import HALF
from shardwright.compiler.capture.rewriting.makers import Makers
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.table import Column, column, row_of

LARGE = 1 << 15
"""Classes of which logits are cast part by part; of fewer a step holds larger tensors than these."""
_SUM = 2  # torch's number for reduction=


def without_wide_logits(capture: Capture) -> Capture:
    """Return the capture in which no summed cross entropy over a large vocabulary reads a cast that it alone reads."""
    wide, writer = _Wide(capture), Writer(capture)
    for node in capture.nodes:
        read = _READ.of(node.op)
        settings = read(writer, node) if read else None
        logits = wide.source(node, writer) if settings else None
        if logits is None or settings is None:
            writer.keep(node)
            continue
        writer.emit(node, "shardwright.cross_entropy_sum", (logits, *settings), (), torch.float32)
        writer.name_last(node)
    return check(without_unused(writer.capture()))


def _of_sum(writer: Writer, node: Node) -> tuple[Any, ...] | None:
    """The arguments of `cross_entropy_sum` after the logits."""
    return tuple(writer.fill(arg, node) for arg in node.args[1:])


def _of_torch(writer: Writer, node: Node) -> tuple[Any, ...] | None:
    named = writer.arguments(node)
    if named["reduction"] != _SUM:
        return None
    return tuple(named[name] for name in ("target", "weight", "ignore_index", "label_smoothing"))


_READ: Column[Any] = column(("shardwright.cross_entropy_sum", _of_sum), ("cross_entropy_loss", _of_torch))


class _Wide:
    """The casts of logits in a graph."""

    def __init__(self, capture: Capture) -> None:
        self._values, self._makers = capture.values, Makers(capture)

    def source(self, loss: Node, writer: Writer) -> Value | None:
        """Return the logits of a loss as they were before a cast to float32, None where there is no such cast."""
        logits, target = (self._values[name] for name in loss.operands[:2])
        if logits.dtype != torch.float32 or len(logits.shape) < 2 or logits.shape[1] < LARGE:
            return None
        if target.dtype.is_floating_point:
            return None
        views, name = list[Node](), logits.name
        while (maker := self._makers.for_one_reader(name)) is not None:
            name = maker.operands[0] if maker.operands else ""
            if row_of(maker.op).casts and self._values[name].dtype in HALF:
                return self._viewed(writer.value(name), views, writer)
            if not row_of(maker.op).view or len(maker.operands) != 1:
                return None
            views.append(maker)
        return None

    def _viewed(self, source: Value, views: list[Node], writer: Writer) -> Value:
        """Write the views between a cast and the loss, the last one first, for what was cast."""
        value = source
        for view in reversed(views):
            args = [value if isinstance(arg, Operand) else arg for arg in view.args]
            shape = self._values[view.results[0]].shape
            value = writer.emit(view, view.op, args, shape, source.dtype, dict(view.kwargs))
        return value
