"""Linear layers between two reshapes keep the dims that the first one joins and the second one takes apart again.

`torch.nn.MultiheadAttention` joins tokens and rows before its last layer, the rows being the inner dim. A part of the
rows is then no contiguous part of what is joined, so that a split batch would be gathered. The layer computes with the
last dim alone, and gives the same with both dims in front of that.
"""

from __future__ import annotations

import math

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Node, without_unused
from shardwright.compiler.capture.rewriting.makers import Makers
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.table import Column, column

_RESHAPES: Column[bool] = column(("reshape", True))
_LINEAR = "aten.linear.default"


def without_joined_rows(capture: Capture) -> Capture:
    """Return the capture in which no linear layer is between two reshapes that undo each other in its first dims."""
    writer, makers = Writer(capture), Makers(capture)
    for node in capture.nodes:
        layer = _between(node, capture, makers)
        if layer is None:
            writer.keep(node)
            continue
        joined = makers.of(layer.operands[0])
        assert joined is not None
        source, rows = writer.value(joined.operands[0]), capture.values[layer.operands[0]]
        wanted = writer.replaced(node)
        apart = (*wanted.shape[:-1], rows.shape[-1])
        given = writer.emit(joined, "aten.reshape.default", (source, apart), apart, source.dtype)
        args = tuple(writer.fill(arg, layer) for arg in layer.args[1:])
        writer.emit(layer, _LINEAR, (given, *args), wanted.shape, wanted.dtype)
        writer.name_last(node)
    return check(without_unused(writer.capture()))


def _between(node: Node, capture: Capture, makers: Makers) -> Node | None:
    """Return the layer that a reshape takes the rows of apart, if another one has joined them; None otherwise."""
    if not _RESHAPES.of(node.op) or len(node.operands) != 1:
        return None
    layer = makers.for_one_reader(node.operands[0])
    if layer is None or layer.op != _LINEAR or layer.pin is not None:
        return None
    joined = makers.of(layer.operands[0])
    if joined is None or not _RESHAPES.of(joined.op) or len(joined.operands) != 1 or joined.pin is not None:
        return None
    *rows, width = capture.values[node.operands[0]].shape
    *dims, last = capture.values[node.results[0]].shape
    is_undone = len(rows) == 1 and len(dims) > 1 and last == width and math.prod(dims) == rows[0]
    return layer if is_undone else None
