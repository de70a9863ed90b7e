"""A batch as a step takes it: its key, the rows of the global batch that a rank has, and its part of each input.

The key is found in microseconds, by which the program of a step is looked up. With ``batch="local"`` ranks tell each
other how many rows they pass, in one collective of a few numbers in each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.tracing.sizes.open_sizes import in_batch
from shardwright.compiler.capture.tracing.trace import capture_device
from shardwright.compiler.mesh.collectives import Communicator, all_gather
from shardwright.compiler.mesh.layout import WHOLE, Layout
from shardwright.compiler.mesh.mesh import SEARCHED_STAGES, Mesh
from shardwright.compiler.mesh.processes import BLOCKING_SUM
from shardwright.data.loading.batch import Batch
from shardwright.data.order import chunk_range
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.backends.table import backend_moving
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import UsageError, WorldError
from shardwright.runtime.graphs.captures import Captures

BatchKind = Literal["local", "global"]
Range = tuple[int, int]
Shape = tuple[int, ...]

_REQUIRES_GRAD = attrgetter("requires_grad")
_MOST = 1024  # batches that are remembered
_KEYS = frozenset({str, int})  # of mappings: no two that are equal differ

_TOLD = 4  # numbers of each rank with batch="local"


class Look(NamedTuple):
    """The tensors of a batch, in the order of the inputs of its capture, and all else that its graph can depend on."""

    tensors: list[Tensor]
    form: Hashable


class _UnusualError(Exception):
    """The batch holds something that has to be looked at more closely."""


def look_at(batch: Any) -> Look | None:
    """None for batches of unusual kinds, which `Captures.key` and `tensors_of` know."""
    tensors: list[Tensor] = []
    try:
        return Look(tensors, _FORMS[type(batch)](batch, tensors))
    except _UnusualError:
        return None


def _of_tensor(part: Tensor, tensors: list[Tensor]) -> Hashable:
    if part.is_meta:
        raise _UnusualError
    tensors.append(part)
    return part.dtype, part.shape


def _of_entries(part: Any, tensors: list[Tensor]) -> Hashable:
    return list if type(part) is list else tuple, *[_FORMS[type(entry)](entry, tensors) for entry in part]


def _of_mapping(part: Mapping[Hashable, Any], tensors: list[Tensor]) -> Hashable:
    if not _KEYS.issuperset(map(type, part)):  # of which some are equal and yet not the same
        raise _UnusualError
    return dict, *[(name, _FORMS[type(entry)](entry, tensors)) for name, entry in part.items()]


def _of_value(part: Any, tensors: list[Tensor]) -> Hashable:
    return type(part), repr(part)


_Write = Callable[[Any, list[Tensor]], Hashable]


class _Forms(dict[type, _Write]):
    """The way to write each type of a part of a batch."""

    def __missing__(self, kind: type) -> _Write:
        raise _UnusualError


_FORMS = _Forms()
_FORMS |= {Tensor: _of_tensor, dict: _of_mapping}
_FORMS |= dict.fromkeys((tuple, list, Batch), _of_entries)
_FORMS |= dict.fromkeys((bool, int, float, str, type(None)), _of_value)


class Keys:
    """`Captures.key` of the steps of a model, whose parameters are the ones that it keeps.

    Cached by all that the key itself is made of: the kind of step, what tells apart the dtypes, shapes, structure and
    other values of a batch (a `Look`), autocast, the default dtype, and which parameters have gradients.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._device = capture_device(captures.module, captures.device).type
        self._parameters = list(captures.module.parameters())
        self._known: dict[Hashable, str] = {}

    def of(self, kind: StepKind, batch: Any, look: Look | None) -> str:
        """The key of a step on a batch that looks so."""
        if look is None:
            return self._captures.key(kind, batch)
        autocast = torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device)
        trained = tuple(map(_REQUIRES_GRAD, self._parameters))
        seen = kind, look.form, autocast, torch.get_default_dtype(), trained
        key = self._known.get(seen)
        if key is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            key = self._known[seen] = self._captures.key(kind, batch)
        return key


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch that a rank has: ``mine`` of ``total``; ``all_ranks`` where every rank knows.

    A Batch that does not say it leaves ``all_ranks`` None: the ranges are those of an even cut, or must be asked for.
    ``agreed`` tells that all ranks have just said that their batches are of one shape.
    """

    mine: Range
    total: int
    all_ranks: tuple[Range, ...] | None
    agreed: bool = False


def shapes_of(capture: Capture) -> str:
    """The shapes of the tensors of a batch, by name."""
    return ", ".join(f"{in_batch(value.label)}: {list(value.shape)}" for value in capture.of_kind("input"))


def rows_of(batch: object, tensors: Sequence[Tensor], kind: BatchKind | None, size: int) -> Rows:
    """Return this rank's rows among those of ``size`` ranks; sizes are exchanged where plain tensors are parts.

    Raises:
        UsageError: where plain tensors come without saying whether they are the whole batch or a part of it.
    """
    count = count_rows(tensors)
    if isinstance(batch, Batch):
        ranges = batch.ranges or (((0, count),) if size == 1 else None)
        return Rows((batch.start, batch.stop), batch.global_size, ranges)
    if size == 1 or kind == "global":
        return Rows((0, count), count, ((0, count),) * size)
    if kind != "local":
        raise UsageError(
            "the batch is made of plain tensors: say batch='local' (each rank passes its own part) or batch='global' "
            "(each rank passes the same whole), or take batches from sw.loader"
        )
    return consecutive(from_all_ranks(count))


def consecutive(counts: Sequence[int]) -> Rows:
    """Return the rows of ranks that have so many each, one rank's after the other's."""
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    ranges = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    return Rows(ranges[dist.get_rank()], ends[-1], ranges)


def count_rows(tensors: Sequence[Tensor]) -> int:
    """Return how many rows a rank passes."""
    return next((t.shape[0] for t in tensors if t.ndim), 0)


def shown(tensors: Sequence[Tensor]) -> str:
    """Tensors by dtype and shape."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensors"


