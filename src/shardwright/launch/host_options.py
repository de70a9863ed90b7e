"""Where a job is to run: the words of the command line that name hosts, and what they come to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.launch.hosts import Hosts, is_this_host, own_slots
from shardwright.launch.placement import Placement
from shardwright.launch.rank_table import RankTable

LEASE_S = 10.0
_SHORTEST_LEASE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What holds on all hosts. ``python`` and ``wdir`` are those of the launcher unless given.

    ``lease_s`` is the silence after which each side gives the other up.
    """

    oversubscribe: bool = False
    python: str | None = None
    wdir: str | None = None
    interface: str | None = None
    lease_s: float = LEASE_S
    connect_timeout_s: float = 10.0


@dataclass(frozen=True)
class RemoteOptions(HostSettings):
    """The hosts of a job on several, or on another one.

    ``ranks`` is None for one per slot, ``table`` places the ranks where there is one.
    """

    hosts: Hosts
    ranks: int | None = None
    table: RankTable | None = None
    tee: str = "0"


@dataclass(frozen=True)
class Whereabouts:
    """``remote`` for a job on hosts; else it is on this one, with ``slots_here`` ranks where its slots were named."""

    remote: RemoteOptions | None = None
    slots_here: int | None = None


@dataclass(frozen=True)
class HostOptions(HostSettings):
    """As typed. ``allocation`` is the environment in which Slurm's is looked for."""

    hosts: str | None = None
    hostfile: str | None = None
    allocation: Mapping[str, str] = field(default_factory=dict)

    def read(self, ranks: str | None, table: RankTable | None, via: str | None, tee: str) -> Whereabouts:
        """Raises `UsageError` for words that contradict each other."""
        hosts, source = self._hosts(table)
        if not self.lease_s >= _SHORTEST_LEASE_S:
            raise UsageError(f"--lease {self.lease_s:g} is too short; type the seconds of silence, at least 0.5")
        if not self.connect_timeout_s >= 1:
            raise UsageError(f"--connect-timeout {self.connect_timeout_s:g} is too short; type at least 1 second")
        elsewhere = hosts is not None and (
            len(hosts) > 1 or via == "ssh" or not all(is_this_host(host.name) for host in hosts)
        )
        if table is not None and hosts is not None and via != "ssh":
            # The first one suffices: finding out that a name cannot be resolved may take seconds.
            elsewhere = any(not is_this_host(host.name) for host in hosts)
        if hosts is None or not elsewhere:
            self._refuse_without_hosts(via)
            if hosts is None or table is not None:
                return Whereabouts()
            here = hosts.with_slots(lambda _: own_slots())
            return Whereabouts(slots_here=Placement.by_slots(here, read_count(ranks), self.oversubscribe).size)
        if via in ("local", "mpirun"):
            raise UsageError(f"--via {via} starts ranks on this host alone, but {source} names {hosts}; type --via ssh")
        settings = {entry.name: getattr(self, entry.name) for entry in fields(HostSettings)}
        return Whereabouts(RemoteOptions(hosts, table.size if table else read_count(ranks), table, tee, **settings))

    def _hosts(self, table: RankTable | None) -> tuple[Hosts | None, str]:
        """And what named them."""
        named = [
            (name, value)
            for name, value in (("-H", self.hosts), ("--hostfile", self.hostfile), ("--rank-table", table))
            if value is not None
        ]
        if len(named) > 1:
            raise UsageError(f"{' and '.join(name for name, _ in named)} both name hosts; type one of them")
        if self.hosts is not None:
            return Hosts.from_list(self.hosts), "-H"
        if self.hostfile is not None:
            return Hosts.from_hostfile(Path(self.hostfile)), "--hostfile"
        if table is not None:
            return table.hosts(), "--rank-table"
        return hosts_of_allocation(self.allocation), "Slurm's allocation"

    def _refuse_without_hosts(self, via: str | None) -> None:
        words = {"--python": self.python, "--wdir": self.wdir, "--interface": self.interface}
        if given := next((f"{name} {value}" for name, value in words.items() if value is not None), None):
            raise UsageError(f"{given} is for other hosts, but the job is on this one; type -H HOST:SLOTS,... too")
        if via == "ssh":
            raise UsageError("--via ssh needs hosts; type -H HOST:SLOTS,... or --hostfile FILE")


def hosts_of_allocation(environment: Mapping[str, str]) -> Hosts | None:
    """Of Slurm, where this is the shell or the batch script of an allocation of several hosts, and no step of it."""
    names = environment.get("SLURM_JOB_NODELIST")
    if not names or environment.get("SLURM_STEP_NODELIST"):
        return None
    hosts = Hosts.from_slurm(names, environment.get("SLURM_TASKS_PER_NODE") or "1")
    return hosts if len(hosts) > 1 else None


def read_count(ranks: str | None) -> int | None:
    """``-n`` where hosts have slots: None for all of them."""
    if ranks in (None, "auto"):
        return None
    if not re.fullmatch(r"[0-9]{1,6}", ranks) or int(ranks) == 0:
        raise UsageError(f"-n {ranks} is no number of ranks; type a whole number from 1 on, or leave it out")
    return int(ranks)
