"""A checkpoint, or a directory of them, as tables that a person can read."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.checkpoint.format.manifest import MANIFEST, Entry, Manifest, TensorEntry
from shardwright.checkpoint.loading.source import checkpoints, latest, open_source, pointed_at
from shardwright.checkpoint.storage.folders import Folder, open_folder
from shardwright.compiler.report.text import size_text

_SHOWN = ("step", "epoch", "saved", "world_size", "mode", "mesh", "metrics", "versions")
_SECTIONS = {"model": "model", "optimizer": "optimizer", "ema": "averages (ema)", "run": "run"}


def show(where: str | os.PathLike[str], entries: bool = False) -> RenderableType:
    """Return what is in a checkpoint; of a directory of checkpoints the list of all and the latest one.

    ``entries`` adds a table of all entries. Nothing but the manifests is read.

    Raises:
        CheckpointError: where there is none.
    """
    folder = open_folder(where)
    parts: list[RenderableType] = []
    if MANIFEST not in folder.sizes() and latest(folder) is not None:
        parts += [_list(folder), ""]
    source = open_source(folder)
    parts += [Text(source.where, style="bold"), _about(source.manifest), "", _contents(source.manifest), ""]
    parts.append(_files(source.manifest))
    if entries:
        parts += ["", _entries(source.manifest)]
    return Group(*parts)


def print_shown(where: str | os.PathLike[str], entries: bool = False) -> None:
    """Print what `show` gives; into a file or pipe with lines as long as they need to be."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    console.print(show(where, entries))


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(columns):  # names of files and checkpoints stay whole, so that they can be copied
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=i == 0)
    return table


def _list(folder: Folder) -> Table:
    columns = ("checkpoint", "step", "epoch", "ranks", "bytes", "saved (UTC)", "metrics", "")
    table = _table(*columns, right=columns[1:5])
    pointed = pointed_at(folder)
    for name, manifest in checkpoints(folder).items():
        info = manifest.info
        size = size_text(sum(record.size_bytes for record in manifest.files.values()))
        known = [str(info.get(key, "-")) for key in ("step", "epoch", "world_size")]
        saved = str(info.get("saved", "-"))[:16].replace("T", " ")
        table.add_row(name, *known, size, saved, _numbers(info.get("metrics")), "latest" if name == pointed else "")
    return table


def _numbers(metrics: Any) -> str:
    if not isinstance(metrics, Mapping) or not metrics:
        return "-"
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def _about(manifest: Manifest) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    others = [key for key in manifest.info if key not in _SHOWN and key != "sequence"]
    for key in (*_SHOWN, *others):
        value = manifest.info.get(key)
        if value in (None, {}, ""):
            continue
        if key == "metrics":
            value = _numbers(value)
        elif isinstance(value, Mapping):
            value = ", ".join(f"{name} {what}" for name, what in value.items())
        table.add_row(Text(key.replace("_", " "), style="dim"), Text(str(value)))
    return table


def _contents(manifest: Manifest) -> Table:
    table = _table(
        "what", "tensors", "numbers", "bytes", "dtypes", "values", right=("tensors", "numbers", "bytes", "values")
    )
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in manifest.entries.values():
        found[entry.path[0]].append(entry)
    for section in sorted(found, key=lambda name: (name not in _SECTIONS, [*_SECTIONS, name].index(name), name)):
        tensors = [entry for entry in found[section] if isinstance(entry, TensorEntry)]
        numbers = sum(math.prod(entry.shape) for entry in tensors)
        size = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in tensors)
        dtypes = ", ".join(sorted({entry.dtype_name for entry in tensors})) or "-"
        values = str(len(found[section]) - len(tensors))
        table.add_row(
            _SECTIONS.get(section, section), str(len(tensors)), f"{numbers:,}", size_text(size), dtypes, values
        )
    return table


def _files(manifest: Manifest) -> Table:
    table = _table("file", "bytes", right=("bytes",))
    for name, record in sorted(manifest.files.items()):
        table.add_row(name, f"{record.size_bytes:,}")
    return table


def _entries(manifest: Manifest) -> Table:
    table = _table("entry", "dtype", "shape", "bytes", "chunks", "files", right=("bytes", "chunks"))
    for name, entry in sorted(manifest.entries.items()):
        if isinstance(entry, TensorEntry):
            size = math.prod(entry.shape) * entry.dtype.itemsize
            files = ", ".join(sorted({place.file for place in entry.places}))
            shape = "×".join(map(str, entry.shape)) or "scalar"
            table.add_row(name, entry.dtype_name, shape, f"{size:,}", str(len(entry.chunks)), files)
        else:
            table.add_row(name, "-", "value", f"{entry.place.length:,}", "1", entry.place.file)
    return table
