"""Whether a loss is a mean over samples, which is what torch's DistributedDataParallel takes every loss for.

A sum, a mean over unmasked entries, class weights, or a loss that compares samples with each other is none: the mean of
the losses of parts, weighted by their samples, is then another number than the loss of the whole. How far roundings
may bring these apart depends on the model: under autocast, or where it knows the answers nearly, farther than those of
a sum. So where they differ the loss is tried again with the result of each module another rounding away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.data.loading.samples import count_samples, map_tensors
from shardwright.run.like_module import evaluating

_FACTOR = 64  # how many roundings apart two orders of adding may be
_FACTOR_OF_HALF = 4  # the same in two bytes, where torch adds in float32 and rounds the sum
_TRIES = 5  # of results that are another rounding away
_BEYOND = 16  # how many times as far as these the parts may be


LossOf = Callable[[Any, int], Any]
"""The loss of a batch, or that and more, with random numbers of a seed; it changes nothing that others see."""


def problem_with_mean(model: nn.Module, loss_of: LossOf, batch: Any) -> str | None:
    """What is wrong with ``loss_of`` as a mean over the samples of ``batch``, in evaluation mode; else None.

    None too where it cannot be tried: with one sample, random numbers inside, or a loss that needs training mode.
    """
    samples = count_samples(batch)
    if samples < 2:
        return None
    third = max(1, samples // 3)
    cuts = sorted({third, min(third + 1, samples - 1)})  # every second sample may be masked
    for gradients in (torch.no_grad, torch.enable_grad):  # inside, the loss may take gradients itself
        try:
            with evaluating(model), gradients():
                whole, again = _loss(loss_of, batch, seed=0), _loss(loss_of, batch, seed=1)
                parts = [_of_parts(loss_of, batch, cut) for cut in cuts]
        except Exception:  # what fails here has worked in training mode, and will be used there alone
            continue
        if float(whole) != float(again):
            return None
        for cut, (first, second) in zip(cuts, parts, strict=True):
            mean = float((cut * first + (samples - cut) * second) / samples)
            scale = max(abs(float(each)) for each in (whole, first, second))  # the parts may nearly cancel
            apart = abs(float(whole) - mean)
            if not apart <= _roundings(whole.dtype) * scale and not apart <= _apart_by_roundings(model, loss_of, batch):
                return _no_mean(samples, float(whole), mean)
        return None
    return None


def _roundings(dtype: torch.dtype) -> float:
    return (_FACTOR if dtype.itemsize > 2 else _FACTOR_OF_HALF) * torch.finfo(dtype).eps


def _apart_by_roundings(model: nn.Module, loss_of: LossOf, batch: Any) -> float:
    """How far apart losses of the same samples may be by the roundings inside of the model; 0 where it has no modules
    that are called."""
    with evaluating(model), torch.no_grad():
        losses = [float(_loss(loss_of, batch, seed=0))]
        for number in range(_TRIES):
            with _another_rounding_away(model, number):
                losses.append(float(_loss(loss_of, batch, seed=0)))
    return _BEYOND * max(abs(loss - losses[0]) for loss in losses)


@contextmanager
def _another_rounding_away(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, each number of each module's result is one rounding larger or smaller than it would be."""
    generator = torch.Generator().manual_seed(seed)

    def moved(result: Any) -> Any:
        if isinstance(result, (tuple, list)) and not hasattr(result, "_fields"):
            return type(result)(map(moved, result))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        larger = torch.randint(2, result.shape, generator=generator, dtype=torch.bool, device="cpu")
        eps = torch.finfo(result.dtype).eps
        return torch.where(larger.to(result.device), result * (1 + eps), result * (1 - eps))

    hooks = [module.register_forward_hook(lambda module, args, result: moved(result)) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_parts(loss_of: LossOf, batch: Any, cut: int) -> tuple[Tensor, Tensor]:
    """The losses of the samples before and after the ``cut``."""
    first = _loss(loss_of, map_tensors(lambda tensor: tensor[:cut], batch), seed=0)
    return first, _loss(loss_of, map_tensors(lambda tensor: tensor[cut:], batch), seed=0)


def _no_mean(samples: int, whole: float, mean: float) -> str:
    return (
        f"the loss of the {samples} samples that were tried is {whole:.6g}, but the mean of the losses of their "
        f"parts is {mean:.6g}: it is no mean over samples (is it a sum, masked, weighted by class, or are "
        "samples compared with each other?), and DistributedDataParallel takes every loss for one; return a mean over "
        "samples, or mend what keeps the model from being captured"
    )


def _loss(loss_of: LossOf, batch: Any, seed: int) -> Tensor:
    result = loss_of(batch, seed)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss.detach()
