"""Reads label files: lines of ICDAR 2015, lines with JSON, lists of words, and SynthText's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import DataError
from shardwright.ocr.samples.sample import Array, TextBox, corners


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1; UTF-8, with a byte-order mark or without.

    Raises:
        DataError: where the file is missing or no UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"there is no label file {path}; give its path below dataset_root as label_file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line


def read_icdar(path: Path) -> tuple[TextBox, ...]:
    """The texts of one image, a line ``x1,y1,x2,y2,x3,y3,x4,y4,text`` each.

    Raises:
        DataError: names the line that is none.
    """
    boxes = []
    for number, line in lines_of(path):
        fields = line.split(",", 8)
        try:
            points = corners(np.array([float(field) for field in fields[:8]]))
            boxes.append(TextBox(points, fields[8].strip()))
        except (ValueError, IndexError) as error:
            raise _broken(path, number, line, "x1,y1,x2,y2,x3,y3,x4,y4,text") from error
    return tuple(boxes)


def read_detection_list(path: Path) -> list[tuple[str, tuple[TextBox, ...]]]:
    """The images and their texts, a line ``img_1.jpg<TAB>[{"transcription": ..., "points": ...}, ...]`` each.

    Raises:
        DataError: names the line that is none.
    """
    found = []
    for number, line in lines_of(path):
        name, tab, texts = line.partition("\t")
        try:
            if not tab or not name:
                raise ValueError("no tab")
            found.append((name, tuple(_box(text) for text in json.loads(texts))))
        except (ValueError, KeyError, TypeError) as error:
            what = 'image, tab, [{"transcription": "text", "points": [[x, y], ...]}, ...]'
            raise _broken(path, number, line, what) from error
    return found


def _box(text: Any) -> TextBox:
    points = corners(text["points"])
    if len(points) < 3:
        raise ValueError("fewer than three points")
    return TextBox(points, str(text["transcription"]))


def read_word_list(path: Path) -> list[tuple[str, str]]:
    """The images and their words, a line ``word.png<TAB>text`` each.

    Raises:
        DataError: names the line that is none.
    """
    found = []
    for number, line in lines_of(path):
        name, tab, text = line.partition("\t")
        if not tab or not name:
            raise _broken(path, number, line, "image, tab, text")
        found.append((name, text.strip()))
    return found


def icdar_line(box: TextBox) -> str:
    """A text as `read_icdar` reads it.

    >>> icdar_line(TextBox(corners([[1, 2], [5, 2], [5, 4], [1, 4]]), "Ab"))
    '1,2,5,2,5,4,1,4,Ab'
    """
    return ",".join([*(str(round(number)) for number in box.points.ravel().tolist()), box.text])


def detection_line(image: str, boxes: tuple[TextBox, ...]) -> str:
    """An image and its texts as `read_detection_list` reads them."""
    texts = [
        {"transcription": box.text, "points": [[round(x), round(y)] for x, y in box.points.tolist()]} for box in boxes
    ]
    return f"{image}\t{json.dumps(texts, ensure_ascii=False)}"


def _broken(path: Path, number: int, line: str, expected: str) -> DataError:
    shown = line if len(line) <= 80 else f"{line[:77]}..."
    return DataError(f"{path}, line {number}: expected {expected}, got {shown!r}; correct the line or take it out")


class SynthText:
    """The labels of SynthText's MATLAB file, one row for each image: ``imnames``, ``wordBB`` and ``txt``.

    Gupta, Vedaldi, Zisserman, *Synthetic Data for Text Localisation in Natural Images*, 2016, arXiv:1604.06646.

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
