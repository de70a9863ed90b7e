"""The communicator of a real rank: a c10d group for every set of axes that a program communicates over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.common.torch_private import operators_are_watched
from shardwright.compiler.mesh.carried import moved, summed_as
from shardwright.compiler.mesh.collectives import Axes, Communicator, gather_joined, reduce_scatter_joined, views_into
from shardwright.compiler.mesh.groups import SharedGroups
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.backends.group import backends_of
from shardwright.distributed.backends.table import Backend, backend_moving
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import LoweringError, WorldError

# torch 2.13 gave these new names and deprecated the old ones, which are all that 2.11 has.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Of several tensors, to copy which takes less than to tell where each lies. Not the room of a question between ranks
# (runtime/parts.py), whose size each step pays; but what fits there is few bytes, and comes as one tensor.
_FEW_BYTES = 1024
_ALIGNED = 16  # bytes, of the widest dtype


def _plainly(collective: Callable[..., object], *tensors: Tensor | list[Tensor], group: dist.ProcessGroup) -> None:
    collective(*tensors, group=group)


def _start_plainly(
    collective: Callable[..., dist.Work | None], *tensors: Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    work = collective(*tensors, group=group, async_op=True)
    assert work is not None
    return work.wait


def _together(
    collective: str, outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool = False
) -> dist.Work:
    """A collective of several tensors, which the groups of the backend shm have as a method of that name."""
    work: dist.Work = getattr(group, collective)(outputs, inputs, async_op)
    return work


_all_gather_together = partial(_together, "all_gather_together")
_reduce_scatter_together = partial(_together, "reduce_scatter_together")


class _Packed:
    """Small tensors of any dtypes, one behind the other in a row of bytes, and the ``rows`` of as many members: they
    serve for all that are alike, since each view of a part takes microseconds."""

    def __init__(self, tensors: Sequence[Tensor], members: int) -> None:
        lengths = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        device = tensors[0].device
        self.row = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
        self.rows = torch.zeros(members, sum(lengths), dtype=torch.uint8, device=device)
        starts = [0, *accumulate(lengths)][: len(tensors)]

        def views(memory: Tensor, *of: int) -> list[Tensor]:
            return [
                memory.narrow(-1, start, tensor.nbytes).view(tensor.dtype).view((*of, *tensor.shape))
                for start, tensor in zip(starts, tensors, strict=True)
            ]

        self._parts, self._of_all = views(self.row), views(self.rows, members)

    def write(self, tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor)

    def sums(self) -> list[Tensor]:
        """Of the tensors that all members have written, once ``rows`` has theirs."""
        return [parts.sum(0, dtype=parts.dtype) for parts in self._of_all]


def at_once(group: dist.ProcessGroup, name: str, *tensors: Tensor) -> dist.Work | bool:
    """Have a group of the backend shm do something without torch.distributed, by its method of that name.

    True where it has ended, what is to be waited for where others come later; False, and nothing is done, where the
    group does no such thing, or somebody wants to see the operators that are called.
    """
    method = None if operators_are_watched() else getattr(group, name, None)
    return False if method is None else method(*tensors)


def _done() -> None:
    """What waits for nothing."""


def _come(gathering: Tensor | None = None, into: Tensor | None = None) -> bool:
    """Nothing is to be done before a collective, and so nothing was gathered with it."""
    return False


def communicator_over(mesh: Mesh, lockstep: Lockstep | None = None) -> Communicator:
    """What this rank talks to the others through, who are laid out as ``mesh``, in the calls of ``lockstep``.

    Raises:
        WorldError: where the world has another size than the mesh.
    """
    return ProcessCommunicator(mesh, lockstep)


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
        self.mesh, self._size = mesh, mesh.size
        self.rank = dist.get_rank()
        self._shared = SharedGroups.of_world()
        # Cached by the axes, whose members in rank order are the same in whichever order axes stand; until `close`.
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._along: dict[Axes, dist.ProcessGroup] = {}  # those of them that were asked for, as they were
        # Cached by the type of device and the group, which `moves` and `backends_of` read.
        self._backends: dict[tuple[str, dist.ProcessGroup], Backend] = {}
        # Cached by all that a `_Packed` is made of, in order: the members, and device, dtype and shape of each tensor,
        # also of one that comes twice. What is in it is written anew each time, and what comes of it are new tensors.
        self._packed: dict[tuple[Axes, tuple[tuple[torch.device, torch.dtype, torch.Size], ...]], _Packed] = {}
        self._pulse = own_pulse()
        self._come: Callable[..., bool] = lockstep.come if lockstep is not None else _come
        self._run: Callable[..., None] = lockstep.run if lockstep is not None else _plainly
        self._finish: Callable[[dist.Work], object] = lockstep.finish if lockstep is not None else dist.Work.wait
        self._start: Callable[..., Callable[[], object]] = lockstep.start if lockstep is not None else _start_plainly

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        """Make the groups for these sets of axes. All ranks call it together, with the same sets in any order."""
        wanted = {self.mesh.ordered(axes) for axes in axes_sets if self.mesh.extent(axes) > 1}
        missing = sorted(axes for axes in wanted if frozenset(axes) not in self._groups)
        for axes, group in zip(missing, self._shared.take(self.mesh, missing), strict=True):
            self._groups[frozenset(axes)] = group

    def close(self) -> None:
        """Give the groups back."""
        self._shared.give_back(self.mesh, map(tuple, self._groups))
        self._groups.clear()
        self._along.clear()
        self._backends.clear()
        self._packed.clear()

    def _group(self, axes: Axes) -> dist.ProcessGroup | None:
        """The group along ``axes``, to talk to now; None where it is this rank alone."""
        if (known := self._along.get(axes)) is not None:
            self._come()
            return known
        if self.mesh.extent(axes) == 1:
            return None
        self._come()
        if frozenset(axes) not in self._groups:
            ready = ", ".join("·".join(self.mesh.ordered(known)) for known in self._groups) or "nothing"
            raise LoweringError(f"no group over {'·'.join(axes)} on the mesh {self.mesh}; prepared: {ready}")
        found = self._along[axes] = self._groups[frozenset(axes)]
        return found

    def _backend(self, tensor: Tensor, group: dist.ProcessGroup) -> Backend:
        """What moves such a tensor in a group."""
        key = tensor.device.type, group
        if key not in self._backends:
            self._backends[key] = backend_moving(tensor.device.type, backends_of(group))
        return self._backends[key]

    def _ended(self, work: dist.Work | bool) -> bool:
        """Whether that was begun at once; it is waited for then."""
        if work is not True and work is not False:
            self._finish(work)
        return bool(work)

    def empty(self, numel: int, like: Tensor, axes: Axes) -> Tensor:
        """In memory that the members share, where they are a group of the backend shm."""
        make = getattr(self._groups.get(frozenset(axes)), "empty", None)
        empty: Tensor = like.new_empty(numel) if make is None or not like.is_cpu else make(numel, like.dtype)
        return empty

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        group = self._group(axes)
        if group is None:
            return tensor
        with self._pulse(b"all_reduce"):
            if not self._ended(at_once(group, "sum_at_once", tensor)):
                numbers = summed_as(tensor.dtype, self._backend(tensor, group))
                total = numbers.made(tensor)
                self._run(dist.all_reduce, total, group=group)
                numbers.write(tensor, total)
        return tensor

    def all_reduce_together(self, tensors: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Of one dtype they are reduced as one; else each rank sums what all have, in the order of the ranks."""
        if len({tensor.dtype for tensor in tensors}) == 1:
            flat = self.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), axes)
            return views_into(flat, [*tensors])
        kinds = axes, tuple([(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors])
        packed = self._packed.get(kinds)
        if packed is None:
            with torch.inference_mode(False):  # in which later calls may be made
                packed = self._packed[kinds] = _Packed(tensors, self.mesh.extent(axes))
        packed.write(tensors)
        self._gather(packed.rows, packed.row, axes)
        return packed.sums()

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        group = self._group(axes)
        if group is None:
            return _done
        numbers = summed_as(tensor.dtype, self._backend(tensor, group))
        total = numbers.made(tensor)
        with self._pulse(b"all_reduce"):
            wait = self._start(dist.all_reduce, total, group=group)

        def finish() -> None:
            with self._pulse.again(b"all_reduce"):
                wait()
            numbers.write(tensor, total)

        return finish

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        gathered = tensor.new_empty(self.mesh.extent(axes), *tensor.shape)
        self._gather(gathered, tensor, axes)
        return gathered

    def _gather(self, rows: Tensor, tensor: Tensor, axes: Axes) -> None:
        """Every member's tensor into ``rows``; with what ranks ask each other before a step's first collective, where
        all of them are members and it has room for that."""
        if len(rows) == self._size > 1 and self._come(tensor, rows):
            return
        group = self._group(axes)
        if group is None:
            rows.copy_(tensor.unsqueeze(0))
            return
        with self._pulse(b"all_gather"):
            if not self._ended(at_once(group, "gather_at_once", rows, tensor)):
                backend = self._backend(tensor, group)
                flat = moved(rows, backend).view(-1), moved(tensor, backend).view(-1)
                self._run(all_gather_single, *flat, group=group)

    def all_gather_together(self, tensors: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """Without a copy of all where the members are a group of the backend shm."""
        group = self._moving_together(tensors, axes, sums=False)
        if group is None:
            return gather_joined(self, tensors, axes)
        gathered = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
        with self._pulse(b"all_gather"):
            self._run(_all_gather_together, gathered, [*tensors], group=group)
        return gathered

    def _moving_together(self, tensors: Sequence[Tensor], axes: Axes, *, sums: bool) -> dist.ProcessGroup | None:
        """The group along ``axes``, to talk to now, where it moves several tensors in one collective without a copy.

        What is to be called before a collective may gather a few bytes with what it gathers itself, in one tensor.
        """
        moves = getattr(self._groups.get(frozenset(axes)), "moves_together", None)
        if moves is None or not tensors[0].is_cpu or sum(tensor.nbytes for tensor in tensors) <= _FEW_BYTES:
            return None
        return self._group(axes) if moves(tensors[0].dtype, sums=sums) else None

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        group = self._group(axes)
        if group is None:
            return rows[0]
        backend = self._backend(rows, group)
        numbers = summed_as(rows.dtype, backend)
        if not backend.reduce_scatters:
            brought = numbers.made(self._exchanged(rows, group))
            return numbers.back(brought.sum(0, dtype=brought.dtype))
        given = numbers.made(rows)
        scattered = torch.empty_like(given[0])
        with self._pulse(b"reduce_scatter"):
            self._run(reduce_scatter_single, scattered.view(-1), given.view(-1), group=group)
        return numbers.back(scattered)

    def reduce_scatter_together(self, tensors: Sequence[Tensor], axes: Axes) -> list[Tensor]:
        """As `all_gather_together`; into one memory, since many tensors that live longer would scatter what is free."""
        group = self._moving_together(tensors, axes, sums=True)
        if group is None:
            return reduce_scatter_joined(self, tensors, axes)
        sizes = [tensor[0].numel() for tensor in tensors]
        pieces = torch.split(tensors[0].new_empty(sum(sizes)), sizes)
        scattered = [piece.view(tensor.shape[1:]) for piece, tensor in zip(pieces, tensors, strict=True)]
        with self._pulse(b"reduce_scatter"):
            self._run(_reduce_scatter_together, scattered, [*tensors], group=group)
        return scattered

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        group = self._group(axes)
        return tensors if group is None else list(self._exchanged(torch.stack(tensors), group).unbind())

    def _exchanged(self, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """What every member has for this rank, each as a row of ``sent``."""
        received, backend = torch.empty_like(sent), self._backend(sent, group)
        with self._pulse(b"all_to_all"):
            self._run(dist.all_to_all_single, moved(received, backend), moved(sent, backend), group=group)
        return received
