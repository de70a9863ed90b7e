"""The options of other launchers, as one table: whose each is, and what it means to ``shardwright launch``.

What is read of the table, and where it says that a job is on several hosts, stands in `other_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["ranks", "ranks of a host", "hosts", "host", "address", "port", "address and port"]


@dataclass(frozen=True)
class OtherOption:
    """An option of another launcher, of which ``-`` and ``_`` are the same.

    Attributes:
        names: how it is typed.
        of: whose it is.
        value: what follows it; empty for a flag.
        part: what of a job it says, which `other_words` puts together.
        ours: what our own options would be in its place, by the names that they have in our command.
        word: what is said on stderr of a value that means something else here; empty for others.
        refusal: why it is not served, and what to type.

    One that has neither `part` nor `ours` nor `refusal` asks for what holds anyway.
    """

    names: tuple[str, ...]
    of: str
    value: str = ""
    part: Part | None = None
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
