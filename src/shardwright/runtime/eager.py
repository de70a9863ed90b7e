"""Data parallelism by torch's DistributedDataParallel, for a model as it is.

Every rank computes the mean loss of its own part. The loss of the global batch is the mean of these, weighted by the
samples in each part, so parts may be uneven, or empty: with n_r samples on rank r, N = Σ n_r and R ranks,

    loss = Σ n_r/N · loss_r            gradient = 1/R Σ (R · n_r/N · ∂loss_r)

where the outer mean is what DistributedDataParallel does, and R · n_r/N enters in `_GlobalMean`'s backward.

Batch normalisation sees each rank's own samples here, and its running statistics are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.common.torch_private import assert_on_device, backward_number, gradients_are_returned
from shardwright.data.loading.samples import count_samples
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import UsageError
from shardwright.runtime.checks.changed_buffers import ChangedBuffers, digest, refusal, refuse_unlike
from shardwright.runtime.programs.aux_outputs import refused_where_it_flows
from shardwright.runtime.programs.buckets import Unreduced

LossFn = Callable[[nn.Module, Any], Any]
_OTHER_SIZES = "ranks passed batches of different sizes, which are to be the same, or parts of it"


class DataParallelStep:
    """Calls ``loss_fn(model, part)`` on this rank's part and gives the loss of the global batch.

    ``ranks`` is how many parts a global batch has; ``gradient_scale`` multiplies the mean gradient; ``used`` names
    the parameters that the loss depends on, ``changing`` the buffers that a forward is known to change, and
    ``left`` what it changes in Python; ``returns_aux`` says that the loss function returns ``(loss, aux)``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        ranks: int,
        gradient_scale: float,
        used: frozenset[str],
        changing: Collection[str],
        left: Sequence[str],
        returns_aux: bool,
        lockstep: Lockstep,
    ) -> None:
        self._ranks = ranks
        self._left = tuple(left)
        self._lockstep = lockstep
        self._gradient_scale = gradient_scale
        self._returns_aux = returns_aux
        self._changed = ChangedBuffers(model, changing)
        self._local = _LocalLoss(model, loss_fn, used, returns_aux, self._changed)
        self._replicated: DistributedDataParallel | None = None  # None where nothing is split
        self._reductions: _Reductions | None = None
        if ranks > 1:
            every = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            self._replicated = DistributedDataParallel(self._local, find_unused_parameters=used != every)
            self._reductions = _Reductions(self._replicated, model)

    def __call__(self, part: Any, global_size: int | None) -> Any:
        """The loss of the global batch, with the loss function's aux for this part (None for an empty one).

        ``global_size`` is None where only the other ranks know how many samples they have.
        """
        loss, aux = (self._replicated or self._local)(part)
        count, buffers = count_samples(part), self._changed.end()
        mean: Tensor = _GlobalMean.apply(  # type: ignore[no-untyped-call]
            loss, count, global_size, self._ranks, self._gradient_scale, self._lockstep, buffers, self._left
        )
        if self._reductions is not None:
            self._reductions.watch(mean)
        if not self._returns_aux:
            return mean
        # A rank has the gradient of its own part, which torch would take the mean of as if all parts were equal.
        alone = self._ranks == 1 and self._gradient_scale == 1
        return mean, aux if alone else refused_where_it_flows(aux)

    def accumulate(self) -> AbstractContextManager[None]:
        """Backwards inside leave this rank's own gradients, which the next one outside reduces with its own."""
        if self._replicated is None or self._reductions is None:
            return nullcontext()
        self._reductions.begin()
        return self._replicated.no_sync()


class _Reductions(Unreduced):
    """Refuses backwards whose gradients would stay as they are on each rank, or are shown to hooks before.

    DistributedDataParallel reduces in one backward for each forward: in the first one after it, whichever forward's
    that is. It lets others pass without a word.
    """

    def __init__(self, replicated: DistributedDataParallel, model: nn.Module) -> None:
        super().__init__()
        self._replicated = replicated
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._kept: set[str] = set()
        self.ask_for(model)
        self._leaf = next(parameter for parameter in replicated.parameters() if parameter.requires_grad)
        self._ready = False  # to reduce in the next backward
        self._backward = -1  # the last one in which gradients were reduced

    @property
    def kept(self) -> Collection[str]:
        """Those whose gradients an accumulation has left, and nobody has dropped."""
        return [name for name in self._kept if self._trained[name].grad is not None]

    def drop(self, names: Iterable[str]) -> None:
        self._kept.difference_update(names)

    def watch(self, loss: Tensor) -> None:
        """Look at the backwards of what a forward gave."""
        if loss.requires_grad:
            reduced = bool(self._replicated.require_backward_grad_sync)
            self._ready = self._ready or reduced
            loss.register_hook(lambda _: self._refuse(reduced))  # type: ignore[no-untyped-call]

    def _refuse(self, reduced: bool) -> None:
        """Asked when the backward of a forward begins; ``reduced`` is False for a forward inside `accumulate`."""
        if gradients_are_returned(self._leaf):
            raise UsageError(
                "torch.autograd.grad would give this rank's share of the gradient alone, since the model runs by "
                "DistributedDataParallel, which reduces what backward() leaves at parameters; call backward() and read "
                "parameter.grad"
            )
        if name := self.hooked(self._trained):
            raise UsageError(
                f"{name} has a hook on its gradient, which would be given this rank's own: the model runs by "
                "DistributedDataParallel, which reduces gradients after hooks; read and change them between "
                "backward() and optimizer.step()"
            )
        backward = backward_number()
        if self._ready:
            self._ready, self._backward = False, backward
            self._kept.clear()
        elif backward == self._backward:
            return
        elif not reduced and not self._replicated.require_backward_grad_sync:
            self._kept.update(self._trained)
        else:
            raise UsageError(
                "the gradients of this backward would stay as they are on each rank: the model runs by "
                "DistributedDataParallel, which reduces them in one backward for each forward; call backward() after "
                "each forward, or once for the sum of the losses, and both forward and backward inside accumulate()"
            )


