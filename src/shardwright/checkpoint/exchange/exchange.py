"""Reads state dicts in other formats, loads them into any model of ours, and converts them to checkpoints.

What is read is mapped into memory, not copied: of a large file every rank touches the pages of its own parts alone.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright.checkpoint.format.manifest import Box, Entry, Extent, Manifest, TensorEntry, ValueEntry
from shardwright.checkpoint.format.pieces import State, TensorShard
from shardwright.checkpoint.loading.load import current_rank
from shardwright.checkpoint.loading.match import Match, Rename, match
from shardwright.checkpoint.saving.asynchronous import wait_copied
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.folders import file_system
from shardwright.checkpoint.storage.objects import open_store
from shardwright.checkpoint.whole_run.state import model_state, module_of, put_model_state
from shardwright.common.threads import thread_pool
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import CheckpointError, UsageError
from shardwright.launch.progress_notes import waiting_for

# Under which keys training scripts keep the model beside other things.
NESTED = ("model", "state_dict", "model_state_dict")
# What transformers calls the files in its folders.
_IN_FOLDERS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state dict in a file that others wrote: names to tensors, mapped into memory, on the CPU.

    Args:
        path: a ``.pth``, ``.pt`` or ``.bin`` file of ``torch.save``, where the state dict may lie under ``"model"``,
            ``"state_dict"`` or ``"model_state_dict"``; a ``.safetensors`` file; or a folder of ``transformers``, in one
            file or several. A URL that fsspec knows is copied to a temporary file first, which needs no cleaning up.

    ``module.`` before all names (DistributedDataParallel) and ``_orig_mod.`` in any (torch.compile) are taken away.
    What is no tensor among them (extra state of a module) is kept as it is. No code in the file is run.

    Raises:
        CheckpointError: where the file is missing, damaged, or holds no state dict.
    """
    where = os.fspath(path)
    if "://" in where:
        with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:  # what is mapped outlives the name
            return read_state(_copied(where, folder))
    found = _read_folder(Path(where)) if os.path.isdir(where) else _read_file(Path(where))
    names = {name: name.replace("_orig_mod.", "") for name in found}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {old: name.removeprefix("module.") for old, name in names.items()}
    if len(set(names.values())) < len(names):
        raise CheckpointError(f"{where} has two names that are one without module. and _orig_mod. in them")
    return {names[old]: value for old, value in found.items()}


def load_state(
    source: str | os.PathLike[str] | Mapping[str, Any],
    model: Any,
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> Match:
    """Load a plain state dict into a model, on every rank its own part; what `read_state` reads, or such a dict.

    ``model`` is what `sw.parallelize` returned, a DistributedDataParallel or a plain module. ``strict`` and ``rename``
    are those of `sw.checkpoint.load`. Returns what did not fit, with ``strict=False``.

    Raises:
        CheckpointError: where the file cannot be read, or does not fit; nothing is changed then.
    """
    where = "the state" if isinstance(source, Mapping) else os.fspath(source)
    state = source if isinstance(source, Mapping) else read_state(source)
    module = module_of(model)
    wanted = model_state(module)
    values: dict[tuple[str, ...], Any] = dict(wanted)
    with waiting_for(f"loading {where}"):  # what was read is mapped, and comes from the disk now
        found = fill({("model", name): value for name, value in state.items()}, wanted, values, where, strict, rename)
    put_model_state(module, values)
    return found


def fill(
    state: State,
    wanted: State,
    values: dict[tuple[str, ...], Any],
    where: str,
    strict: bool = True,
    rename: Rename | None = None,
    rank: int | None = None,
) -> Match:
    """Fill the tensors of ``wanted`` in place from whole tensors, a DTensor or `TensorShard` with this rank's part.

    What is wanted and no tensor is put into ``values``.
    """
    entries = {path: _described(path, value) for path, value in state.items()}
    found = match(entries, wanted, where=where, strict=strict, rename=rename)
    rank = current_rank() if rank is None else rank
    wait_copied()
    for path, entry in found.pairs:
        target, value = wanted[path], state[entry.path]
        if not isinstance(target, Tensor | TensorShard):
            values[path] = value
            continue
        piece = TensorShard.of(path, target)
        piece.local.detach().copy_(piece.box(rank).of_tensor(value, Box.whole(piece.shape)))
    return found


def _described(path: tuple[str, ...], value: Any) -> Entry:
    if isinstance(value, Tensor):
        return TensorEntry(path, value.dtype, tuple(value.shape), ())
    return ValueEntry(path, Extent("", 0, 0, 0, ()))


# Reading files


def _copied(url: str, folder: str) -> Path:
    files, root = file_system(url)
    target = Path(folder) / root.rstrip("/").rsplit("/", 1)[-1]
    try:
        if not files.isdir(root):
            files.get_file(root, str(target))
            return target
        target.mkdir()
        for facts in files.ls(root, detail=True):
            name = facts["name"].rsplit("/", 1)[-1]
            if facts["type"] == "file" and name.endswith((".safetensors", ".bin", ".index.json")):
                files.get_file(facts["name"], str(target / name))
    except Exception as error:  # each protocol has exceptions of its own
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    return target


def _read_folder(folder: Path) -> dict[str, Any]:
    name = next((name for name in _IN_FOLDERS if (folder / name).is_file()), None)
    if name is None:
        listed = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"no model in the folder {folder}: expected {', '.join(_IN_FOLDERS)}; it has {listed}")
    if not name.endswith(".json"):
        return _read_file(folder / name)
    try:
        files = json.loads((folder / name).read_text())["weight_map"]
        parts = {file: _read_file(folder / file) for file in sorted(set(files.values()))}
        return {tensor: parts[file][tensor] for tensor, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / name} does not say in which file which tensor is: {error!r}") from error


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.*"))[:8]) if path.parent.is_dir() else ""
        raise CheckpointError(f"there is no file {path}" + (f"; beside it are {near}" if near else ""))
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(str(path), framework="pt") as file:  # its tensors are pages of the file until they are used
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or is no safetensors file: {error}") from error


