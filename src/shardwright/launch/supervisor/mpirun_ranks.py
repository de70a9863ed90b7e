"""Supervises ranks that mpirun starts, with the same handling of output, exits and signals as other ranks.

    supervisor
      └─ mpirun
           ├─ carrier of rank 0 (this file's `run_rank`, a few milliseconds of Python without torch)
           │    └─ rank 0 (a new program: MPI and a forked copy of an interpreter do not go together)
           └─ carrier of rank 1 ...

The ranks are not the supervisor's children, so that each has a carrier that waits for it. A carrier finds the pipes of
its rank, and one for its reports, as ``/proc/<supervisor>/fd/<number>``: mpirun hands no open files on. Where any
process of the chain is killed, the kernel kills what is below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from shardwright.common import package
from shardwright.common.pulse import PulseFile
from shardwright.launch.host.processes import die_with_parent
from shardwright.launch.host.protocol import STREAMS, CarrierOutput, Continued, Exited, Order, Start, Started, Stopped
from shardwright.launch.host.stream import Decoder, encode
from shardwright.launch.supervisor import rank_start
from shardwright.launch.supervisor.rank_start import RankProcess
from shardwright.launch.supervisor.supervisor import Ending, Supervisor

NEVER_STARTED = 0  # the pid of a rank that mpirun gave up, since another had failed
_CARRIER_END_S = 10.0  # after its last rank, in which mpirun ends by itself
_SAID_BYTES = 1 << 16
_BOOT = (
    "import sys; sys.path.append({root!r}); "
    "from shardwright.launch.supervisor.mpirun_ranks import run_rank; run_rank({path!r})"
)
_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class MpirunSupervisor(Supervisor):
    """The supervision of ranks whose ends come on ``reports`` and by the end of mpirun."""

    def __init__(
        self, orders: int, events: int, decoder: Decoder[Start | Order], ranks: dict[int, RankProcess], mpirun: int,
        reports: Reports, said: int, stall_s: float | None = None,
    ) -> None:  # fmt: skip
        self.mpirun, self.reports, self.said = mpirun, reports, said
        super().__init__(orders, events, decoder, ranks, stall_s=stall_s)
        for rank in [rank for rank, process in ranks.items() if process.pid == NEVER_STARTED]:
            ranks[rank].signalled = True
            self._exited(rank, -signal.SIGTERM, time.time())
        self.selector.register(reports.fd, selectors.EVENT_READ, lambda: None)  # wakes the loop, which then takes them

    def _reap(self) -> bool:
        self._take_reports()
        children = True
        while children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                children = False
            else:
                if pid == 0:
                    break
                if pid == self.mpirun:
                    self._mpirun_ended(os.waitstatus_to_exitcode(status))
        if not self.ending and all(process.ended for process in self.ranks.values()):
            now_s = time.monotonic()
            self.ending = Ending(now_s + _CARRIER_END_S, now_s + 2 * _CARRIER_END_S)
        return not children

    def _take_reports(self) -> None:
        for report in self.reports.read():
            match report:
                case Started():
                    self._tell(report)
                case Exited(rank, code, time_s):
                    self._exited(rank, code, time_s)
                case Stopped(rank, signum):
                    self.ranks[rank].stopped_by = signum
                    self._tell(report)
                case Continued(rank):
                    self.ranks[rank].stopped_by = 0
                    self._tell(report)

    def _mpirun_ended(self, code: int) -> None:
        """Tell what mpirun said, the help of MPI with it. Ranks not heard of were killed with their carriers."""
        self._take_reports()
        lost = [rank for rank, process in self.ranks.items() if not process.ended]
        if said := os.pread(self.said, _SAID_BYTES, 0).decode(errors="replace").strip():
            self._tell(CarrierOutput(said, code != 0))
        for rank in lost:
            self._exited(rank, -signal.SIGKILL, time.time())


Report = Started | Stopped | Continued | Exited


class Reports:
    """The pipe of the carriers' reports, each written in one piece."""

    def __init__(self) -> None:
        self.fd, self.theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held: list[Report] = []
        self._decoder: Decoder[Report] = Decoder(*get_args(Report))

    def read(self) -> list[Report]:
        """Return the reports since the last call, after those in ``held``, which were read too early."""
        reports, self.held = self.held, []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, 1 << 16):
                reports += self._decoder.feed(data)
        return reports


