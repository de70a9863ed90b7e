"""From the command to the end of the first all-reduce on two hosts: ours beside ``torchrun`` and ``mpirun``.

    python benchmarks/launch_hosts.py [--ranks 4] [--repeats 5]

Needs root: the hosts are network namespaces of this machine, each with its sshd. torchrun is started on
both hosts at once by ssh, mpirun starts its daemons by ssh. All take turns (A B C A B C ...), so that they see the
same load. The clock starts before the launcher's process does and stops on rank 0 when the all-reduce is done.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from hosts import HostNetwork, host_network

SCRIPT = """
import os, sys, time
for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
    if theirs in os.environ:
        os.environ[ours] = os.environ[theirs]
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    assert total.item() == dist.get_world_size() == int(sys.argv[2])
    with open(sys.argv[1], "w") as file:
        file.write(repr(time.time()))
dist.destroy_process_group()
"""
BIN = Path(sys.executable).parent


class Starting:
    """The three ways to start ``ranks`` ranks on each of two hosts."""

    def __init__(self, network: HostNetwork, folder: Path, ranks: int) -> None:
        self.network, self.folder, self.ranks = network, folder, ranks
        self.script = [str(folder / "first.py"), str(folder / "answer"), str(2 * ranks)]
        self.first, self.second = network.hosts.values()

    def shardwright(self) -> list[list[str]]:
        hosts = f"host1:{self.ranks},host2:{self.ranks}"
        return [[str(BIN / "shardwright"), "launch", "-H", hosts, *self.script]]

    def torchrun(self) -> list[list[str]]:
        port = random.SystemRandom().randrange(20_000, 30_000)
        return [
            self.network.ssh_command(
                host.name, f"cd {self.folder} && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={host.interface}",
                str(BIN / "torchrun"), "--nnodes=2", f"--nproc-per-node={self.ranks}", f"--node-rank={number}",
                f"--master-addr={self.first.address}", f"--master-port={port}", *self.script,
            )
            for number, host in enumerate((self.first, self.second))
        ]  # fmt: skip

    def mpirun(self) -> list[list[str]]:
        """Its ranks are told the name of their interface by a line of shell, since it differs by host."""
        port = random.SystemRandom().randrange(20_000, 30_000)
        line = f'export GLOO_SOCKET_IFNAME=nic$(hostname | tr -d a-z); exec {sys.executable} "$@"'
        agent = str(self.network.programs / "ssh")
        return [
            [
                str(BIN / "mpirun"), "--allow-run-as-root", "--prtemca", "plm_ssh_agent", agent,
                "--host", f"host1:{self.ranks},host2:{self.ranks}", "-n", str(2 * self.ranks), "--bind-to", "none",
                "-x", "OMP_NUM_THREADS=1", "-x", f"MASTER_ADDR={self.first.address}", "-x", f"MASTER_PORT={port}",
                "sh", "-c", line, "sh", *self.script,
            ]
        ]  # fmt: skip

    def measure_s(self, commands: list[list[str]]) -> float:
        answer = self.folder / "answer"
        answer.unlink(missing_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": self.network.path}
        start_s = time.time()
        running = [
            subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
            for command in commands
        ]  # fmt: skip
        for process in running:
            said, _ = process.communicate(timeout=120)
            if process.returncode != 0:
                raise SystemExit(f"{' '.join(process.args)} failed:\n{said}")  # type: ignore[arg-type]
        return float(answer.read_text()) - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="on each host")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-mpirun", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, host_network(2, Path(name)) as network:
        folder = Path(name)
        (folder / "first.py").write_text(SCRIPT)
        starting = Starting(network, folder, options.ranks)
        ways: dict[str, Callable[[], list[list[str]]]] = {
            "shardwright": starting.shardwright, "torchrun": starting.torchrun,
        } | ({} if options.without_mpirun else {"mpirun": starting.mpirun})  # fmt: skip
        for way in ways.values():
            starting.measure_s(way())  # warms the disk's cache
        rounds = [{name: starting.measure_s(way()) for name, way in ways.items()} for _ in range(options.repeats)]
    print("| 2 hosts x ranks | started by | s | ours / theirs | lowest to highest |")
    print("| --- | --- | --- | --- | --- |")
    for name in ways:
        ratios = sorted(row["shardwright"] / row[name] for row in rounds)
        median_s = statistics.median(row[name] for row in rounds)
        print(
            f"| {options.ranks} | {name} | {median_s:.2f} | {statistics.median(ratios):.2f} "
            f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
