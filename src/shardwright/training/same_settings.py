"""Refuses runs whose ranks have different callbacks, settings of callbacks, or configurations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from shardwright.distributed.agreement import agree, from_all_ranks
from shardwright.errors import UsageError
from shardwright.training.checkpointing import named_callbacks
from shardwright.training.hooks import RunView

_FOLDERS = ("directory", "folder")
_FOLDER = "what all ranks do together goes into one folder, so that one of each rank's own would stay empty"


def refuse_unlike_run(run: RunView, settings: Mapping[str, Any]) -> None:
    """Compare the callbacks and the ``settings`` of a trainer between all ranks, which call this together.

    Raises:
        UsageError: on every rank, where a callback is missing on a rank or has other settings there, among them the
            folder into which it writes.
    """
    ours = {name: (callback.on_every_rank, callback.alike()) for name, callback in named_callbacks(run)}
    everyone = from_all_ranks({"Trainer": (True, dict(settings))} | ours)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        having = [rank for rank, theirs in enumerate(everyone) if name in theirs]
        needed, first = everyone[having[0]][name]
        lacking = next((rank for rank in range(len(everyone)) if rank not in having), None)
        if needed and lacking is not None:
            raise UsageError(
                f"rank {having[0]} has the callback {name} and rank {lacking} has not; it needs all ranks: make it on "
                "every rank, and not under `if rank == 0`"
            )
        for rank in having[1:]:
            _refuse_other(name, having[0], first, rank, everyone[rank][name][1])


def _refuse_other(name: str, rank: int, settings: Mapping[str, Any], other: int, theirs: Mapping[str, Any]) -> None:
    for setting in dict.fromkeys([*settings, *theirs]):
        ours, another = settings.get(setting), theirs.get(setting)
        if ours != another:
            why = f"{_FOLDER}; " if setting in _FOLDERS else ""
            raise UsageError(
                f"ranks disagree about {name}({setting}=...): rank {rank} has {ours!r}, rank {other} has "
                f"{another!r}; {why}give every rank the same"
            )


def refuse_unlike_settings(settings: Any, apart: Collection[str] = ()) -> None:
    """Compare a configuration, a tree of dataclasses, between all ranks, which call this together.

    ``apart`` are the paths of what may differ, as where a host has its data.

    Raises:
        UsageError: on every rank, where a setting is another one on some rank.
    """
    agree("the training", {name: repr(value) for name, value in _flat(asdict(settings)) if not _within(name, apart)})


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _within(name: str, paths: Collection[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)
