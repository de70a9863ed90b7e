"""The formats in which a job can be printed, as one table: a person chooses with ``--print``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.errors import UsageError
from shardwright.launch.carriers.srun import batch_script
from shardwright.launch.carriers.torchrun import command_lines
from shardwright.launch.manifests import kubernetes, mpirun
from shardwright.launch.options.carrier_facts import SRUN, TORCHRUN
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest


@dataclass(frozen=True)
class PrintRequest:
    """The ``words`` as they were typed, and the ``request`` that they make."""

    words: Sequence[str]
    request: LaunchRequest
    image: str | None = None


def _torchrun(asked: PrintRequest) -> tuple[str, list[str]]:
    options = read_options(replace(asked.request, via=TORCHRUN.name))
    if options.stall_timeout_s is not None:
        TORCHRUN.refuse("--stall-timeout without --run")
    return command_lines(options), []


PRINTED: Mapping[str, Callable[[PrintRequest], tuple[str, list[str]]]] = {
    "k8s": lambda asked: kubernetes.manifest(asked.request, asked.image),
    "slurm": lambda asked: (batch_script(asked.words, asked.request), []),
    "torchrun": _torchrun,
    "mpirun": lambda asked: mpirun.script(asked.request),
}
"""By name: the text, and lines that a person is to read beside it."""
_OWN_CARRIER = {"slurm": SRUN.name, "torchrun": TORCHRUN.name, "mpirun": "mpirun"}


def printed(to: str, asked: PrintRequest) -> tuple[str, list[str]]:
    """Return the text that runs the job elsewhere, and lines to read beside it.

    Raises `UsageError` for options that it cannot serve.
    """
    if asked.image is not None and to != "k8s":
        raise UsageError(f"--image {asked.image} is for --print k8s; leave it out")
    via = asked.request.via
    if via is not None and via != _OWN_CARRIER.get(to):
        raise UsageError(f"--print {to} and --via {via} are two ways to start the job; type one of them")
    request = asked.request if to == "slurm" else replace(asked.request, via=None)
    return PRINTED[to](replace(asked, request=request))
