"""The commands for jobs that run: `logs`, `ps` and `stop`."""

from __future__ import annotations

import sys

import click

from shardwright.cli.group import cli
from shardwright.cli.host_options import HOST, HOSTFILE, PYTHON, TIMEOUT


@cli.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit with its code.")
@click.option("--rank", "ranks", default="0", show_default=True, metavar="all|0,3", help="The ranks to show.")
@click.option("--log-dir", default="log_output", show_default=True, metavar="DIR", help="Where the jobs' folders are.")
@click.argument("job", required=False)
def logs(job: str | None, follow: bool, ranks: str, log_dir: str) -> None:
    """Show what a job's ranks wrote; without JOB that of the job started last."""
    from pathlib import Path

    from shardwright.launch.kept.follow import show_logs

    sys.exit(show_logs(Path(log_dir), job, ranks, follow))


@cli.command()
@HOST
@HOSTFILE
@PYTHON
@TIMEOUT
def ps(hosts: str | None, hostfile: str | None, python: tuple[str, ...], connect_timeout_s: float) -> None:
    """List the jobs that you have launched on this host, with their hosts, ranks, restarts and logs.

    With -H those that run on these hosts, wherever they were launched, also where their launcher is gone.
    """
    from shardwright.launch.asked.host_options import HostRequest, PerHost

    named, _ = HostRequest(hosts=hosts, hostfile=hostfile).named(None)
    if named is None:
        from shardwright.launch.kept.jobs import show_jobs

        click.echo(show_jobs())
        return
    from shardwright.cluster.jobs.command import ps as ps_on

    sys.exit(ps_on(named, PerHost.read("--python", python, named), connect_timeout_s))


@cli.command()
@click.option("--now", is_flag=True, help="Kill the ranks at once.")
@HOST
@HOSTFILE
@PYTHON
@TIMEOUT
@click.argument("job")
def stop(
    job: str, now: bool, hosts: str | None, hostfile: str | None, python: tuple[str, ...], connect_timeout_s: float
) -> None:
    """End a job on all its hosts: JOB is its name, as `shardwright ps` shows it, or the folder of its logs.

    Its ranks are told to end (TERM) and have the grace with which it was launched; a second call kills them. With -H a
    job that runs on these hosts, wherever it was launched, also where its launcher is gone.
    """
    from shardwright.launch.asked.host_options import HostRequest, PerHost

    named, _ = HostRequest(hosts=hosts, hostfile=hostfile).named(None)
    if named is None:
        from shardwright.launch.jobs_stop import stop_job

        sys.exit(stop_job(job, now, lambda text: click.echo(f"shardwright: {text}")))
    from shardwright.cluster.jobs.command import stop as stop_on

    sys.exit(stop_on(job, named, PerHost.read("--python", python, named), connect_timeout_s, now))
