"""Rewrites of a captured graph, each exact.

Means become sums over a global count: the mean over a part of a batch is not part of the mean, while a partial sum
is part of the sum, and the count does not depend on how the batch is split, unless it is itself a sum of what is not
ignored. float16 and bfloat16 are summed in float32, as torch's own means are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Filled, Node, Value
from shardwright.compiler.capture.operators import HALF
from shardwright.compiler.capture.rewriting.flattened import without_joined_rows
from shardwright.compiler.capture.rewriting.joins import without_joins_of_one
from shardwright.compiler.capture.rewriting.logits import without_wide_logits
from shardwright.compiler.capture.rewriting.masks import lookups_as_views, without_known_masks
from shardwright.compiler.capture.rewriting.norms import with_rms_norms
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.row import chosen_dims
from shardwright.compiler.rules.table import Column, column

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for reduction=


def rewrite(
    capture: Capture,
    *,
    batch_norm: Literal["global", "per-replica"] = "global",
    filled: Collection[Filled] = (),
) -> Capture:
    """Return the capture with every mean taken apart, and batch normalisation as asked for.

    It has no masks that are known, no logits of a large vocabulary that are cast as a whole, norms as one operator, no
    joins of one tensor with nothing, and no linear layer for which rows are joined and taken apart again.

    Args:
        filled: inputs of which each entry is known.
    """
    summed = means_to_sums(with_rms_norms(without_joined_rows(without_joins_of_one(capture))))
    rewritten = without_known_masks(lookups_as_views(without_wide_logits(summed)), filled)
    return rewritten if batch_norm == "global" else statistics_per_replica(rewritten)


def statistics_per_replica(capture: Capture) -> Capture:
    """Batch normalisation over each replica's own part of the batch, as torch's DistributedDataParallel has it."""
    nodes = ((node, _PER_REPLICA.of(node.op)) for node in capture.nodes)
    return check(replace(capture, nodes=tuple(apply(node) if apply else node for node, apply in nodes)))


def _batch_norm_per_replica(node: Node) -> Node:
    """Only training has statistics of the batch: the argument after the running ones, which ours does not have."""
    *tensors, training = node.args[:6]
    if not training:
        return node
    return replace(node, op="shardwright.batch_norm_per_replica", args=(*tensors, *node.args[6:]))


def means_to_sums(capture: Capture) -> Capture:
    """Means, and losses that take a mean, as sums divided by a global count.

    Left whole are means that are none of the operators of `_MEANS`: ``ctc_loss``, ``multi_margin_loss`` and others
    of which each element has its own divisor.
    """
    writer = Writer(capture)
    for node in capture.nodes:
        apply = _MEANS.of(node.op)
        if apply is None or not apply(writer, node):
            writer.keep(node)
    return check(writer.capture())


def _cast(writer: Writer, node: Node, value: Value, dtype: torch.dtype) -> Value:
    return writer.emit(node, "aten._to_copy.default", (value,), value.shape, dtype, {"dtype": dtype})


def _finish(writer: Writer, node: Node, total: Value, count: Value | int) -> bool:
    """``total / count`` in the dtype of the node's result, as that result."""
    wanted = writer.replaced(node)
    value = writer.emit(node, "aten.div.Tensor", (total, count), wanted.shape, total.dtype)
    if wanted.dtype != total.dtype:
        _cast(writer, node, value, wanted.dtype)
    writer.name_last(node)
    return True


def _mean(writer: Writer, node: Node) -> bool:
    """``mean(x)`` and ``mean(x, dim)``."""
    arguments = writer.arguments(node)
    x: Value = arguments["self"]
    wanted = writer.replaced(node)
    dtype = torch.float32 if wanted.dtype in HALF else wanted.dtype
    named = {} if dtype == x.dtype else {"dtype": dtype}
    count = math.prod(x.shape)
    if "dim" not in arguments:
        total = writer.emit(node, "aten.sum.default", (x,), (), dtype, named)
    else:
        dim, keepdim = arguments["dim"], arguments["keepdim"]
        dims = chosen_dims(dim, len(x.shape))
        total = writer.emit(node, "aten.sum.dim_IntList", (x, dims, keepdim), wanted.shape, dtype, named)
        count = math.prod(x.shape[d] for d in dims)
    return _finish(writer, node, total, count)


def _pointwise_loss(writer: Writer, node: Node) -> bool:
    """A loss of every element, averaged over all elements, whatever their weights."""
    arguments = writer.arguments(node)
    if arguments["reduction"] != _MEAN:
        return False
    shape = _broadcast([writer.value(name).shape for name in node.operands])
    dtype = writer.replaced(node).dtype
    if dtype in HALF:
        each = writer.emit_again(node, {"reduction": _NONE}, shape, dtype)
        total = writer.emit(node, "aten.sum.default", (each,), (), torch.float32, {"dtype": torch.float32})
    else:
        total = writer.emit_again(node, {"reduction": _SUM}, (), dtype)
    return _finish(writer, node, total, math.prod(shape))


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    ndim = max(len(shape) for shape in shapes)
    padded = [(*(1,) * (ndim - len(shape)), *shape) for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _summed_cross_entropy(writer: Writer, node: Node, tensors: tuple[Any, ...], settings: Mapping[str, Any]) -> Value:
    logits, target, weight = tensors
    args = (logits, target, weight, settings["ignore_index"], settings["label_smoothing"])
    return writer.emit(node, "shardwright.cross_entropy_sum", args, (), logits.dtype)


def _summed_likelihood(writer: Writer, node: Node, tensors: tuple[Any, ...], settings: Mapping[str, Any]) -> Value:
    return writer.emit(node, node.op, (*tensors, _SUM, settings["ignore_index"]), (), tensors[0].dtype)


def _class_loss(
    writer: Writer, node: Node, summed: Callable[[Writer, Node, tuple[Any, ...], Mapping[str, Any]], Value]
) -> bool:
    """A loss over classes that ``summed`` writes, averaged over the weights of the classes that are not ignored.

    A target of probabilities has no weights to divide by: the average is over the samples. The loss of one sample
    without a batch dim is left whole.
    """
    arguments = writer.arguments(node)
    logits: Value = arguments["self"]
    if arguments["reduction"] != _MEAN or len(logits.shape) < 2:
        return False
    logits, target, weight = (
        _cast(writer, node, value, torch.float32) if value is not None and value.dtype in HALF else value
        for value in (logits, arguments["target"], arguments["weight"])
    )
    total = summed(writer, node, (logits, target, weight), arguments)
    if target.dtype.is_floating_point:
        return _finish(writer, node, total, math.prod(logits.shape) // logits.shape[1])
    dtype = torch.int64 if weight is None else weight.dtype
    count = writer.emit(node, "shardwright.cross_entropy_count", (target, weight, arguments["ignore_index"]), (), dtype)
    return _finish(writer, node, total, count)


# Columns of the table of operators: what is written in place of a mean, and of a batch normalisation per replica.
_MEANS: Column[Callable[[Writer, Node], bool]] = column(
    ("mean", _mean),
    ("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss", _pointwise_loss),
    ("binary_cross_entropy binary_cross_entropy_with_logits kl_div", _pointwise_loss),
    ("cross_entropy_loss", partial(_class_loss, summed=_summed_cross_entropy)),
    ("nll_loss nll_loss_nd nll_loss2d", partial(_class_loss, summed=_summed_likelihood)),
)
_PER_REPLICA: Column[Callable[[Node], Node]] = column(("_native_batch_norm_legit_functional", _batch_norm_per_replica))
