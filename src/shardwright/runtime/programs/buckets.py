"""The gradients of replicated parameters, joined and reduced while the backward runs.

A bucket is two functions of the local program. ``reduce_gradients`` is the identity forward; backward it begins one
flat all-reduce in place. ``later``, with which the program begins, is the identity too; backward it waits for that; a
single bucket with which the backward ends waits for itself.
Autograd comes last to what was made first, so that all the rest of the backward runs in between. Both stand inside
autograd's dataflow: `torch.autograd.grad`, hooks on parameters and ``.grad`` all see reduced gradients.

Of gradients that ``accumulate()`` keeps unreduced torch's optimizers and hooks know nothing. A step without them would
be another one than that of one device, and so would one with those that a script has dropped by
``optimizer.zero_grad()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.common import torch_private
from shardwright.common.torch_private import backward_number
from shardwright.compiler.mesh.collectives import Axes, Communicator
from shardwright.errors import UsageError

Wait = Callable[[], None]


class Unreduced(ABC):
    """The keeper of unreduced gradients of a model's parameters; optimizers ask all keepers."""

    def __init__(self) -> None:
        self._named: Mapping[str, nn.Parameter] = {}

    def ask_for(self, model: nn.Module) -> None:
        """Be asked by optimizers of the parameters of ``model``, as they are stored now."""
        _watch_optimizers()
        self._named = dict(model.named_parameters(remove_duplicate=False))
        _all.add(self)

    def begin(self) -> None:
        """Be told of gradients that are dropped, from now on until none is kept."""
        if not _dropping:
            _dropping.append(ExitStack())
            _dropping[0].enter_context(_zero_grad_reported())

    @property
    @abstractmethod
    def kept(self) -> Collection[str]:
        """The names of the parameters whose gradients are kept."""

    @abstractmethod
    def drop(self, names: Iterable[str]) -> None:
        """Keep those of these parameters no more."""

    def kept_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The names of the optimizer's parameters whose gradients are kept."""
        if not self.kept:
            return []
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [name for name in self.kept if name in self._named and id(self._named[name]) in updated]

    def hooked(self, names: Iterable[str]) -> str:
        """The name of one of these parameters that has a hook on its gradient, empty where none has."""
        return next((name for name in names if name in self._named and torch_private.has_hook(self._named[name])), "")


_all: WeakSet[Unreduced] = WeakSet()
_dropping: list[ExitStack] = []  # one, as long as `_zero_grad_reported`


@cache
def _watch_optimizers() -> None:
    """Be asked before each step of an optimizer. Cached so that it is done once."""
    register_optimizer_step_pre_hook(_refuse_unreduced)


@contextmanager
def _zero_grad_reported() -> Iterator[None]:
    """Let ``optimizer.zero_grad()`` drop what is kept of its parameters, too."""

    @wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        before["zero_grad"](optimizer, *args, **kwargs)
        for each in _all:
            each.drop(each.kept_of(optimizer))
        _end()

    with torch_private.patched("zero_grad", zero_grad=zero_grad) as before:
        yield


def _end() -> None:
    """Leave torch as it is where nothing is kept any more."""
    if _dropping and not any(each.kept for each in _all):
        _dropping.pop().close()


