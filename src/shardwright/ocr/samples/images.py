"""Steps on the pixels alone, for detection and recognition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardwright.errors import DataError
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.samples.sample import Array, Sample

IMAGENET = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
"""Of red, green and blue."""


@dataclass(frozen=True)
class DecodeImage:
    """Reads the bytes of an image file, in the order of channels ``img_mode``.

    With ``ignore_orientation`` it stays as the camera held it, whatever the file says of how to turn it.
    """

    img_mode: Literal["RGB", "BGR"] = "BGR"
    to_float32: bool = False
    ignore_orientation: bool = False
    keep_ori: bool = False

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        image = decode(sample.image, sample.name, self.ignore_orientation)
        image = image[:, :, ::-1] if self.img_mode == "RGB" else image
        sample.image = np.ascontiguousarray(image, dtype=np.float32 if self.to_float32 else np.uint8)
        sample.shape = sample.size


def decode(encoded: Array, name: str, ignore_orientation: bool = False) -> Array:
    """Return the image (height, width, 3), blue first, of the bytes of a file.

    Raises:
        DataError: where they are no image.
    """
    cv2 = library("cv2")
    cv2.setNumThreads(0)  # each worker is one process of many
    flags = cv2.IMREAD_COLOR | (cv2.IMREAD_IGNORE_ORIENTATION if ignore_orientation else 0)
    image: Array | None = cv2.imdecode(encoded, flags) if len(encoded) else None
    if image is None:
        raise DataError(f"{name} is no image that opencv can read ({len(encoded)} bytes)")
    return image


@dataclass(frozen=True)
class NormalizeImage:
    """``(image - mean) / std``, one number per channel or "imagenet", which has them in the order of the channels."""

    bgr_to_rgb: bool = True
    is_hwc: Literal[True] = True
    mean: tuple[float, ...] | str = "imagenet"
    std: tuple[float, ...] | str = "imagenet"

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        image = sample.image[:, :, ::-1] if self.bgr_to_rgb else sample.image
        mean, std = (self._numbers(name) for name in ("mean", "std"))
        sample.image = (image.astype(np.float32) - mean) / std

    def _numbers(self, name: Literal["mean", "std"]) -> Array:
        given: Any = getattr(self, name)
        return np.asarray(IMAGENET[name] if isinstance(given, str) else given, dtype=np.float32)


@dataclass(frozen=True)
class Normalize:
    """`NormalizeImage` of channels that stay in their order."""

    mean: tuple[float, ...] | str = "imagenet"
    std: tuple[float, ...] | str = "imagenet"

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        NormalizeImage(False, True, self.mean, self.std)(sample, random)


@dataclass(frozen=True)
class ToCHWImage:
    """(height, width, 3) -> (3, height, width)."""

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        sample.image = np.ascontiguousarray(sample.image.transpose(2, 0, 1))


@dataclass(frozen=True)
class RandomColorAdjust:
    """Brightness, contrast and saturation, each times a number that is uniform within so much of 1."""

    brightness: float = 32 / 255
    contrast: float = 0.5
    saturation: float = 0.5

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        image = sample.image.astype(np.float32)
        bright, strong, coloured = (
            1 + share * (2 * random.random() - 1) for share in (self.brightness, self.contrast, self.saturation)
        )
        image *= bright
        image = (image - image.mean()) * strong + image.mean()
        grey = image.mean(axis=2, keepdims=True)
        sample.image = (grey + (image - grey) * coloured).clip(0, 255).astype(sample.image.dtype)


def resized(image: Array, height: int, width: int) -> Array:
    """Return an image in another size, by linear interpolation."""
    cv2 = library("cv2")
    scaled: Array = cv2.resize(image, (max(1, width), max(1, height)), interpolation=cv2.INTER_LINEAR)
    return scaled


def padded(image: Array, height: int, width: int) -> Array:
    """The image in the upper left of a larger one that is zero beside it."""
    whole = np.zeros((height, width, *image.shape[2:]), dtype=image.dtype)
    whole[: image.shape[0], : image.shape[1]] = image
    return whole


def encoded(image: Array, form: str = ".png", options: Sequence[int] = ()) -> bytes:
    """The bytes of a file that holds the image, blue first."""
    _, found = library("cv2").imencode(form, image, list(options))
    return bytes(found.tobytes())
