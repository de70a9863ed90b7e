"""Transforms of image batches, whose random numbers belong to (seed, epoch, sample index).

So an image is cropped and flipped in the same way whichever rank or worker reads it, whatever batch it is in, and after
resuming; and in another way in each epoch. `sw.loader` passes seed, epoch and indices to a dataset whose ``gather``
takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.data.collate import collate
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
                    f"expected transforms of shardwright.data.transforms, got {transform!r}; Map(function) makes one "
                    "from a function of one image"
                )
        object.__setattr__(self, "transforms", tuple(transforms))

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        for number, transform in enumerate(self.transforms):
            images = transform(images, keys.split(number))
        return images


@dataclass(frozen=True)
class Map(Transform):
    """Applies a function of one image to each; what is random in it is the caller's to key."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        return torch.stack([self.function(image) for image in images])


@dataclass(frozen=True)
class Rescale(Transform):
    """``images * factor + shift``; bytes become float32."""

    factor: float = 1 / 255
    shift: float = 0.0

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        images = images if images.is_floating_point() else images.float()
        return images * self.factor + self.shift


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
class ChannelsFirst(Transform):
    """(n, h, w, c) -> (n, c, h, w)."""

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        return images.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Cast(Transform):
    """Changes the type, and leaves values as they are where the type can hold them."""

    dtype: torch.dtype

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        return images.to(self.dtype)


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


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """A rectangle of each image, scaled to a square of ``size`` (bilinear, with low-pass filtering where it shrinks).

    Its area is a share of the image's, uniform in ``scale``; the logarithm of its width by its height is uniform
    between those of ``ratio``. A side longer than the image's is cut to it. Float images only.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __call__(self, images: Tensor, keys: Keys) -> Tensor:
        height, width = images.shape[-2:]
        share, shape, top, left = (keys.split(number).uniform() for number in range(4))
        area = height * width * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
        low, high = map(math.log, self.ratio)
        ratio = (low + shape * (high - low)).exp()
        heights = (area / ratio).sqrt().round().clamp(1, height).long()
        widths = (area * ratio).sqrt().round().clamp(1, width).long()
        tops, lefts = (top * (height - heights + 1)).long(), (left * (width - widths + 1)).long()
        boxes = torch.stack([tops, tops + heights, lefts, lefts + widths], dim=1).tolist()
        return torch.cat([self._scaled(image[:, a:b, c:d]) for image, (a, b, c, d) in zip(images, boxes, strict=True)])

    def _scaled(self, crop: Tensor) -> Tensor:
        return F.interpolate(crop[None], (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)


class Transformed(torch.utils.data.Dataset[Any]):
    """Another dataset with ``transform`` applied to the first tensor of its samples, keyed by their indices."""

    def __init__(self, dataset: Any, transform: Transform) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """One sample; random transforms draw as in the first epoch of seed 0."""
        columns = self.gather([index])
        return columns[0][0] if len(columns) == 1 else tuple(column[0] for column in columns)

    def gather(self, indices: Sequence[int], seed: int = 0, epoch: int = 0) -> tuple[Tensor, ...]:
        """The collated batch of one or more ``indices``."""
        samples = [self.dataset[index] for index in indices]
        collated = collate(samples)
        first, *rest = collated if isinstance(collated, (tuple, list)) else [collated]
        return self.transform(first, Keys.of(indices, seed, epoch)), *rest
