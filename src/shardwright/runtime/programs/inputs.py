"""The rows of a batch that a rank has, and how it comes to hold those that the plan wants it to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.tracing.sizes.open_sizes import in_batch
from shardwright.compiler.mesh.collectives import Communicator, all_gather
from shardwright.compiler.mesh.layout import WHOLE, Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.data.loading.batch import Batch
from shardwright.data.order import chunk_range
from shardwright.distributed.agreement import from_all_ranks
from shardwright.errors import UsageError

BatchKind = Literal["local", "global"]
Range = tuple[int, int]
Shape = tuple[int, ...]


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
    height = height_of(tensors)
    if isinstance(batch, Batch):
        ranges = batch.ranges or (((0, height),) if size == 1 else None)
        return Rows((batch.start, batch.stop), batch.global_size, ranges)
    if size == 1 or kind == "global":
        return _all_rows(height, size)
    if kind != "local":
        raise UsageError(
            "the batch is made of plain tensors: say batch='local' (each rank passes its own part) or batch='global' "
            "(each rank passes the same whole), or take batches from sw.loader"
        )
    return in_turn(from_all_ranks(height))


def _all_rows(height: int, ranks: int) -> Rows:
    return Rows((0, height), height, ((0, height),) * ranks)


def in_turn(counts: Sequence[int]) -> Rows:
    """The rows of ranks that have so many each."""
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    ranges = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    return Rows(ranges[dist.get_rank()], ends[-1], ranges)


def height_of(tensors: Sequence[Tensor]) -> int:
    """Return how many rows a rank passes."""
    return next((t.shape[0] for t in tensors if t.ndim), 0)


def shown(tensors: Sequence[Tensor]) -> str:
    """Tensors by dtype and shape."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensors"


def global_shapes(tensors: Sequence[Tensor], rows: Rows) -> tuple[Shape, ...]:
    """The shapes of the global batch: the first dim counts rows in every tensor that has as many as the first one."""
    height, total = rows.mine[1] - rows.mine[0], rows.total
    shapes = [tensor.shape for tensor in tensors]
    return tuple([(total, *s[1:]) if s and s[0] == height else tuple(s) for s in shapes])


class InputPart(NamedTuple):
    """The place of this rank's part of an input: in what it was given, or in the whole, from the rows of all ranks."""

    slices: tuple[slice, ...]
    whole: Shape
    """The shape that a tensor has if the slices take all of it: -1, which no size is, where one does not begin at 0."""
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
    """Return where this rank's part of every input lies under the plan, and whether ranks had to ask for that."""
    ranges, talked = (rows.all_ranks, False) if rows.all_ranks else _ranges(rows, shapes, layouts, comm)
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
    return parts, talked


def local_inputs(tensors: Sequence[Tensor], parts: Sequence[InputPart], comm: Communicator) -> list[Tensor]:
    """This rank's part of every input; rows are exchanged only where ranks lack some."""
    return [
        tensor
        if part.exchanged is None and tensor.shape == part.whole
        else part.take(tensor if part.exchanged is None else _everything(tensor, part.exchanged, comm))
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
    """The rows of every rank, without talking where the plan cuts as a loader without a plan does."""
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


def _everything(tensor: Tensor, ranges: Sequence[Range], comm: Communicator) -> Tensor:
    """The whole batch, from the rows of all ranks; ranks with equal ranges hold equal rows."""
    widest = max(stop - start for start, stop in ranges)
    padded = tensor.new_zeros(widest, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    pieces = comm.all_gather(padded, comm.mesh.names)
    distinct = {have: pieces[rank][: have[1] - have[0]] for rank, have in enumerate(ranges)}
    return torch.cat([distinct[have] for have in sorted(distinct)])


def mesh_for(mesh: Mesh | str | None, size: int) -> Mesh:
    """The mesh that the user gave, checked against the number of ranks; by default one axis over all of them.

    Raises:
        UsageError: where the mesh has another number of devices.
    """
    chosen = Mesh.parse(mesh) if isinstance(mesh, str) else mesh or Mesh.of(ranks=size)
    if chosen.size != size:
        raise UsageError(f"the mesh {chosen} has {chosen.size} devices, the world has {size} ranks")
    return chosen
