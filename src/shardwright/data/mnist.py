"""MNIST from its IDX files, whole or one shard.

IDX is a big-endian header (magic, then one length per dim) and one byte per entry. The magic number is 2048 plus the
number of dims: 2049 for labels, 2051 for images. Nothing in a file is trusted: it is read in pieces, so that a header
which promises terabytes costs an error, not the memory.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from shardwright.data.images import Bytes, ImageFiles, Pair
from shardwright.errors import DataError

DOWNLOAD = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SIDE = 28
CLASSES = 10
_MAGIC_OF_BYTES = 2048
_PIECE_BYTES = 1 << 20
_CONTENTS = {1: "labels", 3: "images"}


def file_names(train: bool) -> tuple[str, str]:
    """Return the names of the files of images and of labels, to train or to test on."""
    part = "train" if train else "t10k"
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


class MNIST(ImageFiles):
    """The handwritten digits of the MNIST files in ``root``: pairs of an image and its label.

    An image is float32 of shape (1, 28, 28) in [0, 1], a label is int64 of shape (). ``root`` is a folder or its URL,
    which is copied once per host (see `local_copy`). ``train`` picks the ``train-*`` files or the ``t10k-*`` ones, and
    None all of them, training images first; they may be gzipped, and the unpacked file is taken where both are there.
    With ``num_shards`` and ``shard_id`` it is one of that many contiguous parts. ``transform``: see `LabelledImages`.
    `sw.loader` splits every batch over the ranks itself: give it the whole dataset on every rank, not a shard.

    Raises `DataError` where a file is missing, short, too long or corrupt, or where images and labels do not match,
    and `UsageError` for a shard that does not exist.
    """

    @staticmethod
    def _read(root: Path, train: bool) -> Pair:
        images, labels = _read_pair(root, train)
        return images[:, None], labels


def _read_pair(root: Path, train: bool) -> tuple[Bytes, Bytes]:
    """Images (n, 28, 28) and labels (n,), checked against each other."""
    image_path, label_path = (_find(root, name) for name in file_names(train))
    images, labels = read_idx(image_path, dims=3), read_idx(label_path, dims=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{image_path}: at offset 8: expected images of {SIDE} x {SIDE}, got {images.shape[1]} x {images.shape[2]}"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{label_path}: at offset 4: expected {len(images)} labels, one per image of {image_path.name}, "
            f"got {len(labels)}"
        )
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise DataError(
            f"{label_path}: at offset {8 + wrong[0]}: expected a label from 0 to {CLASSES - 1}, got {labels[wrong[0]]}"
        )
    return images, labels


def _find(root: Path, name: str) -> Path:
    candidates = [root / name, root / f"{name}.gz"]
    for path in candidates:
        if path.exists():
            return path
    raise DataError(
        f"{root}: found neither {name} nor {name}.gz. Download the four files of MNIST from {DOWNLOAD}, or make a "
        f"small set of the same format with: shardwright data digits --format mnist --out {root}"
    )


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
