"""A labelled image on its way from a file to a network, and the steps of that way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Task = Literal["det", "rec"]
IGNORED = ("###", "*")
"""Transcriptions of texts that nobody can read, which are neither demanded nor counted as wrong."""


@dataclass(frozen=True)
class TextBox:
    """A text in an image: its corners, (n, 2) of x and y in pixels, in order around it."""

    points: Array
    text: str

    @property
    def ignored(self) -> bool:
        return self.text in IGNORED


@dataclass(frozen=True)
class SampleSource:
    """The source of a sample, and its label.

    ``boxes`` are the texts of an image (detection), ``text`` the word that a cropped image shows (recognition).
    """

    name: str
    read: Any
    boxes: tuple[TextBox, ...] = ()
    text: str = ""


@dataclass
class Sample:
    """The values that the steps of a pipeline pass on, each changing what it is for.

    ``image`` is encoded bytes at first, then (height, width, 3), at last (3, height, width). ``boxes`` lie in the image
    as it is. ``shape`` is its height and width as it was read, and ``ratio`` by how much these were scaled since.
    ``columns`` are what else the network's loss or the metric is given, by name.
    """

    name: str
    image: Array
    boxes: list[TextBox]
    text: str = ""
    shape: tuple[int, int] = (0, 0)
    ratio: tuple[float, float] = (1.0, 1.0)
    columns: dict[str, Array] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image as it is, with the channels behind them."""
        height, width = self.image.shape[:2]
        return int(height), int(width)


class PipelineStep(Protocol):
    """A step of a pipeline, whose fields are the keys that it has in a configuration."""

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        """Change the sample; what is random comes from ``random`` alone."""


@runtime_checkable
class NeedsLabel(Protocol):
    """A step that not every label fits."""

    def misfit(self, text: str) -> str | None:
        """Return the defect of a label, as "too long"; None where it fits."""


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch, whichever rank or worker reads it.

    >>> generator(1, 2, 3).random() == generator(1, 2, 3).random()
    True
    """
    counter = np.array([0, 0, epoch, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, 0x0C2], dtype=np.uint64), counter=counter))


def corners(points: Sequence[Sequence[float]] | Array) -> Array:
    """Points as an array (n, 2) of float64."""
    return np.asarray(points, dtype=np.float64).reshape(-1, 2)
