"""Verifies that every byte of a checkpoint is what was written, and that every file belongs to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.checkpoint.format.manifest import BLOCK_BYTES, LATEST, MANIFEST, Extent, Manifest
from shardwright.checkpoint.loading.source import (
    Damage,
    Source,
    checkpoints,
    damaged_file,
    pointed_at,
    read_manifest,
    wrong_sizes,
)
from shardwright.checkpoint.storage.folders import Folder, open_folder
from shardwright.checkpoint.storage.objects import MARK
from shardwright.common.threads import thread_pool
from shardwright.errors import CheckpointError
from shardwright.launch.progress_notes import waiting_for

_NAMED = 5  # entries that are named where a file lost many


@dataclass(frozen=True)
class Verified:
    """The findings about the checkpoint (or directory of checkpoints) at ``where``."""

    where: str
    damage: tuple[Damage, ...]
    files: int = 0
    size_bytes: int = 0

    def lines(self) -> list[str]:
        """One line for each damage, or one that says that there is none; none for a sound directory of checkpoints."""
        if self.damage:
            return [f"{self.where}/{damage}" for damage in self.damage]
        if not self.files:
            return []
        return [f"{self.where}: {self.files} files, {self.size_bytes:,} bytes, all as they were written"]


def verify(where: str | os.PathLike[str] | Folder) -> list[Verified]:
    """Read all of a checkpoint, or of every one in a directory of them, the newest first, the directory last.

    Memory: a piece per thread (1 MiB of local files, 8 MiB of others), and the files that are not tensors.

    Raises:
        CheckpointError: where there is no checkpoint at all.
    """
    folder = open_folder(where) if isinstance(where, str | os.PathLike) else where
    sizes = folder.sizes()
    if MANIFEST in sizes or _looks_like_one(sizes):
        return [verify_one(folder)]
    valid = checkpoints(folder)
    names = [name for name in folder.folders() if name in valid or _looks_like_one(folder.inner(name).sizes())]
    if not names and LATEST not in sizes:
        raise CheckpointError(
            f"no checkpoint in {folder.where}: expected {MANIFEST} in it, or directories that have one; it has "
            f"{', '.join(sorted([*sizes, *folder.folders()])[:8]) or 'nothing, or is not there'}"
        )
    order = [*(name for name in names if name not in valid), *reversed(valid)]
    return [
        *(verify_one(folder.inner(name)) for name in order),
        Verified(folder.where, (*_pointer(folder, valid, names),)),
    ]


def verify_one(folder: Folder) -> Verified:
    """Verify the checkpoint in a folder, with a progress note."""
    with waiting_for(f"verifying {folder.where}"):
        return _verified(folder)


def _verified(folder: Folder) -> Verified:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        what = str(error).removeprefix(f"{folder.where}/{MANIFEST} ")
        return Verified(folder.where, (Damage(MANIFEST, None, what),))
    sizes = folder.sizes()
    found = [
        *wrong_sizes(folder, manifest),
        *_unexpected([*sizes, *(f"{name}/" for name in folder.folders())], manifest),
    ]
    missing = {name for name in manifest.files if name not in sizes}
    for name, record in sorted(manifest.files.items()):
        if record.checksum and name not in missing:
            found += [damage] if (damage := damaged_file(folder, manifest, name)) else []
    found += _containers(Source(folder, manifest), sizes)
    return Verified(folder.where, tuple(found), len(sizes), sum(sizes.values()))


def _looks_like_one(sizes: dict[str, int]) -> bool:
    """Return whether a directory has, or had, a checkpoint, and no save is about to make or to remove it."""
    return MANIFEST in sizes or (MARK not in sizes and any(name.endswith(".distcp") for name in sizes))


def _pointer(folder: Folder, valid: dict[str, Manifest], names: list[str]) -> Iterator[Damage]:
    """Return the defects of ``latest`` itself; damage of the checkpoint that it names is reported there."""
    name, newest = pointed_at(folder), next(reversed(valid), None)
    advice = f"; the newest complete checkpoint is {newest}" if newest else ""
    if LATEST not in folder.sizes():
        yield Damage(LATEST, None, f"the file is missing{advice}")
    elif name is None:
        yield Damage(LATEST, None, f"is damaged: expected one line with the name of a checkpoint{advice}")
    elif name not in names:
        yield Damage(LATEST, None, f"names {name!r}, which is no complete checkpoint here{advice}")
    elif name in valid and name != newest:
        yield Damage(LATEST, None, f"names {name}, but {newest} was saved after it")


def _unexpected(names: Iterable[str], manifest: Manifest) -> Iterator[Damage]:
    for name in sorted(set(names) - manifest.files.keys() - {MANIFEST, MARK}):
        yield Damage(name, None, "does not belong to the checkpoint: its manifest does not know it")


def _places(manifest: Manifest) -> dict[str, list[tuple[str, Extent]]]:
    """The containers of every file, by where they start, with their entries."""
    found: dict[str, dict[Extent, str]] = {}
    for entry in manifest.entries.values():
        for place in entry.places:
            found.setdefault(place.file, {})[place] = entry.name
    return {
        file: sorted(((name, place) for place, name in places.items()), key=lambda item: item[1].start)
        for file, places in sorted(found.items())
    }


def _containers(source: Source, sizes: dict[str, int]) -> Iterator[Damage]:
    """Gaps between containers, containers beyond the end, and blocks that are not what was written."""
    placed = _places(source.manifest)
    for name, record in sorted(source.manifest.files.items()):
        if record.checksum is None and name not in placed:
            yield Damage(name, None, "no entry of the manifest lies in it, and it has no checksum")
    for file, places in placed.items():
        yield from _gaps(source.manifest, file, [place for _, place in places])
        if file not in sizes:
            continue
        inside = [(name, place) for name, place in places if place.start + place.length <= sizes[file]]
        lost = [name for name, place in places if place.start + place.length > sizes[file]]
        if lost:
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            yield Damage(file, None, f"its end is missing, where these lay: {', '.join(lost[:_NAMED])}{more}")
        with thread_pool(source.folder.threads) as pool:
            for damage in pool.map(lambda item: _blocks(source, *item), inside):
                yield from damage


def _gaps(manifest: Manifest, file: str, places: Iterable[Extent]) -> Iterator[Damage]:
    at = 0
    for place in places:
        if place.start != at:
            what = f"no entry covers its bytes {at} to {place.start - 1}" if place.start > at else "its entries overlap"
            yield Damage(file, None, what)
        at = place.start + place.length
    if at != manifest.files[file].size_bytes:
        yield Damage(file, None, f"no entry covers its bytes from {at} on")


def _blocks(source: Source, name: str, place: Extent) -> list[Damage]:
    step = max(source.folder.piece_bytes // BLOCK_BYTES, 1)
    memory = bytearray(min(step * BLOCK_BYTES, place.length))
    found = []
    for index in range(0, len(place.checksums), step):
        size = min(step * BLOCK_BYTES, place.length - index * BLOCK_BYTES)
        found += source.check_blocks(name, place, index, memoryview(memory)[:size])
    return found
