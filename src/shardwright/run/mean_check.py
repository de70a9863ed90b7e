"""Whether a loss is a mean over samples, which is what torch's DistributedDataParallel takes every loss for.

A sum, a mean over unmasked entries, class weights, or a loss that compares samples with each other is none: the mean of
the losses of parts, weighted by their samples, is then another number than the loss of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.data.loading.samples import count_samples, map_tensors
from shardwright.run.like_module import evaluating

_FACTOR = 64  # how many roundings apart two orders of adding may be


def problem_with_mean(model: nn.Module, loss_of: Callable[[Any], Any], batch: Any) -> str | None:
    """What is wrong with ``loss_of(batch)`` as a mean over the samples of ``batch``, in evaluation mode; else None.

    None too where it cannot be tried: with one sample, random numbers inside, or a loss that needs training mode.
    """
    samples = count_samples(batch)
    if samples < 2:
        return None
    first = max(1, samples // 3)
    try:
        with evaluating(model), torch.no_grad():
            whole, again = _loss(loss_of, batch, seed=0), _loss(loss_of, batch, seed=1)
            parts = [
                _loss(loss_of, map_tensors(lambda tensor: tensor[:first], batch), seed=0),
                _loss(loss_of, map_tensors(lambda tensor: tensor[first:], batch), seed=0),
            ]
    except Exception:  # what fails here has worked in training mode, and will be used there alone
        return None
    mean = (first * parts[0] + (samples - first) * parts[1]) / samples
    scale = max(abs(float(whole)), abs(float(mean)))
    tolerance = _FACTOR * torch.finfo(whole.dtype).eps * scale
    if float(whole) != float(again) or abs(float(whole) - float(mean)) <= tolerance:
        return None
    return (
        f"the loss of the {samples} samples that were tried is {float(whole):.6g}, but the mean of the losses of their "
        f"parts is {float(mean):.6g}: it is no mean over samples (is it a sum, masked, weighted by class, or are "
        "samples compared with each other?), and DistributedDataParallel takes every loss for one; return a mean over "
        "samples, or mend what keeps the model from being captured"
    )


def _loss(loss_of: Callable[[Any], Any], batch: Any, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = loss_of(batch)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss.detach()
