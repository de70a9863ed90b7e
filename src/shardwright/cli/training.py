"""Train from a configuration; data sets to try it with."""

from __future__ import annotations

import os
import sys

import click

from shardwright.cli.group import cli


@cli.group()
def data() -> None:
    """Data sets to try things with."""


@data.command()
@click.option("--format", default="mnist", show_default=True, help="mnist, cifar10 or cifar10-binary.")
@click.option("--out", type=click.Path(file_okay=False), required=True, metavar="DIR", help="The folder to write to.")
@click.option("--force", is_flag=True, help="Replace another data set that is there already.")
def digits(format: str, out: str, force: bool) -> None:
    """Write scikit-learn's 1,797 handwritten digits, 1,437 to train and 360 to test, as the files of a data set."""
    from shardwright.data.digits import write_digits

    for path in write_digits(out, format, force):
        click.echo(path)


@cli.command()
@click.option("--config", required=True, metavar="FILE.yaml", help="A file, or the name of a shipped configuration.")
@click.option("-o", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -o train.epochs=3.")
@click.option("-n", "--ranks", metavar="N", help="Check everything, then launch N ranks; without it this process runs.")
def train(config: str, overrides: tuple[str, ...], ranks: str | None) -> None:
    """Train as a configuration says.

    \b
    shardwright train --config mnist_mlp -o data.root=DIR               alone
    shardwright train -n 8 --config cifar10_resnet50.yaml               on 8 processes
    shardwright launch -n 8 train --config FILE.yaml                    the same; also torchrun and mpirun
    """

    from shardwright.hosts.environment import read_environment

    try:
        from shardwright.zoo import train as zoo

        if ranks is None:
            zoo.train(config, overrides)
            return
    except KeyboardInterrupt:
        if read_environment(os.environ).size == 1:  # else the launcher says it, once
            click.echo("shardwright: interrupted", err=True)
        sys.exit(130)
    from shardwright.launch.start import launch as launch_job

    job = zoo.job(config, overrides, ranks)
    zoo.prepare(config, overrides, job.ranks)
    sys.exit(launch_job(job))
