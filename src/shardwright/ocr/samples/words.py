"""Words in a database of LMDB: ``num-samples``, and from 1 on ``image-000000001`` and ``label-000000001``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from shardwright.errors import DataError
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.samples.sample import SampleSource


class WordDatabase:
    """A folder with the files of LMDB.

    Each loading process opens it once for itself. Any other process opens it for each read alone, since what is open
    when a process forks can be opened neither by its children nor used by them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        counted = self._get("num-samples")
        self.size = int(counted) if counted is not None else 0
        if not self.size:
            said = "has no key num-samples" if counted is None else "says num-samples 0"
            raise DataError(
                f"the database {folder} {said}; expected image-%09d and label-%09d from 1 on; fill it, or take it "
                "out of data_dir"
            )

    def source(self, number: int) -> SampleSource:
        """The word ``number``, counted from 1, whose image is read when it is asked for."""
        label = self._get(f"label-{number:09d}")
        if label is None:
            raise DataError(f"the database {self.folder} of {self.size} words has no key label-{number:09d}")
        return SampleSource(f"{self.folder}: image-{number:09d}", self.reader(number), text=label.decode("utf-8"))

    def texts(self, numbers: Iterable[int]) -> Iterator[str | None]:
        """The words of many numbers, read in a row; None stands for one that is missing or no UTF-8."""
        with _open(self.folder) as environment, environment.begin() as reading:
            for number in numbers:
                yield _decoded(reading.get(f"label-{number:09d}".encode()))

    def reader(self, number: int) -> Any:
        return lambda: self._image(number)

    def _image(self, number: int) -> bytes:
        image = self._get(f"image-{number:09d}")
        if image is None:
            raise DataError(f"the database {self.folder} of {self.size} words has no key image-{number:09d}")
        return image

    def _get(self, key: str) -> bytes | None:
        if get_worker_info() is not None:
            return _read(_kept_open(self.folder), key)
        with _open(self.folder) as environment:
            return _read(environment, key)


def _decoded(label: bytes | None) -> str | None:
    try:
        return None if label is None else label.decode("utf-8")
    except UnicodeDecodeError:  # reading the sample says so
        return None


def _read(environment: Any, key: str) -> bytes | None:
    with environment.begin() as reading:
        found: bytes | None = reading.get(key.encode())
    return found


@cache
def _kept_open(folder: Path) -> Any:
    """Return the open database of a folder.

    Cached by the folder for the life of one loading process, which reads what was there when it began.
    """
    return _open(folder)


def _open(folder: Path) -> Any:
    lmdb = library("lmdb")
    if not (folder / "data.mdb").is_file():
        raise DataError(
            f"there is no database of LMDB in {folder}: it has no file data.mdb; give its path below "
            "dataset_root as data_dir"
        )
    try:
        opened = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, meminit=False, max_readers=1024)
    except lmdb.Error as error:
        raise DataError(f"{folder} cannot be read as a database of LMDB: {error}") from error
    try:
        _refuse_truncated(opened, folder / "data.mdb")
    except BaseException:
        opened.close()
        raise
    return opened


def _refuse_truncated(environment: Any, path: Path) -> None:
    """Raise `DataError` where the file lacks pages that its header counts: the kernel ends who reads those (SIGBUS)."""
    needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if (size_bytes := path.stat().st_size) < needed_bytes:
        raise DataError(
            f"{path} is cut short: it has {size_bytes} bytes of {needed_bytes}; copy it again, or make it anew"
        )


def write_words(folder: Path, words: Iterable[tuple[bytes, str]], size_bytes: int = 1 << 31) -> int:
    """Write encoded images and their words as such a database; the number of them."""
    lmdb = library("lmdb")
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    try:
        with lmdb.open(str(folder), map_size=size_bytes) as environment, environment.begin(write=True) as writing:
            for count, (image, text) in enumerate(words, 1):
                writing.put(f"image-{count:09d}".encode(), image)
                writing.put(f"label-{count:09d}".encode(), text.encode("utf-8"))
            writing.put(b"num-samples", str(count).encode())
    except lmdb.Error as error:
        raise DataError(f"the database of LMDB {folder} cannot be written: {error}") from error
    return count
