"""The options of a job that whoever else starts it cannot serve: refused, or told to be left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import is_host_name
from shardwright.launch.options.request import HostRequest, LaunchRequest

# What the job is, or where; without one of these it would be another.
_OF_THE_JOB = {
    "ranks": "-n", "variables": "-x", "port": "--port", "devices": "--devices", "rank_table": "--rank-table",
    "save_graphs": "--save-graphs", "via": "--via", "backend": "--backend", "mca": "--mca", "stage": "--stage",
    "interface": "--interface", "python": "--python", "wdir": "--wdir", "oversubscribe": "--oversubscribe",
}  # fmt: skip
# How this launcher starts it, watches it and keeps what it says.
_OF_THE_LAUNCHER = {
    "job": "--job", "tee": "--tee", "log_dir": "--log-dir", "grace_s": "--grace", "preload": "--no-preload",
    "bind_to": "--bind-to", "stall_timeout_s": "--stall-timeout", "on_stall": "--on-stall", "detach": "--detach",
    "restarts": "--max-restarts", "keep_stage": "--keep-stage", "collect_logs": "--no-collect-logs",
    "lease_s": "--lease", "connect_timeout_s": "--connect-timeout",
}  # fmt: skip


def left_out(request: LaunchRequest, starter: str, serves: Collection[str]) -> str:
    """Return a line that names the options of this launcher alone that were typed; empty where there are none.

    ``serves`` are the fields that ``starter`` has a word for. Raises `UsageError` for another that makes the job what
    it is.
    """
    typed = _typed(request) - set(serves)
    if refused := [option for name, option in _OF_THE_JOB.items() if name in typed]:
        raise UsageError(f"{', '.join(refused)}: {starter} has nothing like it; leave it out of --print")
    names = [option for name, option in _OF_THE_LAUNCHER.items() if name in typed]
    return f"left out, as this launcher alone has it: {', '.join(names)}" if names else ""


def _typed(request: LaunchRequest) -> set[str]:
    usual = ((request, LaunchRequest(arguments=())), (request.where, HostRequest()))
    return {
        entry.name
        for asked, plain in usual
        for entry in fields(plain)
        if getattr(asked, entry.name) != getattr(plain, entry.name)
    }


def for_all_hosts(option: str, words: Sequence[str], starter: str) -> str | None:
    """Return the one value of an option that could differ between hosts. Raises `UsageError` where it does."""
    for word in words:
        name, equals, _ = word.partition("=")
        if len(words) > 1 or (equals and is_host_name(name)):
            raise UsageError(f"{option} {word}: {starter} has one for all hosts; type it once, without a host")
    return words[0] if words else None
