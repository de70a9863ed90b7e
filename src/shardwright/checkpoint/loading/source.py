"""Reads a checkpoint and verifies its checksums: files of this host, or behind a URL that fsspec knows.

Nothing that is read here is used before its checksum has been compared, and nothing is read that is not asked for but
the rest of the blocks of 256 KiB in which it lies.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from shardwright.checkpoint.format.manifest import (
    BLOCK_BYTES,
    LATEST,
    MANIFEST,
    Extent,
    Manifest,
    ValueEntry,
    checksum,
    checksums,
)
from shardwright.checkpoint.storage.folders import File, Folder, LocalFolder, last_part, open_folder
from shardwright.common.pulse import own_pulse
from shardwright.distributed.ranks import Purpose
from shardwright.errors import CheckpointError, DamageError

TO_LOAD = Purpose("loading a checkpoint", CheckpointError)


@dataclass(frozen=True)
class Damage:
    """A defect of a file, and the entry of the checkpoint that lies there (None: the file as a whole)."""

    file: str
    entry: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" + (f" (entry {self.entry})" if self.entry else "")


class _Scratch(threading.local):
    """The file that a thread read last, which stays open, and memory for what it reads and does not want."""

    name: str | None = None
    file: File

    def __init__(self) -> None:
        self.before, self.after = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)

    def opened(self, folder: Folder, name: str) -> File:
        if self.name != name:
            self.file = folder.open(name)
            self.name = name
        return self.file


class Source:
    """One checkpoint to read from. Its methods may be called from several threads at once."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._scratch = _Scratch()
        self._pulse = own_pulse()

    @property
    def where(self) -> str:
        return self.folder.where

    def read(self, entry: str, place: Extent, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a container from its byte ``start`` on, and check every block of them.

        Raises `CheckpointError` where a block is not what was written, or the file ends before it.
        """
        stop, step = start + len(buffer), max(self.folder.piece_bytes // BLOCK_BYTES, 1)
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        firsts = range(first, max(last - step // 2, first + 1), step) if first < last else ()  # none is a mere rest
        for index, end in pairwise([*firsts, last]):
            begin, finish = index * BLOCK_BYTES, min(end * BLOCK_BYTES, place.length)
            before, after = max(start - begin, 0), max(finish - stop, 0)  # read for the checksums alone
            part = buffer[begin + before - start : finish - after - start]
            beside = memoryview(self._scratch.before)[:before], memoryview(self._scratch.after)[:after]
            if found := self.check_blocks(entry, place, index, *filter(len, (beside[0], part, beside[1]))):
                raise self.damaged(found[0])

    def check_blocks(self, entry: str, place: Extent, index: int, *buffers: memoryview) -> list[Damage]:
        """Read blocks of a container into ``buffers``, and return the damage that is found.

        The first block is number ``index``, and the buffers together have the size of all of them. The checksums of a
        few blocks at once are computed while the blocks are in the processor's cache.
        """
        start, size = place.start + index * BLOCK_BYTES, sum(map(len, buffers))
        try:
            came = self._scratch.opened(self.folder, place.file).read_into(start, buffers)
        except FileNotFoundError:
            return [Damage(place.file, entry, "the file is missing")]
        except OSError as error:
            return [Damage(place.file, entry, f"cannot be read: {error.strerror or error}")]
        self._pulse.beat()
        if came < size:
            return [Damage(place.file, entry, f"ends at byte {start + came}, where {size - came} more were written")]
        sums = checksums(buffers)
        if sums == place.checksums[index : index + len(sums)]:
            return []
        return [*_altered(entry, place, index, sums)]

    def value(self, entry: ValueEntry) -> Any:
        data = bytearray(entry.place.length)
        self.read(entry.name, entry.place, 0, memoryview(data))
        return torch.load(io.BytesIO(data), weights_only=True)

    def file(self, name: str) -> bytes:
        """A whole small file of the checkpoint: ``plan.json``, ``config.yaml``.

        Raises `CheckpointError` where the checkpoint has none of that name, or it was altered.
        """
        if name not in self.manifest.files:
            names = ", ".join(sorted(n for n, record in self.manifest.files.items() if record.checksum))
            raise CheckpointError(f"{self.where} has no {name}; it has: {names}")
        if found := damaged_file(self.folder, self.manifest, name):
            raise self.damaged(found)
        return self.folder.read(name)

    def check_files(self) -> None:
        """Raise `CheckpointError` that names all files which are not there with all bytes, or are small and altered."""
        found = [*wrong_sizes(self.folder, self.manifest)]
        bad = {damage.file for damage in found}
        whole = [name for name, record in self.manifest.files.items() if record.checksum and name not in bad]
        found += [damage for name in sorted(whole) if (damage := damaged_file(self.folder, self.manifest, name))]
        if found:
            raise self.damaged(*found)

    def damaged(self, *found: Damage) -> CheckpointError:
        return damage_error(self.folder, found)


def _altered(entry: str, place: Extent, index: int, sums: Sequence[str]) -> Iterator[Damage]:
    """The blocks of a container from number ``index`` on whose checksums are not those that were written."""
    for number, found in enumerate(sums, index):
        if found != place.checksums[number]:
            first, last = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, place.length) - 1
            where = f"bytes {place.start + first} to {place.start + last}"
            yield Damage(place.file, entry, f"{where} are not what was written: their checksum differs")


def damage_error(folder: Folder, found: tuple[Damage, ...] | list[Damage]) -> CheckpointError:
    """The error that tells of damage in the checkpoint in ``folder``, and which other one to take."""
    told = "; ".join(str(damage) for damage in found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    text = f"{folder.where} is damaged: {told}"
    outer = folder.outer()
    name = last_part(os.path.abspath(folder.where) if isinstance(folder, LocalFolder) else folder.where)
    others = [other for other in intact(outer) if other != name]
    if others:
        text += f". {outer.where}/{others[-1]} is the newest other one that has all its bytes"
    return DamageError(f"{text}. `shardwright checkpoint verify {outer.where}` names all damage in all of them")


def wrong_sizes(folder: Folder, manifest: Manifest) -> Iterator[Damage]:
    """The files that are missing, too short or too long."""
    sizes = folder.sizes()
    for name, record in sorted(manifest.files.items()):
        if name not in sizes:
            yield Damage(name, None, "the file is missing")
        elif sizes[name] != record.size_bytes:
            yield Damage(name, None, f"has {sizes[name]} bytes, {record.size_bytes} were written")


def damaged_file(folder: Folder, manifest: Manifest, name: str) -> Damage | None:
    """Return the defects of a file that has a checksum of its own."""
    record = manifest.files[name]
    try:
        data = folder.read(name)
    except OSError as error:
        return Damage(name, None, f"cannot be read: {error.strerror or error}")
    if record.checksum is not None and checksum(data) != record.checksum:
        return Damage(name, None, "is not what was written: its checksum differs")
    return None


def read_manifest(folder: Folder) -> Manifest:
    """The manifest in a folder; raises `CheckpointError` where there is none, or it is damaged."""
    source = f"{folder.where}/{MANIFEST}"
    try:
        return Manifest.from_text(folder.read(MANIFEST), source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from error


def checkpoints(folder: Folder) -> dict[str, Manifest]:
    """The checkpoints in a directory of them that have a valid manifest, the one saved first at the beginning."""
    found = {}
    for name in folder.folders():
        try:
            found[name] = read_manifest(folder.inner(name))
        except CheckpointError:
            continue
    return dict(sorted(found.items(), key=lambda item: (int(item[1].info.get("sequence", 0)), item[0])))


def intact(folder: Folder) -> list[str]:
    """Those of which every file has all its bytes, the newest last."""
    return [name for name, manifest in checkpoints(folder).items() if not [*wrong_sizes(folder.inner(name), manifest)]]


def pointed_at(folder: Folder) -> str | None:
    """The name that ``latest`` holds, None where the pointer is missing or is not one line with a name."""
    try:
        text = folder.read(LATEST).decode()
    except (OSError, UnicodeDecodeError):
        return None
    name = text.removesuffix("\n")
    return name if text == f"{name}\n" and name.isprintable() and "/" not in name and name else None


def latest(folder: Folder) -> str | None:
    """The newest checkpoint of a directory of them, None where it has none.

    Where the pointer is damaged, a warning says so, and the manifests tell.
    """
    name = pointed_at(folder)
    if name is not None and MANIFEST in folder.inner(name).sizes():
        return name
    newest = next(reversed(checkpoints(folder)), None)
    if newest is not None:
        what = f"names {name}, which is no checkpoint here" if name else "is missing or damaged"
        warnings.warn(f"{folder.where}/{LATEST} {what}; reading the newest complete one, {newest}", stacklevel=3)
    return newest


def open_source(where: str | os.PathLike[str] | Folder) -> Source:
    """The checkpoint at a path or URL; of a directory of checkpoints the latest.

    Raises `CheckpointError` where there is none, or its manifest is damaged.
    """
    folder = open_folder(where) if isinstance(where, str | os.PathLike) else where
    sizes = folder.sizes()
    if MANIFEST not in sizes:
        name = None if ".metadata" in sizes else latest(folder)
        if name is None:
            raise CheckpointError(_no_checkpoint(folder, sizes))
        folder = folder.inner(name)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise damage_error(folder, [Damage(MANIFEST, None, str(error))]) from error
    return Source(folder, manifest)


def _no_checkpoint(folder: Folder, sizes: dict[str, int]) -> str:
    if ".metadata" in sizes:
        return (
            f"{folder.where} has a .metadata but no {MANIFEST}: torch.distributed.checkpoint wrote it. Read it "
            "with its dcp.load, or turn it into one of ours: python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {folder.where} FILE.pt, then shardwright checkpoint split FILE.pt --to DIR"
        )
    found = sorted([*sizes, *(f"{name}/" for name in folder.folders())])
    listed = ", ".join(found[:8]) + (" ..." if len(found) > 8 else "") or "nothing, or is not there"
    return (
        f"no checkpoint in {folder.where}: expected {MANIFEST} in it, or directories that have one and a file "
        f"`{LATEST}` that names one of them; it has {listed}"
    )
