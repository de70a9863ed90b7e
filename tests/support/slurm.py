"""A real Slurm for tests: its controller here, a node daemon on each host of a `hosts.host_network`, and a munge.

    with host_network(2, folder) as network, slurm(network, folder) as environment:
        subprocess.run(["srun", "-n", "2", "hostname"], env=os.environ | environment)

Nothing of a Slurm that this machine may have is read or written. At the end, or where this process is killed, all of
it ends: the daemons on hosts with the hosts, the others by the kernel.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import HostNetwork
from ranks import given_port

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo", "munged", "setpriv")
_START_S = 60.0
_CONFIGURATION = """
ClusterName=shardwright
SlurmctldHost={name}({address})
SlurmctldPort={port}
SlurmdPort=6818
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
"""


def why_not() -> str | None:
    """The reason why there can be no Slurm here, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    return f"no {', '.join(missing)} on this machine; type `apt-get install slurm-wlm munge`" if missing else None


@contextlib.contextmanager
def slurm(network: HostNetwork, folder: Path, cpus: int = 4) -> Iterator[dict[str, str]]:
    """Every host of the network is a node with so many ``cpus``; yields what programs need in their environment.

    The test is skipped, with the reason, where Slurm is not installed.
    """
    if reason := why_not():
        pytest.skip(reason)
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    with contextlib.ExitStack() as stack:

        def start(name: str, *command: str, host: str | None = None) -> None:
            inside = network.inside(host, *command) if host else list(command)
            with open(folder / f"{name}.out", "wb") as out:
                process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *inside], env=environment, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=out, start_new_session=True,
                )  # fmt: skip
            stack.callback(process.wait, 10)
            stack.callback(process.kill)

        _configure(network, folder, cpus)
        paths = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        words = [f"--{name}={folder / path}" for name, path in paths.items()]
        start("munged", "munged", "--foreground", "--force", f"--log-file={folder / 'munge.log'}", *words)
        _wait("munged", folder, lambda: (folder / "munge.socket").exists())
        start("slurmctld", "slurmctld", "-D")
        for name in network.hosts:
            start(f"slurmd.{name}", "slurmd", "-D", "-N", name, host=name)
        _wait("nodes", folder, lambda: _idle_nodes(environment) == len(network.hosts))
        yield environment


def _configure(network: HostNetwork, folder: Path, cpus: int) -> None:
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    # Hosts of a network have no control groups, which nothing here needs.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for name in network.hosts:
        (folder / f"spool.{name}").mkdir()
    nodes = [
        f"NodeName={name} NodeAddr={host.address} CPUs={cpus} State=UNKNOWN" for name, host in network.hosts.items()
    ]
    text = _CONFIGURATION.format(name=socket.gethostname(), address=network.address, port=given_port(), folder=folder)
    partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    (folder / "slurm.conf").write_text("\n".join([text, *nodes, partition, ""]))


def _idle_nodes(environment: dict[str, str]) -> int:
    listed = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle"], env=environment, capture_output=True, text=True, timeout=20
    )
    return len(listed.stdout.splitlines())


def _wait(what: str, folder: Path, condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            said = "\n".join(path.read_text(errors="replace")[-1000:] for path in folder.glob("*.out"))
            raise RuntimeError(f"{what}: Slurm did not start within {_START_S:g} s\n{said}")
        time.sleep(0.05)
