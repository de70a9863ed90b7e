"""`shardwright ps -H` and `stop -H`: the jobs on hosts, whoever launched them from wherever."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from shardwright.cluster.doctor.reading import plain
from shardwright.cluster.jobs import on_host
from shardwright.cluster.jobs.found import FoundJob, find, lines_of, put_together
from shardwright.cluster.programs.connection import Probe, Silent, open_all
from shardwright.errors import LaunchError
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.options.request import PerHost

_GRACE_S = 10.0  # of processes that nobody watches
_LAUNCHER_S = 40.0  # beyond the grace of a job: the kernel may need long to end a large process
_UNKNOWN_GRACE_S = 20.0  # of a launcher that is elsewhere
_TOLD_NOW_S = 4.0
_POLL_S = 0.3

Probes = Mapping[str, Probe]


def ps(hosts: Hosts, python: PerHost, timeout_s: float) -> int:
    """Print the jobs on the hosts; the exit code is 1 where a host is silent."""
    with open_all(hosts, on_host.__name__, python, timeout_s) as (probes, silent):
        jobs = _look(probes)
    click.echo("\n".join(lines_of(jobs)) if jobs else "no job of this user runs on these hosts")
    return _tell_silent(silent)


def stop(word: str, hosts: Hosts, python: PerHost, timeout_s: float, now: bool) -> int:
    """End a job on the hosts; the exit code is 0 where nothing of it is left on any of them."""
    with open_all(hosts, on_host.__name__, python, timeout_s) as (probes, silent):
        job = find(_look(probes), word)
        ended = _stop(job, probes, now)
    return max(_tell_silent(silent), 0 if ended else 1)


def _tell_silent(silent: Mapping[str, str]) -> int:
    for name, why in silent.items():
        click.echo(f"shardwright: {name}: {plain(why)}", err=True)
    return 1 if silent else 0


def _ask(probes: Probes, names: Iterable[str], order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The answers of hosts. Raises `LaunchError` where one of them fails."""

    def ask(name: str) -> dict[str, Any]:
        try:
            return probes[name].ask(order)
        except Silent as error:
            raise LaunchError(f"{name}: {plain(error)}") from None

    asked = list(names)
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        return dict(zip(asked, pool.map(ask, asked), strict=True))


def _look(probes: Probes) -> list[FoundJob]:
    try:
        return put_together(_ask(probes, probes, {"order": "jobs"}))
    except ValueError as error:
        raise LaunchError(plain(error)) from None


def _stop(job: FoundJob, probes: Probes, now: bool) -> bool:
    """Returns whether nothing is left of the job."""
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
