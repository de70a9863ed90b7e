"""The commands that measure machines: `shardwright bench` for collectives, `traffic` for network devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardwright.cli.group import HOST_SLOTS, HOSTFILE


@click.command()
@click.option("--every", "every_s", default=1.0, metavar="SECONDS", help="Between two looks.")
@click.option("--count", type=int, metavar="N", help="How many looks; without it until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each device and look.")
@click.option("--sysfs", default="/sys", metavar="DIR", help="Where the host's /sys is mounted.")
@click.argument("devices", metavar="[DEVICE]...", nargs=-1)
def traffic(devices: tuple[str, ...], every_s: float, count: int | None, as_json: bool, sysfs: str) -> None:
    """Show bytes and rates in and out of InfiniBand and Ethernet devices, errors and drops beside them.

    DEVICE is eth0, or mlx5_0/1 for one port and mlx5_0 for all of them; without any, all that are up but the loopback.
    Ctrl-C ends it with what was moved altogether.
    """
    from shardwright.cluster.traffic import show

    show(devices, every_s, count, as_json, Path(sysfs))


@click.command()
@click.option("-n", "number", metavar="N", help="Ranks to start; under a launcher, iterations as in nccl-tests.")
@click.option("--ranks", metavar="N", help="How many ranks to start; without it one per visible GPU, or one.")
@click.option("--iters", type=int, metavar="N", help="Calls that are timed together.  [default: 20]")
@click.option("-w", "--warmup", default=5, metavar="N", help="Calls before them.")
@click.option("-b", "begin", metavar="SIZE", help="The smallest size: 8, 1K, 1.5M, 1024M, 1G.  [default: 32M]")
@click.option("-e", "end", metavar="SIZE", help="The largest size.  [default: 32M]")
@click.option("-f", "factor", type=int, metavar="N", help="Each size is so many times the last.")
@click.option("-i", "step", metavar="SIZE", help="Without -f, each size is so much larger.  [default: 1M]")
@click.option("-d", "dtype", default="float", metavar="TYPE", help="half, double, int8, ...")
@click.option("-o", "reduction", default="sum", metavar="OP", help="sum, prod, max or min.")
@click.option("-r", "root", default=0, metavar="RANK", help="Who broadcasts.")
@click.option("-c", "check", default=1, metavar="N", help="Calls that are checked; 0 checks none.")
@click.option("-g", "devices", default=1, metavar="1", help="Devices of a rank.")
@HOST_SLOTS
@HOSTFILE
@click.option("--backend", metavar="NAME", help="As in sw.init(), which without it takes the usual one of the devices.")
@click.option("--json", is_flag=True, help="Print JSON in place of the tables.")
@click.option("--save-profile", "profile", metavar="FILE.json", help="Measure the machine for the planner too.")
@click.argument("collective", required=False)
def bench(collective: str | None, **options: Any) -> None:
    """Time and check collectives; print them as nccl-tests does.

    \b
    shardwright bench all_reduce -n 8 -b 8 -e 1G -f 2
    shardwright bench all_reduce -H a:8,b:8 -b 8 -e 1G -f 2
    mpirun -n 2 shardwright bench all_reduce -b 8 -e 128M -f 2 -g 1
    shardwright bench -n 2 --save-profile hardware.json

    COLLECTIVE is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, sendrecv, or all of them. -n is the
    number of ranks, which this command starts; where a launcher has started them already (mpirun, torchrun, shardwright
    launch), -n is the number of iterations. The exit code is 0, or 1 where an element of some row was wrong.
    """
    from shardwright.cluster.bench.command import bench as run

    sys.exit(run(collective, **options))
