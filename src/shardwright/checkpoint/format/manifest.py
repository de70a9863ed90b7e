"""The index of a checkpoint: what is in it, and where.

A checkpoint is a directory. Its tensors lie in the files of `torch.distributed.checkpoint`, one or more of a rank,
each a row of containers that ``torch.save`` wrote; ``.metadata`` is that format's own index, for its own reader.
``checkpoint.json`` is ours: a person can read it, and it knows the checksum of every block of every file, and where
inside a container the elements themselves begin, so that a rank reads no bytes but those that it needs.

A box is a range of every dim: ``offsets`` is its first corner, ``sizes`` its extent. The boxes of a tensor's chunks
cover the tensor exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
import xxhash
from torch import Tensor

from shardwright.common.schema import SchemaError, checked, from_json
from shardwright.errors import CheckpointError

MANIFEST = "checkpoint.json"
LATEST = "latest"
"""The file of a directory of checkpoints that names the one saved last."""
FORMAT = "shardwright-checkpoint-1"
BLOCK_BYTES = 256 << 10
"""Checksums are of blocks of this many bytes: what is read of a large tensor is checked
without reading all of it, and ranks whose parts meet in a block both read no more than that block."""


def checksum(*parts: Any) -> str:
    """The 64-bit XXH3 of bytes-like objects that follow each other, as the program ``xxh3sum`` prints it."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def checksums(parts: Sequence[memoryview]) -> tuple[str, ...]:
    """`checksum` of each block of `BLOCK_BYTES` of buffers that follow each other; the last block may be shorter."""
    starts = range(0, sum(map(len, parts)), BLOCK_BYTES)
    return tuple([checksum(*between(parts, at, at + BLOCK_BYTES)) for at in starts])


def between(buffers: Iterable[memoryview], first: int, last: int) -> list[memoryview]:
    """The bytes from ``first`` to ``last`` of buffers that follow each other, where they lie.

    >>> [bytes(part) for part in between([memoryview(b"abc"), memoryview(b"de"), memoryview(b"fg")], 2, 5)]
    [b'c', b'de']
    """
    found = []
    for buffer in buffers:
        size = len(buffer)
        if first < size and last > 0:
            found.append(buffer[max(first, 0) : last])
        first, last = first - size, last - size
    return found


@dataclass(frozen=True)
class Box:
    """A part of a tensor: one range of every dim.

    >>> Box((0, 4), (2, 8)).common(Box((1, 0), (9, 6)))
    Box(offsets=(1, 4), sizes=(1, 2))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)

    @staticmethod
    def of(slices: Sequence[slice]) -> Box:
        """The box of what `Layout.local_slice` returns."""
        return Box(tuple(part.start for part in slices), tuple(part.stop - part.start for part in slices))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box:
        """Return what both cover; a box without elements where that is nothing."""
        dims = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ranges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in dims]
        return Box(tuple([start for start, _ in ranges]), tuple([max(stop - start, 0) for start, stop in ranges]))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return where this box lies in ``outer``, of which it is a part."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes, strict=True))

    def of_tensor(self, tensor: Tensor, outer: Box) -> Tensor:
        """This part of a tensor that is all of ``outer``."""
        return tensor if self == outer else tensor[self.slices_in(outer)]


@dataclass(frozen=True)
class Extent:
    """The place of a container in a file of the checkpoint.

    It is ``length`` bytes of ``file`` from ``start`` on. Its elements begin ``data`` bytes after its start (0 for a
    value that is no tensor). ``checksums`` are of its blocks of `BLOCK_BYTES`, counted from ``start``.
    """

    file: str
    start: int
    length: int
    data: int
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its elements lie, in row-major order."""

    box: Box
    place: Extent


@dataclass(frozen=True)
class TensorEntry:
    """A tensor. ``path`` is where it stands in the nested state: ``("optimizer", "state", "fc.weight", "exp_avg")``."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def places(self) -> list[Extent]:
        return [chunk.place for chunk in self.chunks]


@dataclass(frozen=True)
class ValueEntry:
    """Anything else that ``torch.load(..., weights_only=True)`` reads back."""

    path: tuple[str, ...]
    place: Extent

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def places(self) -> list[Extent]:
        return [self.place]


Entry = TensorEntry | ValueEntry


@dataclass(frozen=True)
class FileRecord:
    """A file beside the manifest, with its size and its checksum.

    ``checksum`` is of the whole file. It is None where the entries in the file have checksums of their own, which cover
    every byte.
    """

    size_bytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    ``info`` is for people and for choosing among checkpoints: step, epoch, time, world size, mesh, versions, metrics.
    """

    entries: Mapping[str, Entry]
    files: Mapping[str, FileRecord]
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """JSON whose first line holds the checksum of all that follows it."""
        body = {
            "format": FORMAT,
            "block_bytes": BLOCK_BYTES,
            "info": dict(self.info),
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
        }
        head = json.dumps(body, indent=1)[1:-2]
        lines = [f"  {json.dumps(_to_json(entry))}" for _, entry in sorted(self.entries.items())]
        rest = head.lstrip("\n") + ',\n "entries": [\n' + ",\n".join(lines) + "\n ]\n}\n"
        return f'{{ "checksum": "{checksum(rest.encode())}",\n{rest}'

    @staticmethod
    def from_text(text: str | bytes, source: str) -> Manifest:
        """The manifest that `to_text` wrote; ``source`` is the name of its file, for errors.

        Raises `CheckpointError` where it was altered, is incomplete, or has another format.
        """
        raw = text.encode() if isinstance(text, str) else text
        first, _, rest = raw.partition(b"\n")
        if first != f'{{ "checksum": "{checksum(rest)}",'.encode():
            raise CheckpointError(
                f"{source} was altered or is incomplete: its first line is not the checksum of the rest"
            )
        try:
            found = from_json(raw, dict[str, Any])
            if (found.get("format"), found.get("block_bytes")) != (FORMAT, BLOCK_BYTES):
                raise CheckpointError(
                    f"{source} has the format {found.get('format')} with blocks of {found.get('block_bytes')} bytes; "
                    f"this version reads {FORMAT} with blocks of {BLOCK_BYTES}"
                )
            manifest = _of_file(checked(found, _File))
            _refuse_impossible(manifest)
        except SchemaError as error:
            raise CheckpointError(f"{source} is no manifest of a checkpoint: {error}") from None
        return manifest


