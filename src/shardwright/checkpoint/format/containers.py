"""A tensor or a value as a container: what ``torch.save`` writes, with checksums, and where its elements begin."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from shardwright.checkpoint.format.manifest import BLOCK_BYTES, Extent, between, checksum
from shardwright.common.pulse import own_pulse
from shardwright.errors import CheckpointError

_RECORD = b"archive/data/0"  # the elements' record in the zip archive
_crc = threading.Lock()


@contextmanager
def _without_crc() -> Iterator[None]:
    """``torch.save`` without CRC-32 sums, which depend on the elements and which its reader does not look at."""
    with _crc:  # the option is of the process, and several threads may save
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


@dataclass(frozen=True)
class ContainerFrame:
    """The bytes before and after the ``size`` bytes of a tensor's elements in its container."""

    head: bytes
    size: int
    tail: bytes

    @property
    def data(self) -> int:
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
        """Do nothing: torch.save calls this on its file."""


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: torch.Size) -> ContainerFrame:
    """Return what ``torch.save`` writes around the elements of any tensor like this, without their checksums.

    Cached by the dtype and the shape, which are all of a tensor that it says. Settings of ``torch.save`` that a process
    may change, as the alignment, enter too: a frame of any of them is one that ``torch.load`` reads.
    """
    like = torch.empty(shape, dtype=dtype, device="cpu")  # memory that is never touched is none
    rest = _Rest(like.numel() * like.element_size())
    with _without_crc():
        torch.save(like, cast(BinaryIO, rest))
    at = _data_at(rest.kept)
    assert at is not None
    return ContainerFrame(bytes(rest.kept[:at]), rest.size, bytes(rest.kept[at:]))


def _data_at(head: bytes | bytearray) -> int | None:
    """Return where the elements begin, after the local header of their record; None before it is complete."""
    name = head.find(_RECORD)
    if name < 0:
        return None
    lengths = head[name - 4 : name]
    return name + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, as bytes to read or to write."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: BinaryIO, tensor: Tensor, name: str, start: int) -> Extent:
    """Write a plain tensor of the CPU as a container at ``start`` of the file called ``name``.

    A part of a larger tensor that is contiguous is written from where it lies, without a copy.
    """
    frame = frame_of(tensor.dtype, tensor.shape)
    elements = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    return _write(file, name, start, frame.data, memoryview(frame.head), elements, memoryview(frame.tail))


def packed(path: tuple[str, ...], value: Any) -> bytes:
    """A value that is no tensor, as ``torch.save`` writes it.

    Raises `CheckpointError` where a weights-only load would not read it back.
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


def write_value(file: BinaryIO, data: bytes, name: str, start: int) -> Extent:
    """Write what `packed` made as a container at ``start`` of the file called ``name``."""
    return _write(file, name, start, 0, memoryview(data))


def _write(file: BinaryIO, name: str, start: int, data: int, *parts: memoryview) -> Extent:
    """Write a container whose elements begin at its byte ``data``, block by block, each summed while it is at hand."""
    length, checksums, pulse = sum(map(len, parts)), [], own_pulse()
    for first in range(0, length, BLOCK_BYTES):
        block = between(parts, first, first + BLOCK_BYTES)
        checksums.append(checksum(*block))
        for part in block:
            file.write(part)
        pulse.beat()
    return Extent(name, start, length, data, tuple(checksums))
