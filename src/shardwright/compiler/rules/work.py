"""How many floating-point operations an operator's forward takes, on the shapes that it has in a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.rules.operator import Operator


def one_per_element(op: Operator) -> int:
    """One for each element of the largest operand or result."""
    return max((math.prod(shape) for shape in (*op.operands, *op.results)), default=0)


def none(op: Operator) -> int:
    """Nothing is computed: a lookup."""
    return 0


def product(op: Operator) -> int:
    """matmul and bmm: two operations for each element of the result and each term of its sum."""
    return 2 * math.prod(op.results[0]) * op.operands[0][-1]


def product_with_bias(op: Operator) -> int:
    """addmm, baddbmm: the bias comes first."""
    return 2 * math.prod(op.results[0]) * op.operands[1][-1]


def convolution(op: Operator) -> int:
    """Every element of the result sums over a kernel of ``in_channels / groups`` channels."""
    return 2 * math.prod(op.results[0]) * math.prod(op.operands[1][1:])


def transposed_convolution(op: Operator) -> int:
    """Every element of the input is spread over a kernel of ``out_channels / groups`` channels."""
    return 2 * math.prod(op.operands[0]) * math.prod(op.operands[1][1:])


def attention(op: Operator) -> int:
    """Scores and their product with the values; half of it where the mask is causal; the softmax is small beside it."""
    query, key, value = op.operands[:3]
    *heads, rows, width = query
    whole = 2 * math.prod(heads) * rows * key[-2] * (width + value[-1])
    return whole // 2 if op["is_causal"] else whole


def recurrent(op: Operator) -> int:
    """Every weight matrix multiplies every step of every sequence."""
    steps = math.prod(op.operands[0][:-1])
    return 2 * steps * sum(math.prod(shape) for shape in op.operands[1:] if len(shape) == 2)


def looked_up(operands_bytes: Sequence[int], results_bytes: Sequence[int]) -> int:
    """The bytes that a lookup moves: it reads its indices and the rows that it is asked for, not the table."""
    return operands_bytes[1] + 2 * results_bytes[0]
