"""The gradients of a hand-written loop, reduced over the ranks in few large collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.distributed.world import current_world
from shardwright.errors import UsageError

Reduction = Literal["mean", "sum"]
# As many bytes of gradients are reduced by one collective, where nobody knows better (torch's DDP: 25 MiB).
BUCKET_BYTES = 32 * 2**20


def reduce_gradients(parameters: Iterable[Tensor], op: Reduction = "mean") -> None:
    """Replace the gradient of every parameter by its mean, or sum, over the ranks, in place.

    All ranks pass the same parameters in the same order, after the backward. Gradients travel in flat buckets of up to
    32 MiB for each dtype and device, one all-reduce each. A parameter without a gradient on any rank is left alone.
    Raises `UsageError` when ``op`` is unknown, when a gradient is sparse, and, on all ranks alike and before any
    gradient has changed, when some ranks have a gradient for a parameter and others have none.
    """
    if op not in get_args(Reduction):
        raise UsageError(f"op={op!r} is unknown; choose one of {', '.join(get_args(Reduction))}")
    size = current_world().size
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for index, parameter in enumerate(trained):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of parameter {index} (shape {list(parameter.shape)}) is {parameter.grad.layout}; "
                "reduce_gradients takes dense gradients: pass sparse=False to the embedding"
            )
    if size == 1 or not trained:
        return
    present: list[bool] = []
    for members in _buckets(trained):
        # The first bucket also carries which parameters have gradients, so that no collective is spent on that.
        flat = torch.cat(
            [_flat_gradient(parameter) for parameter in members] + ([] if present else [_presence(trained)])
        )
        with own_pulse().inside(b"all_reduce"):
            dist.all_reduce(flat)
        if not present:
            flat, counts = flat[: -2 * len(trained)], flat[-2 * len(trained) :]
            present = _agreed(trained, counts)
        if op == "mean":
            flat /= size
        _scatter(flat, members)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in order, grouped by dtype and device, up to `BUCKET_BYTES` together or a single larger one."""
    kinds = dict.fromkeys((parameter.dtype, parameter.device) for parameter in parameters)
    for kind in kinds:
        bucket: list[Tensor] = []
        filled_bytes = 0
        for parameter in parameters:
            if (parameter.dtype, parameter.device) != kind:
                continue
            if bucket and filled_bytes + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled_bytes = [], 0
            bucket.append(parameter)
            filled_bytes += parameter.nbytes
        yield bucket


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Zeros where there is none, so that the buckets of all ranks have one size whatever they hold."""
    gradient = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
    return gradient.detach().reshape(-1)


def _presence(parameters: list[Tensor]) -> Tensor:
    """Return one entry for each gradient that is there, and one for each that is not.

    Sums of them are compared with zero alone, which every dtype can tell exactly, however many ranks there are.
    """
    has = [float(parameter.grad is not None) for parameter in parameters]
    return parameters[0].new_tensor(has + [1 - there for there in has])


def _agreed(parameters: list[Tensor], counts: Tensor) -> list[bool]:
    there, lacking = (counts.reshape(2, -1) != 0).tolist()
    for index, parameter in enumerate(parameters):
        if there[index] and lacking[index]:
            raise UsageError(
                f"parameter {index} (shape {list(parameter.shape)}) has a gradient on some ranks and none on others "
                f"({'one' if parameter.grad is not None else 'none'} on rank {current_world().rank}); let every rank "
                "use it in its loss, or leave it out on all"
            )
    return [bool(has) for has in there]


def _scatter(flat: Tensor, members: list[Tensor]) -> None:
    pieces = torch.split(flat, [parameter.numel() for parameter in members])
    for parameter, piece in zip(members, pieces, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(piece.view(parameter.shape))
