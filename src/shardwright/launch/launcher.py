"""The launcher's loop: it shows and keeps what ranks write, hears how they end, and ends the job as the judge has it.

    launcher (this process: console, logs, verdict)
      ├─ connection to the supervisor of this or the first host
      │    ├─ rank 0 (forked, own session)
      │    └─ rank 1 ...
      └─ connection to the supervisor of the next host ...

The exit code is that of the rank that failed first (128 + N for signal N), 0 where every rank returned 0, and 128 + N
where the launcher was ended by signal N.

One `Launcher` is one attempt at one job, from its carrier's start to the last word of every supervisor. Connections to
other hosts outlive it: who wants to run the job again there makes another `Launcher` with the same carrier. Whether a
job that failed begins again is for who made the launcher (`restarts`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping

from shardwright.common.system_errors import in_words
from shardwright.common.words import describe_ranks
from shardwright.errors import LaunchError
from shardwright.launch.attempt import Attempt, AttemptEnd
from shardwright.launch.carriers.connection import Carrier, Connection, Connections
from shardwright.launch.hangs.stall import HINT, STALLED_CODE, StallWatch
from shardwright.launch.host import processes, protocol
from shardwright.launch.joblog.judge import Judge, RankEnd, rank_end, signal_name, torchrun_end
from shardwright.launch.joblog.logs import LiveFiles, RankLogs
from shardwright.launch.progress.lines import current_task


class Launcher:
    """One attempt at a job. ``started`` is called once all ranks have started; the carrier is closed by who made it."""

    def __init__(self, attempt: Attempt, carrier: Carrier, started: Callable[[], None]) -> None:
        self.attempt, self.carrier, self.started = attempt, carrier, started
        self.say = attempt.console.say
        self.connections = Connections()
        if attempt.options.stall_timeout_s is not None:
            # Now: a package that is replaced while the job runs would not fit what is loaded already.
            from shardwright.launch.hangs import stall_report  # noqa: F401
        self.stall = StallWatch(attempt.options.stall_timeout_s, hears=not attempt.options.logs_stay)
        self.all_started_s: float | None = None  # by the monotonic clock
        self.unsure_until_s = 0.0  # by the monotonic clock: ranks may still run on a host that is lost
        self.killed: set[int] = set()
        self.unkillable: list[str] = []
        self.selector = selectors.DefaultSelector()

    def run(self) -> AttemptEnd:
        """Run the attempt to its end. Raises `LaunchError` where nothing could be started."""
        with self._catch_signals():
            self._start()
            try:
                while self.connections.living:
                    for key, _ in self.selector.select(self._timeout_s()):
                        key.data()
                    self._watch()
                    self._judge()
                    self._look_for_stall()
                return self._conclude()
            finally:
                self._close()

    def _start(self) -> None:
        attempt, folder, options = self.attempt, self.attempt.folder, self.attempt.options
        logs: RankLogs | None = None
        try:
            folder.begin_again()
            folder.make_ranks(options.ranks)
            logs = RankLogs(folder, options.ranks, self.say, attempt.first_line, options.logs_stay, self._host)
            self.logs = logs
            self.live = LiveFiles(folder, len(attempt.past), options.ranks)
            self._note(lambda: folder.write_state(attempt.state))
            self._note(folder.reserve)
            connections = self.carrier.start(attempt.run_id, folder, attempt.first_line, options.shown)
            self.hosts = self.carrier.describe_hosts()
            self._note(lambda: attempt.write_report(self.hosts, attempt.state))
        except OSError as error:
            if logs is not None:
                logs.close()
            if not attempt.past:
                folder.remove()
            raise LaunchError(f"job {folder.name} cannot be started: {in_words(error, folder.path)}") from None
        attempt.console.shown = options.shown
        processes.become_subreaper()  # if a supervisor of this host is killed, what it had adopted comes to us
        self.not_ours = processes.descendants(os.getpid(), without={c.process.pid for c in connections})
        self.connections = Connections(connections)
        self.judge = Judge(options.ranks, self.logs.stderr_tail, self.connections.hosts)
        self.connections.attach(self.selector, self._take_events)

    def _close(self) -> None:
        self.logs.close()
        self.attempt.console.show_fragments(older_than_s=0.0)
        self.connections.detach()
        self.selector.close()

    def _note(self, write: Callable[[], None]) -> None:
        """Write what is known of the job. A disk that has become full since is no reason not to begin again."""
        try:
            write()
        except OSError as error:
            if not self.attempt.past:
                raise
            self.say(f"what is known of this restart cannot be written: {error}")

    def _host(self, rank: int) -> str:
        """Return the name of a rank's host, empty where there is one host alone."""
        return self.connections.hosts.get(rank, "")

    def _on(self, connection: Connection) -> str:
        return f" on {connection.name}" if self.connections.hosts else ""

    def _timeout_s(self) -> float | None:
        waits = [self.judge.wait_s(time.monotonic()), self.stall.wait_s(), self.attempt.console.show_fragments()]
        return min((wait for wait in [*waits, *self.connections.ticks()] if wait is not None), default=None)

    def _watch(self) -> None:
        for connection in self.connections.living:
            if connection.silent_too_long:
                self._lost(connection)

    # --- signals

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Have signals end nothing for a while: they wake the loop, which takes them."""
        signals = (*processes.ENDING_SIGNALS, *processes.PASSED_SIGNALS, processes.KILL_NOW)
        with processes.woken_by(dict.fromkeys(signals, lambda *_: None)) as read:
            self.selector.register(read, selectors.EVENT_READ, lambda: self._take_signals(read))
            yield

    def _take_signals(self, fd: int) -> None:
        for signum in os.read(fd, 512):
            if signum in processes.PASSED_SIGNALS:
                self.connections.order(protocol.Signal(signum))
            elif signum in processes.ENDING_SIGNALS:
                self._interrupt(signum)
            elif signum == processes.KILL_NOW:
                self._end_now("stop --now")

    def _end_now(self, why: str) -> None:
        if not self.judge.ending:
            self._interrupt(signal.SIGTERM)
        self._kill(why)

    def _interrupt(self, signum: int) -> None:
        name, grace_s = signal_name(signum), self.attempt.options.grace_s
        match self.judge.interrupt(signum):
            case "kill":
                self._kill(name)
            case "abandon":
                self.connections.abandon()
            case "end":
                living = self.attempt.options.ranks - len(self.judge.ends)
                self.say(
                    f"{name}: ending {living} ranks, which have {grace_s:g} s before they are killed"
                    f" (Ctrl-C{' again' if signum == signal.SIGINT else ''} kills them now)"
                )
                self.connections.end(protocol.End(signum, grace_s))

    def _kill(self, why: str) -> None:
        self.say(f"{why}: killing what is left")
        self.connections.end(protocol.Kill())

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

    def _take(self, connection: Connection, event: protocol.Event) -> None:
        if isinstance(
            event, protocol.Output | protocol.OutputLost | protocol.Progressed | protocol.Continued | protocol.Exited
        ):
            self._moved()
        match event:
            case protocol.Started(rank, pid):
                self.live.write_state(rank, "running", pid=pid, host=connection.name)
                self._started(rank)
            case protocol.StepsReported(rank, data):
                self.live.write_steps(rank, data)
                if (doing := current_task(data)) is not None:
                    self.attempt.console.draw(doing)
            case protocol.Output(rank, stream, data):
                self.logs.write(rank, stream, data)
                self.attempt.console.output(rank, stream, data)
            case protocol.OutputLost(rank, stream, lost_bytes, reason):
                self.logs.lose(rank, stream, lost_bytes, reason)
            case protocol.OutputTail(rank, stream, data):
                self.logs.write(rank, stream, data)
            case protocol.LogLost(rank, stream, lost_bytes, why):
                self.say(f"{self.logs.path(rank, stream)} lacks {lost_bytes} bytes{f' ({why})' if why else ''}")
            case protocol.Stopped(rank, signum, pid):
                self.live.write_state(rank, "stopped", signal=signal_name(signum), pid=pid, host=connection.name)
                self._tell(connection, event)
            case protocol.Continued(rank):
                self.live.write_state(rank, "running")
                self._tell(connection, event)
            case protocol.LeftoverProcesses():
                self._tell(connection, event)
            case protocol.Stacks(quiet_s, data):
                self.stall.answered(connection.name, quiet_s, data)
            case protocol.Exited(rank):
                self.live.write_state(rank, "ended", code=event.code)
                tail = self.logs.stderr_tail(rank)
                end = rank_end(event, connection.clock_ahead_s, tail, self._host(rank))
                if self.judge.ended(torchrun_end(end) if self.attempt.options.by_torchrun else end):
                    self._ask_errors()
            case protocol.Errors(errors):
                ahead_s = connection.clock_ahead_s
                self.judge.answered(connection.name, {r: (text, time_s - ahead_s) for r, text, time_s in errors})
            case protocol.CarrierOutput(text, matters):
                self._carrier_said(text, matters)
            case protocol.NotStarted(reason):
                self._not_started(f"{connection.name}: {reason}" if self.connections.hosts else reason)
            case protocol.EndRequested(now=True):
                self._end_now(f"stop --now -H {connection.name}")
            case protocol.EndRequested() if not self.judge.ending:
                self.say(f"`shardwright stop -H {connection.name}` asks to end the job")
                self._interrupt(signal.SIGTERM)
            case protocol.SupervisorGone():
                self._lost(connection)
            case protocol.Ended():
                self._ended(connection, event)

    def _started(self, rank: int) -> None:
        if self.judge.rank_started(rank):
            self.all_started_s = time.monotonic()
            self._moved()
            self.started()

    def _moved(self) -> None:
        if self.stall.moved():
            self.say("the ranks get on again")

    def _tell(
        self, connection: Connection, event: protocol.Stopped | protocol.Continued | protocol.LeftoverProcesses
    ) -> None:
        if self.judge.ending:
            return
        match event:
            case protocol.Stopped(rank, signum, pid):
                self.say(
                    f"rank {rank} is stopped ({signal_name(signum)}) and the job waits for it; "
                    f"`kill -CONT {pid}`{self._on(connection)} continues it, Ctrl-C ends the job"
                )
            case protocol.Continued(rank):
                self.say(f"rank {rank} continues")
            case protocol.LeftoverProcesses(names):
                listed = ", ".join(f"{name} (pid {pid})" for pid, name in names.items())
                self.say(f"the ranks left processes behind, which are ended now: {listed}")

    def _carrier_said(self, text: str, matters: bool) -> None:
        path = self.attempt.folder.path / "mpirun"
        with contextlib.suppress(OSError):
            path.write_text(f"{text}\n")
            if matters:
                self.say(f"what mpirun said: {path}")

    def _not_started(self, reason: str) -> None:
        self.judge.not_started = reason
        for connection in self.connections.all:
            connection.over = True

    def _ended(self, connection: Connection, event: protocol.Ended) -> None:
        connection.over = True
        self.killed |= set(event.killed)
        self.unkillable += [f"{pid}{self._on(connection)}" for pid in event.unkillable]
        self._judge()
        if self.connections.living:
            return
        if self.killed:
            self.say(f"{describe_ranks(self.killed)} had to be killed")
        if self.unkillable:
            self.say(f"processes that do not end even when killed: {', '.join(self.unkillable)}")

    def _lost(self, connection: Connection) -> None:
        lost_s = time.time()
        if connection.silent_too_long and connection.lease_s is not None:
            lost_s -= connection.lease_s  # when it was last heard
        connection.detach()
        connection.over = True
        code, what = connection.why_lost(self.attempt.run_id, self.not_ours)
        self.unsure_until_s = max(self.unsure_until_s, time.monotonic() + connection.may_live_s)
        end = RankEnd(-1, code or 1, lost_s, host=connection.name, other_cause=f"{what}, and all ranks with it")
        match self.judge.host_lost(end, connection.ranks):
            case "say":
                self.say(what)
            case "not started":
                self._not_started(f"{what} while it imported torch")
            case "settle":
                if self.judge.undecided:
                    self._ask_errors()
                self._judge()

    # --- the verdict

    def _ask_errors(self) -> None:
        self.connections.order(protocol.RequestErrors())
        self.judge.settle(self.connections.leases().items(), time.monotonic())

    def _judge(self) -> None:
        cause = self.judge.decide(time.monotonic(), self.connections.gone)
        if cause is not None:
            details = self.judge.details(cause, self.logs.path, self.logs.stdout_tail)
            self._fail(cause, cause.rank if cause.rank >= 0 else None, details)

    def _look_for_stall(self) -> None:
        """Ask where the ranks are, once they have been quiet for too long; with the answers the job ends.

        With ``--on-stall report`` it goes on.
        """
        if not self.judge.undecided:
            return
        if self.stall.should_hint():
            self.say(HINT)
        if self.stall.should_ask():
            self.stall.ask(self.connections.leases())
            self.connections.order(protocol.RequestStacks())
        elif self.stall.is_stalled():
            self._stalled()

    def _stalled(self) -> None:
        from shardwright.launch.hangs.stall_report import group_lines, headline, write_report

        hang = self.stall.hang(tuple(sorted(self.judge.ends)), self.connections.hosts)
        details = [f"    {line}" for line in group_lines(hang)]
        try:
            details.append(f"their stacks: {write_report(hang, self.attempt.folder.path)}")
        except OSError as error:
            details.append(f"their stacks cannot be written: {error}")
        if not self.attempt.options.stall_ends:
            self.say("\n".join([headline(hang), *details, "the job goes on (--on-stall report); Ctrl-C ends it"]))
            self.stall.reported()
            return
        odd = hang.verdict()[1]
        cause = RankEnd(-1, STALLED_CODE, time.time(), other_cause=headline(hang))
        self.judge.blame(cause)
        self._fail(cause, odd[0] if len(odd) == 1 else None, details)

    def _fail(self, cause: RankEnd, rank: int | None, details: list[str]) -> None:
        """End the job: ``rank`` is what failed.json blames, ``details`` are told after the headline."""
        text = self.judge.headline(cause)
        failure: Mapping[str, object] = {"rank": rank, "cause": text, "time_s": cause.time_s}
        try:
            self.attempt.folder.write_failure(failure)  # marked first, then told
        except OSError as error:
            self.say(f"the job cannot be marked as failed: {error}")
        self.say("\n".join([text, *details]))
        self.connections.end(protocol.End(signal.SIGTERM, self.attempt.options.grace_s, failure))

    def _conclude(self) -> AttemptEnd:
        if (reason := self.judge.not_started) is not None and self.judge.interrupted is None:
            if not self.attempt.past:
                self.attempt.folder.remove()
                raise LaunchError(reason)
            if self.judge.cause is None:
                self.say(reason)
        end = AttemptEnd(
            self.attempt, self.judge.outcome(), self.judge, self.hosts, self.connections.clocks_ahead_s(),
            self.all_started_s, self.unsure_until_s,
        )  # fmt: skip
        if not end.may_restart:
            end.finish(end.outcome.status, end.outcome.exit_code)
        return end
