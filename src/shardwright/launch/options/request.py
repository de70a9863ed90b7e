"""The options of `shardwright launch` as they were typed, and the hosts and restarts that they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwright.errors import UsageError
from shardwright.launch.host.program import ProgramKind
from shardwright.launch.hosts.hosts import Hosts, is_host_name, is_this_host, own_slots
from shardwright.launch.hosts.job_name import check_job_name
from shardwright.launch.options.carrier_facts import UNSAID, CarrierFacts

if TYPE_CHECKING:
    from shardwright.launch.host.stage import Stage
    from shardwright.launch.hosts.rank_table import RankTable


@dataclass(frozen=True)
class RestartOptions:
    """``limit`` restarts at most, of which ``count`` have been made.

    ``elastic``: a restart does without hosts that are lost, as long as ``min_ranks`` ranks remain.
    """

    limit: int = 0
    elastic: bool = False
    min_ranks: int = 1
    count: int = 0

    @classmethod
    def read(cls, max_restarts: int, elastic: bool, min_ranks: int | None) -> RestartOptions:
        """Return the restart options. Raises `UsageError` for options that contradict each other."""
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts} is no number of restarts; type a whole number from 0 on")
        if elastic and max_restarts == 0:
            raise UsageError("--elastic says what a restart may do without; type --max-restarts K too")
        if min_ranks is not None and not elastic:
            raise UsageError(f"--min-ranks {min_ranks} is for jobs that may shrink; type --elastic too")
        if min_ranks is not None and min_ranks < 1:
            raise UsageError(f"--min-ranks {min_ranks} is no number of ranks; type a whole number from 1 on")
        return cls(max_restarts, elastic, 1 if min_ranks is None else min_ranks)

    @property
    def left(self) -> int:
        return self.limit - self.count

    def check(self, ranks: int | None, *, by_table: bool = False, carrier: CarrierFacts = UNSAID) -> None:
        """Raise `UsageError` where the job, of so many ranks where they are known, cannot become smaller."""
        if self.elastic and by_table:
            raise UsageError(
                "--elastic gives ranks other hosts, but a rank table says where each is; type -H HOST:SLOTS,... in "
                "place of --rank-table, or leave --elastic out"
            )
        if self.elastic:
            carrier.refuse("--elastic")
        if ranks is not None and self.min_ranks > ranks:
            raise UsageError(
                f"--min-ranks {self.min_ranks} is more than the {ranks} rank{'s' * (ranks != 1)} of the job; type one "
                f"from 1 to {ranks}"
            )


NO_RESTARTS = RestartOptions()
"""The options of a job that ends when it fails."""


LEASE_S = 10.0
_SHORTEST_LEASE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The settings of all hosts. ``lease_s`` is the silence after which each side gives the other up.

    Without ``collect_logs`` the logs stay on the hosts of their ranks.
    """

    oversubscribe: bool = False
    interface: str | None = None
    collect_logs: bool = True
    lease_s: float = LEASE_S
    connect_timeout_s: float = 10.0


@dataclass(frozen=True)
class PerHost:
    """The value of an option on each host: ``/w`` on all hosts, ``a=/w`` on the host a."""

    everywhere: str | None = None
    by_host: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.everywhere is not None or bool(self.by_host)

    def on(self, host: str) -> str | None:
        return self.by_host.get(host, self.everywhere)

    @classmethod
    def read(cls, option: str, words: Sequence[str], hosts: Hosts) -> PerHost:
        """Return the values of an option. Raises `UsageError` for an unknown host, and for what is said twice.

        >>> PerHost.read("--wdir", ["/w", "a=/v"], Hosts.from_list("a,b")).on("a")
        '/v'
        """
        values: dict[str | None, str] = {}
        for word in words:
            before, equals, after = word.partition("=")
            host, value = (before, after) if equals and is_host_name(before) else (None, word)
            if host is not None:
                refuse_unknown(host, f"{option} {word}", hosts)
            if host in values:
                raise UsageError(
                    f"{option} {values[host]} and {option} {value} are for the same host; type one of them"
                )
            values[host] = value
        return cls(values.pop(None, None), {host: value for host, value in values.items() if host is not None})


