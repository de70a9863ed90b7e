"""Images of texts that are drawn, for those who have none: for detection and for recognition, labelled in all formats.

Below the folder are ``det/train`` and ``det/test``, each with ``images``, ``gt`` (ICDAR's lines) and ``det_gt.txt``
(JSON), and ``rec/train`` and ``rec/test``, each with ``words``, ``rec_gt.txt`` and the database ``lmdb``. What is drawn
follows from the seed, the number of the image, and the fonts that there are.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import made_folder
from shardwright.errors import DataError, UsageError
from shardwright.launch.progress_notes import counted
from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.samples.dictionary import LETTERS
from shardwright.ocr.samples.images import encoded
from shardwright.ocr.samples.labels import detection_line, icdar_line
from shardwright.ocr.samples.sample import IGNORED, Array, TextBox, generator
from shardwright.ocr.samples.words import write_words

FONTS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts")
TEST_SHARE = 5  # one image of so many is for testing
_PLAIN_FONTS = ("DejaVuSans", "DejaVuSerif", "LiberationSans", "LiberationSerif", "FreeSans", "NotoSans-")


@dataclass(frozen=True)
class Drawing:
    """The settings of drawn images.

    ``count`` images of ``size`` pixels squared with up to ``texts`` words each, and ``words`` cropped words.
    """

    count: int = 100
    seed: int = 0
    words: int = 1000
    size: int = 640
    texts: int = 8
    alphabet: str = LETTERS
    shortest: int = 3
    longest: int = 8


def write_images(out: Path, drawing: Drawing, force: bool = False) -> list[Path]:
    """Draw and write everything below ``out``; the folders that were written.

    Raises:
        UsageError: where ``out`` is a file, or has something already and ``force`` is not said.
        DataError: where they cannot be written; nothing of them is left then.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file and no folder; name another")
    if out.exists() and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty; name another folder, or type --force to write into it")
    if not 1 <= drawing.shortest <= drawing.longest or not drawing.alphabet:
        raise UsageError("expected words of at least one character, the longest no shorter than the shortest")
    parts = [part for part in (out / "det", out / "rec") if not part.exists()]
    try:
        with made_folder(out), _taken_back(parts):
            return _write_parts(out, drawing)
    except OSError as error:
        raise DataError(f"the images cannot be written: {in_words(error, out)}") from error


@contextlib.contextmanager
def _taken_back(folders: Iterable[Path]) -> Iterator[None]:
    """Remove these folders, with all that was written into them, where the body fails."""
    try:
        yield
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_parts(out: Path, drawing: Drawing) -> list[Path]:
    fonts = find_fonts()
    folders = []
    for part, first, count in _parts(drawing.count):
        folders.append(_write_scenes(out / "det" / part, range(first, first + count), drawing, fonts))
    for part, first, count in _parts(drawing.words):
        folders.append(_write_words(out / "rec" / part, range(first, first + count), drawing, fonts))
    return folders


