"""The process above the ranks of one host: relays what they write, reports how they end, ends them.

It decides nothing: it follows the orders of its launcher (`protocol`), and where those end it kills everything, so that
a launcher killed with SIGKILL leaves no process behind. It runs in a session of its own, away from the terminal's
signals, and adopts orphans of the ranks, those that called setsid included. Where it is killed itself, the kernel
kills the ranks, and the launcher finds by their mark what they had started.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.launch.hangs.stacks import Target
from shardwright.launch.host import protocol
from shardwright.launch.host.folders import remove_folder
from shardwright.launch.host.memory_kills import MemoryKills
from shardwright.launch.host.processes import descendants, kill_all, name_of, send_signal
from shardwright.launch.host.stream import Decoder, Writer, encode
from shardwright.launch.joblog.judge import read_error_file
from shardwright.launch.supervisor.progress import Progress
from shardwright.launch.supervisor.rank_start import STEPS, UNKILLABLE_S, RankProcess

_CHUNK_BYTES = 1 << 16
_BACKLOG_BYTES = 1 << 21  # events that the launcher has not taken: above, the ranks' pipes are left alone
_ENDING_TICK_S = 0.05
_LEFT_TO_ITSELF_S = 0.5  # after the last rank: Python's resource tracker, for one, ends by itself
_LEFT_GRACE_S = 5.0
_IDLE_TICK_S = 30.0


@dataclass
class Ending:
    """The one grace period, common to all ranks and to what they leave behind."""

    tell_at_s: float  # when what ranks left behind is told to end
    kill_at_s: float
    scan_at_s: float = 0.0
    told: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)


class Supervisor:
    """The supervision of ranks that are already running, until none is left."""

    def __init__(
        self, orders: int, events: int, decoder: Decoder[protocol.Start | protocol.Order],
        ranks: dict[int, RankProcess], lease_s: float | None = None, scratch: str | None = None,
        stall_s: float | None = None, temporary: Path | None = None,
    ) -> None:  # fmt: skip
        self.orders, self.decoder, self.ranks = orders, decoder, ranks
        self.lease_s, self.scratch, self.temporary = lease_s, scratch, temporary
        self.heard_s = time.monotonic()
        self.writer = Writer(events, gone=self._abandoned)
        self.ending: Ending | None = None
        self.memory_kills = MemoryKills()
        self.memory_kills.look(process.pid for process in ranks.values())
        self.selector = selectors.DefaultSelector()
        self.reading = False
        self.writer.attach(self.selector)
        self.selector.register(orders, selectors.EVENT_READ, self._take_orders)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 512))
        self.progress: Progress | None = None
        if stall_s is not None:
            pulses = {rank: process.pulse for rank, process in ranks.items() if process.pulse is not None}
            self.progress = Progress(stall_s, pulses, lambda: os.write(wake_write, b"\0"))
        for rank, process in ranks.items():
            self._tell(protocol.Started(rank, process.pid))
        self._follow(b"")  # orders that came together with the start

    def run(self) -> None:
        """Supervise until every rank and everything below it has ended, and the launcher has heard of it."""
        while not self._reap():
            self._read_while_heard()
            tick_s = _IDLE_TICK_S if self.lease_s is None else min(_IDLE_TICK_S, self.lease_s / 4)
            tick_s = tick_s if self.progress is None else min(tick_s, self.progress.interval_s)
            for key, _ in self.selector.select(_ENDING_TICK_S if self.ending else tick_s):
                key.data()
            if self.lease_s is not None and time.monotonic() - self.heard_s > self.lease_s:
                self._abandoned()
            self.memory_kills.look(process.pid for process in self._living())
            if self.progress is not None:
                self._tell_progress(self.progress)
            if self.ending:
                self._advance(self.ending)
        self._finish(unkillable=[])

    def _finish(self, unkillable: list[int]) -> None:
        for rank in self.ranks:
            self._drain(rank)
        killed = sorted(r for r, p in self.ranks.items() if self.ending and p.pid in self.ending.killed)
        if self.temporary is not None:
            remove_folder(self.temporary)
        self._tell(protocol.Ended(tuple(killed), tuple(unkillable)))
        while self.writer.waiting_bytes:
            for key, _ in self.selector.select():
                key.data()
        os._exit(0)  # torch's own clean-up at exit has nothing to do here

    # --- to and from the launcher

    def _tell(self, event: protocol.Event) -> None:
        self.writer.put(encode(event))

    def _take_orders(self) -> None:
        data = os.read(self.orders, _CHUNK_BYTES)
        if not data:
            self._abandoned()
        self.heard_s = time.monotonic()
        self._follow(data)

    def _follow(self, data: bytes) -> None:
        for order in self.decoder.feed(data):
            match order:
                case protocol.RequestErrors():
                    self._tell(protocol.Errors(self._errors()))
                case protocol.RequestStacks() if self.progress is not None:
                    living = {rank: process for rank, process in self.ranks.items() if not process.ended}
                    self.progress.ask({r: Target(p.pid, p.pulse, p.stopped_by) for r, p in living.items()})
                case protocol.Signal(signum):
                    for process in self._living():
                        send_signal(process.pid, signum)
                case protocol.End(signum, grace_s):
                    self._end(signum, grace_s)
                case protocol.Kill():
                    self._end(signal.SIGCONT, 0.0)

    def _tell_progress(self, progress: Progress) -> None:
        if progress.look():
            self._tell(protocol.Progressed())
        if (answer := progress.take_answer()) is not None:
            quiet_s, observations = answer
            self._tell(protocol.Stacks(quiet_s, observations))

    def _abandoned(self) -> None:
        """Kill everything and end: the launcher is gone, and nobody is left to tell."""
        kill_all(lambda: descendants(os.getpid()), UNKILLABLE_S)
        for folder in (self.scratch, self.temporary):
            if folder is not None:
                remove_folder(Path(folder))
        os._exit(1)

    # --- what the ranks write

    def _read_while_heard(self) -> None:
        """Read what ranks write as long as the launcher takes it, so that memory stays bounded."""
        wanted = self.writer.waiting_bytes < _BACKLOG_BYTES
        if wanted == self.reading:
            return
        for rank, process in self.ranks.items():
            for stream, fd in process.pipes.items():
                if wanted:
                    self.selector.register(fd, selectors.EVENT_READ, lambda r=rank, s=stream: self._relay(r, s))
                else:
                    self.selector.unregister(fd)
        self.reading = wanted

    def _relay(self, rank: int, stream: str) -> bool:
        """Pass one chunk on. Returns whether there was one."""
        pipes = self.ranks[rank].pipes
        if stream not in pipes:
            return False
        try:
            data = os.read(pipes[stream], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            if self.progress is not None:
                self.progress.heard()
            self._tell(protocol.StepsReported(rank, data) if stream == STEPS else protocol.Output(rank, stream, data))
            return True
        if self.reading:
            self.selector.unregister(pipes[stream])
        os.close(pipes.pop(stream))
        return False

    def _drain(self, rank: int) -> None:
        """Pass on the rest of a rank's pipes, as much as they hold at most: its children may go on writing."""
        for stream in (STEPS, *protocol.STREAMS):
            for _ in range(32):
                if not self._relay(rank, stream):
                    break

    # --- how the ranks end

    def _reap(self) -> bool:
        """Report every change of state. Returns whether no child is left, adopted ones included."""
        by_pid = {process.pid: rank for rank, process in self.ranks.items() if not process.ended}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            if pid in by_pid:
                self._report(by_pid[pid], status)
        if not self.ending and all(process.ended for process in self.ranks.values()):
            now_s = time.monotonic()
            self.ending = Ending(now_s + _LEFT_TO_ITSELF_S, now_s + _LEFT_GRACE_S)
        return False

    def _report(self, rank: int, status: int) -> None:
        process = self.ranks[rank]
        if os.WIFSTOPPED(status):
            process.stopped_by = os.WSTOPSIG(status)
            self._tell(protocol.Stopped(rank, process.stopped_by, process.pid))
        elif os.WIFCONTINUED(status):
            process.stopped_by = 0
            self._tell(protocol.Continued(rank))
        else:
            self._exited(rank, os.waitstatus_to_exitcode(status), time.time())

    def _exited(self, rank: int, code: int, ended_s: float) -> None:
        process = self.ranks[rank]
        process.ended = True
        self._drain(rank)
        killed_by_us = self.ending is not None and process.pid in self.ending.killed
        out_of_memory = code == -signal.SIGKILL and not killed_by_us and self.memory_kills.recent(process.pid)
        self._tell(protocol.Exited(rank, code, ended_s, process.signalled, out_of_memory, _error_of(process)))

    def _errors(self) -> tuple[tuple[int, str, float], ...]:
        living = [(rank, process) for rank, process in self.ranks.items() if not process.ended]
        return tuple((rank, *error) for rank, process in living if (error := _error_of(process)))

    # --- ending them

    def _living(self) -> list[RankProcess]:
        return [process for process in self.ranks.values() if not process.ended]

    def _end(self, signum: int, grace_s: float) -> None:
        """Signal the ranks, and the processes that they leave behind when they end; all have one deadline."""
        now_s = time.monotonic()
        if self.ending is None:
            self.ending = Ending(now_s, now_s + grace_s)
        self.ending.tell_at_s = now_s
        self.ending.kill_at_s = min(self.ending.kill_at_s, now_s + grace_s)
        for process in self._living():
            process.signalled = True
            send_signal(process.pid, signum)
            send_signal(process.pid, signal.SIGCONT)  # a stopped rank hears the signal, too

    def _advance(self, ending: Ending) -> None:
        now_s = time.monotonic()
        if now_s < ending.scan_at_s:
            return
        ending.scan_at_s = now_s + _ENDING_TICK_S
        if now_s >= ending.kill_at_s:
            below = descendants(os.getpid())
            ending.killed |= below
            for pid in below:
                send_signal(pid, signal.SIGKILL)
            if now_s >= ending.kill_at_s + UNKILLABLE_S:
                self._finish(unkillable=sorted(below))
        elif now_s >= ending.tell_at_s:
            left = descendants(os.getpid(), without={process.pid for process in self._living()}) - ending.told
            ending.told |= left
            if left:
                self._tell(protocol.LeftoverProcesses({str(pid): name_of(pid) for pid in left}))
            for pid in left:
                send_signal(pid, signal.SIGTERM)
                send_signal(pid, signal.SIGCONT)


def _error_of(process: RankProcess) -> tuple[str, float] | None:
    return read_error_file(process.error_file) if process.error_file is not None else None
