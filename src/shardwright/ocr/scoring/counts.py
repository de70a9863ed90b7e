"""Counts that belong to images, are added over images and ranks, and only then divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol, Self

import numpy as np

from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.libraries.geometry import Points
from shardwright.ocr.samples.dictionary import Dictionary
from shardwright.ocr.samples.sample import TextBox


class Counts(Protocol):
    """The counts of a score, each image once."""

    @property
    def images(self) -> int:
        """Return how many images were counted."""

    def __add__(self, other: Any, /) -> Self:
        """The counts of both together."""

    def metrics(self) -> Mapping[str, float]:
        """The quotients."""


@dataclass(frozen=True)
class DetectionCounts:
    """Of texts that are to be found, of those that were detected, and of both that were matched."""

    images: int = 0
    texts: int = 0
    detected: int = 0
    matched: int = 0

    def __add__(self, other: DetectionCounts) -> DetectionCounts:
        return DetectionCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> Mapping[str, float]:
        """Precision, recall and their harmonic mean; 0 where nothing was detected, or there was nothing to find."""
        precision = self.matched / self.detected if self.detected else 0.0
        recall = self.matched / self.texts if self.texts else 0.0
        both = precision + recall
        return {"precision": precision, "recall": recall, "hmean": 2 * precision * recall / both if both else 0.0}


def count_detections(detections: Sequence[Points], texts: Sequence[TextBox], iou: float = 0.5) -> DetectionCounts:
    """Match detections with the texts of one image by the rule of ICDAR 2015.

    A detection more than half inside of a text that nobody can read does not count. Each text is matched by the first
    detection whose intersection by union with it is more than ``iou``; each further one is wrong.
    """
    readable = [box.points for box in texts if not box.ignored]
    unreadable = [box.points for box in texts if box.ignored]
    both, areas, _ = geometry.overlaps(detections, unreadable)
    hidden = (both > 0.5 * areas[:, None]).any(axis=1) & (areas > 0)
    counted = [points for points, drop in zip(detections, hidden, strict=True) if not drop]
    both, found, given = geometry.overlaps(readable, counted)
    union = found[:, None] + given[None, :] - both
    close = both > iou * union
    taken = np.zeros(len(counted), dtype=bool)
    for row in close:
        first = np.flatnonzero(row & ~taken)
        taken[first[:1]] = True
    return DetectionCounts(1, len(readable), len(counted), int(taken.sum()))


@dataclass(frozen=True)
class RecognitionCounts:
    """Of words, of those that are right to the last character, and the sum of their normalised edit distances."""

    images: int = 0
    right: int = 0
    distance: float = 0.0

    def __add__(self, other: RecognitionCounts) -> RecognitionCounts:
        return RecognitionCounts(self.images + other.images, self.right + other.right, self.distance + other.distance)

    def metrics(self) -> Mapping[str, float]:
        """The share of right words, and one less the mean distance."""
        count = max(1, self.images)
        return {"acc": self.right / count, "norm_edit_distance": 1 - self.distance / count}


def count_word(
    said: str, text: str, dictionary: Dictionary, ignore_space: bool = True, lower: bool | None = None
) -> RecognitionCounts:
    """Compare a word with its label by the characters of the dictionary alone.

    They are compared in lower case where ``lower`` says so; None means where the dictionary has no other.
    """
    said, text = dictionary.known(said, lower), dictionary.known(text, lower)
    if ignore_space:
        said, text = said.replace(" ", ""), text.replace(" ", "")
    distance = float(library("rapidfuzz.distance").Levenshtein.normalized_distance(said, text))
    return RecognitionCounts(1, int(said == text), distance)
