"""The command that starts a job, `shardwright launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import click

from shardwright.cli.group import HOST_SLOTS, HOSTFILE, LOG_DIR, PYTHON, TIMEOUT, WDIR, RowOf, file_names
from shardwright.launch.options.other_options import OTHER_OPTIONS

_WORDS = "shardwright.launch.words"
_OTHER = "other_option_{}"


class _LaunchCommand(click.Command):
    """A command that keeps a ``--`` before the program, and takes hidden options of other launchers."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.params += [
            click.Option(
                [*option.names, _OTHER.format(number)],
                is_flag=not option.value,
                nargs=len(option.value.split()) or 1,
                metavar=option.value or None,
                hidden=True,
            )
            for number, option in enumerate(OTHER_OPTIONS)
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = args
        if "--" in args:
            args = [*args[: args.index("--")], "--", *args[args.index("--") :]]  # one for click, or for us below
        ctx.meta[_WORDS] = tuple(typed)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown(error, ctx.meta[_WORDS]) from None
        command = list(ctx.params["command"])
        ctx.params["program"] = command[:1] == ["--"]
        if "--" in command:
            command.remove("--")
        ctx.params["command"] = tuple(command)
        return rest


def _unknown(error: click.NoSuchOption, typed: Sequence[str]) -> click.NoSuchOption:
    """Return the error with the whole word, of which click names only the first letter behind one `-`."""
    begin = error.option_name
    word = next((word for word in typed if word.replace("_", "-").startswith(begin)), begin).partition("=")[0]
    others = "those of other launchers that are not known here are best left out; type --help for ours"
    return click.NoSuchOption(word, f"No such option: {word}; {others}", error.possibilities, error.ctx)


