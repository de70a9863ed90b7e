"""MNIST from its IDX files, whole or one shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.data.idx import Bytes, read_idx
from shardwright.data.order import even_range
from shardwright.errors import DataError, UsageError

DOWNLOAD = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SIDE = 28
CLASSES = 10


def file_names(train: bool) -> tuple[str, str]:
    """The names of the image file and of the label file."""
    part = "train" if train else "t10k"
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


class MNIST(torch.utils.data.Dataset[tuple[Any, Tensor]]):
    """The handwritten digits of the MNIST files in ``root``: pairs of an image and its label.

    An image is float32 of shape (1, 28, 28) in [0, 1], a label is int64 of shape (). ``train`` picks the
    ``train-*`` files or the ``t10k-*`` ones; both may be gzipped, and the unpacked file is taken where both are there.
    With ``num_shards`` and ``shard_id`` the dataset is one of that many contiguous parts, whose sizes differ by at
    most one. `sw.loader` splits every batch over the ranks itself: give it the whole dataset on every rank, not a
    shard. ``transform`` maps each image.

    Raises `DataError` where a file is missing, short, too long or corrupt, or where images and labels do not match,
    and `UsageError` for a shard that does not exist.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        num_shards: int | None = None,
        shard_id: int | None = None,
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        shard = _checked_shard(num_shards, shard_id)
        images, labels = _read_pair(Path(root), train)
        start, stop = even_range(len(labels), *shard)
        # Copies, so that a shard does not hold the memory of the whole.
        self._images = torch.from_numpy(images[start:stop].copy()).unsqueeze(1)
        self._labels = torch.from_numpy(labels[start:stop].astype(np.int64))
        self.transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self._item(self._images[index].float().div_(255), self._labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Tensor]]:
        """What torch's DataLoader calls for a batch: one conversion for all of them."""
        images, labels = self._rows(indices)
        return [self._item(image, label) for image, label in zip(images, labels, strict=True)]

    def gather(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """The collated batch of one or more ``indices``: images of shape (n, 1, 28, 28), labels of shape (n,).

        What `sw.loader` calls, since taking rows of one tensor is many times faster than stacking samples.
        """
        if self.transform is None:
            return self._rows(indices)
        images, labels = torch.utils.data.default_collate(self.__getitems__(indices))
        return images, labels

    def _rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self._images[rows].float().div_(255), self._labels[rows]

    def _item(self, image: Tensor, label: Tensor) -> tuple[Any, Tensor]:
        return (image if self.transform is None else self.transform(image)), label


def _checked_shard(num_shards: int | None, shard_id: int | None) -> tuple[int, int]:
    """(number of shards, which one)."""
    if num_shards is None and shard_id is None:
        return 1, 0
    if num_shards is None or shard_id is None:
        raise UsageError(
            f"num_shards and shard_id go together, got num_shards={num_shards}, shard_id={shard_id}; "
            "for example MNIST(root, num_shards=4, shard_id=0)"
        )
    if num_shards < 1 or not 0 <= shard_id < num_shards:
        raise UsageError(
            f"expected num_shards of at least 1 and shard_id from 0 to num_shards - 1, "
            f"got num_shards={num_shards}, shard_id={shard_id}"
        )
    return num_shards, shard_id


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