def _to_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueEntry):
        return {"path": entry.path, **vars(entry.place)}
    chunks = [{**vars(chunk.box), **vars(chunk.place)} for chunk in entry.chunks]
    return {"path": entry.path, "dtype": entry.dtype_name, "shape": entry.shape, "chunks": chunks}


@dataclass(frozen=True)
class _File:
    """The document that `Manifest.to_text` writes."""

    checksum: str
    format: str
    block_bytes: int
    info: dict[str, Any]
    files: dict[str, FileRecord]
    entries: list[dict[str, Any]]


class _Info(TypedDict, total=False):
    """The keys of ``info`` that are read; there may be any others in it."""

    step: int
    epoch: int
    sequence: int
    saved: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Value(Extent):
    path: tuple[str, ...]


@dataclass(frozen=True)
class _Chunk(Extent):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Tensor:
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def _of_file(found: _File) -> Manifest:
    checked(found.info, _Info, "info")
    entries = [_from_json(entry, f"entries[{i}]") for i, entry in enumerate(found.entries)]
    by_name = {entry.name: entry for entry in entries if entry.path}
    if len(by_name) < len(entries):
        raise SchemaError("entries has two of one name, or one without a name")
    return Manifest(by_name, found.files, found.info)


def _from_json(found: dict[str, Any], at: str) -> Entry:
    if "chunks" not in found:
        value = checked(found, _Value, at)
        return ValueEntry(value.path, _place(value))
    tensor = checked(found, _Tensor, at)
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaError(f"{at}.dtype is {tensor.dtype!r}, expected the name of a dtype of torch")
    chunks = tuple([Chunk(Box(chunk.offsets, chunk.sizes), _place(chunk)) for chunk in tensor.chunks])
    return TensorEntry(tensor.path, dtype, tensor.shape, chunks)


def _place(found: Extent) -> Extent:
    return Extent(found.file, found.start, found.length, found.data, found.checksums)


def _refuse_impossible(manifest: Manifest) -> None:
    """Raise `SchemaError` for chunks that do not make up their tensors, and places that cannot be in their files."""
    for name, record in manifest.files.items():
        if record.size_bytes < 0 or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SchemaError(f"files has {name!r} of {record.size_bytes} bytes, expected a file of the same folder")
    for entry in manifest.entries.values():
        if isinstance(entry, TensorEntry):
            _refuse_chunks(entry)
        for place in entry.places:
            _refuse_place(entry.name, place, manifest.files)


def _refuse_place(name: str, place: Extent, files: Mapping[str, FileRecord]) -> None:
    if place.file not in files:
        raise SchemaError(f"{name} lies in {place.file!r}, which is none of its files")
    if not (place.start >= 0 and 0 <= place.data <= place.length <= files[place.file].size_bytes - place.start):
        raise SchemaError(f"{name} does not lie within {place.file}, which has {files[place.file].size_bytes} bytes")
    if len(place.checksums) != (blocks := -(-place.length // BLOCK_BYTES)):
        raise SchemaError(f"{name} has {len(place.checksums)} checksums in {place.file}, expected {blocks}")


def _refuse_chunks(entry: TensorEntry) -> None:
    if any(size < 0 for size in entry.shape):
        raise SchemaError(f"{entry.name} has the shape {list(entry.shape)}, expected sizes from 0 on")
    for chunk in entry.chunks:
        box, dims = chunk.box, len(entry.shape)
        if len(box.offsets) != dims or len(box.sizes) != dims or not all(
            o >= 0 <= n and o + n <= size for o, n, size in zip(box.offsets, box.sizes, entry.shape, strict=True)
        ):  # fmt: skip
            raise SchemaError(f"{entry.name} of the shape {list(entry.shape)} has a chunk that is no part of it: {box}")
        if chunk.place.data + box.numel * entry.dtype.itemsize > chunk.place.length:
            raise SchemaError(f"{entry.name}: its elements do not fit into their container")
    if (count := sum(chunk.box.numel for chunk in entry.chunks)) != math.prod(entry.shape):
        raise SchemaError(f"{entry.name}: its chunks have {count} elements of {math.prod(entry.shape)}")
