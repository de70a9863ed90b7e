"""IDX files, the format of MNIST: a big-endian header (magic, then one length per dim) and one byte per entry.

The magic number is 2048 plus the number of dims: 2049 for labels, 2051 for images. Nothing in a file is trusted: it is
read in pieces, so that a header which promises terabytes costs an error, not the memory.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError

_MAGIC_OF_BYTES = 2048
_PIECE_BYTES = 1 << 20
_CONTENTS = {1: "labels", 3: "images"}

Bytes = npt.NDArray[np.uint8]


def read_idx(path: str | os.PathLike[str], dims: int) -> Bytes:
    """The array of unsigned bytes in an IDX file with ``dims`` dims; a name that ends in ``.gz`` is unpacked.

    Raises `DataError` with the file, the offset (in the unpacked contents), what was expected and what was got.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            return _read(file, path, dims)  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError, a truncated one an EOFError
        raise DataError(f"{path}: cannot be read: {error}") from error


def _read(file: IO[bytes], path: Path, dims: int) -> Bytes:
    expected, contents = _MAGIC_OF_BYTES + dims, _CONTENTS.get(dims, f"an array of {dims} dims")
    magic = _take(file, path, 0, 4, "the magic number")
    if int.from_bytes(magic) != expected:
        hint = "; it is gzipped: let its name end in .gz" if magic[:2] == b"\x1f\x8b" else ""
        raise DataError(
            f"{path}: at offset 0: expected the magic number {expected} ({contents}), "
            f"got {int.from_bytes(magic)} (bytes {magic.hex(' ')}){hint}"
        )
    header = _take(file, path, 4, 4 * dims, f"{dims} lengths of 4 bytes")
    shape = tuple(int.from_bytes(header[at : at + 4]) for at in range(0, 4 * dims, 4))
    if 0 in shape:
        raise DataError(f"{path}: at offset {4 + 4 * shape.index(0)}: expected a length of at least 1, got 0")
    offset, count = 4 + 4 * dims, math.prod(shape)
    payload = _take(file, path, offset, count, f"{count} bytes of {contents} ({' x '.join(map(str, shape))})")
    if file.read(1):
        raise DataError(f"{path}: at offset {offset + count}: expected the end of the file, got more bytes")
    return np.frombuffer(payload, dtype=np.uint8).reshape(shape)


def _take(file: IO[bytes], path: Path, offset: int, count: int, what: str) -> bytearray:
    """Exactly ``count`` bytes, or a `DataError`."""
    taken = bytearray()
    while len(taken) < count:
        try:
            piece = file.read(min(_PIECE_BYTES, count - len(taken)))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: at offset {offset + len(taken)}: expected {what}, got: {error}") from error
        if not piece:
            raise DataError(
                f"{path}: at offset {offset}: expected {what}, got {len(taken)} bytes and the end of the file"
            )
        taken += piece
    return taken


def idx_bytes(array: Bytes) -> bytes:
    """The contents of the IDX file that holds ``array``.

    >>> idx_bytes(np.array([7, 1], dtype=np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 01'
    """
    numbers = (_MAGIC_OF_BYTES + array.ndim, *array.shape)
    return b"".join(number.to_bytes(4) for number in numbers) + array.astype(np.uint8, copy=False).tobytes()


def write_idx(path: str | os.PathLike[str], array: Bytes) -> None:
    """Write ``array`` as an IDX file; a name that ends in ``.gz`` is gzipped, with the same bytes every time."""
    contents = idx_bytes(array)
    Path(path).write_bytes(gzip.compress(contents, mtime=0) if Path(path).suffix == ".gz" else contents)
