"""What an operator costs: floating-point operations and bytes, of its forward, on the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.graph.ir import Capture, Node, Value
from shardwright.rules.operator import named_arguments

# views of their operand: they compute and move nothing
_VIEWS = frozenset(
    {"alias", "detach", "expand", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "chunk"}
    | {"squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
)


def flops(node: Node, capture: Capture) -> int:
    """Floating-point operations of the forward: two per multiplication and addition, one per element elsewhere."""
    operands = [capture.values[name] for name in node.operands]
    results = [capture.values[name] for name in node.results]
    count = _FLOPS.get(node.op.split(".")[1])
    if count is not None:
        return count(node, operands, results)
    if node.op.split(".")[1] in _VIEWS:
        return 0
    return max((math.prod(value.shape) for value in (*operands, *results)), default=0)


def bytes_moved(node: Node, capture: Capture) -> int:
    """Bytes that the forward reads and writes at least: every operand and result once; nothing for a view."""
    if node.op.split(".")[1] in _VIEWS:
        return 0
    if node.op == "aten.embedding.default":  # reads the rows that it is asked for, not the table
        indices, result = capture.values[node.operands[1]], capture.values[node.results[0]]
        return indices.bytes + 2 * result.bytes
    return sum(capture.values[name].bytes for name in {*node.operands, *node.results})


def _product(node: Node, operands: list[Value], results: list[Value]) -> int:
    """matmul and bmm: two operations for each element of the result and each term of its sum."""
    return 2 * math.prod(results[0].shape) * operands[0].shape[-1]


def _with_bias(node: Node, operands: list[Value], results: list[Value]) -> int:
    """addmm, baddbmm: the bias comes first."""
    return 2 * math.prod(results[0].shape) * operands[1].shape[-1]


def _convolution(node: Node, operands: list[Value], results: list[Value]) -> int:
    """Every element of the result sums over a kernel of ``in_channels / groups`` channels."""
    return 2 * math.prod(results[0].shape) * math.prod(operands[1].shape[1:])


def _transposed_convolution(node: Node, operands: list[Value], results: list[Value]) -> int:
    """Every element of the input is spread over a kernel of ``out_channels / groups`` channels."""
    return 2 * math.prod(operands[0].shape) * math.prod(operands[1].shape[1:])


def _attention(node: Node, operands: list[Value], results: list[Value]) -> int:
    """Scores and their product with the values; half of it where the mask is causal; the softmax is small beside it."""
    query, key, value = operands[:3]
    *heads, rows, width = query.shape
    whole = 2 * math.prod(heads) * rows * key.shape[-2] * (width + value.shape[-1])
    causal = named_arguments(node.op, node.args, dict(node.kwargs))["is_causal"]
    return whole // 2 if causal else whole


def _recurrent(node: Node, operands: list[Value], results: list[Value]) -> int:
    """Every weight matrix multiplies every step of every sequence."""
    steps = math.prod(operands[0].shape[:-1])
    return 2 * steps * sum(math.prod(value.shape) for value in operands[1:] if len(value.shape) == 2)


_FLOPS: dict[str, Callable[[Node, list[Value], list[Value]], int]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _with_bias),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "scaled_dot_product_attention": _attention,
    "embedding": lambda node, operands, results: 0,
}