def global_shapes(tensors: Sequence[Tensor], rows: Rows) -> tuple[Shape, ...]:
    """The shapes of the global batch: the first dim counts rows in every tensor that has as many as the first one."""
    count, total = rows.mine[1] - rows.mine[0], rows.total
    shapes = [tensor.shape for tensor in tensors]
    return tuple([(total, *s[1:]) if s and s[0] == count else tuple(s) for s in shapes])


class SizeExchange:
    """Tells all ranks how many rows each of them passes, and compares what else is to be the same.

    In the memory of the CPU, so that a step need not wait for what a GPU still has to do.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep, self._pulse = lockstep, own_pulse()
        self._group: tuple[dist.ProcessGroup, bool] | None = None  # and whether it can be waited for in turns

    def of_all_ranks(self, tensors: Sequence[Tensor], count: int, key: str, alike: Sequence[str]) -> list[list[int]]:
        """Return the sizes that each rank says of its part; all ranks call it together.

        Args:
            tensors: what this rank passes, of ``count`` rows.
            key: what the program depends on beside sizes.
            alike: what all ranks are to have passed alike, in words.

        Raises:
            UsageError, WorldError: as `Lockstep.wait`.
        """
        program = _number(f"{key} {global_shapes(tensors, Rows((0, count), -1, None))}")
        beside = _number(str([*alike])) if alike else 0
        if self._group is None:
            group = control_group()
            backend = backend_moving("cpu", str(dist.get_backend(group)))
            self._group = group, backend.waits_in_turns
            if not backend.waits_in_turns:
                self._lockstep.answer_aside()
        group, in_turns = self._group
        # Each rank adds its row to zeros: a sum of so few numbers takes less than an all-gather does.
        everyone = torch.zeros(dist.get_world_size(), _TOLD, dtype=torch.int64, device="cpu")
        everyone[dist.get_rank()] = torch.tensor([count, program, beside, self._lockstep.calls], device="cpu")
        self._pulse.note(b"all_reduce", begins=True)
        try:
            work = group.allreduce([everyone], BLOCKING_SUM)
            if work is not None:  # a group gives none where it has ended
                self._lockstep.wait(work, in_turns)
        finally:
            self._pulse.note(b"")
        found: list[list[int]] = everyone.tolist()
        return found

    def rows(self, told: Sequence[Sequence[int]], tensors: Sequence[Tensor], alike: Sequence[str]) -> Rows:
        """Return which rows each rank has, of what all have told; all ranks call it together.

        Raises:
            UsageError: on every rank, where parts differ in more than their number of rows, or what is beside rows.
            WorldError: where others tell of an earlier call, in which this rank failed.
        """
        counts, programs, beside, calls = zip(*told, strict=True)
        if len(set(calls)) != 1:
            raise WorldError(
                f"ranks answer for different calls of the model ({', '.join(map(str, calls))}, rank by rank), since an "
                "earlier one failed on some of them while others waited; let such an error end the job"
            )
        if len(set(programs)) != 1:
            passed = from_all_ranks(shown(tensors))
            other = next(rank for rank, theirs in enumerate(programs) if theirs != programs[0])
            raise UsageError(
                f"the parts of the batch do not fit together: rank 0 passed {passed[0]}, rank {other} passed "
                f"{passed[other]}; parts may differ in their number of rows alone: pad all to one length, and have the "
                "same values beside tensors, and model.train() or eval(), on all ranks"
            )
        if len(set(beside)) != 1:
            passed = from_all_ranks(", ".join(alike) or "none")
            other = next(rank for rank, theirs in enumerate(passed) if theirs != passed[0])
            raise UsageError(
                "with batch='local' ranks pass rows of their own in tensors whose dim 0 is as long as the first one's, "
                f"and all others alike, but rank 0 passed {passed[0]} and rank {other} passed {passed[other]}; let dim "
                "0 count the samples in what is cut, or pass the whole batch on all ranks with batch='global'"
            )
        return replace(consecutive(counts), agreed=True)


def _number(text: str) -> int:
    """Return a number of 7 bytes that other texts would nearly never give."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


