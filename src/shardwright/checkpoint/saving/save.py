"""Write a state as a checkpoint: each rank its share of what it holds, and rank 0 the index.

1. The ranks agree: rank 0 compares what they are about to save, makes the directory and tells its name.
2. Every rank writes its chunks to one file, fsyncs it, and tells rank 0 where they lie.
3. Rank 0 writes the indexes and renames the directory; all learn how it ended.

A rank that fails says so in its next message, and one that ends is noticed when it is next listened to; then rank 0
takes back what was written, and all ranks raise the same error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from shardwright import __version__
from shardwright.checkpoint.format.containers import packed, write_tensor, write_value
from shardwright.checkpoint.format.manifest import (
    MANIFEST,
    Box,
    Chunk,
    Entry,
    Extent,
    FileRecord,
    Manifest,
    TensorEntry,
    ValueEntry,
    checksum,
)
from shardwright.checkpoint.format.pieces import State, TensorShard, shares
from shardwright.checkpoint.storage.files import written
from shardwright.checkpoint.storage.store import Save, Store
from shardwright.common.torch_private import dcp_storage_info
from shardwright.distributed.agreement import attempt
from shardwright.distributed.ranks import Lost, Purpose, Ranks
from shardwright.errors import CheckpointError

METADATA = ".metadata"
"""The index that ``torch.distributed.checkpoint`` reads, made from the manifest."""
TO_SAVE = Purpose("saving a checkpoint", CheckpointError)
ONE_FOLDER = "all ranks write their parts into one folder and read them from there: give every rank the same"

Part = tuple[str, Box]
"""An entry's name and a box of it, `NO_BOX` for a value that is no tensor."""

NO_BOX = Box((), ())


@dataclass(frozen=True, eq=False)
class Prepared:
    """The values to save, and the parts of them that this rank writes.

    ``described`` must be the same on all ranks. ``parts`` are the chunks that this rank writes: views of the state, on
    any device. ``values`` rank 0 alone writes. ``also`` are the other paths of a tensor that stands under several: it
    is written once.
    """

    described: tuple[str, ...]
    pieces: Mapping[str, TensorShard]
    parts: Mapping[Part, Tensor]
    values: Mapping[tuple[str, ...], bytes]
    also: Mapping[tuple[str, ...], str]


@dataclass(frozen=True)
class Written:
    """The file of one rank, and where in it the parts lie."""

    file: str
    size_bytes: int
    places: Mapping[Part, Extent]


def prepare(state: State, ranks: Ranks) -> Prepared:
    """Return what this rank writes of ``state``; `CheckpointError` for what cannot be saved, or two of one name."""
    pieces: dict[str, TensorShard] = {}
    values: dict[tuple[str, ...], bytes] = {}
    also: dict[tuple[str, ...], str] = {}
    first: dict[int, str] = {}
    described = []
    for path, value in state.items():
        name = _name(path)
        if isinstance(value, Tensor | TensorShard) and first.setdefault(id(value), name) != name:
            also[path] = first[id(value)]
            described.append(f"{name}: the same as {also[path]}")
        elif isinstance(value, Tensor | TensorShard):
            piece = TensorShard.of(path, value)
            _check(piece)
            pieces[name] = piece
            described.append(f"{name}: {piece.dtype} {list(piece.shape)} {piece.layout} on {piece.mesh}")
        else:
            described.append(f"{name}: {type(value).__name__}")
            _refuse_parts(name, value)
            if ranks.rank == 0:
                values[path] = packed(path, value)
    if len(described) != len({line.partition(": ")[0] for line in described}):
        raise CheckpointError(f"two entries of the state have the same name: {_twice(state)}")
    parts = {
        (name, box): _part(pieces[name], box, ranks.rank)
        for name, box in shares(list(pieces.values()), ranks.size, ranks.rank)
    }
    return Prepared(tuple(sorted(described)), pieces, parts, values, also)


def _refuse_parts(name: str, value: Any) -> None:
    """Raises `CheckpointError` where a value, which is saved as rank 0 has it, holds DTensors."""
    place = next(_dtensors_in(value, name, set()), None)
    if place is not None:
        raise CheckpointError(
            f"{place} is a DTensor, which belongs to the rank that holds it, while values are saved as rank 0 has "
            "them. Pass a model and its optimizer as such, each such pair with a directory of its own, or put whole "
            "tensors there (tensor.full_tensor(), parallel.full_state_dict())"
        )


