"""CIFAR-10 from its published files, the python version or the binary one, unpacked or not, whole or one shard."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.cifar_pickle import RefusedPickle, byte_array, pickle_bytes, read_pickle
from shardwright.data.images import Bytes, ImageFiles, Pair
from shardwright.errors import DataError

DOWNLOAD = "https://www.cs.toronto.edu/~kriz/"
SIDE = 32
CLASSES = 10
TRAIN_FILES = 5
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_IMAGE_BYTES = 3 * SIDE * SIDE
_RECORD_BYTES = 1 + _IMAGE_BYTES


@dataclass(frozen=True)
class Version:
    """One of the two published versions: how its files are called, read and written.

    ``write`` gives the contents of a file with images (n, 3, 32, 32), labels (n,) and a description of it, where the
    version has a place for that; ``names_file`` gives name and contents of the file that says what the classes mean.
    """

    folder: str
    archive: str
    suffix: str
    read: Callable[[str, bytes], Pair]
    write: Callable[[Bytes, Bytes, str], bytes]
    names_file: Callable[[Sequence[str]], tuple[str, bytes]]

    def file_names(self, train: bool) -> list[str]:
        stems = [f"data_batch_{number}" for number in range(1, TRAIN_FILES + 1)] if train else ["test_batch"]
        return [f"{stem}{self.suffix}" for stem in stems]


class CIFAR10(ImageFiles):
    """The colour images of CIFAR-10: pairs of an image, float32 (3, 32, 32) in [0, 1], and its label, int64 ().

    ``root`` is the folder of the files, or one that has ``cifar-10-batches-py``, ``cifar-10-batches-bin`` or one of the
    published archives in it, or such an archive, or the URL of any of these, which is copied once per host (see
    `local_copy`). Pickles are read without executing what is in them. ``train`` picks the five training files or the
    test file, and None all six, training images first. With ``num_shards`` and ``shard_id`` the dataset is one of that
    many contiguous parts. ``transform``: see `LabelledImages`. `sw.loader` splits every batch over the ranks itself:
    give it the whole dataset on every rank, not a shard.

    Raises `DataError` where a file is missing, short, too long or corrupt or a pickle holds more than data, and
    `UsageError` for a shard that does not exist.
    """

    @staticmethod
    def _read(root: Path, train: bool) -> Pair:
        version, files = _find(root, train)
        pairs = [version.read(name, contents) for name, contents in files.items()]
        images, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
        return images, labels


def _find(root: Path, train: bool) -> tuple[Version, dict[str, bytes]]:
    """The version that is there, and its files in order, path -> contents."""
    for version in VERSIONS:
        names = version.file_names(train)
        for folder in (root, root / version.folder):
            if (folder / names[0]).exists():
                return version, {str(folder / name): _contents(folder / name) for name in names}
        for archive in (root / version.archive, root):
            if archive.name == version.archive and archive.is_file():
                return version, _from_archive(archive, [f"{version.folder}/{name}" for name in names])
    looked_for = " nor ".join(name for v in VERSIONS for name in (v.folder, v.archive))
    archives = " or ".join(DOWNLOAD + version.archive for version in VERSIONS)
    raise DataError(
        f"{root}: found neither {looked_for}, nor their files. Download {archives} into that folder, or make a small "
        f"set of the same format with: shardwright data digits --format cifar10 --out {root}"
    )


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _from_archive(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.name in names else None
                if file is not None:
                    contents[member.name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{archive}: cannot be read: {error}; download it again from {DOWNLOAD}") from error
    for name in names:
        if name not in contents:
            raise DataError(f"{archive}: {name} is not in it; download it again from {DOWNLOAD}")
    return {f"{archive}/{name}": contents[name] for name in names}


def _read_python(path: str, contents: bytes) -> Pair:
    try:
        entries = read_pickle(contents)
        images = byte_array(_entry(entries, "data"))
        labels = _entry(entries, "labels")
    except RefusedPickle as error:
        raise DataError(f"{path}: {error}") from error
    if images.ndim != 2 or images.shape[1] != _IMAGE_BYTES or not len(images):
        raise DataError(f"{path}: expected data of shape (images, {_IMAGE_BYTES}), got {images.shape}")
    if not isinstance(labels, list) or len(labels) != len(images):
        count = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: expected {len(images)} labels, one per image, got {count}")
    for number, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < CLASSES:
            raise DataError(f"{path}: expected labels from 0 to {CLASSES - 1}, got {label!r} for image {number}")
    return images.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.uint8)


def _entry(entries: Mapping[str, Any], key: str) -> Any:
    if key not in entries:
        raise RefusedPickle(f"expected the entries data and labels, got {', '.join(sorted(entries)) or 'none'}")
    return entries[key]


def _read_binary(path: str, contents: bytes) -> Pair:
    count, rest = divmod(len(contents), _RECORD_BYTES)
    if rest or not count:
        raise DataError(
            f"{path}: at offset {count * _RECORD_BYTES}: expected a record of {_RECORD_BYTES} bytes (label and image), "
            f"got {rest} bytes and the end of the file"
        )
    records = np.frombuffer(contents, dtype=np.uint8).reshape(count, _RECORD_BYTES)
    labels = records[:, 0]
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise DataError(
            f"{path}: at offset {wrong[0] * _RECORD_BYTES}: expected a label from 0 to {CLASSES - 1}, "
            f"got {labels[wrong[0]]}"
        )
    return records[:, 1:].reshape(count, 3, SIDE, SIDE), labels


def python_bytes(images: Bytes, labels: Bytes, description: str) -> bytes:
    """The contents of a file of the python version with images (n, 3, 32, 32) and labels (n,)."""
    names = [f"{label}_{number:05}.png".encode() for number, label in enumerate(labels.tolist())]
    return pickle_bytes(
        {
            b"batch_label": description.encode(),
            b"labels": labels.tolist(),
            b"data": images.reshape(len(images), _IMAGE_BYTES),
            b"filenames": names,
        }
    )


def binary_bytes(images: Bytes, labels: Bytes, description: str = "") -> bytes:
    """The contents of a file of the binary version with images (n, 3, 32, 32) and labels (n,), undescribed."""
    return np.concatenate([labels[:, None], images.reshape(len(images), _IMAGE_BYTES)], axis=1).tobytes()


def _python_names(names: Sequence[str]) -> tuple[str, bytes]:
    meta = {b"label_names": [name.encode() for name in names], b"num_vis": _IMAGE_BYTES}
    return "batches.meta", pickle_bytes(meta)


def _binary_names(names: Sequence[str]) -> tuple[str, bytes]:
    return "batches.meta.txt", "".join(f"{name}\n" for name in names).encode()


PYTHON = Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _read_python, python_bytes, _python_names)
BINARY = Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _read_binary, binary_bytes, _binary_names)
VERSIONS = (PYTHON, BINARY)


def cifar_files(version: Version, train: Pair, test: Pair, names: Sequence[str] = NAMES) -> dict[str, bytes]:
    """All files of a version, path below the root -> contents; the training images are cut evenly over five files."""
    files: dict[str, bytes] = {}
    for is_train, (images, labels) in ((True, train), (False, test)):
        file_names = version.file_names(is_train)
        parts = zip(np.array_split(images, len(file_names)), np.array_split(labels, len(file_names)), strict=True)
        for number, (name, part) in enumerate(zip(file_names, parts, strict=True), start=1):
            what = f"training batch {number} of {TRAIN_FILES}" if is_train else "testing batch 1 of 1"
            files[f"{version.folder}/{name}"] = version.write(*part, what)
    names_file, contents = version.names_file(names)
    files[f"{version.folder}/{names_file}"] = contents
    return files