class InputPart(NamedTuple):
    """The slices that take this rank's shard from its rows of an input, or from all, gathered where ``exchanged``."""

    slices: tuple[slice, ...]
    whole: Shape
    """The shape of a tensor of which the slices take all; with -1, which no size is, where one does not begin at 0."""
    exchanged: tuple[Range, ...] | None = None

    @staticmethod
    def at(slices: tuple[slice, ...], exchanged: tuple[Range, ...] | None = None) -> InputPart:
        """Return the part that these slices take."""
        return InputPart(slices, tuple(-1 if each.start else each.stop for each in slices), exchanged)

    def take(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor; torch takes microseconds to index one."""
        if tensor.shape == self.whole:
            return tensor
        for dim, (part, size) in enumerate(zip(self.slices, tensor.shape, strict=True)):
            if part.start != 0 or part.stop != size:
                tensor = tensor.narrow(dim, part.start, part.stop - part.start)
        return tensor


def input_parts(
    shapes: Sequence[Shape], layouts: Sequence[Layout], rows: Rows, comm: Communicator
) -> tuple[list[InputPart], bool]:
    """Return the slices of every input that are this rank's shard under the plan, and whether ranks communicated."""
    ranges, communicated = (rows.all_ranks, False) if rows.all_ranks else _ranges(rows, shapes, layouts, comm)
    if len(ranges) != comm.mesh.size:
        raise UsageError(
            f"the batch was cut for {len(ranges)} ranks, and there are {comm.mesh.size}: it comes from a loader for "
            "other ranks"
        )
    parts = []
    for shape, layout in zip(shapes, layouts, strict=True):
        wanted = [layout.local_slice(shape, comm.mesh, rank) for rank in range(comm.mesh.size)]
        part = wanted[comm.rank]
        if not shape or shape[0] != rows.total:
            parts.append(InputPart.at(part))
        elif all(
            have[0] <= want[0].start and want[0].stop <= have[1] for have, want in zip(ranges, wanted, strict=True)
        ):
            start = ranges[comm.rank][0]
            parts.append(InputPart.at((slice(part[0].start - start, part[0].stop - start), *part[1:])))
        else:
            parts.append(InputPart.at(part, ranges))
    return parts, communicated


def local_inputs(tensors: Sequence[Tensor], parts: Sequence[InputPart], comm: Communicator) -> list[Tensor]:
    """Return this rank's shard of every input; rows are gathered from other ranks only where ranks lack some."""
    return [
        tensor
        if part.exchanged is None and tensor.shape == part.whole
        else part.take(tensor if part.exchanged is None else _global_batch(tensor, part.exchanged, comm))
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def rows_of_output(
    tensor: Tensor, shape: Shape, layout: Layout, rows: Rows, comm: Communicator, *, whole: bool
) -> Tensor:
    """An output whole, or its rows that this rank was given; rows are exchanged only where ranks lack some."""
    if not shape or shape[0] != rows.total:
        return tensor
    split, mesh = layout.dims[0], comm.mesh
    held = tuple(split.bounds(rows.total, mesh, mesh.coordinates(rank)) for rank in range(mesh.size))
    given = rows.all_ranks or tuple(chunk_range(rows.total, mesh.size, rank) for rank in range(mesh.size))
    if not whole and (held == given or set(given) == {(0, rows.total)}):
        return tensor
    if split:
        tensor = all_gather(tensor, comm, dim=0, axes=split.axes, size=rows.total, adjoint="slice")
    return tensor if whole else tensor[slice(*rows.mine)]


def _ranges(
    rows: Rows, shapes: Sequence[Shape], layouts: Sequence[Layout], comm: Communicator
) -> tuple[tuple[Range, ...], bool]:
    """Return the rows of every rank, without communication where the plan splits as a loader without a plan does."""
    mesh = comm.mesh
    even = tuple(chunk_range(rows.total, mesh.size, rank) for rank in range(mesh.size))
    split = next((layout.dims[0] for s, layout in zip(shapes, layouts, strict=True) if s and s[0] == rows.total), WHOLE)
    if tuple(split.bounds(rows.total, mesh, mesh.coordinates(rank)) for rank in range(mesh.size)) == even:
        if rows.mine != even[comm.rank]:
            raise UsageError(
                f"rank {comm.rank} was given the rows {rows.mine} of {rows.total}, expected {even[comm.rank]}: "
                "the batch comes from a loader for other ranks"
            )
        return even, False
    return tuple(from_all_ranks(rows.mine)), True


def _global_batch(tensor: Tensor, ranges: Sequence[Range], comm: Communicator) -> Tensor:
    """Return the global batch, gathered from the rows of all ranks; ranks with equal ranges hold equal rows."""
    widest = max(stop - start for start, stop in ranges)
    padded = tensor.new_zeros(widest, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    pieces = comm.all_gather(padded, comm.mesh.names)
    distinct = {have: pieces[rank][: have[1] - have[0]] for rank, have in enumerate(ranges)}
    return torch.cat([distinct[have] for have in sorted(distinct)])


def mesh_for(mesh: Mesh | str | None, size: int) -> Mesh:
    """The mesh that the user gave, checked against the number of ranks; by default one axis over all of them.

    With "pp=auto" it is that, too: whoever plans looks for stages on it.

    Raises:
        UsageError: where the mesh has another number of devices.
    """
    given = None if mesh == SEARCHED_STAGES else mesh
    chosen = Mesh.parse(given) if isinstance(given, str) else given or Mesh.of(ranks=size)
    if chosen.size != size:
        raise UsageError(f"the mesh {chosen} has {chosen.size} devices, the world has {size} ranks")
    return chosen
