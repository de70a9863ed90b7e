"""What a job is asked to be, as it was typed: nothing of it is read or checked yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.launch.host.program import ProgramKind
from shardwright.launch.hosts.job_name import check_job_name
from shardwright.launch.options.host_options import HostRequest
from shardwright.launch.options.restart_options import ONCE, RestartOptions


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The words of ``shardwright launch``, with what holds where one is left out.

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
    restarts: RestartOptions = ONCE
    stall_timeout_s: float | None = None
    on_stall: str | None = None
    detach: bool = False

    def __post_init__(self) -> None:
        if self.job is not None:
            check_job_name(self.job)
