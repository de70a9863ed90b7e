"""A tensor or a value as a container: what ``torch.save`` writes, with checksums, and where its elements begin."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from shardwright.checkpoint.format.manifest import BLOCK_BYTES, Place
from shardwright.errors import CheckpointError
from shardwright.pulse import own_pulse

_RECORD = b"archive/data/0"  # the elements' record in the zip archive


@contextmanager
def without_crc() -> Iterator[None]:
    """``torch.save`` without CRC-32 sums, which cost more than writing and which its reader does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@dataclass(frozen=True)
class Frame:
    """What stands before and after the ``size`` bytes of a tensor's elements in its container."""

    head: bytes
    size: int
    tail: bytes

    @property
    def data(self) -> int:
        """Where the elements begin."""
        return len(self.head)

    @property
    def length(self) -> int:
        return len(self.head) + self.size + len(self.tail)


class _Rest:
    """A file that keeps what is written to it but for the elements of a tensor, the one large part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept = bytearray()
        self.elements_at: int | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.elements_at is None and len(view) == self.size and len(self.kept) == _data_at(self.kept):
            self.elements_at = len(self.kept)
        else:
            self.kept += view
        return len(view)

    def flush(self) -> None:
        """What torch.save asks of a file; there is nothing here to flush."""


def frame_of(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """What `write_tensor` writes around the elements of any tensor like this; call it inside `without_crc`.

    Without sums, nothing of it depends on the elements.
    """
    like = torch.empty(shape, dtype=dtype)  # memory that is never touched is none
    rest = _Rest(like.numel() * like.element_size())
    torch.save(like, cast(BinaryIO, rest))
    at = _data_at(rest.kept)
    assert at is not None
    return Frame(bytes(rest.kept[:at]), rest.size, bytes(rest.kept[at:]))


def _data_at(head: bytes | bytearray) -> int | None:
    """Where the elements begin: after the name and the padding in the local header of their record; None before it."""
    name = head.find(_RECORD)
    if name < 0:
        return None
    lengths = head[name - 4 : name]
    return name + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Summed:
    """A file in front of ``file`` that notes the checksum of every block, and the first bytes before the elements."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = 0
        self.head = bytearray()
        self.checksums: list[str] = []
        self.failure: BaseException | None = None
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if (at := _data_at(self.head)) is None or len(self.head) < at:
            self.head += view[:4096]
        self.length += len(view)
        rest = view
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._cut()
            try:
                self.file.write(part)
            except BaseException as failure:
                self.failure = failure
                raise
            own_pulse().beat()
        return len(view)

    def flush(self) -> None:
        """What torch.save asks of a file; there is nothing here to flush."""

    def _cut(self) -> None:
        self.checksums.append(self._block.hexdigest())
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def place(self, name: str, start: int, tensor: bool) -> Place:
        if self._room < BLOCK_BYTES:
            self._cut()
        return Place(name, start, self.length, (_data_at(self.head) or 0) if tensor else 0, tuple(self.checksums))


def write_tensor(file: BinaryIO, tensor: Tensor, name: str, start: int) -> Place:
    """Write a plain tensor of the CPU as a container at ``start`` of the file called ``name``.

    A part of a larger tensor that is contiguous is written from where it lies, without a copy.
    """
    summed = _Summed(file)
    try:
        torch.save(_alone(tensor), cast(BinaryIO, summed))
    except Exception as error:  # torch tells what it was writing, and not why that failed
        raise summed.failure or error from None
    return summed.place(name, start, tensor=True)


def _alone(tensor: Tensor) -> Tensor:
    """The same elements as the only ones of their storage: torch.save writes the whole storage of a view."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    storage = tensor.untyped_storage()[start : start + tensor.numel() * size]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def packed(path: tuple[str, ...], value: Any) -> bytes:
    """A value that is no tensor, as ``torch.save`` writes it.

    Raises:
        CheckpointError: where a weights-only load would not read it back.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the entry {'.'.join(path)} is a {type(value).__name__}, which cannot be read back by "
            f"torch.load(..., weights_only=True): {str(error).strip().splitlines()[0]}. Save numbers, strings, "
            "tensors and lists and dictionaries of them"
        ) from error
    return buffer.getvalue()


def write_value(file: BinaryIO, data: bytes, name: str, start: int) -> Place:
    """Write what `packed` made as a container at ``start`` of the file called ``name``."""
    summed = _Summed(file)
    summed.write(data)
    return summed.place(name, start, tensor=False)