def supervise(
    start: Start, orders: int, events: int, decoder: Decoder[Start | Order], pulses: Mapping[int, PulseFile]
) -> NoReturn:
    """Start mpirun, wait until all ranks have started, and supervise them until the end."""
    rank_start.check_open_files(start, events)
    steps, _ = rank_start.open_steps(start)
    reports = Reports()
    said = os.memfd_create("mpirun")
    pipes = {rank: {stream: os.pipe2(os.O_CLOEXEC) for stream in STREAMS} for rank in start.ranks}
    plan = {
        "supervisor": os.getpid(), "reports": reports.theirs,
        "ranks": {
            rank: {
                "variables": variables, "pipes": {stream: fds[1] for stream, fds in pipes[rank].items()},
                "command": start.program.for_rank(variables).command_line(),
            }
            for rank, variables in start.ranks.items()
        },
    }  # fmt: skip
    written = os.memfd_create("plan")
    with os.fdopen(os.dup(written), "wb") as file:
        file.write(json.dumps(plan).encode())
    path = f"/proc/{os.getpid()}/fd/{written}"
    boot = _BOOT.format(root=str(package.SEARCHED), path=path)
    mpirun = _start([*start.carrier, sys.executable, "-I", "-S", "-c", boot], said)
    pids = _wait_for_ranks(len(start.ranks), mpirun, reports, orders, events, said)
    for fds in pipes.values():
        for fd, _ in fds.values():
            os.set_blocking(fd, False)
    ranks = {}
    for rank, variables in start.ranks.items():
        ours = {stream: fds[0] for stream, fds in pipes[rank].items()}
        if rank in steps:
            ours[rank_start.STEPS] = steps[rank]
        pid, error_file = pids.get(rank, NEVER_STARTED), rank_start.error_file(variables)
        ranks[rank] = RankProcess(pid, ours, error_file, pulses.get(rank))
    die_with_parent(0)
    MpirunSupervisor(orders, events, decoder, ranks, mpirun, reports, said, start.stall_s).run()
    sys.exit(0)


def _start(command: list[str], said: int) -> int:
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.dup2(said, 1)
    os.dup2(said, 2)
    rank_start.execute(command)
    os._exit(127)


def _wait_for_ranks(ranks: int, mpirun: int, reports: Reports, orders: int, events: int, said: int) -> dict[int, int]:
    """Wait for the process id of each rank; where mpirun ends before, the launcher is told what it said."""
    ended = os.pidfd_open(mpirun)
    poll = select.poll()
    for fd in (reports.fd, ended):
        poll.register(fd, select.POLLIN)
    poll.register(orders, 0)  # POLLHUP alone: the launcher is gone
    pids: dict[int, int] = {}
    while len(pids) < ranks:
        ready = {fd for fd, _ in poll.poll()}
        if orders in ready:
            os._exit(1)
        came = reports.read()
        pids |= {report.rank: report.pid for report in came if isinstance(report, Started)}
        reports.held = [report for report in came if not isinstance(report, Started)]
        if ended in ready and len(pids) < ranks:
            if not pids:
                text = os.pread(said, _SAID_BYTES, 0).decode(errors="replace").strip()
                rank_start.not_started(events, f"mpirun ended before it had started {ranks} ranks\n{text}")
            break
    os.close(ended)
    return pids


def run_rank(path: str) -> NoReturn:
    """In a process that mpirun started: run this rank's program, and report how it goes."""
    die_with_parent(signal.SIGKILL)
    plan = json.loads(Path(path).read_bytes())
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    mine = plan["ranks"][str(rank)]
    supervisor = Path(f"/proc/{plan['supervisor']}/fd")
    reports = os.open(supervisor / str(plan["reports"]), os.O_WRONLY | os.O_CLOEXEC)
    for signum in _TAKEN:
        signal.signal(signum, signal.SIG_IGN)  # mpirun signals the rank as well, and we wait for what it does
    carrier = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(carrier, supervisor, mine)
    _report(reports, Started(rank, pid))
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED | os.WCONTINUED)
        if os.WIFSTOPPED(status):
            _report(reports, Stopped(rank, os.WSTOPSIG(status), pid))
        elif os.WIFCONTINUED(status):
            _report(reports, Continued(rank))
        else:
            code = os.waitstatus_to_exitcode(status)
            _report(reports, Exited(rank, code, time.time()))
            os._exit(code if code >= 0 else 128 - code)


def _become_rank(carrier: int, supervisor: Path, mine: dict[str, Any]) -> NoReturn:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != carrier:
        os._exit(1)
    for fd, stream in enumerate(STREAMS, start=1):
        opened = os.open(supervisor / str(mine["pipes"][stream]), os.O_WRONLY)
        os.dup2(opened, fd)
        os.close(opened)
    for signum in _TAKEN:
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(mine["variables"])
    rank_start.execute(mine["command"])
    os._exit(127)


def _report(fd: int, report: Report) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone, and we shall be
        os.write(fd, encode(report))