def _parts(count: int) -> Iterator[tuple[str, int, int]]:
    test = max(1, count // TEST_SHARE)
    yield "train", 0, max(1, count - test)
    yield "test", max(1, count - test), test


def find_fonts() -> list[str | None]:
    """The plain fonts of the system, and None, which stands for the one that comes with Pillow."""
    files = sorted(path for folder in FONTS for path in Path(folder).expanduser().rglob("*.tt[fc]"))
    plain = [str(path) for path in files if path.name.startswith(_PLAIN_FONTS) and "Math" not in path.name]
    return [None, *plain]


def _font(path: str | None, size: int) -> Any:
    fonts = library("PIL.ImageFont")
    return fonts.load_default(size) if path is None else fonts.truetype(path, size)


def _write_scenes(folder: Path, numbers: range, drawing: Drawing, fonts: list[str | None]) -> Path:
    for name in ("images", "gt"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for place, number in enumerate(counted(f"drawing {folder}", numbers), 1):
        image, boxes = draw_scene(drawing, number, fonts)
        (folder / "images" / f"img_{place}.jpg").write_bytes(encoded(image, ".jpg"))
        text = "".join(icdar_line(box) + "\r\n" for box in boxes)
        (folder / "gt" / f"gt_img_{place}.txt").write_text(text, encoding="utf-8-sig")
        lines.append(detection_line(f"img_{place}.jpg", boxes))
    (folder / "det_gt.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _write_words(folder: Path, numbers: range, drawing: Drawing, fonts: list[str | None]) -> Path:
    (folder / "words").mkdir(parents=True, exist_ok=True)
    lines, drawn = [], []
    for place, number in enumerate(counted(f"drawing {folder}", numbers), 1):
        image, text = draw_word(drawing, number, fonts)
        drawn.append((encoded(image), text))
        (folder / "words" / f"word_{place}.png").write_bytes(drawn[-1][0])
        lines.append(f"words/word_{place}.png\t{text}")
    (folder / "rec_gt.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_words(folder / "lmdb", drawn)
    return folder


def _word(drawing: Drawing, random: np.random.Generator) -> str:
    length = drawing.shortest + int(random.random() * (drawing.longest - drawing.shortest + 1))
    return "".join(drawing.alphabet[int(share * len(drawing.alphabet))] for share in random.random(length))


def draw_word(drawing: Drawing, number: int, fonts: list[str | None]) -> tuple[Array, str]:
    """An image of one word, blue first, as it might be cut out of a photograph, and the word."""
    random = generator(drawing.seed, 1, number)
    text = _word(drawing, random)
    ink, paper = _colours(random)
    mask = _written(text, fonts[int(random.random() * len(fonts))], 24 + int(random.random() * 17))
    edge = [int(2 + random.random() * 4) for _ in range(4)]
    height, width = mask.shape[0] + edge[0] + edge[1], mask.shape[1] + edge[2] + edge[3]
    whole = np.zeros((height, width), np.float32)
    whole[edge[0] : edge[0] + mask.shape[0], edge[2] : edge[2] + mask.shape[1]] = mask
    turn = library("cv2").getRotationMatrix2D((width / 2, height / 2), (random.random() - 0.5) * 6, 1.0)
    whole = library("cv2").warpAffine(whole, turn, (width, height))
    return _noisy(_background(height, width, paper, random), whole, ink, random), text


def draw_scene(drawing: Drawing, number: int, fonts: list[str | None]) -> tuple[Array, tuple[TextBox, ...]]:
    """An image with words at any angles, none over another, and its texts; a few are too faint to be read."""
    random = generator(drawing.seed, 0, number)
    side = drawing.size
    _, paper = _colours(random)
    image = _background(side, side, paper, random)
    free, boxes = np.ones((side, side), dtype=bool), list[TextBox]()
    for _ in range(1 + int(random.random() * drawing.texts)):
        placed = _placed(drawing, random, fonts, free)
        if placed is None:
            continue
        mask, points, text = placed
        faint = random.random() < 0.05
        image = _inked(image, mask * (0.12 if faint else 1.0), _far_from(paper, random))
        boxes.append(TextBox(points, IGNORED[0] if faint else text))
    return _noisy(image, None, (0.0, 0.0, 0.0), random), tuple(boxes)


def _placed(
    drawing: Drawing, random: np.random.Generator, fonts: list[str | None], free: Array
) -> tuple[Array, Array, str] | None:
    """A word's mask in the image, its corners and itself, where there is a place for it; the place is then taken."""
    cv2 = library("cv2")
    side, text = drawing.size, _word(drawing, random)
    height = side * (0.04 + 0.06 * random.random())
    small = _written(text, fonts[int(random.random() * len(fonts))], max(10, round(height)))
    rows, columns = small.shape
    turn = cv2.getRotationMatrix2D((columns / 2, rows / 2), (random.random() - 0.5) * 50, 1.0)
    frame = np.array([[0, 0], [columns, 0], [columns, rows], [0, rows]], dtype=np.float64)
    for _ in range(10):
        move = random.random(2) * side
        moved = turn.copy()
        moved[:, 2] += move - (columns / 2, rows / 2)
        points = frame @ moved[:, :2].T + moved[:, 2]
        if points.min() < 2 or points.max() > side - 2:
            continue
        place = np.zeros((side, side), np.uint8)
        grown = geometry.offset(points, 0.35 * rows)
        cv2.fillPoly(place, [np.rint(grown[0]).astype(np.int32).reshape(-1, 1, 2)], 1)
        if free[place > 0].all():
            free[place > 0] = False
            return cv2.warpAffine(small, moved, (side, side)), points, text
    return None


def _written(text: str, font: str | None, size: int) -> Array:
    images, draws = library("PIL.Image"), library("PIL.ImageDraw")
    face = _font(font, size)
    left, top, right, bottom = face.getbbox(text)
    image = images.new("L", (max(1, math.ceil(right - left)), max(1, math.ceil(bottom - top))))
    draws.Draw(image).text((-left, -top), text, fill=255, font=face)
    return np.asarray(image, dtype=np.float32) / 255


def _colours(random: np.random.Generator) -> tuple[Array, Array]:
    paper = random.random(3) * 255
    return _far_from(paper, random), paper


def _far_from(paper: Array, random: np.random.Generator) -> Array:
    ink = random.random(3) * 100
    return ink if paper.mean() > 127 else 255 - ink


def _background(height: int, width: int, paper: Array, random: np.random.Generator) -> Array:
    """A paper that is brighter at one side, with a few soft spots: float32."""
    cv2 = library("cv2")
    spots = cv2.resize(random.random((3, 4)).astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    slope = np.linspace(-1, 1, width, dtype=np.float32) * (random.random() - 0.5)
    shade = (spots - 0.5 + slope[None, :]) * 50
    background: Array = (paper[None, None, :] + shade[:, :, None]).astype(np.float32)
    return background


def _inked(image: Array, mask: Array, ink: Any) -> Array:
    amount = mask[:, :, None]
    inked: Array = image * (1 - amount) + np.asarray(ink, dtype=np.float32) * amount
    return inked


def _noisy(image: Array, mask: Array | None, ink: Any, random: np.random.Generator) -> Array:
    """Return the image as a camera sees it: blurred a little, with noise, in bytes."""
    cv2 = library("cv2")
    if mask is not None:
        image = _inked(image, mask, ink)
    image = cv2.GaussianBlur(image, (3, 3), 0.1 + 0.8 * random.random())
    noise = random.random(image.shape, dtype=np.float32) - 0.5
    noisy: Array = (image + noise * 30 * random.random()).clip(0, 255).astype(np.uint8)
    return noisy