def _dtensors_in(value: Any, place: str, seen: set[int]) -> Iterator[str]:
    """Return where in a value they stand; ``seen`` are the containers looked into, which may hold themselves."""
    if isinstance(value, DTensor):
        yield place
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(each, DTensor | Mapping | list | tuple):  # of the many others no place is written
                yield from _dtensors_in(each, f"{place}[{key!r}]", seen)


def _part(piece: TensorShard, box: Box, rank: int) -> Tensor:
    return box.of_tensor(piece.local, piece.box(rank))


def _name(path: tuple[str, ...]) -> str:
    if not path or not all(isinstance(part, str) and part for part in path):
        raise CheckpointError(f"the path {path!r} of an entry must be a tuple of strings that are not empty")
    return ".".join(path)


def _twice(state: State) -> str:
    names = [".".join(path) for path in state]
    return next(name for name in names if names.count(name) > 1)


def _check(piece: TensorShard) -> None:
    if piece.layout.partial:
        raise CheckpointError(
            f"the entry {piece.name} is a partial sum over {', '.join(piece.layout.partial)}; sum it up before saving"
        )
    if piece.local.layout != torch.strided or piece.local.is_quantized:
        raise CheckpointError(
            f"the entry {piece.name} is a {'quantized' if piece.local.is_quantized else 'sparse'} tensor; "
            "save the dense tensors of which it is made"
        )


def save(
    store: Store,
    name: str,
    state: State,
    info: Mapping[str, Any],
    files: Mapping[str, bytes],
    ranks: Ranks,
) -> Manifest | None:
    """Save ``state`` as the checkpoint ``name``, the latest in ``store``. All ranks call it together.

    ``state`` has the same entries on every rank; a value that is no tensor is taken from rank 0. ``info`` (values of
    JSON: step, epoch, metrics, ...) goes into the manifest, beside sequence, time, world size and versions; ``files``
    (plan.json, config.yaml) beside it. Both are taken from rank 0. A complete checkpoint of the same name is replaced.

    Returns the manifest on rank 0, None on the others.

    Raises:
        CheckpointError: the same on every rank that lives, whichever failed; the store then has the checkpoints that
            it had before.
    """
    failure, prepared = attempt(lambda: prepare(state, ranks))
    return write(store, name, prepared, info, files, ranks, failure)


def write(
    store: Store,
    name: str,
    prepared: Prepared | None,
    info: Mapping[str, Any],
    files: Mapping[str, bytes],
    ranks: Ranks,
    failure: str | None = None,
    share: Callable[[Store, str, Prepared, int], Written] | None = None,
) -> Manifest | None:
    """The part of `save` after `prepare`; ``failure`` says why this rank could not prepare.

    ``share`` writes this rank's file of what was prepared into a directory, where that is not to be written from where
    it lies.
    """
    begun: Save | None = None
    try:
        failure = _agree(ranks, failure, prepared.described if prepared else ())
        if failure is None and ranks.rank == 0:
            failure, begun = attempt(lambda: store.begin(name))
        failure, directory = ranks.broadcast((failure, begun and begun.directory))
        if failure is not None or prepared is None:
            raise CheckpointError(failure)
        answer = attempt(lambda: (share or _write_share)(store, directory, prepared, ranks.rank))
        answers = ranks.gather(answer)
        manifest = None
        if answers is not None and begun is not None:
            save = begun
            failure = _first_failure(answers)
            if failure is None:
                parts = [found for _, found in answers]
                failure, manifest = attempt(lambda: _finish(store, save, prepared, parts, info, files))
        failure = ranks.broadcast(failure)
        if failure is not None:
            raise CheckpointError(failure)
    except BaseException:
        if begun is not None:
            store.abort(begun)
        raise
    return manifest


def _agree(ranks: Ranks, failure: str | None, described: Sequence[str]) -> str | None:
    """Return why the ranks cannot save together; on all of them."""
    answers = ranks.gather((failure, checksum("\n".join(described).encode())))
    if answers is not None:
        failure = _first_failure(answers)
    differ = answers is not None and failure is None and len({digest for _, digest in answers}) > 1
    failure, differ = ranks.broadcast((failure, differ))
    if not differ:
        return failure
    everything = ranks.gather((None, described))
    return str(ranks.broadcast(everything and (_first_failure(everything) or _difference(everything))))


