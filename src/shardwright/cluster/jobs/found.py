"""The jobs on several hosts: what each host says of them, put together."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.cluster.doctor.reading import plain
from shardwright.errors import UsageError
from shardwright.launch.joblog.jobs import moment, table_lines

ELSEWHERE, LEFT = "elsewhere", "left"
_EXPLAINED = {
    ELSEWHERE: "its launcher is on none of these hosts, and hears of them; `stop -H` has it end the job",
    LEFT: "no launcher hears of these processes; `stop -H` ends them",
}


@dataclass(frozen=True)
class Part:
    """What there is of a job on one host. ``watched``: an agent stands above it, which ``origin`` has started."""

    processes: int
    begun_s: float
    watched: bool
    origin: str | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Part:
        try:
            origin = str(ipaddress.ip_address(answer["origin"]))
        except ValueError:
            origin = None
        return cls(int(answer["processes"]), time.time() - float(answer["age_s"]), bool(answer["watched"]), origin)


@dataclass(frozen=True)
class Launched:
    """What the host of a launcher says of its job."""

    host: str
    name: str
    folder: str
    state: str
    started_s: float
    grace_s: float
    lives: bool

    @classmethod
    def of(cls, host: str, record: Mapping[str, Any]) -> Launched:
        name, folder, state = (str(record[key]) for key in ("name", "folder", "state"))
        started_s, grace_s = float(record["started_s"]), float(record["grace_s"])
        return cls(host, name, folder, state, started_s, grace_s, bool(record["lives"]))


@dataclass(frozen=True)
class FoundJob:
    """A job, by the id that its processes carry: its parts by host, and its launcher if that is on one of the hosts."""

    id: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    launched: Launched | None = None

    @property
    def name(self) -> str:
        return self.launched.name if self.launched else self.id.rpartition("-")[0]

    @property
    def watched(self) -> bool:
        """Whether somebody is there who can be told to end the job."""
        return any(part.watched for part in self.parts.values()) or bool(self.launched and self.launched.lives)

    @property
    def state(self) -> str:
        if self.launched is not None:
            return self.launched.state
        return ELSEWHERE if self.watched else LEFT

    @property
    def hosts(self) -> list[str]:
        """Where something is to be told or ended."""
        return list(dict.fromkeys([*self.parts, *([self.launched.host] if self.launched else [])]))

    def is_named(self, word: str) -> bool:
        folder = self.launched.folder if self.launched else None
        return word in (self.id, self.name) or (os.sep in word and word == folder)


def put_together(answers: Mapping[str, Mapping[str, Any]]) -> list[FoundJob]:
    """The jobs that hosts tell of, the oldest first. Raises `ValueError` where an answer has another form."""
    parts: dict[str, dict[str, Part]] = {}
    launched: dict[str, Launched] = {}
    try:
        for host, answer in answers.items():
            launched |= {str(record["marks"][0]): Launched.of(host, record) for record in answer["records"]}
            for part in answer["parts"]:
                parts.setdefault(str(part["id"]), {})[host] = Part.of(part)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{host} answered in another form than expected: {error!r}") from None
    jobs = (FoundJob(id, parts.get(id, {}), launched.get(id)) for id in {**launched, **parts})
    return sorted(jobs, key=_begun_s)


def _begun_s(job: FoundJob) -> float:
    begun = [part.begun_s for part in job.parts.values()]
    return job.launched.started_s if job.launched else min(begun)


def find(jobs: Sequence[FoundJob], word: str) -> FoundJob:
    """The job of that name, id or folder of logs. Raises `UsageError` that lists the jobs there are."""
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
    """The table of `shardwright ps -H`. A job is shown by its id where another one has its name."""
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
