"""MNIST from its IDX files, whole or one shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwright.data.idx import Bytes, read_idx
from shardwright.data.images import ImageFiles, Pair
from shardwright.errors import DataError

DOWNLOAD = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SIDE = 28
CLASSES = 10


def file_names(train: bool) -> tuple[str, str]:
    """The names of the image file and of the label file."""
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
