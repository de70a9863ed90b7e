"""Train from a configuration; data sets to try it with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardwright.cli.group import file_names


@click.group()
def data() -> None:
    """Data sets to try things with."""


@data.command()
@click.option("--format", default="mnist", help="mnist, cifar10 or cifar10-binary.")
@click.option("--out", type=click.Path(file_okay=False), required=True, metavar="DIR", help="The folder to write to.")
@click.option("--force", is_flag=True, help="Replace another data set that is there already.")
@click.option("--full-size", is_flag=True, help="As many images as the data set has, each digit many times.")
def digits(format: str, out: str, force: bool, full_size: bool) -> None:
    """Write scikit-learn's 1,797 handwritten digits, 1,437 to train and 360 to test, as the files of a data set."""
    from shardwright.data.digits import write_digits

    for path in write_digits(out, format, force, full_size):
        click.echo(path)


@data.command()
@click.option("--out", type=click.Path(file_okay=False), required=True, metavar="DIR", help="The folder to write to.")
@click.option("--count", type=click.IntRange(2), default=100, help="Images for detection.")
@click.option("--words", type=click.IntRange(2), default=1000, help="Words for recognition.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Other images for another number.")
@click.option("--size", type=click.IntRange(64), default=640, help="The sides of an image, pixels.")
@click.option("--alphabet", metavar="TEXT", help="The characters of which words are made; by default 0-9a-z.")
@click.option("--longest", type=click.IntRange(3), default=8, help="The longest word.")
@click.option("--force", is_flag=True, help="Write into a folder that has something already.")
def ocr(
    out: str, count: int, words: int, seed: int, size: int, alphabet: str | None, longest: int, force: bool
) -> None:
    """Draw images of texts, one of five to test, labelled by the lines of ICDAR 2015, JSON, lists and LMDB."""
    from shardwright.ocr.samples.dictionary import LETTERS
    from shardwright.ocr.samples.drawn import Drawing, write_images

    drawing = Drawing(count, seed, words, size, alphabet=alphabet or LETTERS, longest=longest)
    for path in write_images(Path(out), drawing, force):
        click.echo(path)


@click.command()
@click.option(
    "--config",
    required=True,
    metavar="FILE.yaml",
    shell_complete=file_names,
    help="A file, or the name of a shipped configuration.",
)
@click.option("-o", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -o train.epochs=3.")
@click.option("-n", "--ranks", metavar="N", help="Check everything, then launch N ranks; without it this process runs.")
def train(config: str, overrides: tuple[str, ...], ranks: str | None) -> None:
    """Train as a configuration says.

    \b
    shardwright train --config mnist_mlp -o data.root=DIR               alone
    shardwright train -n 8 --config cifar10_resnet50.yaml               on 8 processes
    shardwright launch -n 8 train --config FILE.yaml                    the same; also torchrun and mpirun
    """
    from shardwright.launch.hosts.environment import read_environment

    try:
        from shardwright.ocr import training as texts
        from shardwright.ocr.settings import is_text_configuration
        from shardwright.training.zoo import train as zoo

        of_texts = is_text_configuration(config)
        if ranks is None:
            (texts.train if of_texts else zoo.train)(config, overrides)
            return
    except KeyboardInterrupt:
        if read_environment(os.environ).size == 1:  # else the launcher says it, once
            click.echo("shardwright: interrupted", err=True)
        sys.exit(130)
    from shardwright.launch.start import launch as launch_job

    job = zoo.job(config, overrides, ranks)
    (texts.prepare if of_texts else zoo.prepare)(config, overrides, job.ranks)
    sys.exit(launch_job(job))
