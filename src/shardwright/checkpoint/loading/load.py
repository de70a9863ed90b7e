"""Load any checkpoint into any layout: each rank reads only the blocks that contain its own shards.

A rank needs a box of every tensor (``TensorShard.box``) and finds, in the manifest, the chunks that overlap it. What is
one stretch of a file and one stretch of memory is read from the one into the other; where a dim but the first was cut,
the rows are read in slabs from the first needed element to the last, and copied from there.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.format.containers import memory_of
from shardwright.checkpoint.format.manifest import BLOCK_BYTES, Box, Chunk, Manifest, TensorEntry, ValueEntry
from shardwright.checkpoint.format.pieces import State, TensorShard
from shardwright.checkpoint.loading.match import Match, Path, Rename, match
from shardwright.checkpoint.loading.source import Source, open_source
from shardwright.checkpoint.saving.asynchronous import wait_copied
from shardwright.checkpoint.storage.folders import Folder
from shardwright.common.threads import thread_pool
from shardwright.errors import CheckpointError

SLAB_BYTES = 16 << 20
"""So much of a chunk is read at once where it cannot be read straight into its destination."""


@dataclass(frozen=True)
class LoadedState:
    """The result of a load: ``values`` are those that are no tensors, ``manifest`` is that of the checkpoint."""

    values: Mapping[Path, Any]
    match: Match
    manifest: Manifest


def load(
    source: str | os.PathLike[str] | Folder | Source,
    wanted: State,
    *,
    rank: int | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    threads: int | None = None,
) -> LoadedState:
    """Fill the tensors of ``wanted`` in place from a checkpoint, each DTensor with this rank's part of it.

    ``wanted`` maps each path to a tensor, DTensor or `TensorShard`, whose memory is filled, or to anything else: then
    what the checkpoint has there is returned in `LoadedState.values`, a tensor whole. No rank waits for another; every
    rank calls it with the same names. ``rank`` is this process's own where not given. ``rename`` says how the
    parameters of the checkpoint are called here, ``{"encoder.*": "backbone.*"}`` or a function of a name.

    With ``strict=False`` what fits is loaded, into other dtypes too, and `LoadedState.match` names the rest.

    Extra memory: per thread (two on local files, eight on remote ones) a slab of 16 MiB and two blocks of 256 KiB, and
    about 1 KiB for each MiB that is read.

    Raises:
        CheckpointError: where the checkpoint does not fit, before anything is changed.
        DamageError: where the checkpoint is damaged, with the file, the entry and what to take instead. Damage of a
            tensor is found while reading it, so what was to be filled may be filled in part.
        UsageError: for patterns of ``rename`` that fit nothing.
    """
    source = source if isinstance(source, Source) else open_source(source)
    entries = {entry.path: entry for entry in source.manifest.entries.values()}
    found = match(entries, wanted, where=source.where, strict=strict, rename=rename)
    rank = current_rank() if rank is None else rank
    values: dict[Path, Any] = {}
    jobs: list[_Job] = []
    with torch.no_grad():  # once, and not for each tensor
        for path, entry in found.pairs:
            target = wanted[path]
            if isinstance(entry, ValueEntry):
                continue
            if not isinstance(target, Tensor | TensorShard):
                target = values[path] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            jobs += _jobs(entry, TensorShard.of(path, target), rank)
    source.check_files()
    wait_copied()
    for path, entry in found.pairs:
        if isinstance(entry, ValueEntry):
            values[path] = source.value(entry)
    _run(source, jobs, threads or source.folder.threads)
    return LoadedState(values, found, source.manifest)


def read_box(source: Source, entry: TensorEntry, box: Box) -> Tensor:
    """Return the elements of a tensor in ``box``, read from a checkpoint."""
    part = torch.empty(box.sizes, dtype=entry.dtype, device="cpu")
    _run(source, _jobs_of(entry, box, part), source.folder.threads)
    return part


def read_whole(source: Source, entry: TensorEntry, into: Tensor) -> None:
    """Read a whole tensor of a checkpoint into ``into``."""
    _run(source, _jobs_of(entry, Box.whole(entry.shape), into), source.folder.threads)


def current_rank() -> int:
    """This process in its world; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Job(NamedTuple):
    """Elements to read: a ``part`` of a chunk, in the coordinates of that, which goes into ``target`` of its shape."""

    entry: TensorEntry
    chunk: Chunk
    part: Box
    target: Tensor


