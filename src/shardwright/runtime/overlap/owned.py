"""Whether a gradient may be changed where it lies, since nobody else holds it or looks into its memory.

Autograd hands one tensor to several operators where the gradients of their results are equal, and views of one memory
where they differ in shape alone; a user's own function may give a tensor that it keeps. All of them are counted: a
gradient is owned where it has no more references than one that was just made for this purpose.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.common.torch_private import References, references_to


class _Probe(torch.autograd.Function):
    """Takes gradients as the functions do that ask `is_owned`."""

    @staticmethod
    def forward(ctx: Any, found: list[References], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.found = found
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _note(gradients[0], ctx.found)
        return None, *gradients


def _note(gradient: Tensor, found: list[References]) -> None:
    found.append(references_to(gradient))


@cache
def least_references() -> References:
    """What a gradient has that was made for one function alone.

    Cached once: it depends on this build of torch and Python alone.
    """
    found: list[References] = []
    with torch.enable_grad():
        parameter = torch.ones(2, requires_grad=True)
        (passed,) = _Probe.apply(found, parameter)  # type: ignore[no-untyped-call]
        torch.autograd.grad((passed * torch.ones(2)).sum(), parameter)
    return found[0]


def is_owned(gradient: Tensor) -> bool:
    """Asked by a function of autograd, in its backward, of one of the gradients that it was called with."""
    plain = gradient.is_contiguous() and gradient.numel() * gradient.itemsize == gradient.untyped_storage().nbytes()
    return plain and not gradient.requires_grad and references_to(gradient) == least_references()
