"""Writes a checkpoint as one plain file, complete or not at all: safetensors, or what ``torch.load`` reads.

Tensors are streamed: no more of them is held than 64 MiB, or one row of a tensor where that is larger. A file for
``torch.load`` is mapped into memory while it is filled; its pages go to the disk when memory is wanted.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwright.checkpoint.exchange.safetensors_layout import lay_out
from shardwright.checkpoint.format.containers import memory_of
from shardwright.checkpoint.format.manifest import Box, Entry, TensorEntry, ValueEntry
from shardwright.checkpoint.format.pieces import cut
from shardwright.checkpoint.loading.load import read_box, read_whole
from shardwright.checkpoint.loading.source import Source, open_source
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.common.trees import tree_flatten
from shardwright.errors import CheckpointError, UsageError
from shardwright.launch.progress_notes import counted

WHAT = ("model", "ema", "all")


@dataclass(frozen=True)
class MergedFile:
    """The ``path`` of the file, and the names of what is no tensor and could not be written to it."""

    path: Path
    tensors: int
    size_bytes: int
    left_out: tuple[str, ...] = ()


def merge(source: str | os.PathLike[str] | Source, to: str | os.PathLike[str], what: str = "model") -> MergedFile:
    """Write a checkpoint (of a directory of them the latest) as one file, which must not be there yet.

    Args:
        to: a name that ends in ``.safetensors``; in ``.pt`` or ``.pth``; or a folder, which gets ``model.safetensors``
            and the ``config.json`` of the run, if it has one, for ``from_pretrained`` of transformers.
        what: ``"model"`` and ``"ema"`` write names to tensors, as ``load_state_dict`` takes them; ``"all"`` writes
            everything: a ``.pt`` file has it nested as the run has it, safetensors has joined names.

    Raises:
        CheckpointError: where the checkpoint is damaged, or has nothing under ``what``.
        UsageError: where ``to`` is there already, or is no name that can be written.
    """
    if what not in WHAT:
        raise UsageError(f"--what {what}: expected one of {', '.join(WHAT)}")
    target = Path(to)
    folder = os.fspath(to).endswith("/") or not target.suffix or target.is_dir()
    if not folder and target.suffix not in (".safetensors", ".pt", ".pth"):
        raise UsageError(f"--to {target}: expected a name that ends in .safetensors, .pt or .pth, or a folder")
    if target.exists() and not (folder and target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"--to {target}: it is there already; choose another name or remove it")
    source = source if isinstance(source, Source) else open_source(source)
    chosen = _chosen(source, what)
    if folder:
        return _write_folder(source, chosen, target)
    if target.suffix == ".safetensors":
        with _whole_or_not(target) as file:
            return _write_safetensors(source, chosen, file, target)
    return _write_torch(source, chosen, target, nested=what == "all")


def _chosen(source: Source, what: str) -> dict[str, Entry]:
    entries = source.manifest.entries
    if what == "all":
        return dict(entries)
    found = {".".join(entry.path[1:]): entry for entry in entries.values() if entry.path[0] == what}
    if not found:
        sections = ", ".join(sorted({entry.path[0] for entry in entries.values()}))
        raise CheckpointError(f"{source.where} has no {what}; it has: {sections}")
    return found


@contextmanager
def _whole_or_not(target: Path) -> Iterator[BinaryIO]:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _name(temporary, target)
        LocalFiles().sync_directory(str(target.parent))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, target: Path) -> None:
    """Give a file its name. A link, unlike a rename, never replaces; some file systems have none."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        os.rename(temporary, target)


def _write_folder(source: Source, chosen: Mapping[str, Entry], target: Path) -> MergedFile:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}.part")
    temporary.mkdir()
    try:
        with _whole_or_not(temporary / "model.safetensors") as file:
            merged = _write_safetensors(source, chosen, file, target / "model.safetensors")
        if "config.json" in source.manifest.files:
            with _whole_or_not(temporary / "config.json") as file:
                file.write(source.file("config.json"))
        os.rename(temporary, target)  # over an empty folder, too
        LocalFiles().sync_directory(str(target.parent))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return merged


def _write_safetensors(source: Source, chosen: Mapping[str, Entry], file: BinaryIO, target: Path) -> MergedFile:
    """Write a safetensors file piece by piece.

    The functions of safetensors want all tensors in memory at once, or a file of them mapped.
    """
    tensors = {name: entry for name, entry in chosen.items() if isinstance(entry, TensorEntry)}
    layout = lay_out({name: (entry.dtype, entry.shape) for name, entry in tensors.items()})
    file.write(layout.begin)
    for name in counted(f"writing {target}", list(layout.starts)):
        entry = tensors[name]
        for part in cut(Box.whole(entry.shape), entry.dtype.itemsize):
            file.write(memory_of(read_box(source, entry, part)))
    left_out = tuple(sorted(chosen.keys() - tensors.keys()))
    return MergedFile(target, len(tensors), file.tell(), left_out)


@dataclass(frozen=True)
class _Room:
    """The place of a tensor in the file that is written."""

    entry: TensorEntry


def _write_torch(source: Source, chosen: Mapping[str, Entry], target: Path, nested: bool) -> MergedFile:
    """Write the file with holes in place of the elements, map it, and read the elements into it."""
    tree: dict[str, Any] = {}
    for name, entry in chosen.items():
        path = entry.path if nested else (name,)
        inner = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = source.value(entry) if isinstance(entry, ValueEntry) else _Room(entry)
    with _whole_or_not(target) as file:
        with torch.serialization.skip_data():
            torch.save(_with_tensors(tree), file)
        file.flush()
        size = os.fstat(file.fileno()).st_size
        os.posix_fallocate(file.fileno(), 0, size)  # where the disk is full this is an error, and a signal later on
        _fill_holes(source, tree, file.name)
    count = sum(isinstance(entry, TensorEntry) for entry in chosen.values())
    return MergedFile(target, count, size)


def _with_tensors(tree: Any) -> Any:
    """The tree with memory that nobody touches in the rooms: it is never really there."""
    if type(tree) is dict:
        return {key: _with_tensors(value) for key, value in tree.items()}
    return torch.empty(tree.entry.shape, dtype=tree.entry.dtype, device="cpu") if isinstance(tree, _Room) else tree


def _fill_holes(source: Source, tree: dict[str, Any], path: str) -> None:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, mmap=True, weights_only=True)
    pairs = list(zip(tree_flatten(tree)[0], tree_flatten(mapped)[0], strict=True))
    for (_, ours), (_, theirs) in counted("writing tensors", pairs):
        if isinstance(ours, _Room):
            read_whole(source, ours.entry, theirs)
        elif isinstance(ours, Tensor):
            theirs.copy_(ours)
