"""The command line. Each command imports what it needs inside the command, so that none waits for torch in vain."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from shardwright import __version__
from shardwright.errors import ShardwrightError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardwright")
def cli() -> None:
    """Train a PyTorch model on many devices as if it were on one."""


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


class _LaunchCommand(click.Command):
    """Keeps a ``--`` that stands before the program, which click would swallow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            args = [*args[: args.index("--")], "--", *args[args.index("--") :]]  # one for click, or for us below
        rest = super().parse_args(ctx, args)
        command = list(ctx.params["command"])
        ctx.params["program"] = command[:1] == ["--"]
        if "--" in command:
            command.remove("--")
        ctx.params["command"] = tuple(command)
        return rest


@cli.command(cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", metavar="N", help="How many ranks; without it one per slot of the hosts, or per GPU.")
@click.option("-m", "--module", is_flag=True, help="The program is a module, as in `python -m`.")
@click.option("-x", "--env", "variables", multiple=True, metavar="VAR[=VALUE]", help="Set or pass on a variable.")
@click.option("--tee", metavar="all|none|0,3", help="The ranks to show on the console.  [default: 0]")
@click.option("--job", metavar="NAME", help="The job's name; without it the next free number.")
@click.option("--log-dir", default="log_output", show_default=True, metavar="DIR", help="Where the jobs' folders are.")
@click.option("--port", type=int, help="The port where the ranks meet; without it a free one is chosen.")
@click.option("--devices", metavar="4,5", help="The GPUs to use, as CUDA_VISIBLE_DEVICES.")
@click.option("--rank-table", metavar="FILE.json", help="The ranks and devices of a rank table, in place of -n.")
@click.option(
    "--grace", default=10.0, show_default=True, metavar="SECONDS", help="Between asking ranks to end and kill."
)
@click.option(
    "--save-graphs",
    metavar="DIR[:LEVEL]",
    help="Ranks dump what they run to DIR/rank_N: level 1 the strategies, level 2 (the default) the local program too. "
    "Sets SHARDWRIGHT_SAVE_GRAPHS, which sw.parallelize reads where its save_graphs= is not given.",
)
@click.option(
    "--via",
    type=click.Choice(["local", "ssh", "mpirun"]),
    help="Who starts the ranks.  [default: ssh where there are other hosts, else local]",
)
@click.option("-H", "--host", "hosts", metavar="a:8,b:8", help="The hosts and how many ranks each takes.")
@click.option("--hostfile", metavar="FILE", help="The same as lines `a slots=8`.")
@click.option("--oversubscribe", is_flag=True, help="Let -n be more than the slots of all hosts.")
@click.option("--python", metavar="PATH", help="The interpreter on other hosts; without it the path of this one.")
@click.option("--wdir", metavar="DIR", help="The working directory on other hosts; without it this one.")
@click.option("--interface", metavar="NAME", help="The network interface of the first host by which ranks meet.")
@click.option(
    "--lease",
    "lease_s",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A host not heard from for so long is lost, and a host that does not hear of us ends its ranks.",
)
@click.option(
    "--connect-timeout", "connect_timeout_s", default=10.0, show_default=True, metavar="SECONDS", help="For ssh."
)
@click.option("--backend", type=click.Choice(["gloo", "nccl", "mpi"]), help="For sw.init() where it is given none.")
@click.option("--mca", multiple=True, nargs=2, metavar="NAME VALUE", help="A setting for mpirun.")
@click.option("--no-preload", is_flag=True, help="Start each rank as a new interpreter instead of forking it.")
@click.option("--detach", is_flag=True, help="Run in the background; follow with `shardwright logs -f`.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(
    command: tuple[str, ...], program: bool, no_preload: bool, log_dir: str, grace: float, **options: Any
) -> None:
    """Run a program on N processes of this host or of several, with torchrun's variables set.

    \b
    shardwright launch -n 8 train.py ARGS
    shardwright launch -n 8 -m package.module ARGS
    shardwright launch -n 8 -- PROGRAM ARGS
    shardwright launch -n 8 --via mpirun --backend mpi train.py ARGS
    shardwright launch -H a:8,b:8 train.py ARGS

    The first rank that fails ends the job, and its exit code is the command's. Ctrl-C, TERM, HUP and QUIT are passed on
    and end the job after the grace; a second Ctrl-C kills it at once. USR1 and USR2 are passed on and end nothing.
    """
    from shardwright.launch.host_options import HostOptions
    from shardwright.launch.local import launch as launch_job
    from shardwright.launch.options import read_options

    words = ("hosts", "hostfile", "oversubscribe", "python", "wdir", "interface", "lease_s", "connect_timeout_s")
    where = HostOptions(**{word: options.pop(word) for word in words}, allocation=os.environ)
    job = read_options(
        arguments=command,
        program=program,
        preload=not no_preload,
        log_dir=log_dir,
        grace_s=grace,
        where=where,
        **options,
    )
    if "--allow-run-as-root" in job.carrier:
        click.echo("shardwright: mpirun is told that it may run as root; it would rather not", err=True)
    sys.exit(launch_job(job))


@cli.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; exit with its code.")
@click.option("--rank", "ranks", default="0", show_default=True, metavar="all|0,3", help="The ranks to show.")
@click.option("--log-dir", default="log_output", show_default=True, metavar="DIR", help="Where the jobs' folders are.")
@click.argument("job", required=False)
def logs(job: str | None, follow: bool, ranks: str, log_dir: str) -> None:
    """Show what a job's ranks wrote; without JOB that of the job started last."""
    from pathlib import Path

    from shardwright.launch.follow import show_logs

    sys.exit(show_logs(Path(log_dir), job, ranks, follow))


_MODES = click.Choice(["single", "data", "semi-auto", "auto"])
_SEARCHES = click.Choice(["propagation", "exact"])


@cli.command()
@click.option("--devices", type=int, metavar="N", help="How many; without it those of the mesh or of the loaded plan.")
@click.option("--mesh", metavar="dp=2,tp=4", help="The devices as named axes.")
@click.option("--mode", type=_MODES, default="auto", show_default=True, help="How much the planner decides.")
@click.option("--search", type=_SEARCHES, help="How it searches; without it the usual way of the mode.")
@click.option("--inputs", type=click.Choice(["split", "whole"]), default="split", show_default=True, help="Of batches.")
@click.option(
    "--hardware", default="cpu", show_default=True, metavar="NAME|FILE.json",
    help="Prices whose: cpu, v100, a100, h100, h200, or a profile that `shardwright bench --save-profile` wrote.",
)  # fmt: skip
@click.option("--save", metavar="plan.json", help="Write the plan, for sw.parallelize(plan=...).")
@click.option("--load", metavar="plan.json", help="Check that this plan fits, and show it, in place of planning.")
@click.argument("target", metavar="FILE.py:build")
def plan(target: str, save: str | None, **options: Any) -> None:
    """Show who would compute what, without any of the devices.

    build is a function without arguments that returns (model, loss_fn, batch), batch being one global batch, and pins
    as a fourth where wanted. It is called on torch's meta device, so that large models take no memory.
    """
    from shardwright.run.plan_file import plan_file

    planned = plan_file(target, **options)
    if save is not None:
        planned.plan.save(save)
    click.echo(planned)


@cli.command()
@click.option("-n", "--ranks", metavar="N", help="How many ranks; without it one per visible GPU, or one.")
@click.option("--mode", type=_MODES, default="auto", show_default=True, help="How much the planner decides.")
@click.option("--mesh", metavar="dp=2,tp=4", help="The ranks as named axes.")
@click.option("--search", type=_SEARCHES, help="How the planner searches; without it the usual way of the mode.")
@click.option("--plan", metavar="plan.json", help="Verify this plan, as `shardwright plan --save` wrote it.")
@click.option("--steps", default=3, show_default=True, help="How many AdamW steps to compare.")
@click.option("--lr", default=1e-3, show_default=True, help="Their learning rate.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["float64", "float32"]), help="Without it, both.")
@click.option("--seed", default=0, show_default=True, help="Set before build() is called.")
@click.argument("target", metavar="FILE.py:build")
def verify(target: str, ranks: str | None, dtypes: tuple[str, ...], **options: Any) -> None:
    """Compare a plan with one device, on real processes: losses, gradients, buffers and updated parameters.

    build is a function without arguments that returns (model, loss_fn, batch), or a list of global batches, and pins
    as a fourth where wanted. The exit code is 0 within the tolerances, 1 beyond them, and 2 where nothing was compared.
    """
    from shardwright.run.verify_file import verify_file

    sys.exit(verify_file(target, ranks, options | {"dtypes": dtypes or ("float64", "float32")}))


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
    import os

    from shardwright.launch.environment import read_environment

    try:
        from shardwright.zoo import train as zoo

        if ranks is None:
            zoo.train(config, overrides)
            return
    except KeyboardInterrupt:
        if read_environment(os.environ).size == 1:  # else the launcher says it, once
            click.echo("shardwright: interrupted", err=True)
        sys.exit(130)
    from shardwright.launch.local import launch as launch_job

    job = zoo.job(config, overrides, ranks)
    zoo.prepare(config, overrides, job.ranks)
    sys.exit(launch_job(job))


@cli.group()
def ranktable() -> None:
    """Rank tables: which device of which server each rank has."""


_PRODUCT = click.option(
    "--product", type=click.Choice(["8-device", "any"]), default="8-device", show_default=True, help="Whose rules hold."
)
_OUT = click.option("--out", metavar="FILE", help="Where to; without it, into this folder under a name that says what.")
_FORCE = click.option("--force", is_flag=True, help="Replace another file that is there already.")


def _write_table(table: Any, notes: list[str], out: str | None, force: bool) -> None:
    from shardwright.cluster.ranktable import file_name, write

    for note in notes:
        click.echo(f"shardwright: {note}", err=True)
    click.echo(write(table.to_json(), out, file_name(table), force))


@ranktable.command("make")
@click.option("--address-file", metavar="FILE", help="Lines address_N=IP; without it /etc/hccn.conf, or hccn_tool.")
@click.option(
    "--server-id", default="127.0.0.1", show_default=True, metavar="IP", help="By which others reach this host."
)
@_PRODUCT
@_OUT
@_FORCE
@click.argument("devices", metavar='"[0,8)"')
def make_table(
    devices: str, address_file: str | None, server_id: str, product: str, out: str | None, force: bool
) -> None:
    """Write the table of this host's devices: a range without its end, "[4,8)", or a list, "{1,2}"."""
    from pathlib import Path

    from shardwright.cluster.ranktable import PRODUCTS, find_addresses, make, read_devices

    ids, rules = read_devices(devices), PRODUCTS[product]
    make(ids, {}, server_id, rules)  # what is not allowed is said before devices are asked
    addresses, note = find_addresses(ids, Path(address_file) if address_file is not None else None)
    _write_table(make(ids, addresses, server_id, rules), [note] if note else [], out, force)


@ranktable.command("merge")
@_PRODUCT
@_OUT
@_FORCE
@click.argument("tables", metavar="A.json B.json", nargs=-1)
def merge_table(tables: tuple[str, ...], product: str, out: str | None, force: bool) -> None:
    """Join the tables of several servers; ranks follow the sorted server ids."""
    from pathlib import Path

    from shardwright.cluster.ranktable import PRODUCTS, merge

    _write_table(merge([Path(table) for table in tables], PRODUCTS[product]), [], out, force)


@ranktable.command("check")
@_PRODUCT
@click.argument("table", metavar="FILE.json")
def check_table(table: str, product: str) -> None:
    """Say everything that is wrong with a table. The exit code is 0 where nothing is, 1 where something is."""
    from pathlib import Path

    from shardwright.cluster.ranktable import PRODUCTS, check

    read, problems, notes = check(Path(table), PRODUCTS[product])
    for problem in problems:
        click.echo(f"{table}: {problem}", err=True)
    for note in notes:
        click.echo(f"{table}: note: {note}", err=True)
    if problems:
        sys.exit(1)
    click.echo(read)


@ranktable.command("from-hostfile")
@_PRODUCT
@_OUT
@_FORCE
@click.argument("hostfile", metavar="FILE")
def table_from_hostfile(hostfile: str, product: str, out: str | None, force: bool) -> None:
    """Write the table of a hostfile's hosts, with as many devices of each as it has slots."""
    from pathlib import Path

    from shardwright.cluster.ranktable import PRODUCTS, from_hostfile

    table, notes = from_hostfile(Path(hostfile), PRODUCTS[product])
    _write_table(table, notes, out, force)


@ranktable.command("to-hostfile")
@click.option("--out", metavar="FILE", help="Where to; without it, the lines are shown.")
@_FORCE
@click.argument("table", metavar="FILE.json")
def table_to_hostfile(table: str, out: str | None, force: bool) -> None:
    """Show or write the hostfile of a table: each server with as many slots as it has ranks."""
    from pathlib import Path

    from shardwright.cluster.ranktable import write
    from shardwright.launch.rank_table import read_rank_table

    text = read_rank_table(Path(table)).hosts().to_hostfile()
    click.echo(text if out is None else f"{write(text, out, 'hostfile', force)}\n", nl=False)


@cli.group()
def checkpoint() -> None:
    """Look at checkpoints, verify them, and exchange them with others."""


@checkpoint.command()
@click.option("--entries", is_flag=True, help="Every tensor and value too.")
@click.argument("where", metavar="DIR")
def show(where: str, entries: bool) -> None:
    """Show what is in a checkpoint.

    DIR is one checkpoint, or a directory of them: then all are listed, and the latest is shown. A URL will do.
    """
    from shardwright.checkpoint.show import print_shown

    print_shown(where, entries)


@checkpoint.command("verify")
@click.argument("where", metavar="DIR")
def verify_checkpoint(where: str) -> None:
    """Read every byte of a checkpoint, or of all in a directory, and compare it with what was written.

    There is one line for each damage, and then the exit code is 1.
    """
    from shardwright.checkpoint.verify import verify as verify_all

    found = verify_all(where)
    for line in (line for verified in found for line in verified.lines()):
        click.echo(line)
    sys.exit(1 if any(verified.damage for verified in found) else 0)


@checkpoint.command()
@click.option("--to", required=True, metavar="FILE|FOLDER/", help="A .safetensors, .pt or .pth file, or a folder.")
@click.option("--what", type=click.Choice(["model", "ema", "all"]), default="model", show_default=True, help="Of it.")
@click.argument("where", metavar="DIR")
def merge(where: str, to: str, what: str) -> None:
    """Write a checkpoint as one file that needs nothing of ours.

    \b
    shardwright checkpoint merge runs/a --to model.safetensors
    shardwright checkpoint merge runs/a --to model.pt            for torch.load and load_state_dict
    shardwright checkpoint merge runs/a --to folder/             for from_pretrained of transformers

    DIR is one checkpoint, or a directory of them: then it is the latest.
    """
    from shardwright.checkpoint.merge import merge as merge_to

    merged = merge_to(where, to, what)
    click.echo(f"{merged.path}: {merged.tensors} tensors, {merged.size_bytes:,} bytes")
    if merged.left_out:
        names = ", ".join(merged.left_out[:5]) + (" ..." if len(merged.left_out) > 5 else "")
        click.echo(f"left out, as safetensors holds tensors only: {len(merged.left_out)} values: {names}")


@checkpoint.command()
@click.option("--to", required=True, metavar="DIR", help="A new directory of checkpoints.")
@click.option("--ranks", default=1, show_default=True, help="Into how many files each tensor is cut.")
@click.argument("file", metavar="FILE")
def split(file: str, to: str, ranks: int) -> None:
    """Make a checkpoint, which any number of ranks loads, of a .pth, .pt or .safetensors file.

    FILE may also be a folder of transformers, or a URL. Of a file that has more than a model in it, the model is taken.
    """
    from shardwright.checkpoint.exchange import split as split_file

    saved = split_file(file, to, ranks)
    size = sum(record.size_bytes for record in saved.files.values())
    click.echo(f"{to}/step-00000000: {len(saved.entries)} entries, {len(saved.files)} files, {size:,} bytes")


@cli.command()
@click.option("--every", "every_s", default=1.0, show_default=True, metavar="SECONDS", help="Between two looks.")
@click.option("--count", type=int, metavar="N", help="How many looks; without it until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each device and look.")
@click.option("--sysfs", default="/sys", show_default=True, metavar="DIR", help="Where the host's /sys is mounted.")
@click.argument("devices", metavar="[DEVICE]...", nargs=-1)
def traffic(devices: tuple[str, ...], every_s: float, count: int | None, as_json: bool, sysfs: str) -> None:
    """Show bytes and rates in and out of InfiniBand and Ethernet devices, errors and drops beside them.

    DEVICE is eth0, or mlx5_0/1 for one port and mlx5_0 for all of them; without any, all that are up but the loopback.
    Ctrl-C ends it with what was moved altogether.
    """
    from pathlib import Path

    from shardwright.cluster.traffic import show

    show(devices, every_s, count, as_json, Path(sysfs))


@cli.command()
@click.option("-n", "number", metavar="N", help="Ranks to start; under a launcher, iterations as in nccl-tests.")
@click.option("--ranks", metavar="N", help="How many ranks to start; without it one per visible GPU, or one.")
@click.option("--iters", type=int, metavar="N", help="Calls that are timed together.  [default: 20]")
@click.option("-w", "--warmup", default=5, show_default=True, metavar="N", help="Calls before them.")
@click.option("-b", "begin", metavar="SIZE", help="The smallest size: 8, 1K, 1.5M, 1024M, 1G.  [default: 32M]")
@click.option("-e", "end", metavar="SIZE", help="The largest size.  [default: 32M]")
@click.option("-f", "factor", type=int, metavar="N", help="Each size is so many times the last.")
@click.option("-i", "step", metavar="SIZE", help="Without -f, each size is so much larger.  [default: 1M]")
@click.option("-d", "dtype", default="float", show_default=True, metavar="TYPE", help="half, double, int8, ...")
@click.option("-o", "reduction", default="sum", show_default=True, metavar="OP", help="sum, prod, max or min.")
@click.option("-r", "root", default=0, show_default=True, metavar="RANK", help="Who broadcasts.")
@click.option("-c", "check", default=1, show_default=True, metavar="N", help="Calls that are checked; 0 checks none.")
@click.option("-g", "devices", default=1, show_default=True, metavar="1", help="Devices of a rank.")
@click.option("--backend", metavar="NAME", help="gloo, nccl or mpi; without it what sw.init() takes.")
@click.option("--json", is_flag=True, help="Print JSON in place of the tables.")
@click.option("--save-profile", "profile", metavar="FILE.json", help="Measure the machine for the planner too.")
@click.argument("collective", required=False)
def bench(collective: str | None, **options: Any) -> None:
    """Time and check collectives; print them as nccl-tests does.

    \b
    shardwright bench all_reduce -n 8 -b 8 -e 1G -f 2
    mpirun -n 2 shardwright bench all_reduce -b 8 -e 128M -f 2 -g 1
    shardwright bench -n 2 --save-profile hardware.json

    COLLECTIVE is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, sendrecv, or all of them. -n is the
    number of ranks, which this command starts; where a launcher has started them already (mpirun, torchrun, shardwright
    launch), -n is the number of iterations. The exit code is 0, or 1 where an element of some row was wrong.
    """
    from shardwright.cluster.bench_command import bench as run

    sys.exit(run(collective, **options))


def main() -> None:
    """The entry point: our own errors are one readable message and exit code 2, not a traceback."""
    try:
        cli()
    except ShardwrightError as error:
        click.echo(f"shardwright: {error}", err=True)
        sys.exit(2)
