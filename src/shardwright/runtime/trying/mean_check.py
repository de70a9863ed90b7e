"""Checks that a loss is a mean over samples, which is what torch's DistributedDataParallel takes every loss for.

A sum, a mean over unmasked entries, class weights, or a loss that compares samples with each other is none: the mean of
the losses of parts, weighted by their samples, is then another number than the loss of the whole. The loss is tried in
the mode of the model, as it will be called: what draws random numbers gives what it gives on average, and batch
normalisation, which sees each rank's own samples, uses statistics that no sample changes.

How far roundings may bring these apart depends on the model: under autocast, or where it knows the answers nearly,
farther than those of a sum. So where they differ the loss is tried again with the result of each operator another
rounding of its dtype away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common import signatures, torch_private, trees
from shardwright.data.loading.samples import count_samples, part_of_batch
from shardwright.runtime.trying.expected_draws import expected_draws

_FACTOR = 64  # how many roundings apart two orders of adding may be
_FACTOR_OF_HALF = 4  # the same in two bytes, where torch adds in float32 and rounds the sum
_TRIES = 5  # of results that are another rounding away
_BEYOND = 32  # how many times as far as these the parts may be
_DIGITS = range(6, 18)  # of which a message shows as many as tell two numbers apart


LossOf = Callable[[Any, int], Any]
"""The loss of a batch, or that and more, with random numbers of a seed; it changes nothing that others see."""
LossAfter = Callable[[Sequence[Any], int], Any]
"""The same of the last of some batches, after steps on the others."""


def problem_with_mean(model: nn.Module, loss_of: LossOf, batch: Any) -> str | None:
    """Return what is wrong with ``loss_of`` as a mean over the samples of ``batch``, in the mode of ``model``.

    None where nothing is, or where it cannot be tried: with one sample, or random numbers of Python inside.
    """
    samples = count_samples(batch)
    if samples < 2:
        return None
    third = max(1, samples // 3)
    cuts = sorted({third, min(third + 1, samples - 1)})  # every second sample may be masked
    for gradients in (torch.no_grad, torch.enable_grad):  # inside, the loss may take gradients itself
        try:
            with _alike_for_each_sample(model), gradients():
                whole, again = _loss(loss_of, batch, seed=0), _loss(loss_of, batch, seed=1)
                parts = [_of_parts(loss_of, batch, cut) for cut in cuts]
        except Exception:  # what fails here has worked on the whole, and will be used there alone
            continue
        if float(whole) != float(again):
            return None
        for cut, (first, second) in zip(cuts, parts, strict=True):
            mean = float((cut * first.double() + (samples - cut) * second.double()) / samples)
            scale = max(abs(float(each)) for each in (whole, first, second))  # the parts may nearly cancel
            apart = abs(float(whole) - mean)
            if not apart <= _roundings(whole.dtype) * scale and not apart <= _apart_by_roundings(model, loss_of, batch):
                return _no_mean(samples, float(whole), mean)
        return None
    return None


def problem_with_state(model: nn.Module, loss_after: LossAfter, batch: Any, place: str) -> str | None:
    """Return what is wrong with the state that steps leave in Python, None where nothing is.

    It is wrong where a later step computes with it and it is not the same for all parts of a batch, which ranks have.
    ``place`` is one of the places where it stands.
    """
    samples = count_samples(batch)
    if samples < 2:
        return None
    try:
        with _alike_for_each_sample(model):
            alone, after = (_loss(loss_after, batches, seed=0) for batches in ([batch], [batch, batch]))
            parts = [part_of_batch(batch, 0, samples // 2), part_of_batch(batch, samples // 2, samples)]
            after_parts = [_loss(loss_after, [part, batch], seed=0) for part in parts]
    except Exception:  # what needs the whole batch, or fails the second time
        return None
    if float(alone) == float(after) or all(float(loss) == float(after) for loss in after_parts):
        return None
    return (
        f"a step leaves in Python what the next one computes with ({place}), and leaves something else for each part "
        "of a batch, so that ranks would not do what one device does; keep it out of the step, or in a buffer, and "
        "write the step so that it can be captured"
    )


def _roundings(dtype: torch.dtype) -> float:
    return (_FACTOR if dtype.itemsize > 2 else _FACTOR_OF_HALF) * torch.finfo(dtype).eps


@contextmanager
def _alike_for_each_sample(model: nn.Module) -> Iterator[None]:
    """Inside, neither random numbers nor batch normalisation let a sample's result depend on the others."""
    norms = [module for module in model.modules() if torch_private.is_batch_norm(module)]
    before = [(norm, norm.training, norm.running_mean, norm.running_var) for norm in norms]
    try:
        for norm in norms:
            norm.training = False
            if norm.running_mean is None:
                like = next(iter(model.parameters()))
                norm.running_mean = like.detach().new_zeros(norm.num_features)
                norm.running_var = like.detach().new_ones(norm.num_features)
        with expected_draws():
            yield
    finally:
        for norm, training, mean, variance in before:
            norm.training, norm.running_mean, norm.running_var = training, mean, variance


