"""`shardwright watch`: the state of the ranks of a job, on a terminal as a screen, elsewhere as lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from rich.console import Console, ConsoleDimensions
from rich.live import Live

from shardwright.cluster.jobs import on_host
from shardwright.cluster.programs.connection import Probe, open_all
from shardwright.cluster.watch.view import events, progress, screen
from shardwright.common.schema import SchemaError, checked
from shardwright.common.words import on_a_clock, plain
from shardwright.errors import LaunchError, UsageError
from shardwright.launch.joblog.job import find_job as find_in_folder
from shardwright.launch.joblog.jobs import LOST, known_jobs, show_jobs
from shardwright.launch.options.request import NamedHosts
from shardwright.launch.progress.ranks import Snapshot, WatchedJob

TakeSnapshot = Callable[[], Snapshot]
_LOOK_S = 1.0
_LINE_S = 10.0  # between two lines where there is no terminal


def watch(word: str | None, log_dir: Path) -> int:
    """Watch a job of this host until it ends, and return its exit code.

    Raises `UsageError` where there is no such job, or several may be meant.
    """
    return show(WatchedJob(_the_one() if word is None else folder_of(word, log_dir)).snapshot)


def watch_on(word: str | None, where: NamedHosts) -> int:
    """Watch a job that was launched on one of these hosts."""
    with open_all(where, on_host.__name__) as (probes, silent):
        for name, why in silent.items():
            click.echo(f"shardwright: {name}: {plain(why)}", err=True)
        probe, folder = _launched(word, probes)
        return show(lambda: _asked(probe, folder))


def show(look: TakeSnapshot, console: Console | None = None, every_s: float = _LINE_S) -> int:
    """Show a job until it has ended; who interrupts ends the watching alone."""
    seen = look()
    console = console or Console()
    try:
        if seen.runs:
            seen = _on_screen(look, console) if console.is_terminal else _in_lines(look, every_s)
    except KeyboardInterrupt:
        click.echo(f"shardwright: job {plain(seen.name)} goes on", err=True)
        return 130
    if console.is_terminal:
        console.print(screen(seen, console.width, len(seen.ranks) + 20))
    elif last := progress(seen):
        click.echo(last)
    click.echo(f"shardwright: job {plain(seen.name)} {seen.state.end}", err=True)
    return seen.state.code


def _on_screen(look: TakeSnapshot, console: Console) -> Snapshot:
    """Show the job until it has ended. The terminal itself says how large it is: COLUMNS may be outdated."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            seen = look()
            console.size = ConsoleDimensions(*os.get_terminal_size(console.file.fileno()))
            live.update(screen(seen, console.width, console.height), refresh=True)
            if not seen.runs:
                return seen
            time.sleep(_LOOK_S)


def _in_lines(look: TakeSnapshot, every_s: float) -> Snapshot:
    before, due_s = None, 0.0
    while True:
        seen = look()
        at = on_a_clock(seen.now_s - seen.state.started_s)
        lines = events(before, seen)
        if time.monotonic() >= due_s and (line := progress(seen)):
            lines, due_s = [*lines, line], time.monotonic() + every_s
        for line in lines:
            print(f"{at}  {plain(line)}", flush=True)
        if not seen.runs:
            return seen
        before = seen
        time.sleep(min(_LOOK_S, every_s))


def folder_of(word: str, log_dir: Path) -> Path:
    """Return the folder of a job that runs here, of one in ``log_dir``, or the one that is named.

    Raises `UsageError` where there is none, or several are named so.
    """
    named = [record for record in known_jobs() if record.lives and record.name == word]
    if len(named) > 1:
        listed = "\n".join(f"  {record.folder}" for record in named)
        raise UsageError(f"{len(named)} jobs are named {word}; name one by the folder of its logs:\n{listed}")
    if named:
        return Path(named[0].folder)
    return Path(word) if os.sep in word else find_in_folder(log_dir, word).path


def _the_one() -> Path:
    living = [record for record in known_jobs() if record.lives]
    if len(living) == 1:
        return Path(living[0].folder)
    if not living:
        raise UsageError(f"{show_jobs()}; type `shardwright watch JOB` for one that has ended, or -H for one elsewhere")
    raise UsageError(f"{len(living)} jobs run here; type `shardwright watch JOB` with one of them:\n{show_jobs()}")


def _launched(word: str | None, probes: Mapping[str, Probe]) -> tuple[Probe, str]:
    """Return the program on the launcher's host, and the job's folder there; a lost job only where no other fits."""
    found = [
        (probe, str(record["name"]), str(record["folder"]), record["state"] == LOST)
        for probe in probes.values()
        for record in probe.demand({"order": "jobs"})["records"]
    ]
    if word is not None and os.sep in word and len(probes) == 1:
        return next(iter(probes.values())), word
    named = [entry for entry in found if word in (None, entry[1], entry[2])]
    named = [entry for entry in named if not entry[3]] or named
    if len(named) == 1:
        return named[0][0], named[0][2]
    listed = "\n".join(f"  {plain(folder)} on {probe.host.name}" for probe, _, folder, _ in named or found)
    what = f"{len(named)} jobs" if named else f"no job {word or ''}".rstrip()
    raise UsageError(
        f"{what} launched on these hosts; a job is watched on the host of its launcher, which `shardwright ps -H` names"
        + (f"; name one by the folder of its logs:\n{listed}" if listed else "")
    )


def _asked(probe: Probe, folder: str) -> Snapshot:
    try:
        return checked(probe.demand({"order": "watch", "folder": folder}), Snapshot)
    except SchemaError as error:
        raise LaunchError(f"{probe.host.name} answered in another form than expected: {error}") from None
