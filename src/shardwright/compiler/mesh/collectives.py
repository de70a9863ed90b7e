"""The steps of a redistribution as differentiable functions, and what they communicate through.

The functions read as a local program prints them:

    x1 = all_gather(x, comm, dim=0, axes=("tp",), size=64, adjoint="reduce_scatter")

or, with other work between the lines:

    w_late, = reduced_late(w)
    w_begun = begin_all_gather(w, comm, dim=0, axes=("tp",), size=64)
    w1 = all_gather(w_late, comm, dim=0, axes=("tp",), size=64, adjoint="reduce_scatter", begun=w_begun)

``dim`` of global ``size`` is cut over ``within`` (major) and then over ``axes`` (minor), between multiples of
``unit``. Uneven parts are padded inside the collective and nowhere else. Tensors of integers and bools pass through
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.layout import Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Shape, Step
from shardwright.errors import LoweringError

Axes = tuple[str, ...]
Begun = Callable[[], Tensor]
"""A collective under way, as a function that waits for it and returns its result; it is called once."""


class Communicator(Protocol):
    """The collectives of one rank with the others of its mesh.

    A collective is among the ranks that differ on ``axes`` only. Rows and lists hold one tensor for each of them, in
    rank order, all of one shape; tensors are contiguous. `compiler.mesh.processes` makes those of real ranks.
    """

    @property
    def mesh(self) -> Mesh: ...

    @property
    def rank(self) -> int: ...

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        """Make ready to communicate over these sets of axes. All ranks call it together, with the same sets."""

    def close(self) -> None:
        """Give back what `prepare` took. All ranks call it, after the last collective."""

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        """The sum over the members, in place; returns its argument."""

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        """Begin to sum over the members, in place; what is returned waits for the end.

        Until then nobody reads or writes ``tensor``. All ranks begin what they begin in one order.
        """

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Every member's tensor, as the rows of a new one."""

    def start_all_gather(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        """Begin an all-gather; what is returned waits for it, once. Until then nobody writes ``tensor``."""

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        """The sum over the members of the row that each of them has for this rank."""

    def start_reduce_scatter(self, rows: Tensor, axes: Axes) -> Callable[[], Tensor]:
        """Begin a reduce-scatter; what is returned waits for it, once. Until then nobody writes ``rows``."""

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        """Return what every member has for this rank."""

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes) -> Tensor:
        """Give each member its rows, ``sent`` of them one after the other, and return those that come from each.

        Rows are entries of the first dim. Each member knows how many come from each other one, ``received``.
        """

    def send(self, tensor: Tensor, axis: str, to: int, backward: bool = False) -> Callable[[], None]:
        """Begin to send a tensor to the rank at coordinate ``to`` of an axis; what is returned waits for the end.

        Until then nobody writes ``tensor``. What one rank sends to another arrives in the order in which it is sent,
        messages of the forward and those of the ``backward`` each for themselves.
        """

    def start_receive(self, tensor: Tensor, axis: str, source: int, backward: bool = False) -> Callable[[], Tensor]:
        """Ask for what the rank at coordinate ``source`` of an axis sends; what is returned waits for it, once.

        It returns ``tensor``, which takes it, and which nobody reads or writes before. Messages are taken in the order
        in which they are asked for.
        """

    def start_shift(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        """Begin to give a tensor to the next member, the last one to the first; all are of one size.

        What is returned waits for the tensor of the member before, once. Until then nobody writes ``tensor``.
        """


class Cut(NamedTuple):
    """A dim of global ``size`` that is cut over ``within`` and then over ``axes``, between multiples of ``unit``."""

    dim: int
    axes: Axes
    size: int
    within: Axes
    unit: int

    def parts(self, comm: Communicator) -> Parts:
        return _parts(self, comm.mesh, comm.rank)


class Parts(NamedTuple):
    """The rows [start, stop) of every member, in rank order, counted from the first row that the group holds.

    They are ``even`` where all members hold as many, one after the other in rank order.
    """

    ranges: tuple[tuple[int, int], ...]
    mine: tuple[int, int]
    widest: int
    total: int
    even: bool


@lru_cache(maxsize=1 << 14)
def _parts(cut: Cut, mesh: Mesh, rank: int) -> Parts:
    """Return what each member holds of a dim.

    Cached by frozen values of whole numbers and names, of which it is a function.
    """
    whole, split = Split(cut.within, cut.unit), Split(cut.within + cut.axes, cut.unit)
    first, last = whole.bounds(cut.size, mesh, mesh.coordinates(rank))
    ranges = {}
    for member in mesh.group(rank, cut.axes):
        start, stop = split.bounds(cut.size, mesh, mesh.coordinates(member))
        ranges[member] = (start - first, stop - first)
    widest = max(stop - start for start, stop in ranges.values())
    even = [(i * widest, (i + 1) * widest) for i in range(len(ranges))] == list(ranges.values())
    return Parts(tuple(ranges.values()), ranges[rank], widest, last - first, even)


def narrow(x: Tensor, dim: int, rows: tuple[int, int]) -> Tensor:
    """Return a view of the rows from ``rows[0]`` to below ``rows[1]`` of a dim."""
    return x.narrow(dim, rows[0], rows[1] - rows[0])


def padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """A contiguous tensor with ``rows`` rows, the added ones zero."""
    missing = rows - x.shape[dim]
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def cut_up(x: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return the padded part of ``x`` of each member, as the rows of a contiguous tensor; ``x`` itself, if it fits."""
    if parts.even:
        apart = x.reshape(*x.shape[:dim], len(parts.ranges), parts.widest, *x.shape[dim + 1 :])
        return apart.movedim(dim, 0).contiguous()
    return torch.stack([padded(narrow(x, dim, rows), dim, parts.widest) for rows in parts.ranges])


def put_together(everyone: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return what `_joined` makes of the rows of a tensor; even parts of dim 0 lie there as they shall.

    Autograd is not to take it for a view, which a program could not write to.
    """
    if parts.even:
        return everyone.movedim(0, dim).flatten(dim, dim + 1).contiguous().detach()
    return _joined(everyone.unbind(), dim, parts)


def _joined(pieces: Sequence[Tensor], dim: int, parts: Parts) -> Tensor:
    """The members' padded pieces in the order of their rows, which is not rank order where a dim's axes are not."""
    order = sorted(range(len(pieces)), key=lambda member: parts.ranges[member])
    return torch.cat([narrow(pieces[m], dim, (0, parts.ranges[m][1] - parts.ranges[m][0])) for m in order], dim)


def check_rows(x: Tensor, cut: Cut, rows: int, comm: Communicator) -> None:
    """Check that a tensor has ``rows`` rows in the dim of a cut; raise `LoweringError` if not."""
    if x.shape[cut.dim] != rows:
        raise LoweringError(
            f"rank {comm.rank} holds {x.shape[cut.dim]} rows of dim {cut.dim} where {rows} were expected: "
            f"tensor of shape {tuple(x.shape)}, {cut} on the mesh {comm.mesh}"
        )


# The four exchanges, without autograd. None of them changes its argument.


def _gather(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    return put_together(comm.all_gather(sent_part(x, comm, cut), cut.axes), cut.dim, cut.parts(comm))


def sent_part(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    """Return what a rank sends to have its part of a dim gathered, as long as that of others."""
    parts = cut.parts(comm)
    check_rows(x, cut, parts.mine[1] - parts.mine[0], comm)
    return padded(x, cut.dim, parts.widest)


def take(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    """A copy: a view would keep the whole alive for as long as its part is needed."""
    parts = cut.parts(comm)
    check_rows(x, cut, parts.total, comm)
    return narrow(x, cut.dim, parts.mine).clone(memory_format=torch.contiguous_format)


def _scatter_sum(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    return own_rows(comm.reduce_scatter(_rows_to_sum(x, comm, cut), cut.axes), comm, cut)


def _begin_scatter_sum(x: Tensor, comm: Communicator, cut: Cut) -> Begun:
    wait = comm.start_reduce_scatter(_rows_to_sum(x, comm, cut), cut.axes)
    return lambda: own_rows(wait(), comm, cut)


def _rows_to_sum(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    parts = cut.parts(comm)
    check_rows(x, cut, parts.total, comm)
    check_summable(x)
    return cut_up(x, cut.dim, parts)


def own_rows(x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
    """Return this rank's part of a dim, without what was added to make it as long as others."""
    mine = cut.parts(comm).mine
    return narrow(x, cut.dim, (0, mine[1] - mine[0])).contiguous()


def _exchange(x: Tensor, comm: Communicator, source: Cut, target: Cut) -> Tensor:
    """Gather ``source`` and cut ``target`` at once."""
    held, wanted = source.parts(comm), target.parts(comm)
    check_rows(x, source, held.mine[1] - held.mine[0], comm)
    check_rows(x, target, wanted.total, comm)
    x = padded(x, source.dim, held.widest)
    pieces = [padded(narrow(x, target.dim, rows), target.dim, wanted.widest) for rows in wanted.ranges]
    return own_rows(_joined(comm.all_to_all(pieces, source.axes), source.dim, held), comm, target)


def _summed(x: Tensor, comm: Communicator, axes: Axes) -> Tensor:
    """In a copy: others may read ``x`` too, and a gradient can be expanded or shared between branches."""
    if x.dtype == torch.bool:
        check_summable(x)
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), axes)


def check_summable(x: Tensor) -> None:
    """Check that a tensor can be a partial sum, as one of bools cannot; raise `LoweringError` if not."""
    if x.dtype == torch.bool:
        raise LoweringError("a tensor of bools cannot be a partial sum; convert it to an integer type first")


class Summed(NamedTuple):
    """The dtype in which a gradient is summed, None for its own.

    For the gradient of a cast of a parameter it is the dtype of the parameter, so that no sum is rounded as the cast
    is.
    """

    dtype: torch.dtype | None = None

    def of(self, gradient: Tensor) -> Tensor:
        return gradient if self.dtype is None else gradient.to(self.dtype)


class LateSum:
    """The sum of gradients by a reduce-scatter, from where the backward begins it to where it waits for it."""

    def __init__(self) -> None:
        self._wait: Callable[[], Sequence[Tensor | None]] | None = None

    def begun(self, wait: Callable[[], Sequence[Tensor | None]], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take what waits for the sums; return what stands for them until then, for those of ``parts`` that have one.

        It is NaN, unless anomaly detection would take that for a gradient.
        """
        self._wait = wait
        number = 0.0 if torch.is_anomaly_check_nan_enabled() else torch.nan
        return [None if x is None else x.new_full((), number).expand(x.shape) for x in parts]

    def wait(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the sums; ``gradients`` where none was begun."""
        wait, self._wait = self._wait, None
        return gradients if wait is None else wait()


class ReducedLate(torch.autograd.Function):
    """The identity; its backward waits for what the backward of an all-gather has begun."""

    @staticmethod
    def forward(ctx: Any, late: LateSum, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.waited_for = late  # `late_sum_of` finds it by this name, which no other function's context has
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.waited_for.wait(gradients)


def late_sum_of(tensor: Tensor) -> LateSum | None:
    """Return where the sum of the gradient of a tensor is waited for; None where it is at once."""
    found: LateSum | None = getattr(tensor.grad_fn, "waited_for", None)
    return found


# Each of the exchanges as an autograd function. Those that sum a gradient give it to ``source``: the operand ``x`` or,
# where that is a cast of a part of a parameter, what was cast, so that the sum is not rounded to the dtype of the cast.
# Nothing is saved for the backward but the numbers of the cut.


class AllGather(torch.autograd.Function):
    """An all-gather, whose backward is a reduce-scatter or a slice, as ``adjoint`` says."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        x: Tensor,
        comm: Communicator,
        cut: Cut,
        adjoint: str,
        how: Summed,
        late: LateSum | None,
        begun: Begun | None,
    ) -> Tensor:
        ctx.comm, ctx.cut, ctx.adjoint, ctx.how, ctx.late = comm, cut, adjoint, how, late
        ctx.dtype, ctx.like = source.dtype, None if late is None else source.detach()
        return _gather(x, comm, cut) if begun is None else begun()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        comm, cut, dtype = ctx.comm, ctx.cut, ctx.dtype
        if ctx.adjoint == "slice":
            part: Tensor | None = take(gradient, comm, cut).to(dtype)
        elif ctx.late is None:
            part = _scatter_sum(ctx.how.of(gradient), comm, cut).to(dtype)
        else:
            wait = _begin_scatter_sum(ctx.how.of(gradient), comm, cut)
            [part] = ctx.late.begun(lambda: [wait().to(dtype)], [ctx.like])
        return part, None, None, None, None, None, None, None


class Slice(torch.autograd.Function):
    """A slice of a replicated tensor, whose backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
        ctx.comm, ctx.cut = comm, cut
        return take(x, comm, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(gradient, ctx.comm, ctx.cut), None, None


class ReduceScatter(torch.autograd.Function):
    """A reduce-scatter of partial sums, whose backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, cut: Cut) -> Tensor:
        ctx.comm, ctx.cut = comm, cut
        return _scatter_sum(x, comm, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(gradient, ctx.comm, ctx.cut), None, None


class AllToAll(torch.autograd.Function):
    """An all-to-all, whose backward is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, source: Cut, target: Cut) -> Tensor:
        ctx.comm, ctx.source, ctx.target = comm, source, target
        return _exchange(x, comm, source, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradient, ctx.comm, ctx.target, ctx.source), None, None, None


class AllReduce(torch.autograd.Function):
    """An all-reduce of partial sums, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, axes: Axes) -> Tensor:
        return _summed(x, comm, axes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None


class Enter(torch.autograd.Function):
    """The identity, whose backward is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, x: Tensor, comm: Communicator, axes: Axes, how: Summed) -> Tensor:
        ctx.comm, ctx.axes, ctx.how, ctx.dtype = comm, axes, how, source.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(ctx.how.of(gradient), ctx.comm, ctx.axes).to(ctx.dtype), None, None, None, None


# The functions that a local program calls.


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def all_gather(
    x: Tensor,
    comm: Communicator,
    *,
    dim: int,
    axes: Axes,
    size: int,
    within: Axes = (),
    unit: int = 1,
    adjoint: Literal["slice", "reduce_scatter"],
    reduced_in: torch.dtype | None = None,
    source: Tensor | None = None,
    begun: Begun | None = None,
) -> Tensor:
    """Join the parts of ``dim`` along ``axes``. Backward: the slice of a whole gradient, or the sum of partial ones.

    Args:
        reduced_in: the dtype of that sum, by default that of the gradient.
        source: what ``x`` is a cast of, which is then given the gradient.
        begun: what `begin_all_gather` has returned, which is waited for.
    """
    cut, (source, x) = Cut(dim, axes, size, within, unit), _source_of(x, source)
    return _apply(AllGather, source, x, comm, cut, adjoint, Summed(reduced_in), late_sum_of(source), begun)


def begin_all_gather(
    x: Tensor, comm: Communicator, *, dim: int, axes: Axes, size: int, within: Axes = (), unit: int = 1
) -> Begun:
    """Begin what `all_gather` then waits for. Until then nobody writes ``x``."""
    cut = Cut(dim, axes, size, within, unit)
    wait = comm.start_all_gather(sent_part(x.detach(), comm, cut), axes)
    return lambda: put_together(wait(), dim, cut.parts(comm))


def reduced_late(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the same tensors for one all-gather to read, whose reduce-scatter is waited for in their backward.

    Autograd comes last to what was made first: what stands between this and the all-gather goes on beside it.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return tensors
    found: tuple[Tensor, ...] = ReducedLate.apply(LateSum(), *tensors)  # type: ignore[no-untyped-call]
    return found


def local_slice(
    x: Tensor, comm: Communicator, *, dim: int, axes: Axes, size: int, within: Axes = (), unit: int = 1
) -> Tensor:
    """This rank's part of ``dim``, as a copy. Backward: all-gather."""
    return _apply(Slice, x, comm, Cut(dim, axes, size, within, unit))


def reduce_scatter(
    x: Tensor, comm: Communicator, *, dim: int, axes: Axes, size: int, within: Axes = (), unit: int = 1
) -> Tensor:
    """This rank's part of ``dim`` of the sum over ``axes``. Backward: all-gather."""
    return _apply(ReduceScatter, x, comm, Cut(dim, axes, size, within, unit))


def all_to_all(
    x: Tensor,
    comm: Communicator,
    *,
    dim: int,
    to_dim: int,
    axes: Axes,
    size: int,
    to_size: int,
    within: Axes = (),
    to_within: Axes = (),
    unit: int = 1,
    to_unit: int = 1,
) -> Tensor:
    """Join the parts of ``dim`` and cut ``to_dim`` instead. Backward: the same, the other way."""
    source, target = Cut(dim, axes, size, within, unit), Cut(to_dim, axes, to_size, to_within, to_unit)
    return _apply(AllToAll, x, comm, source, target)


def all_reduce(x: Tensor, comm: Communicator, *, axes: Axes) -> Tensor:
    """The sum over ``axes``, in a new tensor. Backward: nothing."""
    summed: Tensor = AllReduce.apply(x, comm, axes)  # type: ignore[no-untyped-call]
    return summed


def enter(
    x: Tensor,
    comm: Communicator,
    *,
    axes: Axes,
    reduced_in: torch.dtype | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """A replicated value enters work that is split over ``axes``: unchanged. Backward: all-reduce.

    ``reduced_in`` and ``source`` are those of `all_gather`.
    """
    return _apply(Enter, *_source_of(x, source), comm, axes, Summed(reduced_in))


def _source_of(x: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what is given the gradient of ``x``, and ``x``, which then is given none."""
    return (x, x) if source is None else (source, x.detach())


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (all_gather, local_slice, reduce_scatter, all_to_all, all_reduce, enter)
}


def apply_step(x: Tensor, step: Step, shape: Shape, comm: Communicator) -> Tensor:
    """Perform one step of a redistribution on this rank's part of a tensor of global ``shape``.

    Raises:
        LoweringError: where the part has another shape than ``step.before`` says, or bools would be summed.
    """
    return _FUNCTIONS[step.function](x, comm, **step.arguments(shape))