def _jobs(entry: TensorEntry, piece: TensorShard, rank: int) -> list[_Job]:
    if piece.layout.partial:
        raise CheckpointError(
            f"{entry.name} is partial over {', '.join(piece.layout.partial)} here: the ranks hold summands of it, "
            "which no checkpoint has; redistribute it first"
        )
    if piece.local.is_meta:
        raise CheckpointError(
            f"{entry.name} is on the meta device, where nothing can be stored; first type model.to_empty(device='cpu')"
        )
    return _jobs_of(entry, piece.box(rank), piece.local.detach())


def _jobs_of(entry: TensorEntry, need: Box, local: Tensor) -> list[_Job]:
    jobs, count = [], 0
    for chunk in entry.chunks:
        common = chunk.box.common(need)
        if common.numel:
            offsets = tuple(a - b for a, b in zip(common.offsets, chunk.box.offsets, strict=True))
            jobs.append(_Job(entry, chunk, Box(offsets, common.sizes), common.of_tensor(local, need)))
            count += common.numel
    if count != need.numel:
        raise CheckpointError(
            f"the chunks of {entry.name} in the manifest have {count} of the {need.numel} elements at {need.offsets}, "
            f"{need.sizes}: the manifest was not written by this library"
        )
    return jobs


def _run(source: Source, jobs: Sequence[_Job], threads: int) -> None:
    """Read all jobs with several threads."""
    left, stopped = iter(sorted(jobs, key=lambda job: (job.chunk.place.file, job.chunk.place.start))), threading.Event()
    slabs = _Slabs()

    def work() -> None:
        try:
            for job in left:  # of which each thread takes the next one
                if stopped.is_set():
                    return
                _fill(source, job, slabs)
        except BaseException:
            stopped.set()
            raise

    if threads == 1 or len(jobs) < 2:
        work()
        return
    with thread_pool(threads) as pool:
        try:
            for result in [pool.submit(work) for _ in range(threads)]:
                result.result()
        finally:
            stopped.set()


class _Slabs(threading.local):
    """Room for one slab per thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, size_bytes: int) -> Tensor:
        if len(self.memory) < size_bytes:
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self.memory[:size_bytes]


def _fill(source: Source, job: _Job, slabs: _Slabs) -> None:
    place, dtype = job.chunk.place, job.entry.dtype
    strides = _strides(job.chunk.box.sizes)
    item = dtype.itemsize
    straight = job.target.device.type == "cpu" and job.target.dtype == dtype
    for part in _cut(job.part, 0, job.part, strides, item, job.target if straight else None):
        first = sum(a * s for a, s in zip(part.offsets, strides, strict=True))
        start, count = place.data + first * item, _cover(part.sizes, strides)
        target = part.of_tensor(job.target, job.part)
        if straight and count == part.numel and target.is_contiguous():
            source.read(job.entry.name, place, start, memory_of(target))
            torch.autograd.graph.increment_version(target)  # autograd sees no write from outside
            continue
        raw = slabs.of(count * item)
        source.read(job.entry.name, place, start, memory_of(raw))
        target.copy_(raw.view(dtype).as_strided(part.sizes, strides))


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _cover(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of a box."""
    return sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1


def _cut(part: Box, dim: int, whole: Box, strides: Sequence[int], item: int, target: Tensor | None) -> Iterator[Box]:
    """Divide ``part`` into boxes that are each read at once.

    Each is one stretch both in the file and in ``target``, which is all of ``whole``, or covers at most a slab. All
    dims of ``part`` before ``dim`` have one row.

    Rows with more than a block of other elements between them are not read together.
    """
    count = _cover(part.sizes, strides)
    if count == part.numel and target is not None and part.of_tensor(target, whole).is_contiguous():
        yield part
        return
    while dim < len(strides) and part.sizes[dim] == 1:
        dim += 1
    sparse = any(
        n > 1 and (stride - _cover(part.sizes[d + 1 :], strides[d + 1 :])) * item > BLOCK_BYTES
        for d, (n, stride) in enumerate(zip(part.sizes, strides, strict=True))
    )
    if dim == len(strides) or (count * item <= SLAB_BYTES and not sparse):
        yield part
        return
    row = _cover(part.sizes[dim + 1 :], strides[dim + 1 :])
    rows = 1 if sparse else max((SLAB_BYTES // item - row) // strides[dim] + 1, 1)
    for start, size in _ranges(part.sizes[dim], rows):
        offsets = (*part.offsets[:dim], part.offsets[dim] + start, *part.offsets[dim + 1 :])
        sizes = (*part.sizes[:dim], size, *part.sizes[dim + 1 :])
        yield from _cut(Box(offsets, sizes), dim, whole, strides, item, target)


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    for start, stop in itertools.pairwise([*range(0, count, step), count]):
        yield start, stop - start