def _read_torch(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # torch.save before 1.6 wrote what cannot be mapped
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read without running code that it brings along, or is no file of torch.save ({reason}). "
            "Where you trust it, write what is needed of it: torch.save(torch.load(FILE, "
            "weights_only=False)['model'].state_dict(), 'state.pth')"
        ) from error
    except Exception as error:  # what is no pickle may do anything to an unpickler
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is damaged or is no file of torch.save: {reason}") from error
    return _state_in(found, path)


def _state_in(found: Any, path: Path) -> dict[str, Any]:
    """The state dict in what a file holds: itself, or under one of the keys by which scripts call it."""
    keys = []
    while isinstance(found, Mapping):
        keys = [str(key) for key in found]
        inner = next((found[key] for key in NESTED if isinstance(found.get(key), Mapping)), None)
        if (
            inner is None
            and any(isinstance(v, Tensor) for v in found.values())
            and all(isinstance(k, str) for k in found)
        ):
            return dict(found)
        found = inner
    has = f"the keys {', '.join(keys[:8])}" if keys else f"a {type(found).__name__}"
    raise CheckpointError(
        f"{path} has no state dict: expected names with tensors, or such a dict under {', '.join(NESTED)}; it has {has}"
    )


# Writing


class _ThreadRanks:
    """A `Ranks` whose ranks are threads of this process."""

    purpose = TO_SAVE

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size, self.barrier, self.slots = rank, size, barrier, slots

    def gather(self, value: Any) -> list[Any] | None:
        self.slots[self.rank] = value
        self.barrier.wait()
        found = list(self.slots) if self.rank == 0 else None
        self.barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self.slots[0] = value
        self.barrier.wait()
        found = self.slots[0]
        self.barrier.wait()
        return found


@waiting_for("writing a checkpoint")
def split(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    ranks: int = 1,
    info: Mapping[str, Any] | None = None,
) -> Manifest:
    """Make the checkpoint ``step-00000000`` of a plain state dict, as if ``ranks`` ranks had saved it.

    The number is that of the files into which the tensors are cut along their first dim; any number of ranks loads
    them. Memory: the file is mapped, and its tensors are written from there.

    ``directory`` may be a URL.

    Raises:
        CheckpointError: where the file cannot be read, or the checkpoint cannot be written.
        UsageError: where ``directory`` has checkpoints.
    """
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: expected at least 1")
    store = open_store(os.fspath(directory))
    if there := list(store.complete()):
        raise UsageError(f"{store.directory} has checkpoints already ({there[-1]}); give an empty or a new directory")
    state: State = {("model", name): value for name, value in read_state(source).items()}
    about = {"step": 0, "epoch": 0, "metrics": {}, "from": os.fspath(source), **(info or {})}
    mesh, barrier, slots = Mesh.of(ranks=ranks), threading.Barrier(ranks), [None] * ranks

    def save_part(rank: int) -> Manifest | None:
        try:
            parts = dict(_pieces(state, mesh, rank))
            return save(store, "step-00000000", parts, about, {}, _ThreadRanks(rank, ranks, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with thread_pool(ranks) as pool:
        saved, *_ = pool.map(save_part, range(ranks))
    assert saved is not None
    return saved


def _pieces(state: State, mesh: Mesh, rank: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, value in state.items():
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise CheckpointError(f"{path[-1]} is a sparse tensor; save the dense tensors of which it is made")
        if isinstance(value, Tensor):
            layout = Layout.split(value.ndim, {0: ["ranks"]} if value.ndim else {})
            part = value[layout.local_slice(value.shape, mesh, rank)]
            value = TensorShard(path, tuple(value.shape), value.dtype, layout, mesh, part)
        yield path, value
