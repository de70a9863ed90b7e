"""The labels of SynthText.

Gupta, Vedaldi, Zisserman, *Synthetic Data for Text Localisation in Natural Images*, 2016, arXiv:1604.06646.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import DataError
from shardwright.ocr.samples.sample import Array, TextBox, corners


class SynthText:
    """The labels of a MATLAB file, one row for each image: ``imnames``, ``wordBB`` and ``txt``.

    ``wordBB`` is (2, 4, words), or (2, 4) of one word; ``txt`` are texts, whose words are parted by white space.
    They stay arrays, since there are millions of words.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = _read(path)
        missing = [key for key in ("imnames", "wordBB", "txt") if key not in found]
        if missing:
            raise DataError(
                f"{path} has no {' and no '.join(missing)}; expected SynthText's gt.mat or gt_processed.mat"
            )
        self._names, self._boxes, self._texts = (np.ravel(found[key]) for key in ("imnames", "wordBB", "txt"))
        self.size = len(self._names)
        if not len(self._boxes) == len(self._texts) == self.size:
            raise DataError(
                f"{path}: expected as many wordBB and txt as imnames, got {len(self._boxes)}, {len(self._texts)} and "
                f"{self.size}"
            )

    def image(self, number: int) -> tuple[str, tuple[TextBox, ...]]:
        """Return the path of an image below the folder, and its words.

        Raises:
            DataError: where it has not as many places as words.
        """
        name = str(np.asarray(self._names[number]).item())
        places = _places(np.asarray(self._boxes[number], dtype=np.float64))
        words = [word for text in np.ravel(self._texts[number]) for word in str(text).split()]
        if len(words) != len(places):
            raise DataError(f"{self.path}: {name} has {len(places)} places in wordBB and {len(words)} words in txt")
        return name, tuple(TextBox(corners(place), word) for place, word in zip(places, words, strict=True))


def _places(boxes: Array) -> Array:
    """(words, 4, 2) of (2, 4, words) or (2, 4)."""
    return boxes.transpose().reshape(-1, 4, 2)


def _read(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat  # takes as long to import as all else of a run that has no such file

    try:
        found: dict[str, Any] = loadmat(str(path), variable_names=["imnames", "wordBB", "txt"])
    except FileNotFoundError as error:
        raise DataError(f"there is no label file {path}; give its path below dataset_root as label_file") from error
    except Exception as error:  # of scipy, zlib or struct, as the file may be anything
        raise DataError(f"{path} cannot be read as a file of MATLAB: {error}") from error
    return found
