"""Show, verify, merge and split checkpoints."""

from __future__ import annotations

import sys

import click


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, verify them, and exchange them with others."""


@checkpoint.command()
@click.option("--entries", is_flag=True, help="Every tensor and value too.")
@click.argument("where", metavar="DIR")
def show(where: str, entries: bool) -> None:
    """Show what is in a checkpoint.

    DIR is one checkpoint, or a directory of them: then all are listed, and the latest is shown. A URL will do.
    """
    from shardwright.checkpoint.inspection.show import print_shown

    print_shown(where, entries)


@checkpoint.command("verify")
@click.argument("where", metavar="DIR")
def verify_checkpoint(where: str) -> None:
    """Read every byte of a checkpoint, or of all in a directory, and compare it with what was written.

    There is one line for each damage, and then the exit code is 1.
    """
    from shardwright.checkpoint.inspection.verify import verify as verify_all

    found = verify_all(where)
    for line in (line for verified in found for line in verified.lines()):
        click.echo(line)
    sys.exit(1 if any(verified.damage for verified in found) else 0)


@checkpoint.command()
@click.option("--to", required=True, metavar="FILE|FOLDER/", help="A .safetensors, .pt or .pth file, or a folder.")
@click.option("--what", type=click.Choice(["model", "ema", "all"]), default="model", help="Of it.")
@click.argument("where", metavar="DIR")
def merge(where: str, to: str, what: str) -> None:
    """Write a checkpoint as one file that needs nothing of ours.

    \b
    shardwright checkpoint merge runs/a --to model.safetensors
    shardwright checkpoint merge runs/a --to model.pt            for torch.load and load_state_dict
    shardwright checkpoint merge runs/a --to folder/             for from_pretrained of transformers

    DIR is one checkpoint, or a directory of them: then it is the latest.
    """
    from shardwright.checkpoint.exchange.merge import merge as merge_to

    merged = merge_to(where, to, what)
    click.echo(f"{merged.path}: {merged.tensors} tensors, {merged.size_bytes:,} bytes")
    if merged.left_out:
        names = ", ".join(merged.left_out[:5]) + (" ..." if len(merged.left_out) > 5 else "")
        click.echo(f"left out, as safetensors holds tensors only: {len(merged.left_out)} values: {names}")


@checkpoint.command()
@click.option("--to", required=True, metavar="DIR", help="A new directory of checkpoints.")
@click.option("--ranks", default=1, help="Into how many files each tensor is cut.")
@click.argument("file", metavar="FILE")
def split(file: str, to: str, ranks: int) -> None:
    """Make a checkpoint, which any number of ranks loads, of a .pth, .pt or .safetensors file.

    FILE may also be a folder of transformers, or a URL. Of a file that has more than a model in it, the model is taken.
    """
    from shardwright.checkpoint.exchange.exchange import split as split_file

    saved = split_file(file, to, ranks)
    size = sum(record.size_bytes for record in saved.files.values())
    click.echo(f"{to}/step-00000000: {len(saved.entries)} entries, {len(saved.files)} files, {size:,} bytes")
