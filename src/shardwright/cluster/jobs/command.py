"""`shardwright ps -H` and `stop -H`: the jobs on several hosts, wherever their launchers are, found and ended."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click

from shardwright.cluster.jobs import on_host
from shardwright.cluster.programs.connection import Probe, open_all
from shardwright.common.words import plain
from shardwright.errors import LaunchError, UsageError
from shardwright.launch.joblog.jobs import moment, table_lines
from shardwright.launch.options.request import NamedHosts

ELSEWHERE, LEFT = "elsewhere", "left"
_EXPLAINED = {
    ELSEWHERE: "its launcher is on none of these hosts, and hears of them; `stop -H` has it end the job",
    LEFT: "no launcher hears of these processes; `stop -H` ends them",
}


@dataclass(frozen=True)
class JobOnHost:
    """The part of a job on one host. ``watched``: an agent stands above it, which ``origin`` has started."""

    processes: int
    begun_s: float
    watched: bool
    origin: str | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> JobOnHost:
        try:
            origin = str(ipaddress.ip_address(answer["origin"]))
        except ValueError:
            origin = None
        return cls(int(answer["processes"]), time.time() - float(answer["age_s"]), bool(answer["watched"]), origin)


@dataclass(frozen=True)
class LauncherRecord:
    """The record of a job on the host of its launcher."""

    host: str
    name: str
    folder: str
    state: str
    started_s: float
    grace_s: float
    lives: bool

    @classmethod
    def of(cls, host: str, record: Mapping[str, Any]) -> LauncherRecord:
        name, folder, state = (str(record[key]) for key in ("name", "folder", "state"))
        started_s, grace_s = float(record["started_s"]), float(record["grace_s"])
        return cls(host, name, folder, state, started_s, grace_s, bool(record["lives"]))


@dataclass(frozen=True)
class FoundJob:
    """A job, by the id that its processes carry: its parts by host, and its launcher if that is on one of the hosts."""

    id: str
    parts: Mapping[str, JobOnHost] = field(default_factory=dict)
    launched: LauncherRecord | None = None

    @property
    def name(self) -> str:
        return self.launched.name if self.launched else self.id.rpartition("-")[0]

    @property
    def watched(self) -> bool:
        """Return whether a launcher or agent that can end the job is running."""
        return any(part.watched for part in self.parts.values()) or bool(self.launched and self.launched.lives)

    @property
    def state(self) -> str:
        if self.launched is not None:
            return self.launched.state
        return ELSEWHERE if self.watched else LEFT

    @property
    def hosts(self) -> list[str]:
        """The hosts where something is to be told or ended."""
        return list(dict.fromkeys([*self.parts, *([self.launched.host] if self.launched else [])]))

    def is_named(self, word: str) -> bool:
        folder = self.launched.folder if self.launched else None
        return word in (self.id, self.name) or (os.sep in word and word == folder)


def collect_jobs(answers: Mapping[str, Mapping[str, Any]]) -> list[FoundJob]:
    """Return the jobs that hosts report, the oldest first. Raises `ValueError` where an answer has another form."""
    parts: dict[str, dict[str, JobOnHost]] = {}
    launched: dict[str, LauncherRecord] = {}
    try:
        for host, answer in answers.items():
            launched |= {str(record["marks"][0]): LauncherRecord.of(host, record) for record in answer["records"]}
            for part in answer["parts"]:
                parts.setdefault(str(part["id"]), {})[host] = JobOnHost.of(part)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{host} answered in another form than expected: {error!r}") from None
    jobs = (FoundJob(id, parts.get(id, {}), launched.get(id)) for id in {**launched, **parts})
    return sorted(jobs, key=_begun_s)


def _begun_s(job: FoundJob) -> float:
    begun = [part.begun_s for part in job.parts.values()]
    return job.launched.started_s if job.launched else min(begun)


def find(jobs: Sequence[FoundJob], word: str) -> FoundJob:
    """Return the job of that name, id or folder of logs. Raises `UsageError` that lists the jobs there are."""
    named = [job for job in jobs if job.is_named(word)]
    named = [job for job in named if job.parts or job.watched] or named  # one that is lost stays shown for a while
    if len(named) == 1:
        return named[0]
    if named:
        listed = "\n".join(f"  {plain(job.id)} on {', '.join(job.hosts)}" for job in named)
        raise UsageError(f"{len(named)} jobs there are named {word}; name one by its id:\n{listed}")
    names = ", ".join(plain(job.name) for job in jobs)
    there = f"those there are: {names}" if names else "there is none"
    raise UsageError(f"no job {word} of this user runs on these hosts; {there}")


def lines_of(jobs: Sequence[FoundJob]) -> list[str]:
    """Return the table of `shardwright ps -H`. A job is shown by its id where another one has its name."""
    names = [job.name for job in jobs]
    rows = [("JOB", "STATE", "HOSTS", "PROCESSES", "STARTED", "LAUNCHER")]
    for job in jobs:
        count = sum(part.processes for part in job.parts.values())
        name = job.name if names.count(job.name) == 1 else job.id
        rows.append((
            plain(name), plain(job.state), ",".join(job.parts) or "-", str(count), moment(_begun_s(job)),
            _launcher(job),
        ))  # fmt: skip
    states = {job.state for job in jobs}
    return [*table_lines(rows), *(f"{state}: {text}" for state, text in _EXPLAINED.items() if state in states)]


def _launcher(job: FoundJob) -> str:
    if job.launched is not None:
        return plain(f"{job.launched.host}:{job.launched.folder}")
    origins = dict.fromkeys(part.origin for part in job.parts.values() if part.watched and part.origin)
    return f"at {', '.join(origins)}" if origins else "-"


_GRACE_S = 10.0  # of processes that nobody watches
_LAUNCHER_S = 40.0  # beyond the grace of a job: the kernel may need long to end a large process
_UNKNOWN_GRACE_S = 20.0  # of a launcher that is elsewhere
_TOLD_NOW_S = 4.0
_POLL_S = 0.3

Probes = Mapping[str, Probe]


def ps(where: NamedHosts) -> int:
    """Print the jobs on the hosts; the exit code is 1 where a host is silent."""
    with open_all(where, on_host.__name__) as (probes, silent):
        jobs = _look(probes)
    click.echo("\n".join(lines_of(jobs)) if jobs else "no job of this user runs on these hosts")
    return _tell_silent(silent)


def stop(word: str, where: NamedHosts, now: bool) -> int:
    """End a job on the hosts; the exit code is 0 where nothing of it is left on any of them."""
    with open_all(where, on_host.__name__) as (probes, silent):
        job = find(_look(probes), word)
        ended = _stop(job, probes, now)
    return max(_tell_silent(silent), 0 if ended else 1)


def _tell_silent(silent: Mapping[str, str]) -> int:
    for name, why in silent.items():
        click.echo(f"shardwright: {name}: {plain(why)}", err=True)
    return 1 if silent else 0


def _ask(probes: Probes, names: Iterable[str], order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the answers of hosts. Raises `LaunchError` where one of them fails."""
    asked = list(names)
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        return dict(zip(asked, pool.map(lambda name: probes[name].demand(order), asked), strict=True))


