"""The commands `shardwright ranktable ...`: make, merge, check and convert rank tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


@click.group()
def ranktable() -> None:
    """Rank tables: which device of which server each rank has."""


_PRODUCT = click.option(
    "--product",
    type=click.Choice(["8-device", "any"]),
    help="Whose rules hold; by default what a table says: 8-device.",
)
_OUT = click.option("--out", metavar="FILE", help="Where to; without it, into this folder under a name that says what.")
_FORCE = click.option("--force", is_flag=True, help="Replace another file that is there already.")


def _write_table(table: Any, notes: list[str], out: str | None, force: bool) -> None:
    from shardwright.cluster.table_making import write
    from shardwright.launch.hosts.table_check import file_name

    for note in notes:
        click.echo(f"shardwright: {note}", err=True)
    click.echo(write(table.to_json(), out, file_name(table), force))


@ranktable.command("make", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.option("--address-file", metavar="FILE", help="Lines address_N=IP; without it /etc/hccn.conf, or hccn_tool.")
@click.option("--device-num", metavar='"[0,8)"', help="The devices, as hccl_tools.py has them.")
@click.option(
    "--server-id",
    "--server-ip",
    "server_id",
    default="127.0.0.1",
    metavar="IP",
    help="By which others reach this host.",
)
@_PRODUCT
@_OUT
@_FORCE
@click.argument("devices", metavar='"[0,8)"', required=False)
def make_table(
    devices: str | None,
    device_num: str | None,
    address_file: str | None,
    server_id: str,
    product: str | None,
    out: str | None,
    force: bool,
) -> None:
    """Write the table of this host's devices: a range without its end, "[4,8)", or a list, "{1,2}"."""
    from shardwright.cluster.table_making import find_addresses, make, read_devices

    if (devices is None) == (device_num is None):
        raise click.UsageError('which devices? type them once, as: shardwright ranktable make "[0,8)"')
    ids = read_devices(devices or device_num or "")
    make(ids, {}, server_id, product)  # what is not allowed is said before devices are asked
    addresses, note = find_addresses(ids, Path(address_file) if address_file is not None else None)
    _write_table(make(ids, addresses, server_id, product), [note] if note else [], out, force)


@ranktable.command("merge")
@_PRODUCT
@_OUT
@_FORCE
@click.argument("tables", metavar="A.json B.json", nargs=-1)
def merge_table(tables: tuple[str, ...], product: str | None, out: str | None, force: bool) -> None:
    """Join the tables of several servers; ranks follow the sorted server ids."""
    from shardwright.cluster.table_making import merge

    _write_table(merge([Path(table) for table in tables], product), [], out, force)


@ranktable.command("check")
@_PRODUCT
@click.argument("table", metavar="FILE.json")
def check_table(table: str, product: str | None) -> None:
    """Say everything that is wrong with a table. The exit code is 0 where nothing is, 1 where something is."""
    from shardwright.launch.hosts.table_check import check_rank_table

    checked = check_rank_table(Path(table), product)
    for problem in checked.problems:
        click.echo(f"{table}: {problem}", err=True)
    for note in checked.notes:
        click.echo(f"{table}: note: {note}", err=True)
    if checked.problems:
        sys.exit(1)
    click.echo(checked.table)


@ranktable.command("from-hostfile")
@_PRODUCT
@_OUT
@_FORCE
@click.argument("hostfile", metavar="FILE")
def table_from_hostfile(hostfile: str, product: str | None, out: str | None, force: bool) -> None:
    """Write the table of a hostfile's hosts, with as many devices of each as it has slots."""
    from shardwright.cluster.table_making import from_hostfile

    table, notes = from_hostfile(Path(hostfile), product)
    _write_table(table, notes, out, force)


@ranktable.command("to-hostfile")
@click.option("--out", metavar="FILE", help="Where to; without it, the lines are shown.")
@_FORCE
@click.argument("table", metavar="FILE.json")
def table_to_hostfile(table: str, out: str | None, force: bool) -> None:
    """Show or write the hostfile of a table: each server with as many slots as it has ranks."""
    from shardwright.cluster.table_making import write
    from shardwright.launch.hosts.table_check import read_rank_table

    text = read_rank_table(Path(table)).hosts().to_hostfile()
    click.echo(text if out is None else f"{write(text, out, 'hostfile', force)}\n", nl=False)
