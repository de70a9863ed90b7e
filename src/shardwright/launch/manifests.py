"""A job as somebody else starts it: the formats of ``--print``, and the options that each cannot serve.

A PyTorchJob of Kubeflow's training operator, v1, has a pod for each host with a torchrun in it. Variables of the
operator (``PET_...``) tell each how many pods there are, which of them it is and where they meet.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import yaml

from shardwright.errors import UsageError
from shardwright.launch.carriers.connection import ALLOCATOR_VARIABLES, default_environment, where_unset
from shardwright.launch.carriers.srun import batch_script
from shardwright.launch.carriers.torchrun import MODULE, PORT, command_lines, placement_of, program_words
from shardwright.launch.host.program import unchecked_program
from shardwright.launch.hosts.hosts import is_host_name
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.options.carrier_facts import MPIRUN, SRUN, TORCHRUN, check_mca, mpirun_command
from shardwright.launch.options.launch_options import LaunchOptions, check_numbers, read_options
from shardwright.launch.options.request import HostRequest, LaunchRequest, read_count
from shardwright.launch.options.save_graphs import VARIABLE, SaveGraphs
from shardwright.launch.options.variables import NCCL, read_backend, read_variables, split_variables

# What the job is, or where; without one of these it would be another.
_OF_THE_JOB = {
    "ranks": "-n", "variables": "-x", "port": "--port", "devices": "--devices", "rank_table": "--rank-table",
    "save_graphs": "--save-graphs", "via": "--via", "backend": "--backend", "mca": "--mca", "stage": "--stage",
    "interface": "--interface", "python": "--python", "wdir": "--wdir", "oversubscribe": "--oversubscribe",
}  # fmt: skip
# How this launcher starts it, watches it and keeps what it says.
_OF_THE_LAUNCHER = {
    "job": "--job", "tee": "--tee", "log_dir": "--log-dir", "grace_s": "--grace", "preload": "--no-preload",
    "bind_to": "--bind-to", "stall_timeout_s": "--stall-timeout", "on_stall": "--on-stall", "detach": "--detach",
    "restarts": "--max-restarts", "keep_stage": "--keep-stage", "collect_logs": "--no-collect-logs",
    "lease_s": "--lease", "connect_timeout_s": "--connect-timeout",
}  # fmt: skip


def left_out(request: LaunchRequest, starter: str, serves: Collection[str]) -> str:
    """Return a line that names the options of this launcher alone that were typed; empty where there are none.

    ``serves`` are the fields that ``starter`` has a word for. Raises `UsageError` for another that makes the job what
    it is.
    """
    typed = _typed(request) - set(serves)
    if refused := [option for name, option in _OF_THE_JOB.items() if name in typed]:
        raise UsageError(f"{', '.join(refused)}: {starter} has nothing like it; leave it out of --print")
    names = [option for name, option in _OF_THE_LAUNCHER.items() if name in typed]
    return f"left out, as this launcher alone has it: {', '.join(names)}" if names else ""


def _typed(request: LaunchRequest) -> set[str]:
    usual = ((request, LaunchRequest(arguments=())), (request.where, HostRequest()))
    return {
        entry.name
        for asked, plain in usual
        for entry in fields(plain)
        if getattr(asked, entry.name) != getattr(plain, entry.name)
    }


def for_all_hosts(option: str, words: Sequence[str], starter: str) -> str | None:
    """Return the one value of an option that could differ between hosts. Raises `UsageError` where it does."""
    for word in words:
        name, equals, _ = word.partition("=")
        if len(words) > 1 or (equals and is_host_name(name)):
            raise UsageError(f"{option} {word}: {starter} has one for all hosts; type it once, without a host")
    return words[0] if words else None


_PYTORCH_JOB = "a PyTorchJob"
_BY_PYTORCH_JOB = (
    "ranks", "variables", "port", "save_graphs", "backend", "python", "wdir", "oversubscribe", "job", "grace_s",
    "restarts",
)  # fmt: skip
_NO_IMAGE = "IMAGE"
_SHM = "shm"
_LONGEST_NAME = 50  # Kubernetes allows 63 for the name of a pod, which goes on with -worker-N


def manifest(request: LaunchRequest, image: str | None) -> tuple[str, list[str]]:
    """Return the manifest, with this ``image``, and notes for the person. Raises `UsageError` where it can be none."""
    notes = [left_out(request, _PYTORCH_JOB, _BY_PYTORCH_JOB)]
    check_numbers(request)
    if request.grace_s == math.inf:
        raise UsageError(f"--grace inf: the pods of {_PYTORCH_JOB} end at some time; type seconds")
    if request.restarts.elastic:
        raise UsageError(f"--elastic: {_PYTORCH_JOB} of --print has as many pods from start to end; leave it out")
    pods, ranks = _pods(request)
    if image is None:
        notes.append(f"put the image in place of {_NO_IMAGE}, or type --image NAME: one with torch and the program")
    name = _name(request)
    body = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(ranks),
            "runPolicy": {"backoffLimit": request.restarts.limit},
            "pytorchReplicaSpecs": _replicas(pods, _pod(request, ranks, image or _NO_IMAGE), request),
        },
    }
    head = (
        f"# {pods} pod{'s' * (pods != 1)} of {ranks} rank{'s' * (ranks != 1)}, by the training operator of Kubeflow.\n"
        f"# kubectl apply -f FILE          starts it\n"
        f"# kubectl logs -f {name}-master-0  shows what it says\n"
    )
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        got = error.object[error.start : error.end]
        raise UsageError(f"{got!r} is not UTF-8, which a manifest has to be; give it another name") from None
    text = yaml.safe_dump(body, sort_keys=False, width=math.inf)
    return head + text, [note for note in notes if note]


def _pods(request: LaunchRequest) -> tuple[int, int]:
    """Return the number of pods, one for each host that is named, whatever its name, and of ranks in each."""
    hosts, _ = request.where.named(None)
    count = read_count(request.ranks)
    if hosts is None:
        if count is None:
            raise UsageError("--print k8s: how many ranks? type -n 8 for one pod, or -H a:8,b:8 for two of eight each")
        return 1, count
    placement = Placement.by_slots(hosts, count, request.where.oversubscribe)
    sizes = {len(ranks) for ranks in placement.ranks}
    if len(sizes) > 1:
        raise UsageError(
            f"the pods of {_PYTORCH_JOB} are alike, but those of {hosts.to_list()} have "
            f"{' and '.join(str(len(ranks)) for ranks in placement.ranks)} ranks"
        )
    return len(placement.hosts), sizes.pop()


def _name(request: LaunchRequest) -> str:
    """Return the name of the job, of lower-case letters, digits and `-`, as Kubernetes wants it."""
    wanted = request.job or os.path.basename(request.arguments[0]).removesuffix(".py")
    name = re.sub(r"[^a-z0-9-]+", "-", wanted.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    if request.job is not None and name != request.job:
        raise UsageError(f"--job {request.job} cannot name a PyTorchJob; type --job {name}")
    return name


def _replicas(pods: int, pod: dict[str, Any], request: LaunchRequest) -> dict[str, Any]:
    policy = "OnFailure" if request.restarts.limit else "Never"
    counts = {"Master": 1, "Worker": pods - 1}
    return {
        kind: {"replicas": count, "restartPolicy": policy, "template": {"spec": pod}}
        for kind, count in counts.items()
        if count
    }


def _pod(request: LaunchRequest, ranks: int, image: str) -> dict[str, Any]:
    wdir = for_all_hosts("--wdir", request.where.wdir, _PYTORCH_JOB)
    container: dict[str, Any] = {"name": "pytorch", "image": image}
    if wdir is not None:
        container["workingDir"] = wdir
    container["command"] = _command(request)
    if variables := _variables(request):
        container["env"] = [{"name": name, "value": _literal(value)} for name, value in variables.items()]
    if request.port is not None:
        container["ports"] = [{"name": "pytorchjob-port", "containerPort": request.port}]
    if request.backend in (None, NCCL):
        container["resources"] = {"limits": {"nvidia.com/gpu": ranks}}
    # A container has 64 MiB of /dev/shm, which NCCL and the workers of loaders use up at once.
    container["volumeMounts"] = [{"name": _SHM, "mountPath": "/dev/shm"}]
    return {
        "terminationGracePeriodSeconds": max(1, round(request.grace_s)),
        "containers": [container],
        "volumes": [{"name": _SHM, "emptyDir": {"medium": "Memory"}}],
    }


def _command(request: LaunchRequest) -> list[str]:
    python = for_all_hosts("--python", request.where.python, _PYTORCH_JOB) or "python"
    program = unchecked_program(request.kind, request.arguments)
    return [_literal(word) for word in (python, "-m", MODULE, *program_words(program))]


def _literal(word: str) -> str:
    """Escape a word, since Kubernetes replaces ``$(NAME)`` by a variable, and ``$$`` by ``$``."""
    return word.replace("$", "$$")


def _variables(request: LaunchRequest) -> dict[str, str]:
    words, by_host = split_variables(request.variables)
    if by_host:
        raise UsageError(f"-x {next(iter(by_host))}:...: the pods of {_PYTORCH_JOB} are alike; type it without a host")
    read = read_variables(words, os.environ)
    read |= read_backend(request.backend, TORCHRUN)
    if request.save_graphs is not None:
        read[VARIABLE] = str(SaveGraphs.parse(request.save_graphs))
    return read


_BY_MPIRUN = (
    "ranks", "variables", "port", "devices", "save_graphs", "backend", "mca", "python", "wdir", "oversubscribe",
)  # fmt: skip
_PLACES = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
# mpirun says each rank's place in variables of its own; scripts of torch read torchrun's.
_TELL = f'export {" ".join(f"{ours}=$OMPI_COMM_WORLD_{its}" for ours, its in _PLACES.items())}; exec "$@"'


def mpirun_script(request: LaunchRequest) -> tuple[str, list[str]]:
    """Return the script for the first host, and notes. Raises `UsageError` where mpirun cannot run the job."""
    note = left_out(request, MPIRUN.name, _BY_MPIRUN)
    check_mca(request.mca)
    options = read_options(replace(request, mca=(), backend=None))
    python = for_all_hosts("--python", request.where.python, MPIRUN.name) or sys.executable
    wdir = for_all_hosts("--wdir", request.where.wdir, MPIRUN.name) or os.getcwd()
    hosts, ranks, most, first = _placed(options)
    defaults = default_environment(len(os.sched_getaffinity(0)), most)
    chosen = {name: os.environ[name] for name in (*defaults, *ALLOCATOR_VARIABLES) if name in os.environ}
    variables = where_unset(defaults, chosen | options.environment) | chosen
    variables |= options.environment | read_backend(request.backend, MPIRUN)
    variables |= {"MASTER_ADDR": first, "MASTER_PORT": str(request.port or PORT)}
    start = mpirun_command("mpirun", ranks, request.mca, root=os.geteuid() == 0, hosts=hosts)
    command = options.program.command_line()
    if options.program.kind != "program":
        command[0] = python
    lines = [
        shlex.join(start),
        shlex.join(word for name, value in variables.items() for word in ("-x", f"{name}={value}")),
        f"sh -c {shlex.quote(_TELL)} sh",
        shlex.join(command),
    ]
    text = " \\\n    ".join(lines)
    return f"#!/bin/sh\ncd {shlex.quote(wdir)} || exit\nexec {text}\n", [note] if note else []


def _placed(options: LaunchOptions) -> tuple[str, int, int, str]:
    """Return the hosts as mpirun takes them, the ranks of all and the most of one, and the address where ranks meet."""
    if options.remote is None:
        return f"localhost:{options.ranks}", options.ranks, options.ranks, "127.0.0.1"
    if options.remote.variables:
        raise UsageError(f"-x {next(iter(options.remote.variables))}:...: mpirun gives all hosts the same variables")
    placement = placement_of(options)
    if user := next((host.user for host in placement.hosts if host.user), None):
        raise UsageError(f"{user}@: mpirun logs in as ~/.ssh/config says; set User there, and leave {user}@ out")
    counts = [len(ranks) for ranks in placement.ranks]
    named = [f"{host.name}:{count}" for host, count in zip(placement.hosts, counts, strict=True)]
    return ",".join(named), placement.size, max(counts), placement.hosts[0].name


def _torchrun(request: LaunchRequest, _words: Sequence[str], _image: str | None) -> tuple[str, list[str]]:
    options = read_options(replace(request, via=TORCHRUN.name))
    if options.stall_timeout_s is not None:
        TORCHRUN.refuse("--stall-timeout without --run")
    return command_lines(options), []


PRINTED: Mapping[str, Callable[[LaunchRequest, Sequence[str], str | None], tuple[str, list[str]]]] = {
    "k8s": lambda request, words, image: manifest(request, image),
    "slurm": lambda request, words, image: (batch_script(words, request), []),
    "torchrun": _torchrun,
    "mpirun": lambda request, words, image: mpirun_script(request),
}
"""By name: the text, and lines that a person is to read beside it, of what `printed` takes."""
_OWN_CARRIER = {"slurm": SRUN.name, "torchrun": TORCHRUN.name, "mpirun": "mpirun"}


def printed(to: str, request: LaunchRequest, words: Sequence[str], image: str | None = None) -> tuple[str, list[str]]:
    """Return the text that runs the job elsewhere, and lines to read beside it.

    ``words`` are those that were typed, which make the ``request``.

    Raises `UsageError` for options that it cannot serve.
    """
    if image is not None and to != "k8s":
        raise UsageError(f"--image {image} is for --print k8s; leave it out")
    via = request.via
    if via is not None and via != _OWN_CARRIER.get(to):
        raise UsageError(f"--print {to} and --via {via} are two ways to start the job; type one of them")
    return PRINTED[to](request if to == "slurm" else replace(request, via=None), words, image)
