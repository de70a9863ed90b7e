"""The options of other launchers: one table of them, and the options of ours that they stand for.

Torchrun and msrun are typed on every host, and each of these commands knows the first host and how many there are. Ours
is typed once and names all hosts, so that options of theirs for several hosts are answered, where ``-H`` is not typed,
with the command to complete.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Hosts, is_this_host, own_slots
from shardwright.launch.options.request import HostRequest, hosts_of_allocation

JobField = Literal["ranks", "ranks of a host", "hosts", "host", "address", "port", "address and port"]


@dataclass(frozen=True)
class OtherOption:
    """An option of another launcher, of which ``-`` and ``_`` are the same.

    Attributes:
        names: how it is typed.
        of: whose it is.
        value: what follows it; empty for a flag.
        part: what of a job it says, which `_JobFields` puts together.
        ours: what our own options would be in its place, by the names that they have in our command.
        word: what is said on stderr of a value that means something else here; empty for others.
        refusal: why it is not served, and what to type.

    One that has neither `part` nor `ours` nor `refusal` asks for what holds anyway.
    """

    names: tuple[str, ...]
    of: str
    value: str = ""
    part: JobField | None = None
    ours: Callable[[str], Mapping[str, Any]] | None = None
    word: Callable[[str], str] = lambda _: ""
    refusal: str = ""


def _yes(value: str) -> bool:
    return value.lower() in ("true", "1", "yes")


def _mpirun(*names: str, value: str = "", refusal: str) -> tuple[OtherOption, ...]:
    """Options of mpirun that are answered alike; it takes each name of several letters after one ``-`` too."""
    spelled = [(f"-{name}",) if len(name) == 1 else (f"--{name}", f"-{name}") for name in names]
    return tuple(OtherOption(spellings, "mpirun", value, refusal=refusal) for spellings in spelled)


_BOTH, _TORCH, _MPI, _MSRUN = "torchrun, msrun", "torchrun", "mpirun", "msrun"
_LEAVE_OUT = "leave it out"
_IN_ORDER = "ranks fill one host after the other"
_KEPT = "run.json has the hosts of the ranks; leave it out"
_SHARE = "each rank has its share of the cores of its host"
_CORES = f"-bind-to {{}} is taken for core: {_SHARE}"
_SHARES = f"{_SHARE}; leave it out, or type --bind-to none"
_FILES = "every rank's output is in its files below log_output; leave it out, or type --tee all, none or 0,3"

OTHER_OPTIONS: tuple[OtherOption, ...] = (
    # How many ranks, and on which hosts
    OtherOption(("--nproc-per-node",), _TORCH, "N", part="ranks of a host"),
    OtherOption(("--local-worker-num",), _MSRUN, "N", part="ranks of a host"),
    OtherOption(("--npernode", "-npernode", "-N", "-ppn"), _MPI, "N", part="ranks of a host"),
    OtherOption(("-np", "--np", "--n"), _MPI, "N", part="ranks"),
    OtherOption(("--worker-num",), _MSRUN, "N", part="ranks"),
    OtherOption(("--nnodes",), _TORCH, "N", part="hosts"),
    OtherOption(("--node-rank",), _BOTH, "N", part="host"),
    OtherOption(("--master-addr",), _BOTH, "HOST", part="address"),
    OtherOption(("--master-port",), _BOTH, "PORT", part="port"),
    OtherOption(("--rdzv-endpoint",), _TORCH, "HOST:PORT", part="address and port"),
    OtherOption(("-host",), _MPI, "HOSTS", ours=lambda value: {"hosts": value}),
    OtherOption(("-hostfile", "--machinefile", "-machinefile"), _MPI, "FILE", ours=lambda value: {"hostfile": value}),
    OtherOption(("--rank-table-file",), _MSRUN, "FILE", ours=lambda value: {"rank_table": value}),
    # How they run
    OtherOption(("--no-python",), _TORCH, ours=lambda _: {"program": True}),
    OtherOption(("--use-env",), "torch.distributed.launch", ours=lambda _: {"local_rank": False}),
    OtherOption(("-wdir", "-wd", "--wd"), _MPI, "DIR", ours=lambda value: {"wdir": (value,)}),
    OtherOption(("-oversubscribe",), _MPI, ours=lambda _: {"oversubscribe": True}),
    OtherOption(("-bind-to",), _MPI, "WHAT", ours=lambda value: {"bind_to": "none" if value == "none" else "core"},
                word=lambda value: _CORES.format(value) if value not in ("none", "core") else ""),
    OtherOption(("--bind-core",), _MSRUN, "BOOL", ours=lambda value: {"bind_to": "core" if _yes(value) else "none"}),
    OtherOption(("--output-filename",), _MPI, "DIR", ours=lambda value: {"log_dir": value}),
    OtherOption(("--tag-output", "-tag-output"), _MPI, ours=lambda _: {"tee": "all"}),
    OtherOption(("--join",), _MSRUN, "BOOL", ours=lambda value: {} if _yes(value) else {"detach": True}),
    OtherOption(("--tail-worker-log",), _MSRUN, "N", ours=lambda value: {"tee": "all" if value == "-1" else value}),
    # What holds anyway
    OtherOption(("--standalone",), _TORCH),
    OtherOption(("--run-path",), _TORCH),
    OtherOption(("--rdzv-backend",), _TORCH, "NAME"),
    OtherOption(("--rdzv-id",), _TORCH, "ID"),
    OtherOption(("--rdzv-conf",), _TORCH, "CONF"),
    OtherOption(("--allow-run-as-root", "-allow-run-as-root"), _MPI),
    # What is not served
    OtherOption(("--start-method",), _TORCH, "NAME", refusal="ranks are forked, or --no-preload starts each anew"),
    OtherOption(("--monitor-interval",), _TORCH, "SECONDS", refusal=f"the end of a rank is seen at once; {_LEAVE_OUT}"),
    OtherOption(("--event-log-handler",), _TORCH, "NAME", refusal=f"run.json has what happened; {_LEAVE_OUT}"),
    OtherOption(("--role",), _TORCH, "NAME", refusal=f"all ranks have the role default; {_LEAVE_OUT}"),
    OtherOption(("-r", "--redirects"), _TORCH, "STD", refusal=_FILES),
    OtherOption(("-t",), _TORCH, "STD", refusal=_FILES),
    OtherOption(("--local-ranks-filter",), _TORCH, "RANKS", refusal=_FILES),
    OtherOption(("--duplicate-stdout-filters",), _TORCH, "WORDS", refusal=_FILES),
    OtherOption(("--duplicate-stderr-filters",), _TORCH, "WORDS", refusal=_FILES),
    OtherOption(("--logs-specs",), _TORCH, "NAME", refusal=_FILES),
    OtherOption(("--worker-log-name",), _MSRUN, "NAME", refusal=_FILES),
    OtherOption(("--local-addr",), _TORCH, "HOST", refusal="ranks meet at the first host; type --interface NAME"),
    OtherOption(("--numa-binding",), _TORCH, "KIND", refusal=f"each rank has cores near its GPU; {_LEAVE_OUT}"),
    OtherOption(("--signals-to-handle",), _TORCH, "NAMES", refusal=f"these signals are passed on; {_LEAVE_OUT}"),
    OtherOption(("--shutdown-timeout",), _TORCH, "SECONDS", refusal="type --grace SECONDS"),
    OtherOption(("--virtual-local-rank",), _TORCH, refusal="type --devices, or choose the GPU in the program"),
    OtherOption(("--cluster-time-out",), _MSRUN, "SECONDS", refusal="type --connect-timeout SECONDS"),
    OtherOption(("--sim-level",), _MSRUN, "N", refusal="type `shardwright plan`, which needs no devices"),
    OtherOption(("--sim-rank-id",), _MSRUN, "N", refusal="type `shardwright plan`, which needs no devices"),
    *_mpirun("map-by", value="HOW", refusal=f"{_IN_ORDER}; {_LEAVE_OUT}, or for ppr:8:node type --nproc-per-node 8"),
    *_mpirun("rank-by", value="HOW", refusal=f"ranks are numbered host by host; {_LEAVE_OUT}"),
    *_mpirun("report-bindings", refusal="type `taskset -p PID`, or leave it out"),
    *_mpirun("pernode", refusal="type --nproc-per-node 1"),
    *_mpirun("npersocket", value="N", refusal="type --nproc-per-node with the ranks of a host"),
    *_mpirun("bynode", "byslot", refusal=f"{_IN_ORDER}; {_LEAVE_OUT}"),
    *_mpirun("rankfile", "rf", value="FILE", refusal="type -H a:8,b:8, or --rank-table FILE.json"),
    *_mpirun("nolocal", refusal="name the other hosts alone, as -H a:8,b:8"),
    *_mpirun("nooversubscribe", refusal=f"it is so anyway; {_LEAVE_OUT}"),
    *_mpirun("bind-to-none", refusal="type --bind-to none"),
    *_mpirun("bind-to-core", "bind-to-socket", "use-hwthread-cpus", refusal=_SHARES),
    *_mpirun("cpus-per-proc", "cpus-per-rank", "cpu-set", "cpu-list", "slot-list", value="CORES", refusal=_SHARES),
    *_mpirun("display-map", "display-allocation", "display-devel-map", "display-devel-allocation", "display-topo",
             refusal=_KEPT),
    *_mpirun("display", "report-pid", "report-uri", value="WHAT", refusal=_KEPT),
    *_mpirun("v", "verbose", refusal=_KEPT),
    *_mpirun("debug-daemons", "leave-session-attached", refusal=f"failed.json has why a rank failed; {_LEAVE_OUT}"),
    *_mpirun("q", "quiet", refusal="type --tee none, or leave it out"),
    *_mpirun("prepend-rank", refusal="type --tee all"),
    *_mpirun("timestamp-output", refusal=_FILES),
    *_mpirun("xterm", value="RANKS", refusal=_FILES),
    *_mpirun("merge-stderr-to-stdout", refusal="type 2>&1 after the command"),
    *_mpirun("path", value="DIRS", refusal="type -x PATH=DIRS"),
    *_mpirun("tmpdir", value="DIR", refusal="type -x TMPDIR=DIR"),
    *_mpirun("genv", value="NAME VALUE", refusal="type -x NAME=VALUE"),
    *_mpirun("genvall", refusal="type -x NAME for each variable that other hosts are to have"),
    *_mpirun("f", value="FILE", refusal="type --hostfile FILE"),
    *_mpirun("preload-binary", refusal="type --stage with the program's path"),
    *_mpirun("preload-files", value="FILES", refusal="type --stage PATH for each"),
    *_mpirun("gmca", value="NAME VALUE", refusal="type --mca NAME VALUE with --via mpirun"),
    *_mpirun("tune", "am", value="FILE", refusal="type --mca NAME VALUE with --via mpirun"),
    *_mpirun("enable-recovery", "continuous", refusal="type --max-restarts K"),
    *_mpirun("do-not-launch", refusal="type `shardwright check` in place of launch"),
    *_mpirun("V", "version", refusal="type `shardwright --version`"),
    *_mpirun("prefix", value="DIR", refusal="type --python [HOST=]PATH for another installation"),
    *_mpirun("timeout", value="SECONDS", refusal="type `timeout SECONDS shardwright launch ...`"),
)  # fmt: skip
"""All of them. Options that ours share the name and the meaning of, such as ``-H`` and ``-x``, are not among them."""


_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class TypedCommand:
    """The command as it was typed: the words before the program, and the program with its own."""

    options: Sequence[str]
    program: Sequence[str]

    def without_others(self) -> list[str]:
        """Return our own options."""
        rest, kept = iter(self.options), []
        for word in rest:
            name, equals, _ = word.partition("=")
            option = _NAMES.get(name.replace("_", "-"))
            if option is None:
                kept.append(word)
            elif option.value and not equals:
                next(rest, None)
        return kept


_NAMES = {name: option for option in OTHER_OPTIONS for name in option.names}


def translated(said: Mapping[OtherOption, str], words: Mapping[str, Any], typed: TypedCommand) -> dict[str, Any]:
    """Return the ``words`` of our command with the options of others in ``said``.

    Raises `UsageError` for what is not served, for contradictions, and, with the command to type, for several hosts of
    which only the first is named.
    """
    for option in said:
        if option.refusal:
            raise UsageError(f"{option.names[0]} is {option.of}'s: {option.refusal}")
    ours = dict(words)
    for option, value in said.items():
        ours |= option.ours(value) if option.ours is not None else {}
    job = _JobFields(dict(_parts(said)), ours["ranks"])
    return ours | (job.on_named(hosts, ours) if (hosts := _named(ours)) is not None else job.here(ours, typed))


def notes_on_meaning(said: Mapping[OtherOption, str], words: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that means something else here than with its own launcher."""
    lines = [option.word(value) for option, value in said.items()]
    tee, of_torchrun = words["tee"], any("torchrun" in option.of for option in said)
    if tee == "3" or (of_torchrun and tee in ("0", "1", "2")):
        streams = "none" if tee == "0" else "all"
        lines.append(f"--tee {tee} shows what rank {tee} writes; for torchrun's --tee {tee} type --tee {streams}")
    return [line for line in lines if line]


