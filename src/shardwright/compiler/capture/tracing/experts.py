"""A mixture of experts as one operator: tokens go to the experts chosen for them, and what these give is added.

Rows are sorted by expert, each expert multiplies its own by matrices, and the results are weighted and summed for each
token. How many rows an expert has depends on numbers, and stays inside the operator, whose results have sizes that
follow from sizes. On one device it is plain PyTorch; `lower.operators.experts` sends rows between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwright.compiler.capture.tracing.written import grouped_mm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""What stands between the two products of an expert, by name."""


def experts(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return for each token the weighted sum of what its experts give.

    With two matrices each for ``up``, the first one's product goes through the activation and multiplies the second's.

    Args:
        x: tokens (t, d).
        chosen: the experts of each (t, k), from 0 on; one that there is not gives nothing.
        weights: by what their results are multiplied (t, k).
        up: (e, 1 or 2, f, d).
        down: (e, o, f).
    """
    order, ends = by_expert(chosen, len(up))
    rows = within_experts(dispatched(x, order, chosen.shape[1]), ends, up, down, activation)
    return combined(rows, order, weights)


def by_expert(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of flattened keys, in their order and stably, and how many are up to each of ``count``."""
    ordered, order = keys.reshape(-1).sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(count, device=keys.device), right=True)


def dispatched(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """Return the tokens in an order of their choices, each as often as it stands there."""
    found: Tensor = _Dispatched.apply(x, order, choices)  # type: ignore[no-untyped-call]
    return found


def combined(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the sum of its rows, which stand in ``order``, each times its weight."""
    placed: Tensor = _Placed.apply(rows, order, weights.numel())  # type: ignore[no-untyped-call]
    return (placed.view(*weights.shape, rows.shape[-1]) * weights.unsqueeze(-1)).sum(1)


def within_experts(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return what experts give for rows that are sorted by expert, expert i's before row ``ends[i]``."""
    if not (len(rows) and len(up)):  # connected with all operands, so that the backward comes to the same collectives
        return (rows @ up.sum((0, 1)).transpose(0, 1)) @ down.sum(0).transpose(0, 1)
    inner = grouped_mm(rows, up.flatten(1, 2).transpose(1, 2), ends)
    if up.shape[1] == 2:
        gate, factor = inner.chunk(2, -1)
        inner = ACTIVATIONS[activation](gate) * factor
    else:
        inner = ACTIVATIONS[activation](inner)
    return grouped_mm(inner, down.transpose(1, 2), ends)


class _Dispatched(torch.autograd.Function):
    """The gradients of a token's rows are summed in the order of its choices, so that their sum has one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.choices = x.shape, choices
        return x[order.div(choices, rounding_mode="floor")]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, width = ctx.shape
        placed = gradient.new_zeros(tokens * ctx.choices, width)
        placed[order] = gradient
        return placed.view(tokens, ctx.choices, width).sum(1), None, None


class _Placed(torch.autograd.Function):
    """Rows at their positions among ``count``; the others are zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        placed = rows.new_zeros(count, rows.shape[-1])
        placed[order] = rows
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None
