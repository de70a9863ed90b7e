"""Hosts whose answers were recorded: files, commands and facts in a TOML file, as `HostReading` has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.reading import CommandResult, HostReading

RECORDED = Path(__file__).parent / "recorded"
GPUS = " ".join(sources.NVIDIA_QUERY)
LINKS = " ".join(sources.NVIDIA_TOPOLOGY)


def recorded(name: str) -> HostReading:
    """The host of a file of that name."""
    return read_recorded((RECORDED / f"{name}.toml").read_text())


def read_recorded(text: str) -> HostReading:
    """The host that is recorded so: by hand, or by `scripts/record_host.py`."""
    said = tomllib.loads(text)
    commands = {words: _ran(ran) for words, ran in said["commands"].items()}
    return HostReading.of(said["name"], {"unreadable": {}, **said, "commands": commands})


def _ran(ran: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(ran, str):
        return {"code": 0, "out": ran.removeprefix("\n"), "err": ""}
    return {**ran, "code": None if ran["code"] is False else ran["code"]}


def altered(
    reading: HostReading,
    files: Mapping[str, str | None] | None = None,
    unreadable: Mapping[str, str] | None = None,
    commands: Mapping[str, str | CommandResult | None] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> HostReading:
    """The same host with other files, commands and facts; None takes one away."""
    ran = {
        name: CommandResult(0, said, "") if isinstance(said, str) else said for name, said in (commands or {}).items()
    }
    return replace(
        reading,
        files=_with(reading.files, files or {}),
        unreadable={**reading.unreadable, **(unreadable or {})},
        commands=_with(reading.commands, ran),
        facts=_with(reading.facts, facts or {}),
    )


def _with(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**before, **changes}.items() if value is not None}
