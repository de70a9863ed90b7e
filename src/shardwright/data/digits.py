"""Scikit-learn's handwritten digits, 1,797 real images that need no download, as the files of a known data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import made_folder
from shardwright.data import cifar, mnist
from shardwright.data.images import Bytes
from shardwright.data.mnist import idx_bytes
from shardwright.data.order import permutation
from shardwright.errors import DataError, UsageError
from shardwright.launch.progress_notes import waiting_for

TEST_SIZE = 360
SPLIT_SEED = 0
_LARGEST_VALUE = 16  # of a pixel of the 8 x 8 images


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 8, 8) with values from 0 to 16, and labels of shape (n,)."""

    images: Bytes
    labels: Bytes

    def __getitem__(self, chosen: npt.NDArray[np.int64]) -> Digits:
        return Digits(self.images[chosen], self.labels[chosen])


def load_digits() -> Digits:
    """All 1,797 digits, in scikit-learn's order. Raises `UsageError` where scikit-learn is not installed."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UsageError(
            "the handwritten digits come with scikit-learn, which is not installed; "
            "type: pip install 'shardwright[digits]'"
        ) from error
    digits = datasets.load_digits()
    return Digits(digits.images.astype(np.uint8), digits.target.astype(np.uint8))


def split(digits: Digits) -> tuple[Digits, Digits]:
    """(1,437 to train, 360 to test), both shuffled, each class divided in the same proportion."""
    shuffled = digits[permutation(len(digits.labels), SPLIT_SEED)]
    quotas = _test_quotas(np.bincount(shuffled.labels))
    test = np.concatenate([np.flatnonzero(shuffled.labels == c)[:quota] for c, quota in enumerate(quotas)])
    train = np.setdiff1d(np.arange(len(shuffled.labels)), test)
    # Once more: where a class filled its quota early, the rest would begin with nothing else.
    train, test = (part[permutation(len(part), SPLIT_SEED, epoch=1)] for part in (train, test))
    return shuffled[train], shuffled[test]


def _test_quotas(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many of each class are tested: rounded down, then the largest remainders get the rest."""
    total = int(sizes.sum())
    quotas, remainders = sizes * TEST_SIZE // total, sizes * TEST_SIZE % total
    quotas[np.argsort(-remainders, kind="stable")[: TEST_SIZE - int(quotas.sum())]] += 1
    return quotas


def enlarge(images: Bytes, side: int = mnist.SIDE) -> Bytes:
    """(n, 8, 8) from 0 to 16 -> (n, side, side) from 0 to 255: bilinear to 20 x 20, centred as MNIST's are.

    In whole numbers throughout, so that the bytes are the same on every machine.
    """
    old, new = images.shape[1], 20
    weights = np.zeros((new, old), dtype=np.int64)  # rows sum to `unit`
    unit = 2 * new
    for row in range(new):
        position = max(
            0, (2 * row + 1) * old - new
        )  # the centre of the new pixel, in units of 1 / (2 * new) old pixels
        low, fraction = divmod(position, unit)
        weights[row, low] += unit - fraction
        weights[row, min(low + 1, old - 1)] += fraction
    scaled = weights @ images.astype(np.int64) @ weights.T * 255
    full = _LARGEST_VALUE * unit**2
    margin = (side - new) // 2
    return np.pad((scaled + full // 2) // full, ((0, 0), (margin, margin), (margin, margin))).astype(np.uint8)


def enlarged_parts(side: int, counts: Sequence[int] | None) -> list[Digits]:
    """The digits to train and to test, enlarged; where there are counts, again and again until there are so many."""
    parts = [Digits(enlarge(part.images, side), part.labels) for part in split(load_digits())]
    if counts is None:
        return parts
    return [part[np.arange(count) % len(part.labels)] for part, count in zip(parts, counts, strict=True)]


def mnist_files(full: bool = False) -> dict[str, bytes]:
    """The four files of MNIST, name -> contents; ``full`` ones have as many images as MNIST has."""
    files = {}
    parts = enlarged_parts(mnist.SIDE, (60_000, 10_000) if full else None)
    for train, part in zip((True, False), parts, strict=True):
        image_name, label_name = mnist.file_names(train)
        files[image_name] = idx_bytes(part.images)
        files[label_name] = idx_bytes(part.labels)
    return files


def cifar_files(version: cifar.Version, full: bool = False) -> dict[str, bytes]:
    """Return the files of a version of CIFAR-10, path -> contents.

    Their images are the digits of `mnist_files` in grey, 32 x 32. ``full`` ones have as many images as CIFAR-10 has:
    10,000 in each of six files, on which other people's loaders count.
    """
    parts = enlarged_parts(cifar.SIDE, (50_000, 10_000) if full else None)
    train, test = ((np.repeat(part.images[:, None], 3, axis=1), part.labels) for part in parts)
    return cifar.cifar_files(version, train, test, names=[str(digit) for digit in range(cifar.CLASSES)])


# format -> its files, path -> contents
FORMATS: dict[str, Callable[[bool], dict[str, bytes]]] = {
    "mnist": mnist_files,
    "cifar10": partial(cifar_files, cifar.PYTHON),
    "cifar10-binary": partial(cifar_files, cifar.BINARY),
}


@waiting_for("making the digits")
def write_digits(out: str | os.PathLike[str], format: str, force: bool = False, full_size: bool = False) -> list[Path]:
    """Write the digits into the folder ``out`` as the files of ``format``, and return their paths.

    With ``full_size`` there are as many images as that data set has, each digit many times.

    Files that are there already with the same contents are left alone. Raises `UsageError` for a format that is not
    in `FORMATS`, and `DataError` where another data set is in the way and ``force`` is false, before anything is
    written. Every file is complete under a temporary name before the first takes its place.
    """
    if format not in FORMATS:
        raise UsageError(f"expected a format among {', '.join(sorted(FORMATS))}, got {format!r}")
    files = {Path(out) / name: contents for name, contents in FORMATS[format](full_size).items()}
    in_the_way = [path for path, contents in files.items() if path.exists() and not _holds(path, contents)]
    in_the_way += [packed for path in files if (packed := path.with_name(f"{path.name}.gz")).exists()]
    if in_the_way and not force:
        raise DataError(
            f"{out}: another data set is there already ({', '.join(path.name for path in in_the_way)}); "
            "choose another folder with --out, or add --force to replace it"
        )
    try:
        with made_folder(Path(out)):
            _write_all({path: contents for path, contents in files.items() if not _holds(path, contents)})
    except OSError as error:
        size_bytes = sum(map(len, files.values()))
        raise DataError(f"the digits cannot be written: {in_words(error, out, size_bytes)}") from error
    return list(files)


def _holds(path: Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents


def _write(path: Path, draft: Path, contents: bytes) -> None:
    """Write a draft of a file, below whose folder nothing is made where it cannot be written."""
    with made_folder(path.parent):
        try:
            draft.write_bytes(contents)
        except OSError as error:
            draft.unlink(missing_ok=True)
            error.filename = str(path)
            raise


def _write_all(files: dict[Path, bytes]) -> None:
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        for path, contents in files.items():
            _write(path, temporary[path], contents)
        for path in files:
            temporary[path].replace(path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
