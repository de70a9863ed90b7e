"""The launcher's loop: it shows and keeps what ranks write, hears how they end, and judges the end of the job.

    launcher (this process: console, logs, verdict)
      ├─ connection to the supervisor of this or the first host
      │    ├─ rank 0 (forked, own session)
      │    └─ rank 1 ...
      └─ connection to the supervisor of the next host ...

No operator of torch and no import of it happens here. The exit code is that of the rank that failed first (128 + N for
signal N), 0 where every rank returned 0, and 128 + N where the launcher was ended by signal N.

One `Launcher` is one attempt at one job, from its carrier's start to the last word of every supervisor. Connections to
other hosts outlive it: who wants to run the job again there makes another `Launcher` with the same carrier. Whether a
job that failed begins again is for who made the launcher (`restarts`), which only tells whether it may.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.errors import LaunchError
from shardwright.launch.asked.options import LaunchOptions
from shardwright.launch.carriers.connection import Carrier, Connection
from shardwright.launch.console import Console
from shardwright.launch.hangs.stall import STALLED_CODE, StallWatch
from shardwright.launch.hangs.stall_report import group_lines, headline, write_report
from shardwright.launch.hangs.stall_verdict import Hang
from shardwright.launch.host.processes import become_subreaper, descendants, woken_by
from shardwright.launch.host.protocol import (
    AskErrors,
    AskStacks,
    CarrierSaid,
    Continued,
    End,
    Ended,
    Errors,
    Event,
    Exited,
    Kill,
    Left,
    LogLost,
    NotStarted,
    Order,
    Output,
    OutputLost,
    Progressed,
    Signal,
    Stacks,
    Started,
    StderrTail,
    Stopped,
    SupervisorGone,
)
from shardwright.launch.kept.failure import RankEnd, describe_ranks, signal_name
from shardwright.launch.kept.job import FAILED, INTERRUPTED, SUCCEEDED, JobFolder, JobState
from shardwright.launch.kept.logs import RankLogs
from shardwright.launch.kept.run_report import Attempt, RunReport
from shardwright.launch.kept.verdict import Verdict, rank_end
from shardwright.launch.supervisor.progress import decode_observations

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
KILL_NOW = signal.SIGRTMIN
"""From `shardwright stop --now`: TERM without a grace. SIGINT, the second of which kills, is ignored behind an &."""


@dataclass(frozen=True)
class Before:
    """What the attempts of a job have in common: a console, and from the second one on its state and past."""

    console: Console
    state: JobState | None = None
    past: tuple[Attempt, ...] = ()


class Launcher:
    """One attempt at one job. ``started`` is called once all ranks have started."""

    def __init__(
        self, options: LaunchOptions, folder: JobFolder, carrier: Carrier, started: Callable[[], None],
        before: Before | None = None,
    ) -> None:  # fmt: skip
        self.options, self.folder, self.carrier, self.started = options, folder, carrier, started
        self.before = before
        self.past = before.past if before is not None else ()
        self.began_s = time.time()
        self.all_started_s: float | None = None  # by the monotonic clock
        self.ranks = carrier.ranks
        self.run_id = f"{folder.name}-{secrets.token_hex(8)}"
        self.connections: Sequence[Connection] = ()
        self.hosts: dict[int, str] = {}  # of ranks, where there are several
        self.pids: dict[int, int] = {}
        self.interrupted: int | None = None
        self.told_to_end: int | None = None  # by a signal, also where a failure had begun to end it
        self.unsure_until_s = 0.0  # by the monotonic clock: ranks may still run on a host that is lost
        self.ending = False
        self.may_restart = False  # once it has ended
        self.not_started: str | None = None
        self.stall = StallWatch(options.stall_timeout_s)
        self.killed: set[int] = set()
        self.unkillable: list[str] = []
        self.selector = selectors.DefaultSelector()
        command = [options.program.kind, *options.program.arguments]
        state = before.state if before is not None else None
        self.state = state or JobState.of_this_process(command, self.ranks)

    def run(self) -> int:
        with self._catch_signals():
            try:
                self.folder.begin_again()
                self.folder.make_ranks(self.ranks)
                kept = self.options.remote is not None and not self.options.remote.collect_logs
                self.logs = RankLogs(
                    self.folder, self.ranks, self._say, self._first_line(), kept, lambda rank: self.hosts.get(rank, "")
                )
                self.verdict = Verdict(self.logs.stderr_tail)
                self._note(lambda: self.folder.write_state(self.state))
                self._note(self.folder.reserve)
                self.connections = self.carrier.start(self.run_id, self.folder, self._first_line(), self.options.shown)
                self.report = RunReport(self.folder, self.state, self.carrier.describe_hosts(), self.past)
                self._note(self.report.write)
            except OSError as error:
                if not self.past:
                    self.folder.remove()
                raise LaunchError(f"job {self.folder.name} cannot be started: {error}") from None
            self.console = self.before.console if self.before is not None else Console(self.options.shown)
            self.console.shown = self.options.shown
            become_subreaper()  # if a supervisor of this host is killed, what it had adopted comes to us
            self.not_ours = descendants(os.getpid(), without={c.process.pid for c in self.connections})
            if len(self.connections) > 1:
                self.hosts = {rank: c.name for c in self.connections for rank in c.ranks}
            for connection in self.connections:
                connection.attach(self.selector, partial(self._take_events, connection))
            try:
                while self._living():
                    for key, _ in self.selector.select(self._timeout_s()):
                        key.data()
                    self._watch()
                    self._judge()
                    self._look_for_stall()
                return self._conclude()
            finally:
                self._close()

    def _living(self) -> list[Connection]:
        return [connection for connection in self.connections if not connection.over]

    def _close(self) -> None:
        """The carrier is closed by who made it."""
        self.logs.close()
        if self.before is None:
            self.console.close()
        else:
            self.console.show_fragments(older_than_s=0.0)
        for connection in self.connections:
            connection.detach()
        self.selector.close()

    def _note(self, write: Callable[[], None]) -> None:
        """Write of the job. A disk that has become full since it began is no reason not to begin again."""
        try:
            write()
        except OSError as error:
            if self.before is None or not self.past:
                raise
            self.before.console.say(f"what is known of this restart cannot be written: {error}")

    def _first_line(self) -> str:
        """Of the logs of a restart."""
        if not self.past:
            return ""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began_s))
        return f"[shardwright: restart {len(self.past)} of {self.options.restarts.limit}, {moment}]\n"

    def _say(self, text: str) -> None:
        self.console.say(text)

    def _order(self, order: Order) -> None:
        for connection in self._living():
            connection.send(order)

    def _timeout_s(self) -> float | None:
        # Also those whose ranks have ended: their agents serve until the end of the job.
        ticks = [connection.tick() for connection in self.connections if connection.attached]
        waits = [self.verdict.wait_s(), self.stall.wait_s(), self.console.show_fragments(), *ticks]
        return min((wait for wait in waits if wait is not None), default=None)

    def _watch(self) -> None:
        for connection in self._living():
            if connection.silent_too_long:
                self._lost(connection)

    # --- signals

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Signals wake the loop."""
        with woken_by(dict.fromkeys((*ENDING_SIGNALS, *PASSED_SIGNALS, KILL_NOW), lambda *_: None)) as read:
            self.selector.register(read, selectors.EVENT_READ, lambda: self._take_signals(read))
            yield

    def _take_signals(self, fd: int) -> None:
        for signum in os.read(fd, 512):
            if signum in PASSED_SIGNALS:
                self._order(Signal(signum))
            elif signum in ENDING_SIGNALS:
                self._interrupt(signum)
            elif signum == KILL_NOW:
                if not self.ending:
                    self._interrupt(signal.SIGTERM)
                self._kill("stop --now")

    def _interrupt(self, signum: int) -> None:
        name = signal_name(signum)
        self.told_to_end = signum
        if self.ending:
            if signum == signal.SIGINT:
                self._kill(name)
            return
        self.interrupted = signum
        self.verdict.forget()
        if not self.pids:
            self.ending = True
            for connection in self._living():
                connection.abandon()
            return
        living = self.ranks - len(self.verdict.ends)
        self._say(
            f"{name}: ending {living} ranks, which have {self.options.grace_s:g} s before they are killed"
            f" (Ctrl-C{' again' if signum == signal.SIGINT else ''} kills them now)"
        )
        self._end(signum)

    def _kill(self, why: str) -> None:
        self._say(f"{why}: killing what is left")
        self._order(Kill())
        for connection in self._living():
            connection.wake()

    def _end(self, signum: int, failure: Mapping[str, object] | None = None) -> None:
        """One grace for all hosts. ``failure`` is what failed.json says."""
        self.ending = True
        self._order(End(signum, self.options.grace_s, failure))
        for connection in self._living():
            connection.wake()

    # --- events

    def _take_events(self, connection: Connection) -> None:
        received = connection.receive()
        if received is None:
            if connection.over:
                connection.detach()
            else:
                self._lost(connection)
            return
        for event in received:
            self._take(connection, event)

    def _take(self, connection: Connection, event: Event) -> None:
        if isinstance(event, Output | OutputLost | Progressed | Continued | Exited):
            self.stall.moved()
        match event:
            case Started(rank, pid):
                self._started(rank, pid)
            case Output(rank, stream, data):
                self.logs.write(rank, stream, data)
                self.console.output(rank, stream, data)
            case OutputLost(rank, stream, lost_bytes, reason):
                self.logs.lose(rank, stream, lost_bytes, reason)
            case StderrTail(rank, data):
                self.logs.write(rank, "stderr", data)
            case LogLost(rank, stream, lost_bytes, why):
                self._say(f"{self.logs.path(rank, stream)} lacks {lost_bytes} bytes{f' ({why})' if why else ''}")
            case Stopped(rank, signum, pid):
                self._stopped(connection, rank, signum, pid)
            case Continued(rank):
                if not self.ending:
                    self._say(f"rank {rank} continues")
            case Stacks(quiet_s, data):
                self.stall.answered(connection.name, quiet_s, decode_observations(data))
            case Exited():
                self._exited(connection, event)
            case Errors(errors):
                ahead_s = connection.clock_ahead_s
                self.verdict.answered(connection.name, {r: (text, time_s - ahead_s) for r, text, time_s in errors})
            case Left(names):
                self._left(names)
            case CarrierSaid(text, matters):
                self._carrier_said(text, matters)
            case NotStarted(reason):
                self._not_started(f"{connection.name}: {reason}" if self.hosts else reason)
            case SupervisorGone():
                self._lost(connection)
            case Ended():
                self._ended(connection, event)

    def _started(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid
        if len(self.pids) == self.ranks:
            self.all_started_s = time.monotonic()
            self.stall.moved()
            self.started()

    def _stopped(self, connection: Connection, rank: int, signum: int, pid: int) -> None:
        if not self.ending:
            where = f" on {connection.name}" if self.hosts else ""
            self._say(
                f"rank {rank} is stopped ({signal_name(signum)}) and the job waits for it; "
                f"`kill -CONT {pid}`{where} continues it, Ctrl-C ends the job"
            )

    def _exited(self, connection: Connection, event: Exited) -> None:
        host = self.hosts.get(event.rank, "")
        end = rank_end(event, connection.clock_ahead_s, self.logs.stderr_tail(event.rank), host)
        self.verdict.ends[event.rank] = end
        if end.code != 0:
            self._settle()

    def _left(self, names: Mapping[str, str]) -> None:
        if not self.ending:
            listed = ", ".join(f"{name} (pid {pid})" for pid, name in names.items())
            self._say(f"the ranks left processes behind, which are ended now: {listed}")

    def _carrier_said(self, text: str, matters: bool) -> None:
        path = self.folder.path / "mpirun"
        with contextlib.suppress(OSError):
            path.write_text(f"{text}\n")
            if matters:
                self._say(f"what mpirun said: {path}")

    def _not_started(self, reason: str) -> None:
        self.not_started = reason
        for other in self._living():
            other.over = True

    def _ended(self, connection: Connection, event: Ended) -> None:
        connection.over = True
        self.killed |= set(event.killed)
        where = f" on {connection.name}" if self.hosts else ""
        self.unkillable += [f"{pid}{where}" for pid in event.unkillable]
        self._judge()
        if self._living():
            return
        if self.killed:
            self._say(f"{describe_ranks(self.killed)} had to be killed")
        if self.unkillable:
            self._say(f"processes that do not end even when killed: {', '.join(self.unkillable)}")

    def _lost(self, connection: Connection) -> None:
        """Without its last word."""
        lost_s = time.time()
        silent = connection.silent_too_long
        connection.detach()
        connection.over = True
        code, what = connection.why_lost(self.run_id, self.not_ours)
        self.unsure_until_s = max(self.unsure_until_s, time.monotonic() + connection.may_live_s)
        if self.interrupted is not None or self.verdict.cause is not None:
            if self.hosts and not (self.interrupted is not None and not self.pids):
                self._say(what)
            return
        if not self.pids.keys() & set(connection.ranks):
            self._not_started(f"{what} while it imported torch")
            return
        if silent and connection.lease_s is not None:
            lost_s -= connection.lease_s  # when it was last heard
        self.verdict.losses.append(
            RankEnd(-1, code or 1, lost_s, host=connection.name, loss=f"{what}, and all ranks with it")
        )
        self.verdict.answered(connection.name, {})
        self._settle()
        self._judge()

    # --- the verdict

    def _settle(self) -> None:
        if self.ending or self.verdict.settling or self.verdict.cause is not None:
            return
        self._order(AskErrors())
        self.verdict.settle((connection.name, connection.lease_s) for connection in self._living())

    def _judge(self) -> None:
        if self.verdict.cause is not None or self.ending:
            return
        gone = {rank for c in self.connections if c.over for rank in c.ranks}
        cause = self.verdict.first(self.hosts, all_ended=len(self.verdict.ends.keys() | gone) == self.ranks)
        if cause is None:
            return
        details = self.verdict.details(cause, lambda rank: self.logs.path(rank, "stderr"))
        self._fail(cause, cause.rank if cause.rank >= 0 else None, details)

    def _look_for_stall(self) -> None:
        """Ask where the ranks are, once they have been quiet for too long; with the answers the job ends."""
        if self.ending or self.verdict.settling or self.verdict.cause is not None:
            return
        if self.stall.should_ask():
            self.stall.ask({connection.name: connection.lease_s for connection in self._living()})
            self._order(AskStacks())
        elif self.stall.is_stalled():
            self._stalled()

    def _stalled(self) -> None:
        assert self.stall.timeout_s is not None
        returned = tuple(sorted(self.verdict.ends))
        hang = Hang(tuple(self.stall.observations), self.stall.timeout_s, returned, self.hosts, self.stall.silent_hosts)
        odd = hang.verdict()[1]
        self.verdict.cause = RankEnd(-1, STALLED_CODE, time.time(), loss=headline(hang))
        details = [f"    {line}" for line in group_lines(hang)]
        try:
            details.append(f"their stacks: {write_report(hang, self.folder.path)}")
        except OSError as error:
            details.append(f"their stacks cannot be written: {error}")
        self._fail(self.verdict.cause, odd[0] if len(odd) == 1 else None, details)

    def _fail(self, cause: RankEnd, rank: int | None, details: list[str]) -> None:
        """The job ends: ``rank`` is what failed.json blames, ``details`` are told after the headline."""
        text = self.verdict.headline(cause)
        failure = {"rank": rank, "cause": text, "time_s": cause.time_s}
        try:
            self.folder.write_failure(failure)  # marked first, then told
        except OSError as error:
            self._say(f"the job cannot be marked as failed: {error}")
        self._say("\n".join([text, *details]))
        self._end(signal.SIGTERM, failure)

    def _conclude(self) -> int:
        if self.not_started is not None and self.interrupted is None and not self.past:
            self.folder.remove()
            raise LaunchError(self.not_started)
        cause = None
        if self.verdict.cause is not None:
            status, code, cause = FAILED, self.verdict.exit_code(), self.verdict.headline(self.verdict.cause)
        elif self.interrupted is not None:
            status, code = INTERRUPTED, 128 + self.interrupted
        elif self.not_started is not None:
            status, code, cause = FAILED, 1, self.not_started
            self._say(self.not_started)
        else:
            status, code = SUCCEEDED, 0
        hosts = [str(host["name"]) for host in self.report.hosts]
        self.ended = Attempt(self.began_s, time.time(), hosts, self.ranks, code, cause)
        self.may_restart = status == FAILED and self.options.restarts.left > 0 and self.told_to_end is None
        if not self.may_restart:
            self.finish(status, code)
        return code

    def finish(self, status: str, code: int) -> None:
        """No attempt comes after this one: the job's last state and its report are written."""
        state = self.state.ended(status, code)
        clocks = {connection.name: connection.clock_ahead_s for connection in self.connections}
        try:
            self.folder.write_state(state)
        except OSError as error:
            self._say(f"the job's state cannot be written: {error}")
        try:
            self.report.write(state, self.verdict, clocks, self.ended)
        except OSError as error:
            self._say(f"run.json cannot be written: {error}")
        self.folder.release()