def file_of(rank: int) -> str:
    """The name of the file that ``rank`` writes, in the manner of DCP."""
    return f"__{rank}_0.distcp"


def _write_share(store: Store, directory: str, prepared: Prepared, rank: int) -> Written:
    """Write the chunks of this rank, and on rank 0 the values; to the disk. No file where there is nothing."""
    name = file_of(rank)
    places: dict[Part, Extent] = {}
    if not prepared.values and not prepared.parts:
        return Written(name, 0, places)
    about = sum(len(data) for data in prepared.values.values()) + sum(part.nbytes for part in prepared.parts.values())
    size = 0
    with written(store.files, f"{directory}/{name}", about) as file:
        for path, data in prepared.values.items():
            places[".".join(path), NO_BOX] = at = write_value(file, data, name, size)
            size += at.length
        for part, tensor in prepared.parts.items():
            places[part] = at = write_tensor(file, tensor.to("cpu"), name, size)
            size += at.length
    return Written(name, size, places)


def _finish(
    store: Store,
    save: Save,
    prepared: Prepared,
    parts: Sequence[Written],
    info: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Manifest:
    entries = _entries(prepared, parts)
    records = {w.file: FileRecord(w.size_bytes) for w in parts if w.places}
    index = metadata(Manifest(entries, {}))
    for name, data in {**files, METADATA: index}.items():
        if name in records or name == MANIFEST:
            raise CheckpointError(f"files has {name!r}, which is the name of a file of the checkpoint itself")
        store.write(save, name, data)
        records[name] = FileRecord(len(data), checksum(data))
    about = {
        **info,
        "sequence": save.sequence,
        "saved": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "world_size": len(parts),
        "versions": {"shardwright": __version__, "torch": str(torch.__version__)},
    }
    manifest = Manifest(entries, records, about)
    store.commit(save, manifest)
    return manifest


def _entries(prepared: Prepared, parts: Sequence[Written]) -> dict[str, Entry]:
    chunks: dict[str, list[Chunk]] = {}
    for w in parts:
        for (name, box), place in w.places.items():
            chunks.setdefault(name, []).append(Chunk(box, place))
    entries: dict[str, Entry] = {}
    for path in prepared.values:
        name = ".".join(path)
        entries[name] = ValueEntry(path, chunks[name][0].place)
    for name, piece in prepared.pieces.items():
        found = tuple(sorted(chunks[name], key=lambda chunk: chunk.box.offsets))
        entries[name] = TensorEntry(piece.path, piece.dtype, piece.shape, found)
    for path, name in prepared.also.items():
        same = entries[name]
        assert isinstance(same, TensorEntry)
        entries[".".join(path)] = replace(same, path=path)
    return entries


def _first_failure(answers: Sequence[Any]) -> str | None:
    """The failure of the lowest rank that failed; of those that ended first, since they are causes."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, Lost):
            return f"nothing was saved: rank {rank} {answer}"
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            return f"nothing was saved: rank {rank}: {failure}" if len(answers) > 1 else str(failure)
    return None


def _difference(answers: Sequence[Any]) -> str:
    ours = answers[0][1]
    rank, theirs = next((r, lines) for r, (_, lines) in enumerate(answers) if lines != ours)
    line = min(set(ours) ^ set(theirs))
    name = line.partition(": ")[0]
    on = [
        next((x.partition(": ")[2] for x in lines if x.startswith(f"{name}: ")), "missing") for lines in (ours, theirs)
    ]
    return (
        f"nothing was saved: the state must have the same entries on all ranks, but {name} is {on[0]} on rank 0 and "
        f"{on[1]} on rank {rank}"
    )


def metadata(manifest: Manifest) -> bytes:
    """The pickled metadata with which ``dcp.load`` and ``dcp_to_torch_save`` read the same files."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    for name, entry in manifest.entries.items():
        if not isinstance(entry, TensorEntry):
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _stored(entry.place)
            continue
        chunks: list[ChunkStorageMetadata] = []
        for chunk in entry.chunks:
            offsets, sizes = torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)
            stored[MetadataIndex(name, offsets, len(chunks))] = _stored(chunk.place)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        described[name] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)
    paths = {name: entry.path for name, entry in manifest.entries.items()}
    return pickle.dumps(Metadata(described, paths, stored, StorageMeta()))


def _stored(place: Extent) -> Any:
    return dcp_storage_info(place.file, place.start, place.length)
