"""Joins of one tensor with nothing are that tensor: the first step of a cache of keys, as models of libraries have it.

A join needs the joined dim whole, so that it would gather what is split along the sequence.
"""

from __future__ import annotations

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Node, Value, without_unused
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.table import Column, column

_JOINS: Column[bool] = column(("cat", True))


def without_joins_of_one(capture: Capture) -> Capture:
    """Return the capture in which what is joined with empty tensors alone is a view of itself."""
    writer = Writer(capture)
    for node in capture.nodes:
        joined = _joined_alone(node, capture)
        if joined is None:
            writer.keep(node)
        else:
            writer.emit(node, "aten.alias.default", (writer.value(joined.name),), joined.shape, joined.dtype)
            writer.name_last(node)
    return check(without_unused(writer.capture()))


def _joined_alone(node: Node, capture: Capture) -> Value | None:
    """Return the one operand of a join that has entries; None where several have, or the result is of another dtype."""
    if not _JOINS.of(node.op) or node.pin is not None:
        return None
    filled = [name for name in node.operands if 0 not in capture.values[name].shape]
    if len(filled) != 1:
        return None
    operand, result = capture.values[filled[0]], capture.values[node.results[0]]
    return operand if operand.dtype == result.dtype else None