def _look(probes: Probes) -> list[FoundJob]:
    try:
        return collect_jobs(_ask(probes, probes, {"order": "jobs"}))
    except ValueError as error:
        raise LaunchError(plain(error)) from None


def _stop(job: FoundJob, probes: Probes, now: bool) -> bool:
    """Stop a job. Returns whether nothing is left of it."""
    name, on = plain(job.name), ", ".join(job.hosts)
    launcher = [job.launched.host] if job.launched is not None and job.launched.lives else None
    if now:
        _say(f"killing job {name} on {on}")
        _ask(probes, launcher or job.hosts, {"order": "end", "id": job.id, "now": True})
        left = _wait(job, probes, _TOLD_NOW_S if job.watched else 0.0)
    else:
        whom = "its launcher is" if job.watched else "its processes, which nobody watches, are"
        _say(f"job {name} on {on}: {whom} told to end; `--now` kills")
        _ask(probes, launcher or job.hosts, {"order": "end", "id": job.id, "now": False})
        left = _wait(job, probes, _patience_s(job))
    if left and (now or not job.watched):
        _ask(probes, left, {"order": "kill", "id": job.id})
        left = _wait(job, probes, 0.0)
    _say(f"job {name} has ended on {on}" if not left else f"job {name} still has processes on {', '.join(left)}")
    return not left


def _patience_s(job: FoundJob) -> float:
    if not job.watched:
        return _GRACE_S
    return _LAUNCHER_S + (job.launched.grace_s if job.launched is not None else _UNKNOWN_GRACE_S)


def _wait(job: FoundJob, probes: Probes, timeout_s: float) -> Sequence[str]:
    """Wait for the end of a job. Returns the hosts on which there is still something of it."""
    until_s = time.monotonic() + timeout_s
    while True:
        [found] = [one for one in _look(probes) if one.id == job.id] or [FoundJob(job.id)]
        launched = found.launched is not None and found.launched.lives
        if not found.parts and not launched:
            return ()
        if time.monotonic() >= until_s:
            return found.hosts
        time.sleep(_POLL_S)


def _say(text: str) -> None:
    click.echo(f"shardwright: {text}")
