"""Start the launcher on this machine for jobs on hosts of `hosts.host_network`, and look for what it left there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hosts import HostNetwork, host_network
from launching import Launching, wait_until

PYTHON = ["--", sys.executable]
BOTH = ["-H", "host1:1,host2:1"]
LEASE_S = 2.0
SLACK_S = 60.0  # of a busy machine
# What an account may do to a program that ssh starts, by the key with which one logs in: see `add_accounts`.
NOISY = "echo Welcome to this host; echo 'load: 3 %' >&2; exec sh -c \\\"$SSH_ORIGINAL_COMMAND\\\""
NO_PYTHON = "exec /nowhere/python"
OLD_PYTHON = (
    f'exec {sys.executable} -c \'import sys,io;sys.version_info=(3,8,10);sys.version=\\"3.8.10 (x)\\";'
    "f=io.BufferedReader(io.FileIO(0,closefd=False),1);exec(f.read(int(f.readline())))'"
)
# What ranks do: each says that it is up, and where the job's folder on its host is.
UP = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    with open(f"new.{rank}", "w") as file:
        file.write(str(os.getpid()))
    with open(f"scratch.{rank}", "w") as file:
        file.write(os.path.dirname(os.environ["SHARDWRIGHT_FAILED_MARK"]))
    os.rename(f"new.{rank}", f"up.{rank}")
    def wait():
        while len([n for n in os.listdir() if n.startswith("up.")]) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""
SLEEP = UP + "    time.sleep(100)\n"
STUBBORN = (
    UP + "    for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    "    os.system('setsid sleep 100 & echo $! > grandchild.$RANK')\n    time.sleep(100)\n"
)


@contextlib.contextmanager
def hosts_with_accounts(folder: Path) -> Iterator[HostNetwork]:
    """Two hosts, with the other names of `add_accounts`."""
    with host_network(2, folder) as network:
        add_accounts(network)
        yield network


@contextlib.contextmanager
def jobs_on(network: HostNetwork, folder: Path) -> Iterator[ManyHosts]:
    """In the end no process is left anywhere, and no folder of a job on a host."""
    job = ManyHosts(folder, network)
    try:
        yield job
        job.assert_none_left()
        left = [Path(path.read_text()) for path in folder.glob("scratch.*")]
        wait_until(lambda: not any(path.exists() for path in left), 60, "the job's folders on the hosts are removed")
    finally:
        job.close()


@contextlib.contextmanager
def jobs_on_hosts(count: int, folder: Path) -> Iterator[tuple[HostNetwork, ManyHosts]]:
    """For a test that has hosts of its own."""
    (folder / "network").mkdir()
    with host_network(count, folder / "network") as network, jobs_on(network, folder) as job:
        yield network, job


class ManyHosts(Launching):
    """ssh is this machine's with the network's configuration, by a program of that name that comes first on PATH."""

    def __init__(self, folder: Path, network: HostNetwork) -> None:
        super().__init__(folder)
        self.network = network
        self.before = {pid for host in network.hosts for pid in network.processes(host)}
        self.path = network.path

    def start(self, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> Any:
        return super().start(*arguments, env={"PATH": self.path} | (env or {}), **options)

    def on_host(self, host: str) -> dict[int, str]:
        """Processes that came to a host, but sshd's, with their command lines, by this machine's numbers."""
        found = {}
        for pid in self.network.processes(host):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if pid not in self.before and not name.startswith("sshd") and command:
                found[pid] = command
        return found

    def survivors(self) -> dict[int, str]:
        """With the mark, or on a host: an agent comes from sshd, without the launcher's environment."""
        found = super().survivors()
        for host in self.network.hosts:
            found |= self.on_host(host)
        return found

    def agent(self, host: str) -> int:
        [pid] = [pid for pid, command in self.on_host(host).items() if "io.BufferedReader" in command]
        return pid

    def clients(self) -> list[int]:
        return [pid for pid, command in super().survivors().items() if command.startswith("/usr/bin/ssh")]

    def wait_for_ranks(self, ranks: int) -> None:
        for rank in range(ranks):
            self.wait_for_file(f"up.{rank}")


def add_accounts(network: HostNetwork) -> None:
    """More names for host1 and host2, each of which goes wrong in its own way."""
    first, second = network.hosts["host1"].address, network.hosts["host2"].address
    folder = network.folder
    entries = {
        "refused": f"HostName {first}\n  Port 23",
        "changed": f"HostName {first}\n  HostKeyAlias {second}",
        "unknown": f"HostName {first}\n  HostKeyAlias nobody",
        "gone": f"HostName {first.rpartition('.')[0]}.200",
        "stranger": f"HostName {first}\n  IdentityFile {folder}/stranger_key",
    }
    commands = {"noisy": (second, NOISY), "bare": (first, NO_PYTHON), "old": (first, OLD_PYTHON)}
    for name in ("stranger", *commands):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"{name}_key")], check=True, timeout=20
        )
    with open(folder / "authorized_keys", "a") as file:
        for name, (address, command) in commands.items():
            file.write(f'command="{command}" {(folder / f"{name}_key.pub").read_text()}')
            entries[name] = f"HostName {address}\n  IdentityFile {folder}/{name}_key"
    # The first value that is found counts, but identities add up: these names are left out of the last block.
    text = network.config.read_text().replace("Host *\n", f"Host * {' '.join('!' + n for n in entries)}\n")
    general = text[text.index("Host *") :].splitlines()[1:]
    for name, own in entries.items():
        lines = [line for line in general if not ("IdentityFile" in own and "IdentityFile" in line)]
        text += f"Host {name}\n  {own}\n" + "\n".join(lines) + "\n"
    network.config.write_text(text)


def wait_until_alone(job: ManyHosts, host: str, within_s: float) -> None:
    """No process of a job is left on a host."""
    wait_until(lambda: not job.on_host(host), within_s, f"the end of all processes on {host}")
