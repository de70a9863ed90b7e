"""Auxiliary outputs beside the loss after a step: their numbers are there, and a gradient is refused.

A program computes the gradients of the loss alone. What else it returns would pass for a constant in a loss that a
script adds up itself, where plain PyTorch has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.common.trees import tree_flatten, tree_unflatten
from shardwright.errors import UsageError


def refusing_gradients(tensors: Sequence[Tensor], labels: Sequence[str]) -> tuple[Tensor, ...]:
    """Return the tensors as those with a gradient in plain PyTorch: a backward that comes to one is refused.

    Each lies in the memory that it lay in, and keeps nothing else alive.

    Args:
        labels: what a person calls each among what was returned beside the loss, empty where it is all of that.
    """
    # Were they what the function differentiates, each of its results would keep all of them.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    found: tuple[Tensor, ...] = _BesideTheLoss.apply(  # type: ignore[no-untyped-call]
        labels, anchor, *(tensor.detach() for tensor in tensors)
    )
    return found


def refused_where_it_flows(aux: Any) -> Any:
    """Return the tree of tensors and plain values, of which every result of autograd refuses a gradient."""
    leaves, spec = tree_flatten(aux)
    flowing = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if not flowing:
        return aux
    refusing = refusing_gradients([leaves[i][1] for i in flowing], [leaves[i][0] for i in flowing])
    there = dict(zip(flowing, refusing, strict=True))
    return tree_unflatten([there.get(i, leaf) for i, (_, leaf) in enumerate(leaves)], spec)


class _BesideTheLoss(torch.autograd.Function):
    """Passes tensors on, and raises in the backward."""

    @staticmethod
    def forward(ctx: Any, labels: Sequence[str], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.labels = labels
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # as they are they would be views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        reached = [label for label, gradient in zip(ctx.labels, gradients, strict=True) if gradient is not None]
        names = ", ".join(repr(label) for label in reached if label)
        what = f"{names}, which the loss function returned" if names else "what the loss function returned"
        raise UsageError(
            f"a backward came to {what} beside the loss, where only the loss itself has gradients; add it to the loss "
            "inside the loss function, or type .detach() where its numbers alone are meant"
        )
