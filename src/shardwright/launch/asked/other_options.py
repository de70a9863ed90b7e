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
        refusal: why it is not served, and what to type.

    One that has none of the last three asks for what holds anyway.
    """

    names: tuple[str, ...]
    of: str
    value: str = ""
    part: Part | None = None
    ours: Callable[[str], Mapping[str, Any]] | None = None
    refusal: str = ""


def _yes(value: str) -> bool:
    return value.lower() in ("true", "1", "yes")


_BOTH, _TORCH, _MPI, _MSRUN = "torchrun, msrun", "torchrun", "mpirun", "msrun"
_LEAVE_OUT = "leave it out"
_FILES = "every rank's output is in its files below log_output; leave it out, or type --tee all, none or 0,3"

OTHER_OPTIONS: tuple[OtherOption, ...] = (
    # How many ranks, and on which hosts
    OtherOption(("--nproc-per-node",), _TORCH, "N", part="ranks of a host"),
    OtherOption(("--local-worker-num",), _MSRUN, "N", part="ranks of a host"),
    OtherOption(("--npernode", "-npernode", "-N", "-ppn"), _MPI, "N", part="ranks of a host"),
    OtherOption(("-np", "--np"), _MPI, "N", part="ranks"),
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
    OtherOption(("-bind-to",), _MPI, "none", ours=lambda value: {"bind_to": "none" if value == "none" else "core"}),
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
    OtherOption(("--map-by", "-map-by"), _MPI, "HOW", refusal="ranks fill one host after the other; leave it out, or "
                "for ppr:8:node type --nproc-per-node 8"),
    OtherOption(("--rank-by", "-rank-by"), _MPI, "HOW", refusal="ranks are numbered host by host; leave it out"),
    OtherOption(("--report-bindings", "-report-bindings"), _MPI, refusal="type `taskset -p PID`, or leave it out"),
    OtherOption(("--display-map", "-display-map"), _MPI, refusal="run.json has the hosts of the ranks; leave it out"),
    OtherOption(("--prefix", "-prefix"), _MPI, "DIR", refusal="type --python [HOST=]PATH for another installation"),
    OtherOption(("--timeout", "-timeout"), _MPI, "SECONDS", refusal="type `timeout SECONDS shardwright launch ...`"),
)  # fmt: skip
"""All of them. Options that ours share the name and the meaning of, such as ``-H`` and ``-x``, are not among them."""
