"""The commands for jobs that run: `watch`, `report`, `logs`, `ps` and `stop`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardwright.cli.group import LOG_DIR, on_hosts


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit with its code.")
@click.option("--rank", "ranks", default="0", metavar="all|0,3", help="The ranks to show.")
@LOG_DIR
@click.argument("job", required=False)
def logs(job: str | None, follow: bool, ranks: str, log_dir: str) -> None:
    """Show what a job's ranks wrote; without JOB that of the job started last."""
    from shardwright.launch.joblog.follow import show_logs

    sys.exit(show_logs(Path(log_dir), job, ranks, follow))


@click.command()
@click.option("--log-dir", default="log_output", metavar="DIR", help="Where ended jobs' folders are.")
@on_hosts
@click.argument("job", required=False)
def watch(job: str | None, log_dir: str, **where: Any) -> None:
    """Show what all ranks of a job do, until it ends: step, loss, times, memory, who is slow or stopped, what they say.

    JOB is its name, as `shardwright ps` shows it, or the folder of its logs; without it the one that runs here. With -H
    one that was launched on another host. Exits with the job's code; Ctrl-C ends the watching alone. Where the output
    is no terminal it is lines.
    """
    from shardwright.cluster.watch import command
    from shardwright.launch.options.request import NamedHosts

    named = NamedHosts.read(**where)
    sys.exit(command.watch(job, Path(log_dir)) if named is None else command.watch_on(job, named))


@click.command()
@click.option("--html", metavar="run.html", help="Write a page for a browser, with curves.")
@LOG_DIR
@click.argument("job", required=False)
def report(job: str | None, html: str | None, log_dir: str) -> None:
    """Show what a job has done: its steps, loss, times and memory beside what its plan expected, and what happened.

    JOB is its name, or the folder of its logs; without it the one started last.
    """
    from shardwright.cluster.watch.command import folder_of
    from shardwright.cluster.watch.report import report as write
    from shardwright.launch.joblog.job import find_job

    folder = find_job(Path(log_dir), None).path if job is None else folder_of(job, Path(log_dir))
    write(folder, None if html is None else Path(html))


@click.command()
@on_hosts
def ps(**where: Any) -> None:
    """List the jobs that you have launched on this host, with their hosts, ranks, restarts and logs.

    With -H those that run on these hosts, wherever they were launched, also where their launcher is gone.
    """
    from shardwright.launch.options.request import NamedHosts

    if (named := NamedHosts.read(**where)) is None:
        from shardwright.launch.joblog.jobs import show_jobs

        click.echo(show_jobs())
        return
    from shardwright.cluster.jobs.command import ps as ps_on

    sys.exit(ps_on(named))


@click.command()
@click.option("--now", is_flag=True, help="Kill the ranks at once.")
@on_hosts
@click.argument("job")
def stop(job: str, now: bool, **where: Any) -> None:
    """End a job on all its hosts: JOB is its name, as `shardwright ps` shows it, or the folder of its logs.

    Its ranks are told to end (TERM) and have the grace with which it was launched; a second call kills them. With -H a
    job that runs on these hosts, wherever it was launched, also where its launcher is gone.
    """
    from shardwright.launch.options.request import NamedHosts

    if (named := NamedHosts.read(**where)) is None:
        from shardwright.launch.joblog.jobs import stop_job

        sys.exit(stop_job(job, now, lambda text: click.echo(f"shardwright: {text}")))
    from shardwright.cluster.jobs.command import stop as stop_on

    sys.exit(stop_on(job, named, now))
