"""Steps that make a word's image and its text fit a recogniser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwright.ocr.samples.dictionary import Dictionary
from shardwright.ocr.samples.images import padded, resized
from shardwright.ocr.samples.sample import Sample


@dataclass(frozen=True)
class RecCTCLabelEncode:
    """``text_seq`` are the ids of the text, padded to ``max_text_len``, and ``text_length`` how many of them count.

    The text is lowered where ``lower`` says so, and characters outside of the dictionary are left out. A text of which
    nothing or too much is left does not fit, and the data set leaves its sample out.
    """

    max_text_len: int = 23
    character_dict_path: str | None = None
    use_space_char: bool = False
    lower: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_dictionary", Dictionary.of(self.character_dict_path, self.use_space_char))

    @property
    def dictionary(self) -> Dictionary:
        found: Dictionary = self.__dict__["_dictionary"]
        return found

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        ids = self._ids(sample.text)
        sequence = np.zeros(self.max_text_len, np.int64)
        sequence[: len(ids)] = ids
        sample.columns |= {"text_seq": sequence, "text_length": np.asarray(len(ids), np.int64)}

    def misfit(self, text: str) -> str | None:
        count = len(self._ids(text))
        if not count:
            return "without a character of the dictionary"
        return f"longer than max_text_len, {self.max_text_len}" if count > self.max_text_len else None

    def _ids(self, text: str) -> list[int]:
        id_of = self.dictionary.id_of
        return [id_of[character] for character in (text.lower() if self.lower else text) if character in id_of]


@dataclass(frozen=True)
class LongestWord:
    """Words of more than ``max_text_len`` characters, known or not, are left out, in an evaluation, too."""

    max_text_len: int

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        return

    def misfit(self, text: str) -> str | None:
        return f"longer than max_text_len, {self.max_text_len}" if len(text) > self.max_text_len else None


@dataclass(frozen=True)
class Rotate90IfVertical:
    """Turned by a right angle where the image is more than ``threshold`` times as high as wide."""

    threshold: float = 1.5
    direction: Literal["counterclockwise", "clockwise"] = "counterclockwise"

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        height, width = sample.size
        if height / width > self.threshold:
            turns = 1 if self.direction == "counterclockwise" else -1
            sample.image = np.ascontiguousarray(np.rot90(sample.image, turns))


@dataclass(frozen=True)
class RecResizeImg:
    """Resized to ``image_shape`` (height, width); with ``padding`` the ratio of the sides is kept and the rest zero."""

    image_shape: tuple[int, ...] = (32, 100)
    padding: bool = False
    infer_mode: Literal[False] = False
    character_dict_path: str | None = None

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        height, width = self.image_shape[-2:]
        fitting = width
        if self.padding:
            fitting = min(width, max(1, round(sample.size[1] * height / sample.size[0])))
        sample.image = padded(resized(sample.image, height, fitting), height, width)


@dataclass(frozen=True)
class RecResizeNormForInfer:
    """Resized to ``target_height`` and ``target_width`` and normalised as (x - 127) / 127.

    With ``keep_ratio`` the rest is zero, whatever ``padding`` says, since the images of a batch have one size.
    """

    target_height: int = 32
    target_width: int = 100
    keep_ratio: bool = False
    padding: bool = False
    norm_before_pad: bool = False

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        width = self.target_width
        if self.keep_ratio:
            width = min(width, max(1, round(sample.size[1] * self.target_height / sample.size[0])))
        image = resized(sample.image, self.target_height, width)
        if self.norm_before_pad:
            sample.image = padded(_normal(image), self.target_height, self.target_width)
        else:
            sample.image = _normal(padded(image, self.target_height, self.target_width))


def _normal(
    image: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (image.astype(np.float32) - 127.0) / 127.0