def _refuse_unreduced(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Asked before each step.

    Raises:
        UsageError: where it would be made without a part of the gradient, or by this rank's own.
    """
    for each in _all:
        if names := each.kept_of(optimizer):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"this {type(optimizer).__name__} makes a step while accumulate() keeps gradients of {names[0]}{more} "
                "that are not reduced between ranks yet; call the model and backward() for the last batch of a step "
                "outside of accumulate(), or drop what is kept: parallel.zero_grad()"
            )
    _end()


class BucketOrder:
    """The buckets of one forward, which begin from the last one of the program to the first.

    Their gradients may come in another order, and not alike on all ranks. Where a backward has no gradients for some
    bucket, those that wait for its turn begin when the first one is waited for.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._backward: int | None = None
        self._next = -1
        self._ready: dict[int, Callable[[], None]] = {}

    def ready(self, number: int, begin: Callable[[], None]) -> None:
        """The gradients of a bucket are there: call ``begin`` when it is its turn."""
        if (backward := backward_number()) != self._backward:
            self._backward, self._next = backward, self._count - 1
            self._ready.clear()  # of a backward that has ended with an error
        self._ready[number] = begin
        while self._next in self._ready:
            self._ready.pop(self._next)()
            self._next -= 1

    def rest(self) -> None:
        """Begin all that are ready; no others will come."""
        for number in sorted(self._ready, reverse=True):
            self._ready.pop(number)()


class BucketReduction:
    """The all-reduce of the gradients of one bucket, between the two functions that it consists of."""

    def __init__(self, order: BucketOrder, number: int) -> None:
        self._order, self._number = order, number
        self._wait: Wait | None = None

    def start(self, begin: Callable[[], Wait]) -> None:
        """Begin to reduce the gradients, when it is their turn."""

        def reduce() -> None:
            self._wait = begin()

        self._order.ready(self._number, reduce)

    def wait(self) -> None:
        """Wait until they are reduced."""
        self._order.rest()
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class GradientReduction(Unreduced):
    """Local programs call this as ``reduce_gradients(comm, ("dp",), weight=weight, bias=bias)``.

    Behind the axes may stand the dtype in which gradients are summed, if that is not theirs. While `deferred`,
    gradients are kept here instead, unreduced, and join the next reduction of their parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.deferring = False
        """True within `deferred`, where backwards leave gradients unreduced."""
        self.kept_over: dict[str, dict[Axes, tuple[Tensor, Communicator]]] = {}
        """The sums of gradients that are not reduced yet: by parameter and axes, with who reduces them."""

    def later(self, *buckets: tuple[Tensor, ...]) -> list[Tensor]:
        """The parameters of each bucket, one after the other; their gradients are waited for in the backward."""
        if not torch.is_grad_enabled():
            return [parameter for parameters in buckets for parameter in parameters]
        order, found = BucketOrder(len(buckets)), list[Tensor]()
        for number, parameters in enumerate(buckets):
            found += _Later.apply(BucketReduction(order, number), *parameters)  # type: ignore[no-untyped-call]
        return found

    def __call__(
        self, comm: Communicator, axes: Axes, dtype: torch.dtype | None = None, /, **parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Parameters as `later` gave them, or, with which the backward ends, as they are."""
        given = tuple(parameters.values())
        if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in given)):
            return given
        bucket = getattr(given[0].grad_fn, "bucket", None)
        result: tuple[Tensor, ...] = _Bucket.apply(self, comm, axes, dtype, bucket, tuple(parameters), *given)  # type: ignore[no-untyped-call]
        return result

    def join(self, key: str, parameter: Tensor) -> Tensor:
        """``parameter``, whose backward adds what is kept of its gradient, where no bucket of the program does.

        The last batch of an accumulation may have a plan under which the gradient is whole on every rank.
        """
        if self.deferring or key not in self.kept_over:
            return parameter
        joined: Tensor = _Join.apply(self, key, parameter)  # type: ignore[no-untyped-call]
        return joined

    def late(self, key: str, gradient: Tensor) -> Tensor:
        """The gradient with what is still kept of it, reduced."""
        if self.deferring or key not in self.kept_over:
            return gradient
        for axes, (kept, comm) in self.kept_over.pop(key).items():
            comm.all_reduce(kept, axes)
            gradient = gradient + kept
        return gradient

    def forget(self) -> None:
        """Drop what is kept."""
        self.kept_over.clear()

    @property
    def kept(self) -> Collection[str]:
        return self.kept_over.keys()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            del self.kept_over[name]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Backwards inside leave the gradients of these parameters unreduced, and their ``.grad`` as it was."""
        self.begin()
        before, self.deferring = self.deferring, True
        try:
            yield
        finally:
            self.deferring = before

    def reduce(
        self,
        keys: Sequence[str],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        comm: Communicator,
        axes: Axes,
        dtype: torch.dtype | None,
        bucket: BucketReduction | None,
    ) -> list[Tensor | None]:
        """The sums over the ranks, to be read when they are waited for, or None for each where reduction is deferred.

        Args:
            gradients: None for a parameter of which what was differentiated does not depend, on all ranks alike: it has
                a place in the bucket, and no sum.
            dtype: in which they are summed, by default their own.
            bucket: what they are waited for with; without one they are waited for here.

        Raises:
            UsageError: where reduction is deferred, and a hook waits for a gradient.
        """
        if self.deferring:
            self._refuse_hooks(keys)
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    kept = self.kept_over.setdefault(key, {})
                    kept[axes] = (kept[axes][0] + gradient if axes in kept else gradient.clone()), comm
            return [None] * len(keys)
        known = [g is not None or axes in self.kept_over.get(key, {}) for key, g in zip(keys, gradients, strict=True)]
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        flat = torch.cat([gradient.reshape(-1) for gradient in found])
        lengths = [gradient.numel() for gradient in found]
        pieces = [piece.view_as(g) for piece, g in zip(torch.split(flat, lengths), found, strict=True)]
        if self.kept_over:
            for key, piece in zip(keys, pieces, strict=True):
                if axes in self.kept_over.get(key, {}):
                    piece += self.kept_over[key].pop(axes)[0]
        if bucket is not None:
            bucket.start(partial(_begin, comm, flat, axes, dtype))
        elif dtype is None:
            comm.all_reduce(flat, axes)
        else:
            flat.copy_(comm.all_reduce(flat.to(dtype), axes))
        # What is kept over other axes, `join` adds.
        return [piece if is_known else None for piece, is_known in zip(pieces, known, strict=True)]

    def _refuse_hooks(self, keys: Sequence[str]) -> None:
        if name := self.hooked(keys):
            raise UsageError(
                f"{name} has a hook on its gradient, which inside of accumulate() would be given that of several "
                "batches together; call each backward outside of it, which reduces each gradient, or change gradients "
                "between the last backward and optimizer.step()"
            )


def _begin(comm: Communicator, flat: Tensor, axes: Axes, dtype: torch.dtype | None) -> Wait:
    """Begin to sum ``flat`` over the ranks in place, in another ``dtype`` where one is given; return its wait."""
    if dtype is None:
        return comm.start_all_reduce(flat, axes)
    cast = flat.to(dtype)
    wait = comm.start_all_reduce(cast, axes)

    def cast_back() -> None:
        wait()
        flat.copy_(cast)

    return cast_back


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: BucketReduction, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)  # where reduction is deferred there are none
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.bucket.wait()
        return None, *gradients


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reduction: GradientReduction,
        comm: Communicator,
        axes: Axes,
        dtype: torch.dtype | None,
        bucket: BucketReduction | None,
        keys: Sequence[str],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.comm, ctx.axes, ctx.keys, ctx.bucket = reduction, comm, axes, keys, bucket
        ctx.parameters, ctx.dtype = parameters, dtype
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reduced = ctx.reduction.reduce(ctx.keys, ctx.parameters, gradients, ctx.comm, ctx.axes, ctx.dtype, ctx.bucket)
        return None, None, None, None, None, None, *reduced


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: GradientReduction, key: str, parameter: Tensor) -> Tensor:
        ctx.reduction, ctx.key = reduction, key
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.reduction.late(ctx.key, gradient)
