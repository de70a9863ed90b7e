"""A job by torchrun: its command for each host, printed, or run by this launcher with one torchrun per host.

launcher ─┬─ agent ── supervisor ── torchrun ── ranks 0-1     host a
          └─ agent ── supervisor ── torchrun ── ranks 2-3     host b
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace

from shardwright.common.step_lines import TELLS_VARIABLE
from shardwright.launch.host.program import Program
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.options.launch_options import LaunchOptions

PORT = 29500  # torchrun's own habit
MODULE = "torch.distributed.run"
# The launcher's variables say where the torchruns meet. It listens to one rank of each, the first.
_RUN = (
    'export {tells}=0; {unset}exec "$TORCHRUN_PYTHON" -m torch.distributed.run '
    '--nnodes="$WORLD_SIZE" --node-rank="$RANK" '
    '--nproc-per-node="$TORCHRUN_RANKS" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"'
)


def command_lines(options: LaunchOptions) -> str:
    """Return a command per host, each below a comment with its name, to be typed at about the same time."""
    remote, here = options.remote, os.getcwd()
    restarts = [f"--max-restarts={options.restarts.limit}"] if options.restarts.limit else []
    if remote is None:
        words = ["--standalone", f"--nproc-per-node={options.ranks}", *restarts]
        return _line(here, {}, options, sys.executable, words)
    placement = placement_of(options)
    first = placement.hosts[0].name
    lines = []
    for index, (host, ranks) in enumerate(zip(placement.hosts, placement.ranks, strict=True)):
        words = [
            f"--nnodes={len(placement.hosts)}", f"--node-rank={index}", f"--nproc-per-node={len(ranks)}",
            f"--master-addr={first}", f"--master-port={options.port or PORT}", *restarts,
        ]  # fmt: skip
        python = remote.python.on(host.name) or sys.executable
        own = dict(remote.variables.get(host.name, {}))
        line = _line(remote.wdir.on(host.name) or here, own, options, python, words)
        lines.append(f"# on {host.address}\n{line}")
    return "\n".join(lines)


def one_per_host(options: LaunchOptions) -> LaunchOptions:
    """Return the job whose ranks are torchruns, one for each host."""
    set_by_user = "OMP_NUM_THREADS" in os.environ | options.environment
    text = _RUN.format(tells=TELLS_VARIABLE, unset="" if set_by_user else "unset OMP_NUM_THREADS; ")
    program = Program("program", ("sh", "-c", text, "torchrun", *program_words(options.program)))
    job = replace(options, program=program, preload=False, bind=False, by_torchrun=True)
    remote = options.remote
    if remote is None:
        own = {"TORCHRUN_PYTHON": sys.executable, "TORCHRUN_RANKS": str(options.ranks)}
        return replace(job, ranks=1, shown=options.shown and frozenset({0}), rank_environments={0: own})
    placement = placement_of(options)
    environments = {
        index: {
            "TORCHRUN_PYTHON": remote.python.on(host.name) or sys.executable,
            "TORCHRUN_RANKS": str(len(ranks)),
        }
        for index, (host, ranks) in enumerate(zip(placement.hosts, placement.ranks, strict=True))
    }
    hosts = Hosts(tuple(replace(host, slots=1) for host in placement.hosts))
    return replace(job, rank_environments=environments, remote=replace(remote, hosts=hosts, ranks=None))


def placement_of(options: LaunchOptions) -> Placement:
    """Return the placement of the ranks on the hosts of a job."""
    assert options.remote is not None
    return Placement.by_slots(options.remote.hosts, options.remote.ranks, options.remote.oversubscribe)


def _line(wdir: str, own: dict[str, str], options: LaunchOptions, python: str, words: list[str]) -> str:
    variables = [f"{name}={value}" for name, value in (options.environment | own).items()]
    command = [*(["env", *variables] if variables else []), python, "-m", MODULE, *words]
    return f"cd {shlex.quote(wdir)} && {shlex.join([*command, *program_words(options.program)])}\n"


def program_words(program: Program) -> list[str]:
    """Return the words that name a program on the command line of torchrun."""
    kinds = {"script": [], "module": ["-m"], "program": ["--no-python"]}
    return [*kinds[program.kind], *program.arguments]
