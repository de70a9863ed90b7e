"""Steps that move texts together with their image: flipped, turned, scaled, cropped, resized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardwright.errors import UsageError
from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.networks.dbnet import STRIDE
from shardwright.ocr.samples.images import padded, resized
from shardwright.ocr.samples.sample import IGNORED, Array, Sample, TextBox


@dataclass(frozen=True)
class DetLabelEncode:
    """Texts with the labels ``###`` and ``*`` count as texts that nobody can read; labels are decoded already."""

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        sample.boxes = list(sample.boxes)


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Left and right change places in a share ``p`` of the images."""

    p: float = 0.5

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        if random.random() < self.p:
            width = sample.size[1]
            sample.image = np.ascontiguousarray(sample.image[:, ::-1])
            _move(sample, lambda points: np.stack([width - points[:, 0], points[:, 1]], axis=1)[::-1])


@dataclass(frozen=True)
class RandomRotate:
    """Turned about the middle by an angle that is uniform in ``degrees``, in a canvas that grows if asked to."""

    degrees: tuple[float, ...] = (-10.0, 10.0)
    expand_canvas: bool = True
    p: float = 1.0

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        drawn, share = random.random(), random.random()
        if drawn >= self.p:
            return
        cv2 = library("cv2")
        low, high = min(self.degrees), max(self.degrees)
        height, width = sample.size
        turn = cv2.getRotationMatrix2D((width / 2, height / 2), low + share * (high - low), 1.0)
        if self.expand_canvas:
            cos, sin = abs(turn[0, 0]), abs(turn[0, 1])
            new = round(height * cos + width * sin), round(width * cos + height * sin)
            turn[:, 2] += (new[1] - width) / 2, (new[0] - height) / 2
            height, width = new
        sample.image = cv2.warpAffine(sample.image, turn, (width, height))
        _move(sample, lambda points: points @ turn[:, :2].T + turn[:, 2])


@dataclass(frozen=True)
class RandomScale:
    """Scaled by a number that is uniform in ``scale_range``."""

    scale_range: tuple[float, ...] = (0.5, 3.0)
    p: float = 1.0

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        drawn, share = random.random(), random.random()
        if drawn < self.p:
            low, high = min(self.scale_range), max(self.scale_range)
            scale = low + share * (high - low)
            height, width = (max(1, round(side * scale)) for side in sample.size)
            _resize(sample, height, width)


@dataclass(frozen=True)
class RandomCropWithBBox:
    """A part of the image that cuts no text and has one, scaled into ``crop_size`` (height, width) and padded.

    Tried ``max_tries`` times with parts whose sides are at least ``min_crop_ratio`` of the image's; else it is the
    whole image. Where ``p`` says so there is no part either.
    """

    max_tries: int = 10
    min_crop_ratio: float = 0.1
    crop_size: tuple[int, ...] = (640, 640)
    p: float = 1.0

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        if random.random() < self.p:
            self._cut(sample, *self._window(sample, random))
        (height, width), (crop_height, crop_width) = sample.size, self.crop_size
        scale = min(crop_height / height, crop_width / width)
        _resize(sample, min(crop_height, round(height * scale)), min(crop_width, round(width * scale)))
        sample.image = padded(sample.image, crop_height, crop_width)

    def _window(self, sample: Sample, random: np.random.Generator) -> tuple[int, int, int, int]:
        height, width = sample.size
        rows = _free([box.points[:, 1] for box in sample.boxes], height)
        columns = _free([box.points[:, 0] for box in sample.boxes], width)
        for _ in range(self.max_tries):
            top, bottom = self._between(rows, height, random)
            left, right = self._between(columns, width, random)
            if bottom - top < max(1, self.min_crop_ratio * height):
                continue
            if right - left < max(1, self.min_crop_ratio * width):
                continue
            if any(_inside(box.points, top, bottom, left, right) for box in sample.boxes if not box.ignored):
                return top, bottom, left, right
        return 0, height, 0, width

    @staticmethod
    def _between(free: Array, size: int, random: np.random.Generator) -> tuple[int, int]:
        if not len(free):
            return 0, size
        ends = [int(free[int(share * len(free))]) for share in random.random(2)]
        return min(ends), max(ends)

    @staticmethod
    def _cut(sample: Sample, top: int, bottom: int, left: int, right: int) -> None:
        sample.image = sample.image[top:bottom, left:right]
        sample.boxes = [box for box in sample.boxes if _inside(box.points, top, bottom, left, right)]
        _move(sample, lambda points: points - (left, top))


def _free(spans: list[Array], size: int) -> Array:
    """The positions from 0 to ``size`` at which a cut meets none of the spans."""
    free = np.ones(size + 1, dtype=bool)
    for span in spans:
        if len(span):
            low, high = int(np.floor(span.min())), int(np.ceil(span.max()))
            free[max(0, low + 1) : max(0, high)] = False
    return np.flatnonzero(free)


def _inside(points: Array, top: int, bottom: int, left: int, right: int) -> bool:
    if not len(points):
        return False
    x, y = points[:, 0], points[:, 1]
    return bool(x.min() >= left and x.max() <= right and y.min() >= top and y.max() <= bottom)


@dataclass(frozen=True)
class ValidatePolygons:
    """Texts outside of the image go; those that cross themselves, or show no more than ``min_area``, are unreadable."""

    min_area: float = 1.0

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        height, width = sample.size
        frame = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float64)
        both, _, _ = geometry.overlaps([box.points for box in sample.boxes], [frame])
        kept = []
        for box, shown in zip(sample.boxes, both[:, 0], strict=True):
            if not shown:
                continue
            good = geometry.is_simple(box.points) and shown > self.min_area
            kept.append(box if good else replace(box, text=IGNORED[0]))
        sample.boxes = kept


@dataclass(frozen=True)
class DetResize:
    """Resized for a network whose images have sides that are multiples of ``divisor``.

    Either to ``target_size`` (height, width), or so that the shorter (``limit_type`` min) or longer side (max) is
    ``limit_side_len`` at least or at most. With ``keep_ratio`` and ``padding`` the image is padded to the target size.
    Without ``force_divisable`` that size is one the network takes as it is.
    """

    target_size: tuple[int, ...] | None = None
    keep_ratio: bool = True
    padding: bool = False
    limit_type: Literal["min", "max", "none", "None"] | None = "min"
    limit_side_len: int = 736
    force_divisable: bool = True
    divisor: int = STRIDE

    def __post_init__(self) -> None:
        if self.target_size is not None and len(self.target_size) != 2:
            raise UsageError(f"expected target_size [height, width], got {list(self.target_size)}")
        fixed = self.target_size is not None and (self.padding or not self.keep_ratio)
        if not self.force_divisable and not (fixed and all(side % STRIDE == 0 for side in self.target_size or ())):
            raise UsageError(
                f"force_divisable: False leaves sides that are no multiples of {STRIDE}, which the network cannot "
                f"take; use True, or a target_size of multiples of {STRIDE} with padding: True or keep_ratio: False"
            )

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        height, width = self._size(*sample.size)
        _resize(sample, height, width)
        if self.target_size is not None and self.keep_ratio and self.padding:
            sample.image = padded(sample.image, *map(self._divisible, self.target_size))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if self.target_size is not None:
            down, across = map(self._divisible, self.target_size)
            if not self.keep_ratio:
                return down, across
            scale = min(down / height, across / width)
            if self.padding:
                return max(1, int(height * scale)), max(1, int(width * scale))
        elif self.limit_type == "min":
            scale = max(1.0, self.limit_side_len / min(height, width))
        elif self.limit_type == "max":
            scale = min(1.0, self.limit_side_len / max(height, width))
        else:
            scale = 1.0
        return self._divisible(height * scale), self._divisible(width * scale)

    def _divisible(self, side: float) -> int:
        return max(self.divisor, round(side / self.divisor) * self.divisor)


def _resize(sample: Sample, height: int, width: int) -> None:
    before = sample.size
    height, width = max(1, height), max(1, width)
    if (height, width) == before:
        return
    sample.image = resized(sample.image, height, width)
    down, across = height / before[0], width / before[1]
    sample.ratio = sample.ratio[0] * down, sample.ratio[1] * across
    _move(sample, lambda points: points * (across, down))


def _move(sample: Sample, moved: Callable[[Array], Array]) -> None:
    sample.boxes = [TextBox(moved(box.points) if len(box.points) else box.points, box.text) for box in sample.boxes]
