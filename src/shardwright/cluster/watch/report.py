"""`shardwright report`: what a job has done, as a page of text and as one for a browser."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
from rich.console import Console

from shardwright.cluster.watch.view import screen
from shardwright.compiler.report.runs.html import document_of, history, save_html, whole_run
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.progress.ranks import WatchedJob

_WIDTH = 120  # where the output is no terminal
_MOST_RANKS = 64


def report(folder: Path, html: Path | None) -> None:
    """Print what the job in ``folder`` has done, or write its page.

    Raises `UsageError` where the folder is no job's, or the page cannot be written.
    """
    now, job = WatchedJob(folder).snapshot(), JobFolder(folder)
    histories = [history(job, seen.rank) for seen in now.ranks]
    for damage in filter(None, (one.damage for one in histories)):
        click.echo(f"shardwright: {damage}", err=True)
    whole = whole_run(now, histories)
    document = document_of(job, whole, histories)
    if html is not None:
        save_html(document, html)
        click.echo(f"shardwright: {html}", err=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    Console(width=width).print(screen(whole, width, _MOST_RANKS))
    for event in document["events"]:
        click.echo(event["text"])
