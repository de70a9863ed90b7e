"""The operators that a graph may name: torch's, and ours where torch has none that can be split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.common import signatures
from shardwright.compiler.capture.tracing.experts import experts
from shardwright.compiler.capture.tracing.written import ctc_losses, grouped_mm
from shardwright.compiler.rules.register import function_of, is_function
from shardwright.compiler.rules.table import Column, column
from shardwright.errors import CaptureError

HALF = (torch.float16, torch.bfloat16)
# Numbers in float32 that are held at a time: what stays in the caches of a CPU, and on a GPU so many that its kernels
# take longer than starting them.
_MOST_CPU, _MOST_GPU = 1 << 18, 1 << 24


class _CrossEntropyOfHalf(torch.autograd.Function):
    """The summed cross entropy of logits in half precision, computed in float32 and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, target, weight)
        ctx.settings = ignore_index, label_smoothing
        total = torch.zeros((), device=logits.device)
        for rows in _rows_at_a_time(logits):
            total += cross_entropy_sum(logits[rows].float(), target[rows], weight, ignore_index, label_smoothing)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight = ctx.saved_tensors
        found = torch.empty_like(logits)
        for rows in _rows_at_a_time(logits):
            part = logits[rows].detach().float().requires_grad_()
            # The casts of autocast are operators of the graph, also where a backward is called within one.
            with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
                loss = cross_entropy_sum(part, target[rows], weight, *ctx.settings)
            (found[rows],) = torch.autograd.grad(loss, part, gradient)
        return found, None, None, None, None


def _rows_at_a_time(logits: torch.Tensor) -> Iterator[slice]:
    """Return slices of the first dim with as many rows as are to be held in float32."""
    most = _MOST_CPU if logits.device.type == "cpu" else _MOST_GPU
    step = max(most // max(math.prod(logits.shape[1:]), 1), 1)
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def cross_entropy_sum(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The cross entropy of every element, weighted and summed.

    ``logits`` ``[n, classes, ...]``, ``weight`` ``[classes]``; ``target`` ``[n, ...]`` of class indices, or of
    probabilities like the logits. Logits of half precision are cast to float32, some rows at a time.
    """
    if logits.dtype in HALF:
        if torch.compiler.is_compiling():  # which makes one kernel of the cast and what reads it
            logits = logits.float()
        else:
            given = (logits, target, weight, ignore_index, label_smoothing)
            found: torch.Tensor = _CrossEntropyOfHalf.apply(*given)  # type: ignore[no-untyped-call]
            return found
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )


def cross_entropy_count(
    target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100
) -> torch.Tensor:
    """By what the mean cross entropy divides: how many targets are not ignored, or the sum of their classes' weights.

    ``target`` ``[n, ...]`` of class indices; the count is int64, the sum in the dtype of ``weight``.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum()


def batch_norm_per_replica(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch normalisation in training whose statistics are those of a replica's own part; here, of the whole.

    Results: as of ``aten._native_batch_norm_legit_functional``.
    """
    results: tuple[torch.Tensor, ...] = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return results


def attention_by(backends: Sequence[str] | None) -> AbstractContextManager[None]:
    """Have attention be computed by these kernels, the first ones first, as the captured step chose; None: by any."""
    if backends is None:
        return nullcontext()
    chosen: AbstractContextManager[None] = sdpa_kernel(
        [getattr(SDPBackend, name) for name in backends], set_priority=True
    )
    return chosen


class _WrittenOver(torch.autograd.Function):
    """The second tensor; the gradient of the first one is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(gradient), gradient


def written_over(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return what ``x`` is once ``source``, of its shape and dtype, is copied into it.

    Whatever ``x`` was computed from has a gradient of zero, which optimizers with a decay tell from none.
    """
    written: torch.Tensor = _WrittenOver.apply(x, source)  # type: ignore[no-untyped-call]
    return written


# The column of our own operators: what computes them on whole tensors.
OPERATORS: Column[Callable[..., Any]] = column(
    ("shardwright.batch_norm_per_replica", batch_norm_per_replica),
    ("shardwright.cross_entropy_sum", cross_entropy_sum),
    ("shardwright.cross_entropy_count", cross_entropy_count),
    ("shardwright.ctc_losses", ctc_losses),
    ("shardwright.experts", experts),
    ("shardwright.grouped_mm", grouped_mm),
    ("shardwright.written_over", written_over),
)


def is_ours(op: str) -> bool:
    """Return whether an operator is one of this file, and none of torch's."""
    return OPERATORS.of(op) is not None


def is_of_torch(op: str) -> bool:
    """Return whether an operator is one of torch's or of a library's, which has a schema."""
    return not is_ours(op) and not is_function(op)


def apply_function(op: str, *args: Any, autocast: torch.dtype | None = None) -> Any:
    """Return the tensor, or the tensors, that a user's `autograd.Function` gives under the captured autocast."""
    device = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    with torch.autocast(device, autocast, cache_enabled=False) if autocast is not None else nullcontext():
        output: Any = function_of(op).apply(*args)  # type: ignore[no-untyped-call]
    if isinstance(output, torch.Tensor):
        return output
    return tensors_of(output)


def tensors_of(results: Sequence[Any]) -> Any:
    """The tensors among the results of an operator, or the one that there is."""
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return tensors if len(tensors) > 1 else tensors[0]


def resolve(op: str) -> Callable[..., Any]:
    """The function of the name that a node carries: ``aten.linear.default`` or ``shardwright.cross_entropy_sum``.

    Raises:
        CaptureError: for a name that is none.
    """
    if is_function(op):
        return partial(apply_function, op)
    ours = OPERATORS.of(op)
    if ours is not None:
        return ours
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    if found is None or op.count(".") != 2:
        raise CaptureError(
            f"{op!r} is no operator; torch's are written like aten.linear.default, ours are "
            f"{', '.join(OPERATORS.facts)}"
        )
    return found  # type: ignore[no-any-return]


def takes_device(op: str) -> bool:
    """Return whether an operator makes its result on a device that it is told; a capture leaves the device out."""
    return is_of_torch(op) and any(p.name == "device" for p in signatures.schema_parameters(op))
