"""A job as a PyTorchJob of Kubeflow's training operator, v1: a pod for each host, with a torchrun in it.

The operator tells each pod how many there are, which of them it is and where they meet, in variables (``PET_...``)
that torchrun reads.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

import yaml

from shardwright.errors import UsageError
from shardwright.launch.carriers.torchrun import MODULE, program_words
from shardwright.launch.host.program import unchecked_program
from shardwright.launch.hosts.placement import Placement
from shardwright.launch.manifests.unserved import for_all_hosts, left_out
from shardwright.launch.options.carrier_facts import TORCHRUN
from shardwright.launch.options.launch_options import check_numbers
from shardwright.launch.options.request import LaunchRequest, read_count
from shardwright.launch.options.save_graphs import VARIABLE, SaveGraphs
from shardwright.launch.options.variables import NCCL, read_backend, read_variables, split_variables

_STARTER = "a PyTorchJob"
_SERVED = (
    "ranks", "variables", "port", "save_graphs", "backend", "python", "wdir", "oversubscribe", "job", "grace_s",
    "restarts",
)  # fmt: skip
_NO_IMAGE = "IMAGE"
_SHM = "shm"
_LONGEST_NAME = 50  # Kubernetes allows 63 for the name of a pod, which goes on with -worker-N


def manifest(request: LaunchRequest, image: str | None) -> tuple[str, list[str]]:
    """Return the manifest, for ``kubectl apply``, and notes for the person. ``image`` is that of its containers.

    Raises `UsageError` where a PyTorchJob cannot be what is asked for.
    """
    notes = [left_out(request, _STARTER, _SERVED)]
    check_numbers(request)
    if request.grace_s == math.inf:
        raise UsageError(f"--grace inf: the pods of {_STARTER} end at some time; type seconds")
    if request.restarts.elastic:
        raise UsageError(f"--elastic: {_STARTER} of --print has as many pods from start to end; leave it out")
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
            f"the pods of {_STARTER} are alike, but those of {hosts.to_list()} have {_listed(placement)} ranks"
        )
    return len(placement.hosts), sizes.pop()


def _listed(placement: Placement) -> str:
    return " and ".join(str(len(ranks)) for ranks in placement.ranks)


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
    wdir = for_all_hosts("--wdir", request.where.wdir, _STARTER)
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
    python = for_all_hosts("--python", request.where.python, _STARTER) or "python"
    program = unchecked_program(request.kind, request.arguments)
    return [_literal(word) for word in (python, "-m", MODULE, *program_words(program))]


def _literal(word: str) -> str:
    """Escape a word, since Kubernetes replaces ``$(NAME)`` by a variable, and ``$$`` by ``$``."""
    return word.replace("$", "$$")


def _variables(request: LaunchRequest) -> dict[str, str]:
    words, by_host = split_variables(request.variables)
    if by_host:
        raise UsageError(f"-x {next(iter(by_host))}:...: the pods of {_STARTER} are alike; type it without a host")
    read = read_variables(words, os.environ)
    read |= read_backend(request.backend, TORCHRUN)
    if request.save_graphs is not None:
        read[VARIABLE] = str(SaveGraphs.parse(request.save_graphs))
    return read
