"""The communicator of a real rank: a process group of torch.distributed for every set of axes of a mesh.

    communicator = communicator_over(mesh, lockstep)

`ProcessCommunicator` calls torch.distributed and has the `Lockstep` of a model wait for the end, which compares what
ranks call where one waits for long. `WatchedCommunicator` is around it and tells the pulse in which collective this
rank is. A backend that does something faster does it inside its process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import Pulse, own_pulse
from shardwright.compiler.mesh.carried import SumDtype, movable, summed_as
from shardwright.compiler.mesh.collectives import Axes, Communicator
from shardwright.compiler.mesh.groups import SharedGroups
from shardwright.compiler.mesh.mesh import PIPELINE, Mesh
from shardwright.distributed.backends.group import backends_of
from shardwright.distributed.backends.table import Backend, backend_moving
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import LoweringError, WorldError

T = TypeVar("T")
G = TypeVar("G", Tensor, list[Tensor])

# torch 2.13 gave these new names and deprecated the old ones, which are all that 2.11 has.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BLOCKING_SUM = dist.AllreduceOptions()  # for which the caller waits at once
BLOCKING_SUM.reduceOp, BLOCKING_SUM.asyncOp = dist.ReduceOp.SUM, False  # type: ignore[assignment]


def communicator_over(mesh: Mesh, lockstep: Lockstep | None = None) -> Communicator:
    """Return the communicator of this rank with the others, who are laid out as ``mesh``, in the calls of ``lockstep``.

    Raises:
        WorldError: where the world has another size than the mesh.
    """
    return WatchedCommunicator(ProcessCommunicator(mesh, lockstep), own_pulse())


class _Channel(NamedTuple):
    """The group along some axes, and what moves tensors of one kind of device in it."""

    group: dist.ProcessGroup
    backend: Backend


class ProcessCommunicator:
    """A `collectives.Communicator` on the default process group, whose ranks are those of ``mesh``.

    Call `prepare` on every rank with the same sets of axes before communicating over them.

    Raises:
        WorldError: where the world has another size than the mesh.
    """

    def __init__(self, mesh: Mesh, lockstep: Lockstep | None = None) -> None:
        if dist.get_world_size() != mesh.size:
            raise WorldError(
                f"the mesh {mesh} has {mesh.size} devices, the world {dist.get_world_size()} ranks; "
                f"launch {mesh.size} ranks or choose a mesh of {dist.get_world_size()}"
            )
        self.mesh, self.rank = mesh, dist.get_rank()
        self._shared, self._lockstep = SharedGroups.of_world(), lockstep or Lockstep()
        # By the axes, whose members in rank order are the same in whichever order axes stand; until `close`.
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        # Cached by the axes and the type of device, until `close`: groups and their backends stay.
        self._channels: dict[tuple[Axes, str], _Channel] = {}
        # Cached by the axes, the type of device and the dtype, from which the dtype to sum in follows; None: its own.
        self._sums: dict[tuple[Axes, str, torch.dtype], tuple[_Channel | None, SumDtype | None]] = {}
        # For messages of the backward between stages: NCCL does all of one group in the order in which they are begun,
        # and two stages that each send first would wait for each other.
        self._backward_group: dist.ProcessGroup | None = None

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        """Make the groups for these sets of axes. All ranks call it together, with the same sets in any order."""
        wanted = {self.mesh.ordered(axes) for axes in axes_sets if self.mesh.extent(axes) > 1}
        missing = sorted(axes for axes in wanted if frozenset(axes) not in self._groups)
        for axes, group in zip(missing, self._shared.take(self.mesh, missing), strict=True):
            self._groups[frozenset(axes)] = group
        if (PIPELINE,) in missing:
            [self._backward_group] = self._shared.take(self.mesh, [(PIPELINE,)], number=1)

    def close(self) -> None:
        """Give the groups back."""
        self._shared.give_back(self.mesh, map(tuple, self._groups))
        if self._backward_group is not None:
            self._shared.give_back(self.mesh, [(PIPELINE,)], number=1)
            self._backward_group = None
        self._groups.clear()
        self._channels.clear()
        self._sums.clear()

    def _channel(self, axes: Axes, tensor: Tensor) -> _Channel | None:
        """Return the group along ``axes`` with what moves such a tensor; None where it is this rank alone."""
        known = self._channels.get((axes, tensor.device.type))
        if known is not None or self.mesh.extent(axes) == 1:
            return known
        if frozenset(axes) not in self._groups:
            ready = ", ".join("·".join(self.mesh.ordered(known)) for known in self._groups) or "nothing"
            raise LoweringError(f"no group over {'·'.join(axes)} on the mesh {self.mesh}; prepared: {ready}")
        group, device = self._groups[frozenset(axes)], tensor.device.type
        found = self._channels[axes, device] = _Channel(group, backend_moving(device, backends_of(group)))
        if not found.backend.waits_in_turns:
            self._lockstep.answer_aside()
        return found

    def _summing(self, axes: Axes, tensor: Tensor) -> tuple[_Channel | None, SumDtype | None]:
        """Return the channel, and the dtype in which its backend sums such a tensor; None for its own."""
        channel = self._channel(axes, tensor)
        sum_dtype = None if channel is None else summed_as(tensor.dtype, channel.backend)
        found = self._sums[axes, tensor.device.type, tensor.dtype] = channel, sum_dtype
        return found

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        known = self._sums.get((axes, tensor.device.type, tensor.dtype))
        channel, sum_dtype = self._summing(axes, tensor) if known is None else known
        if channel is None:
            return tensor
        total = tensor if sum_dtype is None else sum_dtype.cast(tensor)
        work = channel.group.allreduce([total], BLOCKING_SUM)
        if work is not None:  # a group gives none where it has ended
            self._lockstep.wait(work, channel.backend.waits_in_turns)
        if sum_dtype is not None:
            sum_dtype.write(tensor, total)
        return tensor

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        channel, sum_dtype = self._summing(axes, tensor)
        if channel is None:
            return lambda: None
        total = tensor if sum_dtype is None else sum_dtype.cast(tensor)
        work = dist.all_reduce(total, group=channel.group, async_op=True)
        self._lockstep.begun(work)

        def finish() -> None:
            self._lockstep.wait(work, channel.backend.waits_in_turns)
            if sum_dtype is not None:
                sum_dtype.write(tensor, total)

        return finish

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        return self._gathering(tensor, axes, blocking=True)()

    def start_all_gather(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        return self._gathering(tensor, axes, blocking=False)

    def _gathering(self, tensor: Tensor, axes: Axes, blocking: bool) -> Callable[[], Tensor]:
        rows = tensor.new_empty(self.mesh.extent(axes), *tensor.shape)
        channel = self._channel(axes, tensor)
        if channel is None:
            rows.copy_(tensor.unsqueeze(0))
            return lambda: rows
        flat = movable(rows, channel.backend).view(-1), movable(tensor, channel.backend).view(-1)
        wait = self._begin(all_gather_single, *flat, channel=channel, blocking=blocking)

        def finish() -> Tensor:
            wait()
            return rows

        return finish

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        return self._scattering(rows, axes, blocking=True)()

    def start_reduce_scatter(self, rows: Tensor, axes: Axes) -> Callable[[], Tensor]:
        return self._scattering(rows, axes, blocking=False)

    def _scattering(self, rows: Tensor, axes: Axes, blocking: bool) -> Callable[[], Tensor]:
        channel, sum_dtype = self._summing(axes, rows)
        if channel is None:
            return lambda: rows[0]
        if not channel.backend.reduce_scatters:
            exchanged = self._exchanging(rows, channel, blocking)

            def finish() -> Tensor:
                received = exchanged()
                brought = received if sum_dtype is None else sum_dtype.cast(received)
                scattered = brought.sum(0, dtype=brought.dtype)
                return scattered if sum_dtype is None else sum_dtype.cast_back(scattered)

            return finish
        given = rows if sum_dtype is None else sum_dtype.cast(rows)
        scattered = torch.empty_like(given[0])
        flat = scattered.view(-1), given.view(-1)
        wait = self._begin(reduce_scatter_single, *flat, channel=channel, blocking=blocking)

        def finish_sum() -> Tensor:
            wait()
            return scattered if sum_dtype is None else sum_dtype.cast_back(scattered)

        return finish_sum

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        channel = self._channel(axes, tensors[0])
        return tensors if channel is None else list(self._exchanging(torch.stack(tensors), channel, True)().unbind())

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes) -> Tensor:
        channel = self._channel(axes, rows)
        if channel is None:
            return rows
        brought = rows.new_empty(sum(received), *rows.shape[1:])
        exchange = partial(dist.all_to_all_single, output_split_sizes=list(received), input_split_sizes=list(sent))
        row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        flat = (movable(x, channel.backend) for x in (brought, rows))  # of some dtypes as bytes
        pair = [
            x.view(count, row_bytes // x.itemsize) for x, count in zip(flat, (len(brought), len(rows)), strict=True)
        ]
        self._begin(exchange, *pair, channel=channel, blocking=True)()
        return brought

    def send(self, tensor: Tensor, axis: str, to: int, backward: bool = False) -> Callable[[], None]:
        channel = self._messages(tensor, axis, backward)
        self._lockstep.answer_aside()  # a message is waited for without a time limit, after which gloo would end
        work = dist.isend(movable(tensor, channel.backend), group=channel.group, group_dst=to)

        def wait() -> None:
            nonlocal tensor
            if work is not None:
                self._lockstep.wait(work, in_turns=False)
            tensor = tensor.new_empty(0)

        return wait

    def _messages(self, tensor: Tensor, axis: str, backward: bool) -> _Channel:
        """Return the channel of messages along an axis, forward or backward."""
        channel = self._channel((axis,), tensor)
        assert channel is not None
        if not backward:
            return channel
        assert self._backward_group is not None
        return _Channel(self._backward_group, channel.backend)

    def start_receive(self, tensor: Tensor, axis: str, source: int, backward: bool = False) -> Callable[[], Tensor]:
        channel = self._messages(tensor, axis, backward)
        self._lockstep.answer_aside()
        work = dist.irecv(movable(tensor, channel.backend), group=channel.group, group_src=source)

        def finish() -> Tensor:
            if work is not None:
                self._lockstep.wait(work, in_turns=False)
            return tensor

        return finish

    def start_shift(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        channel = self._channel(axes, tensor)
        if channel is None:
            return lambda: tensor
        members, received = self.mesh.group(self.rank, axes), torch.empty_like(tensor)
        at, count = members.index(self.rank), len(members)
        to, source = ([int(i == (at + step) % count) for i in range(count)] for step in (1, -1))
        pair = (movable(x, channel.backend).view(1, -1) for x in (received, tensor))
        # One row for a member, none for others: an all-to-all, as every backend has it.
        shift = partial(dist.all_to_all_single, output_split_sizes=source, input_split_sizes=to)
        wait = self._begin(shift, *pair, channel=channel, blocking=False)

        def finish() -> Tensor:
            wait()
            return received

        return finish

    def _exchanging(self, sent: Tensor, channel: _Channel, blocking: bool) -> Callable[[], Tensor]:
        """Begin to give every member what is for it; what is returned waits for theirs, each as a row of ``sent``."""
        received = torch.empty_like(sent)
        pair = movable(received, channel.backend), movable(sent, channel.backend)
        wait = self._begin(dist.all_to_all_single, *pair, channel=channel, blocking=blocking)

        def finish() -> Tensor:
            wait()
            return received

        return finish

    def _begin(
        self, collective: Callable[..., dist.Work | None], *tensors: Tensor, channel: _Channel, blocking: bool
    ) -> Callable[[], None]:
        """Begin a collective; what is returned waits for it, and until then keeps what it reads and writes.

        On GPUs a ``blocking`` collective, which is waited for at once, runs on the computing stream. Any other runs on
        a stream of NCCL's, after what the computing stream was given so far. To wait is ``work.wait()``, which has the
        computing stream wait, and not the program. Memory of the tensors is not given to others before: torch's
        ProcessGroupNCCL keeps them until then, provided that the stream that waits is the one that made them.
        """
        in_turns = channel.backend.waits_in_turns
        work = collective(*tensors, group=channel.group, async_op=in_turns or not blocking)
        if work is None:  # it has ended
            return lambda: None
        begun = work
        if not blocking:
            self._lockstep.begun(begun)

        def wait() -> None:
            nonlocal tensors
            self._lockstep.wait(begun, in_turns)
            tensors = ()

        return wait


class WatchedCommunicator:
    """A communicator that tells a pulse in which collective this rank is."""

    def __init__(self, communicator: Communicator, pulse: Pulse) -> None:
        self.mesh, self.rank = communicator.mesh, communicator.rank
        self._communicator, self._note = communicator, pulse.note
        self.prepare, self.close = communicator.prepare, communicator.close

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        self._note(b"all_reduce", begins=True)  # each step's last, whose way is kept short
        try:
            return self._communicator.all_reduce(tensor, axes)
        finally:
            self._note(b"")

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        return self._begun(b"all_reduce", self._communicator.start_all_reduce, tensor, axes)

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        return self._inside(b"all_gather", self._communicator.all_gather, tensor, axes)

    def start_all_gather(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        return self._begun(b"all_gather", self._communicator.start_all_gather, tensor, axes)

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        return self._inside(b"reduce_scatter", self._communicator.reduce_scatter, rows, axes)

    def start_reduce_scatter(self, rows: Tensor, axes: Axes) -> Callable[[], Tensor]:
        return self._begun(b"reduce_scatter", self._communicator.start_reduce_scatter, rows, axes)

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        return self._inside(b"all_to_all", self._communicator.all_to_all, tensors, axes)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes) -> Tensor:
        def exchange(given: Tensor, among: Axes) -> Tensor:
            return self._communicator.exchange_rows(given, sent, received, among)

        return self._inside(b"all_to_all", exchange, rows, axes)

    def send(self, tensor: Tensor, axis: str, to: int, backward: bool = False) -> Callable[[], None]:
        return self._waiting(b"send", self._communicator.send(tensor, axis, to, backward))

    def start_receive(self, tensor: Tensor, axis: str, source: int, backward: bool = False) -> Callable[[], Tensor]:
        wait = self._communicator.start_receive(tensor, axis, source, backward)
        return self._waiting(b"receive", wait, begins=True)

    def start_shift(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        return self._begun(b"shift", self._communicator.start_shift, tensor, axes)

    def _inside(self, name: bytes, collective: Callable[[G, Axes], T], given: G, axes: Axes) -> T:
        self._note(name, begins=True)
        try:
            return collective(given, axes)
        finally:
            self._note(b"")

    def _begun(self, name: bytes, start: Callable[[G, Axes], Callable[[], T]], given: G, axes: Axes) -> Callable[[], T]:
        return self._waiting(name, self._inside(name, start, given, axes))

    def _waiting(self, name: bytes, wait: Callable[[], T], begins: bool = False) -> Callable[[], T]:
        """Return what waits, and says meanwhile for which collective; ``begins`` where nothing said so before."""

        def finish() -> T:
            self._note(name, begins=begins)
            try:
                return wait()
            finally:
                self._note(b"")

        return finish
