"""A small state of a step, and whether a store holds a good checkpoint of it."""

from __future__ import annotations

import io
from typing import Any

import torch

from shardwright.checkpoint.format.manifest import BLOCK_BYTES, MANIFEST, Manifest, TensorEntry, checksum
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.store import Store
from shardwright.distributed.ranks import OneRank


def state_of(step: int, numel: int = 8) -> dict[tuple[str, ...], Any]:
    return {("model", "weight"): torch.full((numel,), float(step)), ("run", "step"): step}


def save_step(store: Store, step: int, numel: int = 8, name: str | None = None, **info: Any) -> Manifest | None:
    return save(store, name or f"step-{step}", state_of(step, numel), {"step": step, **info}, {}, OneRank(TO_SAVE))


def good_step(store: Store, name: str | None = None) -> int:
    """The step of the latest checkpoint (or of ``name``), of which every byte was compared with its checksum."""
    name = name or store.latest()
    assert name is not None, f"no complete checkpoint; there is {store.files.list(store.directory)}"
    manifest = store.manifest(name)
    contents = {file: store.files.read(f"{store.path(name)}/{file}") for file in manifest.files}
    for file, record in manifest.files.items():
        assert len(contents[file]) == record.size_bytes, file
        assert record.checksum in (None, checksum(contents[file])), file
    read = {}
    for entry in manifest.entries.values():
        place = entry.chunks[0].place if isinstance(entry, TensorEntry) else entry.place
        raw = contents[place.file][place.start : place.start + place.length]
        assert place.checksums == tuple(checksum(raw[i : i + BLOCK_BYTES]) for i in range(0, len(raw), BLOCK_BYTES))
        read[entry.name] = torch.load(io.BytesIO(raw), weights_only=True)
    step = int(manifest.info["step"])
    assert read["run.step"] == step
    assert bool((read["model.weight"] == step).all())
    return step


def no_leftovers(store: Store) -> None:
    names = [name for name in store.files.list(store.directory) if name.startswith(".") and name != ".lock"]
    assert names == [], names
    for name in store.files.list(store.directory):
        if name != "latest" and not name.startswith("."):
            assert MANIFEST in store.files.list(store.path(name)), name
