"""The dtype in which the gradient of each parameter is summed over ranks, also where a cast or view of it is read.

Autocast reads a cast of a parameter, whose gradient comes in half precision. Summed over ranks so, each sum would be
rounded as coarsely as a number of that dtype; DistributedDataParallel casts each rank's gradient back and sums in the
dtype of the parameter. So do plans: the casts and views between a parameter and its readers carry the dtype of its
reduction (`Value.reduced_in`), and sums stand as near to the parameter as they can (`Decisions.entered`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from shardwright.compiler.capture.ir import Capture, Node, Value
from shardwright.compiler.rules.table import row_of
from shardwright.compiler.rules.views import cast


def with_reduction_dtypes(capture: Capture, reduce_dtype: torch.dtype | None = None) -> Capture:
    """Return the capture in which parameters, and casts and views of them, say in which dtype gradients are summed.

    Args:
        reduce_dtype: that of all real parameters; by default each parameter's own.
    """
    values = dict(capture.values)
    for value in capture.of_kind("parameter"):
        if value.needs_gradient:
            chosen = reduce_dtype if value.dtype.is_floating_point else None
            values[value.name] = replace(value, reduced_in=chosen or value.dtype)
    for node in capture.nodes:
        if is_cast_or_view(node) and (made := _passed_on(node, values)) is not None:
            values[made.name] = made
    return replace(capture, values=values)


def is_cast_or_view(node: Node) -> bool:
    """Return whether an operator does nothing but change the dtype or the form of its operand."""
    row = row_of(node.op)
    return len(node.operands) == 1 and bool(node.results) and (row.view or row.casts or row.rule is cast)


def _passed_on(node: Node, values: dict[str, Value]) -> Value | None:
    """Return the result of a cast or view of a parameter whose gradient can as well be summed before it.

    A part of the parameter is left alone: its gradient is smaller than the parameter's.
    """
    source, made = values[node.operands[0]], values[node.results[0]]
    if len(node.results) > 1 or source.reduced_in is None or not made.needs_gradient:
        return None
    if math.prod(made.shape) < math.prod(source.shape) or not made.dtype.is_floating_point:
        return None
    return replace(made, reduced_in=source.reduced_in, viewed=source.viewed or not row_of(node.op).casts)