def _named(words: Mapping[str, Any]) -> Hosts | None:
    if words["rank_table"] is not None:
        return None
    named, _ = HostRequest(hosts=words["hosts"], hostfile=words["hostfile"]).named(None)
    return named or hosts_of_allocation(words["allocation"], asked=words["via"] == "srun")


def _parts(said: Mapping[OtherOption, str]) -> Iterator[tuple[JobField, tuple[str, str]]]:
    """Yield each field of the job that is set, with its value and option. Raises `UsageError` for two values."""
    parts: dict[JobField, tuple[str, str]] = {}
    for option, value in said.items():
        if option.part is None:
            continue
        for part, text in _split(option.part, value):
            name = option.names[0]
            if parts.setdefault(part, (text, name))[0] != text:
                raise UsageError(f"{parts[part][1]} {parts[part][0]} and {name} {text} differ; type one of them")
    yield from parts.items()


def _split(part: JobField, value: str) -> list[tuple[JobField, str]]:
    if part != "address and port":
        return [(part, value)]
    address, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal():
        return [("address", value)]
    return [("address", address.strip("[]")), ("port", port)]


class _JobFields:
    """The fields of a job that options of others set, None where they do not."""

    def __init__(self, parts: Mapping[JobField, tuple[str, str]], ranks: str | None) -> None:
        self._parts = parts
        self.per_host = self._per_host()
        total = self._number("ranks")
        if total is not None and ranks not in (None, str(total)):
            raise UsageError(f"-n {ranks} and {self._said('ranks')} differ; type one of them")
        self.ranks = str(total) if total is not None else ranks
        self.fewest, self.hosts = self._hosts()
        self.host = self._number("host", least=0) or 0
        self.address = parts.get("address", (None, ""))[0]
        port = self._number("port", least=0)
        self.port = {"port": port} if port else {}  # 0 is any, as without

    def _said(self, part: JobField) -> str:
        value, name = self._parts[part]
        return f"{name} {value}"

    def _number(self, part: JobField, least: int = 1) -> int | None:
        if part not in self._parts:
            return None
        value, _ = self._parts[part]
        if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < least:
            raise UsageError(f"{self._said(part)}: expected a whole number from {least} on")
        return int(value)

    def _per_host(self) -> int | str | None:
        value, _ = self._parts.get("ranks of a host", (None, ""))
        if value in ("auto", "gpu"):
            return "auto"
        return own_slots() if value == "cpu" else self._number("ranks of a host")

    def _hosts(self) -> tuple[int | None, int | None]:
        if "hosts" in self._parts:
            fewest, _, most = self._parts["hosts"][0].partition(":")
            if not all(re.fullmatch(r"[1-9][0-9]{0,4}", word) for word in (fewest, most or fewest)):
                raise UsageError(
                    f"{self._said('hosts')}: expected a number of hosts, or the fewest and the most as 2:4"
                )
            return int(fewest), int(most or fewest)
        if isinstance(self.per_host, int) and self.ranks is not None and self.ranks.isdecimal():
            count = -(-int(self.ranks) // self.per_host)
            return count, count
        return None, None

    def here(self, words: Mapping[str, Any], typed: TypedCommand) -> dict[str, Any]:
        """Return the options of a job on this host. Raises `UsageError`, with a command, for several hosts."""
        elsewhere = self.address is not None and self.address not in _HERE and not is_this_host(self.address)
        if words["rank_table"] is None and ((self.hosts or 1) > 1 or self.host > 0 or elsewhere):
            raise UsageError(self._instead(typed))
        return self.port | {"ranks": self.ranks or (None if self.per_host is None else str(self.per_host))}

    def _instead(self, typed: TypedCommand) -> str:
        count = max(self.hosts or 1, self.host + 1)
        first = self.address if self.address not in (None, *_HERE) else "HOST1"
        others = [f"HOST{number}" for number in range(2, count + 1)]
        each = self.per_host or self.ranks or 1
        hosts = ",".join(f"{name}:{'SLOTS' if each == 'auto' else each}" for name in (first or "", *others))
        words = ["-H", hosts]
        if self.fewest != self.hosts:
            words += (
                ["--elastic"] if each == "auto" else ["--elastic", "--min-ranks", str((self.fewest or 1) * int(each))]
            )
        elif self.ranks is not None and self.per_host is not None and int(self.ranks) != count * int(self.per_host):
            words += ["-n", self.ranks]
        words += [word for name, value in self.port.items() for word in (f"--{name}", str(value))]
        command = shlex.join(["shardwright", "launch", *words, *typed.without_others(), *typed.program])
        unnamed = [name for name in (first, *others) if name is not None and name.startswith("HOST")]
        complete = f", with the names of hosts for {', '.join(unnamed)}" if unnamed else ""
        return f"one command starts the ranks of all hosts; type once, on any of them{complete}:\n  {command}"

    def on_named(self, hosts: Hosts, words: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a job on hosts that ours name. Raises `UsageError` where others contradict them."""
        if self.hosts is not None and not (self.fewest or 0) <= len(hosts) <= self.hosts:
            by = self._said("hosts") if "hosts" in self._parts else f"{self._said('ranks of a host')}, -n {self.ranks}"
            raise UsageError(f"{by}: these are {self.hosts} hosts, and {len(hosts)} are named: {hosts}")
        if self.host > 0:
            raise UsageError(f"{self._said('host')}: type the command once, on any host; it starts the ranks of all")
        first = hosts.hosts[0].name
        if self.address not in (None, first, *_HERE):
            raise UsageError(
                f"{self._said('address')}: ranks meet at the first host, which is {first}; leave it out, or name "
                f"{self.address} first"
            )
        found = self.port | {"ranks": self.ranks}
        if not isinstance(self.per_host, int):
            return found
        for host in hosts:
            if host.slots not in (None, 1) and host.slots < self.per_host and not words["oversubscribe"]:
                raise UsageError(f"{self._said('ranks of a host')}, but {host.name} has {host.slots} slots")
        each = Hosts(tuple(replace(host, slots=self.per_host) for host in hosts))
        return found | {"hosts": each.to_list(), "hostfile": None}