@dataclass(frozen=True)
class RemoteOptions(HostSettings):
    """The hosts of a job on several, or on another one.

    ``ranks`` is None for one per slot, ``table`` places the ranks where there is one. ``python`` and ``wdir`` are those
    of the launcher where they say nothing of a host. ``variables`` are those that single hosts have beside what all
    have.
    """

    hosts: Hosts
    ranks: int | None = None
    table: RankTable | None = None
    tee: str = "0"
    python: PerHost = PerHost()
    wdir: PerHost = PerHost()
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stage: Stage | None = None


@dataclass(frozen=True)
class HostRequest(HostSettings):
    """The words that name hosts and say what differs there, as typed.

    ``allocation`` is the environment in which Slurm's is looked for. ``python`` and ``wdir`` are for all hosts, or
    ``HOST=...``. ``stage`` are paths that are copied to the hosts.
    """

    hosts: str | None = None
    hostfile: str | None = None
    allocation: Mapping[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    wdir: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    keep_stage: bool = False

    def read(
        self, ranks: str | None, table: RankTable | None, carrier: CarrierFacts, tee: str,
        variables: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> RemoteOptions | int:  # fmt: skip
        """Return the hosts of the job; for one on this host alone its ranks by the slots that were named, 0 without.

        ``variables`` are those that ``-x HOST:NAME=value`` gives to single hosts.

        Raises `UsageError` for words that contradict each other.
        """
        if carrier.in_allocation and not self.allocation.get("SLURM_JOB_ID"):
            raise UsageError(
                f"--via {carrier.name} starts ranks in an allocation of Slurm, and this is none; type `salloc -N 2 "
                f"shardwright launch --via {carrier.name} ...`, or add --print slurm for a script to hand to sbatch"
            )
        hosts, source = self.named(table)
        if hosts is None:
            hosts, source = hosts_of_allocation(self.allocation, asked=carrier.in_allocation), "Slurm's allocation"
        self._check_times()
        if hosts is None or not _needs_agents(hosts, table, carrier):
            self._refuse_without_hosts(carrier, variables)
            if hosts is None or table is not None:
                return 0
            from shardwright.launch.hosts.placement import Placement

            here = (host if host.slots is not None else replace(host, slots=own_slots()) for host in hosts)
            return Placement.by_slots(Hosts(tuple(here)), read_count(ranks), self.oversubscribe).size
        if not carrier.on_hosts:
            raise UsageError(
                f"--via {carrier.name} starts ranks on this host alone, but {source} names {hosts}; type --via ssh"
            )
        if table is not None:
            carrier.refuse("--rank-table on hosts")
        return self._on(hosts, table.size if table else read_count(ranks), table, tee, variables)

    def _on(
        self, hosts: Hosts, ranks: int | None, table: RankTable | None, tee: str,
        variables: Mapping[str, Mapping[str, str]],
    ) -> RemoteOptions:  # fmt: skip
        for host, names in variables.items():
            refuse_unknown(host, f"-x {host}:{next(iter(names))}", hosts)
        settings = {entry.name: getattr(self, entry.name) for entry in fields(HostSettings)}
        return RemoteOptions(
            hosts, ranks, table, tee, PerHost.read("--python", self.python, hosts),
            PerHost.read("--wdir", self.wdir, hosts), variables, **settings,
        )  # fmt: skip

    def _check_times(self) -> None:
        if not self.lease_s >= _SHORTEST_LEASE_S:
            raise UsageError(f"--lease {self.lease_s:g} is too short; type the seconds of silence, at least 0.5")
        if not self.connect_timeout_s >= 1:
            raise UsageError(f"--connect-timeout {self.connect_timeout_s:g} is too short; type at least 1 second")

    def named(self, table: RankTable | None) -> tuple[Hosts | None, str]:
        """Return the hosts that words of the command line name, and which words."""
        words = {"-H": self.hosts, "--hostfile": self.hostfile, "--rank-table": table}
        if len(named := [name for name, value in words.items() if value is not None]) > 1:
            raise UsageError(f"{' and '.join(named)} both name hosts; type one of them")
        if self.hosts is not None:
            return Hosts.from_list(self.hosts), "-H"
        if self.hostfile is not None:
            return Hosts.from_hostfile(Path(self.hostfile)), "--hostfile"
        if table is not None:
            return table.hosts(), "--rank-table"
        return None, ""

    def _refuse_without_hosts(self, carrier: CarrierFacts, variables: Mapping[str, Mapping[str, str]]) -> None:
        words = {
            "--python": self.python, "--wdir": self.wdir, "--interface": (self.interface,) if self.interface else (),
            "--stage": self.stage, "--keep-stage": ("",) if self.keep_stage else (),
            "--no-collect-logs": () if self.collect_logs else ("",),
            "-x": tuple(f"{host}:{name}" for host, names in variables.items() for name in names),
        }  # fmt: skip
        if typed := next((f"{name} {values[0]}".strip() for name, values in words.items() if values), None):
            raise UsageError(f"{typed} is for other hosts, but the job is on this one; type -H HOST:SLOTS,... too")
        if not carrier.here:
            raise UsageError(f"--via {carrier.name} needs hosts; type -H HOST:SLOTS,... or --hostfile FILE")


@dataclass(frozen=True)
class NamedHosts:
    """The hosts that a command goes to, with the interpreter on each, and the seconds that ssh may take."""

    hosts: Hosts
    python: PerHost
    timeout_s: float

    @classmethod
    def read(
        cls, hosts: str | None, hostfile: str | None, python: Sequence[str], connect_timeout_s: float
    ) -> NamedHosts | None:
        """Return the hosts that the options name; None where they name none."""
        named, _ = HostRequest(hosts=hosts, hostfile=hostfile).named(None)
        return None if named is None else cls(named, PerHost.read("--python", python, named), connect_timeout_s)


def _needs_agents(hosts: Hosts, table: RankTable | None, carrier: CarrierFacts) -> bool:
    """Return whether ranks run on other hosts, or by a carrier; all servers of a rank table may be this host."""
    if not carrier.here or (table is None and len(hosts) > 1):
        return True
    # The first other one suffices: finding out that a name cannot be resolved may take seconds.
    return any(not is_this_host(host.name) for host in hosts)


def refuse_unknown(host: str, words: str, hosts: Hosts) -> None:
    """Raise `UsageError` where the job has no such ``host``, which ``words`` of the command line name."""
    names = [known.name for known in hosts]
    if host not in names:
        raise UsageError(f"{words}: {host} is no host of this job, which has {', '.join(names)}")


def hosts_of_allocation(environment: Mapping[str, str], asked: bool = False) -> Hosts | None:
    """Return the hosts of a Slurm allocation of several; None in a job step, whose ranks srun has started.

    Where they are ``asked`` for, there may be one, and this may be a step, as the shells of some allocations are.
    """
    names = environment.get("SLURM_JOB_NODELIST")
    if not names or (environment.get("SLURM_STEP_NODELIST") and not asked):
        return None
    hosts = Hosts.from_slurm(names, environment.get("SLURM_TASKS_PER_NODE") or "1")
    return hosts if len(hosts) > 1 or asked else None


def read_count(ranks: str | None, otherwise: str = "leave it out") -> int | None:
    """Return the number of ``-n``, None for as many as there is room for; ``otherwise`` is what else may be typed."""
    if ranks in (None, "auto"):
        return None
    if not re.fullmatch(r"[0-9]{1,6}", ranks) or int(ranks) == 0:
        raise UsageError(f"-n {ranks} is no number of ranks; type a whole number from 1 on, or {otherwise}")
    return int(ranks)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The arguments of ``shardwright launch`` as typed, with their defaults.

    ``arguments`` are the program, which is of the kind ``kind``, and what is handed to it; with ``local_rank`` scripts
    that take theirs as an argument are given it. Without ``ranks`` there is one per slot of the hosts, or per GPU.
    Without ``tee`` rank 0 is shown, or nothing if the job is detached. Without ``via`` the hosts decide who starts the
    ranks, and without hosts in ``where`` the job is on this one.
    """

    arguments: Sequence[str]
    kind: ProgramKind = "script"
    local_rank: bool = True
    ranks: str | None = None
    preload: bool = True
    variables: Sequence[str] = ()
    tee: str | None = None
    job: str | None = None
    log_dir: str = "log_output"
    port: int | None = None
    devices: str | None = None
    rank_table: str | None = None
    grace_s: float = 10.0
    save_graphs: str | None = None
    via: str | None = None
    where: HostRequest = field(default_factory=HostRequest)
    backend: str | None = None
    mca: Sequence[tuple[str, str]] = ()
    bind_to: str = "core"
    restarts: RestartOptions = NO_RESTARTS
    stall_timeout_s: float | None = None
    on_stall: str | None = None
    detach: bool = False

    def __post_init__(self) -> None:
        if self.job is not None:
            check_job_name(self.job)