def _apart_by_roundings(model: nn.Module, loss_of: LossOf, batch: Any) -> float:
    """Return how far apart losses of the same samples may be by the roundings inside of operators."""
    with _alike_for_each_sample(model), torch.no_grad():
        first, farthest = float(_loss(loss_of, batch, seed=0)), 0.0
        for number in range(_TRIES):
            try:
                with _another_rounding_away(number):
                    farthest = max(farthest, abs(float(_loss(loss_of, batch, seed=0)) - first))
            except Exception:  # of an operator that takes no such number
                continue
    return _BEYOND * farthest


@contextmanager
def _another_rounding_away(seed: int) -> Iterator[None]:
    """Move results of operators by one rounding towards zero, at random, inside this context.

    Towards zero, because a share (at most 1) then stays one.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        if not signatures.makes_new(operator) or operator.__name__.partition(".")[0] in _MOVED:
            return result
        given = trees.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in given):
            return result  # exactly what it is
        return trees.tree_map(away, result)

    def away(result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        nearer = torch.randint(2, result.shape, generator=generator, dtype=torch.bool, device="cpu")
        return torch.where(nearer.to(result.device), result * (1 - torch.finfo(result.dtype).eps), result)

    with torch_private.OperatorMode(moved):
        yield


# Operators that put numbers elsewhere and round none.
_MOVED = frozenset({
    "cat", "clone", "constant_pad_nd", "detach", "embedding", "flip", "gather", "index", "index_select", "masked_fill",
    "repeat", "roll", "scatter", "stack", "tril", "triu", "where", "zeros_like", "ones_like", "empty_like", "full_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "lift_fresh", "lift_fresh_copy", "copy", "sign", "floor", "ceil",
    "round", "trunc", "relu", "max", "amax", "min", "amin", "sort", "topk", "_local_scalar_dense",
})  # fmt: skip


def _of_parts(loss_of: LossOf, batch: Any, cut: int) -> tuple[Tensor, Tensor]:
    """Return the losses of the samples before and after the ``cut``."""
    first = _loss(loss_of, part_of_batch(batch, 0, cut), seed=0)
    return first, _loss(loss_of, part_of_batch(batch, cut, count_samples(batch)), seed=0)


def _no_mean(samples: int, whole: float, mean: float) -> str:
    shown = ((f"{whole:.{digits}g}", f"{mean:.{digits}g}") for digits in _DIGITS)
    loss, of_parts = next((pair for pair in shown if pair[0] != pair[1]), (repr(whole), repr(mean)))
    return (
        f"the loss of the {samples} samples that were tried is {loss}, but the mean of the losses of their "
        f"parts is {of_parts}: it is no mean over samples (is it a sum, masked, weighted by class, or are "
        "samples compared with each other?), and DistributedDataParallel takes every loss for one; return a mean over "
        "samples, or mend what keeps the model from being captured"
    )


def _loss(loss_of: Callable[[Any, int], Any], batch: Any, seed: int) -> Tensor:
    result = loss_of(batch, seed)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss.detach()