@click.command(
    cls=_LaunchCommand,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")},
)
@click.option("-n", "--ranks", metavar="N", help="How many ranks; without it one per slot of the hosts, or per GPU.")
@click.option("-m", "--module", is_flag=True, help="The program is a module, as in `python -m`.")
@click.option(
    "-x", "--env", "variables", multiple=True, metavar="[HOST:]VAR[=VALUE]", help="Set or pass on a variable."
)
@click.option("--tee", metavar="all|none|0,3", help="The ranks to show on the console.  [default: 0]")
@click.option("--job", metavar="NAME", help="The job's name; without it the next free number.")
@LOG_DIR
@click.option("--port", type=int, help="The port where the ranks meet; without it a free one is chosen.")
@click.option("--devices", metavar="4,5", help="The GPUs to use, as CUDA_VISIBLE_DEVICES.")
@click.option("--rank-table", metavar="FILE.json", help="The ranks and devices of a rank table, in place of -n.")
@click.option(
    "--grace",
    "grace_s",
    default=10.0,
    metavar="SECONDS",
    help="Between asking ranks to end and kill.",
)
@click.option(
    "--save-graphs",
    metavar="DIR[:LEVEL]",
    help="Ranks dump what they run to DIR/rank_N: level 1 the strategies, level 2 (the default) the local program too. "
    "Sets SHARDWRIGHT_SAVE_GRAPHS, which sw.parallelize reads where its save_graphs= is not given.",
)
@click.option(
    "--via",
    type=RowOf("shardwright.launch.options.carrier_facts", "CARRIERS"),
    help="Who starts the ranks; torchrun prints its command for each host.  "
    "[default: ssh where there are other hosts, else local]",
)
@click.option("--run", is_flag=True, help="With --via torchrun: run those commands.")
@click.option(
    "--print",
    "to",
    type=RowOf("shardwright.launch.manifests", "PRINTED"),
    help="Write what runs this job elsewhere, and end: a PyTorchJob, a script for sbatch, or commands.",
)
@click.option("--print-sbatch", is_flag=True, help="The same as --print slurm.")
@click.option("--image", metavar="NAME", help="With --print k8s: the image of the containers.")
@HOST_SLOTS
@HOSTFILE
@click.option("--oversubscribe", is_flag=True, help="Let -n be more than the slots of all hosts.")
@PYTHON
@WDIR
@click.option(
    "--stage",
    multiple=True,
    metavar="PATH",
    help="Copy a file or folder into a fresh folder on each host, where ranks run.",
)
@click.option("--keep-stage", is_flag=True, help="Leave those folders when the job has ended.")
@click.option(
    "--collect-logs/--no-collect-logs",
    default=True,
    help="Bring the logs of all hosts here as they are written, or leave each on the host of its rank.",
)
@click.option("--interface", metavar="NAME", help="The network interface of the first host by which ranks meet.")
@click.option(
    "--lease",
    "lease_s",
    default=10.0,
    metavar="SECONDS",
    help="A host not heard from for so long is lost, and a host that does not hear of us ends its ranks.",
)
@TIMEOUT
@click.option(
    "--backend",
    type=RowOf("shardwright.distributed.backends.table", "BACKENDS"),
    help="For sw.init() where it is given none.",
)
@click.option("--mca", "-mca", "mca", multiple=True, nargs=2, metavar="NAME VALUE", help="A setting for mpirun.")
@click.option(
    "--bind-to",
    type=click.Choice(["core", "none"]),
    default="core",
    help="Give each rank its share of the cores, where they can be shared evenly and there are no GPUs.",
)
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    metavar="K",
    help="Start a job that failed again, so many times at most.",
)
@click.option("--elastic", is_flag=True, help="A restart does without hosts that are lost.")
@click.option("--min-ranks", type=int, metavar="N", help="The fewest ranks of an elastic job.  [default: 1]")
@click.option(
    "--stall-timeout",
    "stall_timeout_s",
    type=float,
    metavar="SECONDS",
    help="When no rank finishes a step or writes anything for so long, show where each is, and end the job with exit "
    "code 124.  [default: never]",
)
@click.option(
    "--on-stall",
    type=click.Choice(["end", "report"]),
    help="With report such a job is shown and goes on.  [default: end]",
)
@click.option("--no-preload", is_flag=True, help="Start each rank as a new interpreter instead of forking it.")
@click.option("--detach", is_flag=True, help="Run in the background; follow with `shardwright logs -f`.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=file_names)
def launch(run: bool, to: str | None, print_sbatch: bool, image: str | None, **words: Any) -> None:
    """Run a program on N processes of this host or of several, with torchrun's variables set.

    \b
    shardwright launch -n 8 train.py ARGS
    shardwright launch -n 8 -m package.module ARGS
    shardwright launch -n 8 -- PROGRAM ARGS
    shardwright launch -n 8 --via mpirun --backend mpi train.py ARGS
    shardwright launch -H a:8,b:8 train.py ARGS
    shardwright launch -n 16 --print slurm train.py ARGS | sbatch -N 2
    shardwright launch -H a:8,b:8 --print k8s --image NAME train.py ARGS | kubectl apply -f -

    The first rank that fails ends the job, and its exit code is the command's. Ctrl-C, TERM, HUP and QUIT are passed on
    and end the job after the grace; a second Ctrl-C kills it at once. USR1 and USR2 are passed on and end nothing.
    """
    from shardwright.launch.options.launch_options import read_options
    from shardwright.launch.options.other_options import TypedCommand, notes_on_meaning, translated
    from shardwright.launch.options.request import HostRequest, LaunchRequest, RestartOptions
    from shardwright.launch.start import STARTS
    from shardwright.launch.start import launch as launch_job

    typed = click.get_current_context().meta[_WORDS]
    others = {option: words.pop(_OTHER.format(number)) for number, option in enumerate(OTHER_OPTIONS)}
    said = {option: str(value) for option, value in others.items() if value not in (None, False)}
    for line in notes_on_meaning(said, words):
        click.echo(f"shardwright: {line}", err=True)
    words["allocation"] = os.environ
    if said:
        before = len(typed) - len(words["command"])  # the last are the program
        words = translated(said, words, TypedCommand(typed[:before], typed[before:]))
    program, module = words.pop("program"), words.pop("module")
    restarts = RestartOptions.read(*(words.pop(word) for word in ("max_restarts", "elastic", "min_ranks")))
    of_hosts = {entry.name: words.pop(entry.name) for entry in fields(HostRequest) if entry.name in words}
    request = LaunchRequest(
        arguments=words.pop("command"), kind="program" if program else "module" if module else "script",
        preload=not words.pop("no_preload"), restarts=restarts, where=HostRequest(**of_hosts),
        **words,
    )  # fmt: skip
    if to is not None or print_sbatch:
        from shardwright.launch.manifests import printed

        text, notes = printed(to or "slurm", request, typed, image)
        for note in notes:
            click.echo(f"shardwright: {note}", err=True)
        click.echo(os.fsencode(text), nl=False)  # with file names that are not UTF-8 as they are
        return
    if image is not None:
        raise click.UsageError("--image is for --print k8s")
    job = read_options(request)
    if job.start_command is not None and job.start_command.note:
        click.echo(f"shardwright: {job.start_command.note}", err=True)
    commands = STARTS[job.carrier.name].commands
    if run and commands is None:
        printing = " or ".join(f"--via {name}" for name, row in STARTS.items() if row.commands is not None)
        raise click.UsageError(f"--run belongs to {printing}; without it jobs run anyway")
    if commands is None or run:
        sys.exit(launch_job(job))
    if job.stall_timeout_s is not None:
        job.carrier.refuse("--stall-timeout without --run")
    click.echo(os.fsencode(commands(job)), nl=False)
