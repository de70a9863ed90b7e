"""Transforms of image batches, whose random numbers belong to (seed, epoch, sample index).

So an image is cropped and flipped in the same way whichever rank or worker reads it, whatever batch it is in, and after
resuming; and in another way in each epoch. `sw.loader` passes seed, epoch and indices to a dataset whose ``gather``
takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.data.order import GOLDEN, mixed
from shardwright.errors import UsageError


@dataclass(frozen=True)
class Keys:
    """The key of a batch's random numbers; ``stream`` tells one draw of a chain from the next."""

    indices: npt.NDArray[np.uint64]
    seed: int = 0
    epoch: int = 0
    stream: int = 0

    @classmethod
    def of(cls, indices: Sequence[int], seed: int = 0, epoch: int = 0) -> Keys:
        return cls(np.asarray(indices, dtype=np.int64).astype(np.uint64), seed, epoch)

    def split(self, number: int) -> Keys:
        """Other keys of the same samples, for draw or transform ``number``."""
        return Keys(self.indices, self.seed, self.epoch, self.stream * 64 + number + 1)

    def uniform(self) -> Tensor:
        """One number in [0, 1) per sample: float64 of shape (n,).

        >>> Keys.of([5, 6], seed=1).uniform()[1:] == Keys.of([6], seed=1).uniform()
        tensor([True])
        """
        bits = np.zeros(len(self.indices), dtype=np.uint64)
        for word in (self.seed, self.epoch, self.stream, self.indices):
            bits = mixed((bits ^ np.asarray(word, dtype=np.uint64)) + GOLDEN)
        return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) / 2**53)

    def integers(self, limit: int) -> Tensor:
        """One whole number in [0, limit) per sample: int64 of shape (n,)."""
        return (self.uniform() * limit).long()


class Transform:
    """Maps a batch of images, (n, c, h, w) unless it says otherwise, with ``keys`` for what is random in it."""

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what it does with images")


@dataclass(frozen=True)
class Compose(Transform):
    """Applies one transform after the other."""

    transforms: tuple[Transform, ...]

    def __init__(self, transforms: Sequence[Transform]) -> None:
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise UsageError(
                    f"expected transforms of shardwright.data.transforms, got {transform!r}; a data set takes a "
                    "function of one image alone, in place of a chain"
                )
        object.__setattr__(self, "transforms", tuple(transforms))

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        for number, transform in enumerate(self.transforms):
            images = transform(images, keys.split(number))
        return images


@dataclass(frozen=True)
class Normalise(Transform):
    """``(images - mean) / deviation``, one number per channel or one for all."""

    mean: Sequence[float]
    deviation: Sequence[float]

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        for name, numbers in (("mean", self.mean), ("deviation", self.deviation)):
            if len(numbers) not in (1, images.shape[1]):
                raise UsageError(
                    f"Normalise has {len(numbers)} numbers as its {name}, the images have {images.shape[1]} channels; "
                    "expected one per channel, or one for all"
                )
        mean, deviation = (images.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.deviation))
        return (images - mean) / deviation


@dataclass(frozen=True)
class RandomCrop(Transform):
    """A square of ``size`` out of each image, after ``padding`` zeros on every side."""

    size: int
    padding: int = 0

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        padded = F.pad(images, [self.padding] * 4)
        spare = [side - self.size for side in padded.shape[-2:]]
        if min(spare) < 0:
            raise UsageError(
                f"RandomCrop({self.size}, padding={self.padding}) does not fit into images of "
                f"{images.shape[-2]} x {images.shape[-1]}"
            )
        tops, lefts = (keys.split(number).integers(room + 1) for number, room in enumerate(spare))
        steps = torch.arange(self.size, device="cpu")
        rows, columns = tops[:, None] + steps, lefts[:, None] + steps
        n, channels = (torch.arange(size, device="cpu") for size in images.shape[:2])
        return padded[n[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None]]


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Left and right change places in a share ``probability`` of the images."""

    probability: float = 0.5

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        flipped = keys.uniform() < self.probability
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)
