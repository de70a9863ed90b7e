"""Labelled images in memory: the base of the readers of MNIST and CIFAR-10, and images of noise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.data.collate import collate
from shardwright.data.order import even_range
from shardwright.data.remote import local_copy
from shardwright.data.transforms import Keys, Transform
from shardwright.errors import UsageError

Bytes = npt.NDArray[np.uint8]
Pair = tuple[Bytes, Bytes]
"""Images of shape (n, c, h, w), and labels of shape (n,)."""


class LabelledImages(torch.utils.data.Dataset[tuple[Any, Tensor]]):
    """Pairs of an image, float32 of shape (c, h, w) in [0, 1], and its label, int64 of shape ().

    Args:
        images: bytes of shape (n, c, h, w).
        labels: of shape (n,).
        shard: (number, index): keep one of that many contiguous parts, whose sizes differ by at most one.
        transform: a `Transform`, which maps whole batches and whose random numbers belong to (seed, epoch, sample
            index), or any function of one image.
    """

    def __init__(
        self,
        images: Bytes,
        labels: Bytes,
        shard: tuple[int, int] = (1, 0),
        transform: Transform | Callable[[Tensor], Any] | None = None,
    ) -> None:
        start, stop = even_range(len(labels), *shard)
        # Copies, so that a shard does not hold the memory of the whole.
        self._images = torch.from_numpy(images[start:stop].copy())
        self._labels = torch.from_numpy(labels[start:stop].copy()).long()
        self.transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Tensor]]:
        """Return a batch to torch's DataLoader; random transforms draw as in the first epoch of seed 0."""
        images, labels = self._rows(indices)
        if isinstance(self.transform, Transform):
            images = self.transform(images, Keys.of(indices))
        elif self.transform is not None:
            return [(self.transform(image), label) for image, label in zip(images, labels, strict=True)]
        return list(zip(images, labels, strict=True))

    def gather(self, indices: Sequence[int], seed: int = 0, epoch: int = 0) -> tuple[Any, Tensor]:
        """The collated batch of one or more ``indices``: images of shape (n, c, h, w), labels of shape (n,).

        What `sw.loader` calls, since taking rows of one tensor is many times faster than stacking samples.
        """
        if self.transform is not None and not isinstance(self.transform, Transform):
            images, labels = collate(self.__getitems__(indices))
            return images, labels
        images, labels = self._rows(indices)
        if self.transform is not None:
            images = self.transform(images, Keys.of(indices, seed, epoch))
        return images, labels

    def _rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        return self._images[rows].float().div_(255), self._labels[rows]


class ImageFiles(LabelledImages):
    """Labelled images from the files of a published set, in a folder or behind its URL, whole or one shard."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool | None = True,
        num_shards: int | None = None,
        shard_id: int | None = None,
        transform: Transform | Callable[[Tensor], Any] | None = None,
    ) -> None:
        shard = _checked_shard(type(self).__name__, num_shards, shard_id)
        folder = local_copy(root)
        parts = [self._read(folder, part) for part in ((True, False) if train is None else (train,))]
        images, labels = (np.concatenate(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        super().__init__(images, labels, shard, transform)

    @staticmethod
    def _read(root: Path, train: bool) -> Pair:
        raise NotImplementedError


def _checked_shard(kind: str, num_shards: int | None, shard_id: int | None) -> tuple[int, int]:
    """(number of shards, which one); raises `UsageError` for a shard that does not exist."""
    if num_shards is None and shard_id is None:
        return 1, 0
    if num_shards is None or shard_id is None:
        raise UsageError(
            f"num_shards and shard_id go together, got num_shards={num_shards}, shard_id={shard_id}; "
            f"for example {kind}(root, num_shards=4, shard_id=0)"
        )
    if num_shards < 1 or not 0 <= shard_id < num_shards:
        raise UsageError(
            f"expected num_shards of at least 1 and shard_id from 0 to num_shards - 1, "
            f"got num_shards={num_shards}, shard_id={shard_id}"
        )
    return num_shards, shard_id


class RandomDataWarning(UserWarning):
    """A warning that the data have nothing in them that could be learned."""


class RandomImages(LabelledImages):
    """``count`` pairs of an image of independent pixels, float32 of ``shape`` in [0, 1], and a label below ``classes``.

    The same ``seed`` gives the same images. Warns (`RandomDataWarning`) that nothing can be learnt from them. Raises
    `UsageError` for sizes that do not fit.
    """

    def __init__(
        self,
        count: int = 5000,
        shape: Sequence[int] = (3, 32, 32),
        classes: int = 2,
        seed: int = 0,
        transform: Transform | Callable[..., Any] | None = None,
    ) -> None:
        if count < 1 or not 1 <= classes <= 256 or len(shape) != 3 or min(shape) < 1:
            raise UsageError(
                "expected count of at least 1, 1 to 256 classes and a shape of three sizes (channels, height, width), "
                f"got count={count}, classes={classes}, shape={tuple(shape)}"
            )
        # Raw words of the bit generator, which NumPy promises to keep; its samplers it does not.
        words = np.random.Philox(key=seed).random_raw(count * (-(-int(np.prod(shape)) // 8) + 1)).reshape(count, -1)
        pixels = np.ascontiguousarray(words[:, 1:]).astype("<u8", copy=False).view(np.uint8)
        images = pixels[:, : int(np.prod(shape))].reshape(count, *shape)
        super().__init__(images, (words[:, 0] % classes).astype(np.uint8), transform=transform)
        warnings.warn(
            f"the images are random and so are their labels: accuracy on others than these will be about "
            f"{'one half' if classes == 2 else f'1/{classes}'}, whatever is trained",
            RandomDataWarning,
            stacklevel=2,
        )
