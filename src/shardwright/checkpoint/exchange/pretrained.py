"""Writes a model of transformers as a folder for its ``from_pretrained``; all ranks write together.

Where each tensor stands in which file follows from names and shapes alone. So every rank writes the parts that it
holds to where they belong, and none ever has more of the model than its own.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.checkpoint.exchange.safetensors_layout import Described, FileLayout, lay_out, size_of, write_box
from shardwright.checkpoint.format.containers import memory_of
from shardwright.checkpoint.format.pieces import State
from shardwright.checkpoint.saving.save import ONE_FOLDER, TO_SAVE, Prepared, prepare
from shardwright.checkpoint.whole_run.state import broadcast_buffers, model_state, module_of
from shardwright.common.whole_file import write_whole
from shardwright.compiler.plan.request import read_memory
from shardwright.distributed.agreement import from_rank_zero, refuse_unlike, together
from shardwright.distributed.ranks import ranks_by_messages
from shardwright.errors import CheckpointError, UsageError
from shardwright.launch.progress_notes import waiting_for

_NAME = "model{}.safetensors"
_INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class _Files:
    """The files of a model: how each is laid out, by its name, and in which of them each tensor is."""

    layouts: Mapping[str, FileLayout]
    file_of: Mapping[str, str]


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> None:
    """Write a model of transformers for its ``from_pretrained``, as ``save_pretrained`` does; all ranks call it.

    No rank gathers the model: each writes the parts that it holds, so that the folder must be one that all hosts see.
    Files of the model that are there already are replaced, when all new ones are complete.

    Args:
        model: what `sw.parallelize` returned, a DistributedDataParallel or the model itself.
        folder: made where it is not there.
        max_shard_size: of one file, as ``"5GB"``; of a larger model there are several, with an index beside them.

    Raises:
        UsageError: where the model is none of transformers.
        CheckpointError: where it cannot be written.
    """
    ranks, module, target = ranks_by_messages(TO_SAVE), module_of(model), Path(folder)
    refuse_unlike(ranks, "the folder", os.fspath(folder), ONE_FOLDER)
    broadcast_buffers(model)

    def begin() -> tuple[Prepared, _Files]:
        prepared = prepare(_state(module), ranks)
        return prepared, _files(prepared, _bytes(max_shard_size))

    prepared, files = together(ranks, begin)
    token = from_rank_zero(ranks, lambda: _make(target, files))
    try:
        with waiting_for(f"saving {target}"):
            together(ranks, lambda: _write_parts(target, token, files, prepared))
            from_rank_zero(ranks, lambda: _name(target, token, files, module))
    finally:
        if ranks.rank == 0:
            for name in (*files.layouts, _INDEX):
                _part(target, name, token).unlink(missing_ok=True)


def _state(module: nn.Module) -> State:
    """Return what transformers saves of a model: of tied tensors the one by whose name it finds the others."""
    if not (hasattr(module, "save_pretrained") and hasattr(module, "config")):
        raise UsageError(
            f"{type(module).__name__} is no model of transformers; type sw.checkpoint.save(...), and `shardwright "
            "checkpoint merge` for one file of it"
        )
    if getattr(module, "_hf_peft_config_loaded", False):
        raise UsageError("the model has adapters of peft, which are not saved here; merge them into the model before")
    state, tied = model_state(module), getattr(module, "all_tied_weights_keys", {})
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return {
        path: value
        for path, value in state.items()
        if path[1] not in ignored and (path[1] not in tied or state.get(("model", tied[path[1]])) is not value)
    }


def _bytes(limit: int | str) -> int:
    try:
        return read_memory(limit)
    except UsageError:
        raise UsageError(f"max_shard_size={limit!r}: expected the bytes of a file, as '5GB'") from None


def _files(prepared: Prepared, limit: int) -> _Files:
    """The tensors in their order, as many in a file as fit.

    Raises `CheckpointError` for what safetensors or transformers would not find again.
    """
    if prepared.also or prepared.values:
        names = ", ".join(path[-1] for path in (*prepared.also, *prepared.values))
        raise CheckpointError(
            f"{names}: no tensors of their own, and transformers does not say that they are tied to others; save a "
            "checkpoint by sw.checkpoint.save(...)"
        )
    tensors: dict[str, Described] = {piece.path[1]: (piece.dtype, piece.shape) for piece in prepared.pieces.values()}
    groups: list[dict[str, Described]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        if size_of(tensor) > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size_of(tensor)
    several = len(groups) > 1
    named = {
        _NAME.format(f"-{number:05d}-of-{len(groups):05d}" if several else ""): group
        for number, group in enumerate(groups, 1)
    }
    return _Files(
        {name: lay_out(group) for name, group in named.items()},
        {tensor: name for name, group in named.items() for tensor in group},
    )


def _part(target: Path, name: str, token: str) -> Path:
    """Return the name of a file until all are complete."""
    return target / f".{name}-{token}.part"


def _make(target: Path, files: _Files) -> str:
    """Make the files at their full length; the word that is in their names."""
    token = secrets.token_hex(4)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, layout in files.layouts.items():
            with _part(target, name, token).open("xb") as file:
                file.write(layout.begin)
                os.posix_fallocate(file.fileno(), 0, layout.size_bytes)  # a full disk is told here
    except OSError as error:
        for name in files.layouts:
            with contextlib.suppress(OSError):
                _part(target, name, token).unlink()
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    return token


def _write_parts(target: Path, token: str, files: _Files, prepared: Prepared) -> None:
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for (entry, box), part in prepared.parts.items():
            piece = prepared.pieces[entry]
            name = files.file_of[piece.path[1]]
            if name not in opened:
                opened[name] = _open(_part(target, name, token))
                stack.callback(os.close, opened[name])
            start = files.layouts[name].starts[piece.path[1]]
            write_box(opened[name], start, piece.shape, piece.dtype.itemsize, box, memory_of(part.cpu().contiguous()))
        for descriptor in opened.values():
            os.fsync(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} is not the folder that rank 0 writes to; name one that all hosts see"
        ) from None


def _name(target: Path, token: str, files: _Files, module: Any) -> None:
    """Give the files their names, when all that can fail is done, so that a model that is there is never lost to it.

    No index is there meanwhile, by which parts of the new model would be read together with some of the old one.
    """
    _write_config(target, module)
    names = list(files.layouts)
    if len(names) > 1:
        write_whole(_part(target, _INDEX, token), lambda draft: draft.write_text(_index(files, module)))
        names.append(_INDEX)
    (target / _INDEX).unlink(missing_ok=True)
    for name in names:
        os.replace(_part(target, name, token), target / name)
    for path in target.iterdir():
        if _WRITTEN.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _index(files: _Files, module: Any) -> str:
    index = {
        "metadata": {
            "total_parameters": module.num_parameters(),
            "total_size": sum(layout.size_bytes - len(layout.begin) for layout in files.layouts.values()),
        },
        "weight_map": dict(files.file_of),
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _write_config(target: Path, module: Any) -> None:
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.save_pretrained(target)
    if module.can_generate():
        module.generation_config.save_pretrained(target)