class _LocalLoss(nn.Module):
    """The model and the loss function as one module, since DistributedDataParallel must see the whole forward."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, used: frozenset[str], returns_aux: bool, buffers: ChangedBuffers
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._used = used
        self._returns_aux = returns_aux
        self._changed = buffers

    def forward(self, part: Any) -> tuple[Tensor, Any]:
        if count_samples(part) == 0:
            return self._zero(), None
        self._changed.begin()  # here, where DistributedDataParallel has given all ranks rank 0's
        result = self._loss_fn(self.model, part)
        return result if self._returns_aux else (result, None)

    def _zero(self) -> Tensor:
        """A loss of nothing that reaches every parameter: the other ranks wait for this one's gradients."""
        used = [parameter for name, parameter in self.model.named_parameters() if name in self._used]
        return torch.stack([parameter.flatten()[:1].sum().double() * 0 for parameter in used]).sum().to(used[0].dtype)


def _refuse_unequal(total: Tensor, squares: Tensor, ranks: int, on_gpu: str, refuse: Callable[[], None]) -> None:
    """Raise on every rank where the ranks' numbers, whose sum and sum of squares these are, are not all equal.

    A GPU is not waited for: its own assertion says ``on_gpu``. Elsewhere ``refuse`` raises.
    """
    equal = total.square() == squares * ranks
    if equal.device.type == "cuda":
        assert_on_device(equal, on_gpu)
    elif not equal:
        refuse()


def _refuse_other_sizes(size: int) -> None:
    """Say which rank has another size of the same batch than rank 0; all ranks call it together."""
    sizes = from_all_ranks(size)
    other = next(rank for rank, theirs in enumerate(sizes) if theirs != sizes[0])
    raise UsageError(
        f"every rank passes the same whole batch, or its part of the same, but rank 0's has {sizes[0]} samples and "
        f"rank {other}'s {sizes[other]}; take batches from sw.loader, or pass parts with batch='local'"
    )


_BEHIND = "a rank has no samples of this batch, so that it does not change"


def _refuse_behind(place: str) -> None:
    """Say that a rank without samples leaves in Python what the others change; all ranks call it together."""
    raise UsageError(
        f"{_BEHIND} {place}, which the others do: the model could not be captured and runs as it is\nPass batches with "
        "samples for every rank, as of sw.loader(..., drop_last=True)."
    )


class _GlobalMean(torch.autograd.Function):
    """Forward: the weighted mean of all ranks' losses. Backward: this rank's share, as the module's docstring says."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        count: int,
        global_size: int | None,
        ranks: int,
        gradient_scale: float,
        lockstep: Lockstep,
        buffers: dict[str, Any],
        left: tuple[str, ...],
    ) -> Tensor:
        size = global_size or 0
        # In float64, so that the order of the ranks leaves no trace in a float32 loss.
        behind = float(count == 0 and bool(left))
        summed = loss.new_zeros(7, dtype=torch.float64)
        weighted, samples, sizes, squared_sizes, digests, squared_digests, without = summed.unbind()
        weighted.copy_(loss.double() * count)
        for number, place in ((count, samples), (size, sizes), (size**2, squared_sizes), (behind, without)):
            place.fill_(number)  # a list of numbers would be copied to a GPU, which waits for it
        if ranks > 1:
            if buffers:
                digests.copy_(digest(buffers, loss.device))
                squared_digests.copy_(digests.square())
            lockstep.run(dist.all_reduce, summed)
            _refuse_unequal(sizes, squared_sizes, ranks, _OTHER_SIZES, partial(_refuse_other_sizes, size))
            _refuse_unequal(digests, squared_digests, ranks, refusal(buffers), partial(refuse_unlike, buffers, count))
            if left:
                _refuse_unequal(without, without, 0, f"{_BEHIND} {left[0]}", partial(_refuse_behind, left[0]))
        total = samples if global_size is None else global_size
        ctx.share = (ranks * gradient_scale * count) / total
        return (loss.clone() if ranks == 1 else weighted / total).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient[0] * ctx.share).to(gradient[0].dtype), None, None, None, None, None, None, None
