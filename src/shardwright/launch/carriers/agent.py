"""The agent on a host: it checks the host, starts the supervisor there, and stands between it and the launcher.

    launcher ── ssh ── sshd ── agent ── supervisor ── ranks

Standard library alone, and nothing of it is installed: it arrives on standard input (`packed`). Beside what it passes
on, it follows orders of its own and answers them (`agent_protocol`).

After an `Ended` it waits for the next start; with the end of its orders it kills what there is and ends. Where the
launcher is silent for the time of the lease it does the same, and so does the supervisor, which hears of each beat.

Ranks never wait for a slow line for long: what they write beyond what the line takes is left out and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from shardwright.common.pulse import JOB_VARIABLE
from shardwright.launch.carriers.packed import SUPERVISOR_BOOT
from shardwright.launch.host import agent_protocol, processes, protocol
from shardwright.launch.host.folders import remove_folder
from shardwright.launch.host.stage import StagedFiles
from shardwright.launch.host.stream import Decoder, Writer, encode, take_stdio
from shardwright.launch.hosts import interfaces
from shardwright.launch.hosts.port import PortLease
from shardwright.launch.joblog.logs import RetainedLogs
from shardwright.launch.supervisor import preflight

_CHUNK_BYTES = 1 << 18
_BACKLOG_BYTES = 1 << 21
_PATIENCE_S = 2.0  # in which a full line holds the ranks up, before what they write is left out
_LOSSY_S = 60.0  # after a loss the line is known to be slow, and nobody waits for it
_KILL_S = 30.0
_TELL_STAGING_S = 1.0


class Agent:
    """The process between launcher and supervisor; ``packed`` is the descriptor of the zip file of this package."""

    def __init__(self, packed: int, orders: int, events: int) -> None:
        self.packed, self.orders = packed, orders
        self.scratch = Path(tempfile.mkdtemp(prefix="shardwright-"))
        self.selector = selectors.DefaultSelector()
        self.decoder: Decoder[agent_protocol.AgentOrder] = Decoder(*agent_protocol.AGENT_ORDERS)
        self.writer = Writer(events, gone=self.abandoned)
        self.writer.attach(self.selector)
        self.line = _Line()
        self.lease_s: float | None = None
        self.heard_s = time.monotonic()
        self.environment: dict[str, str] = {}
        self.port: PortLease | None = None
        self.supervisor: _SupervisorProcess | None = None
        self.has_started = False
        self.kept: RetainedLogs | None = None
        self.staged: StagedFiles | None = None
        self.told_staging_s = 0.0
        os.set_blocking(orders, False)
        self.selector.register(orders, selectors.EVENT_READ, self._take_orders)
        self.tell(preflight.introduce(self.scratch))

    def run(self) -> NoReturn:
        while True:
            self._read_while_taken()
            tick_s = None if self.lease_s is None else self.lease_s / 4
            waits = [wait for wait in (tick_s, self.line.wait_s()) if wait is not None]
            for key, _ in self.selector.select(min(waits, default=None)):
                key.data()
            if self.lease_s is not None and time.monotonic() - self.heard_s > self.lease_s:
                self.abandoned()

    def abandoned(self, code: int = 0) -> NoReturn:
        """Kill everything and end: the launcher is gone. A supervisor without orders kills everything, too."""
        if self.supervisor is not None:
            self.supervisor.hang_up()
        self._kill_everything()
        if self.staged is not None and not (self.staged.keep and self.has_started):
            remove_folder(self.staged.folder)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)

    def _kill_everything(self) -> None:
        mark = self.environment.get(JOB_VARIABLE, "")
        processes.kill_all(lambda: processes.descendants(os.getpid()) | processes.marked(mark), _KILL_S)

    # --- to the launcher

    def tell(self, event: agent_protocol.AgentEvent) -> None:
        self.writer.put(encode(event))

    def pass_signals(self, fd: int) -> None:
        """Pass a request of this host to end the job on to the launcher."""
        for signum in os.read(fd, 512):
            if signum in (processes.ASK_LAUNCHER, processes.KILL_NOW):
                self.tell(protocol.EndRequested(signum == processes.KILL_NOW))

    # --- from the launcher

    def _take_orders(self) -> None:
        try:
            data = os.read(self.orders, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.abandoned()
        self.heard_s = time.monotonic()
        for order in self.decoder.feed(data):
            self._follow(order)

    def _follow(self, order: agent_protocol.AgentOrder) -> None:
        match order:
            case protocol.Heartbeat(sent_s):
                self.tell(agent_protocol.Clock(sent_s, time.time()))
                self._pass_on(order)
            case agent_protocol.StageBegin():
                self.staged = StagedFiles(order, self.scratch)
            case agent_protocol.StageEntry() | agent_protocol.StageMore():
                self._stage(order)
            case agent_protocol.Check():
                self._check(order)
            case agent_protocol.Reach(addresses, port, word):
                self.tell(agent_protocol.Reached(interfaces.reach(addresses, port, word)))
            case protocol.Start():
                self._start(order)
            case protocol.End() | protocol.Kill():
                self._end(order)
            case _:
                self._pass_on(order)

    def _pass_on(self, order: protocol.Order) -> None:
        if self.supervisor is not None:
            self.supervisor.send(order)

    def _check(self, order: agent_protocol.Check) -> None:
        self.lease_s = order.lease_s
        self.environment = dict(os.environ) | order.environment
        if self.staged is not None:
            self.staged.finish()
            order = order._replace(wdir=order.wdir or os.fspath(self.staged.folder))
        answer, self.port, listening = preflight.check(order, self.environment, self.scratch)
        if self.staged is not None:
            problems = tuple(self.staged.problems) or answer.problems
            answer = answer._replace(staged=os.fspath(self.staged.folder), problems=problems)
        if listening is not None:
            word = order.word
            self.selector.register(listening, selectors.EVENT_READ, lambda: interfaces.answer(listening, word))
        self.tell(answer)

    def _stage(self, order: agent_protocol.StageEntry | agent_protocol.StageMore) -> None:
        assert self.staged is not None
        self.staged.take(order)
        if (now_s := time.monotonic()) >= self.told_staging_s + _TELL_STAGING_S:
            self.told_staging_s = now_s
            self.tell(agent_protocol.Staging())

    def _start(self, order: protocol.Start) -> None:
        self.environment |= order.environment
        for left in self.scratch.iterdir():  # by an earlier run
            if not left.is_dir():
                left.unlink()
        self.has_started = True
        try:
            self.kept = None if order.kept is None else RetainedLogs(order.kept, order.ranks)
        except OSError as error:
            self.tell(protocol.NotStarted(
                f"the log {error.filename} cannot be written there: {error.strerror}; type --job NAME or --log-dir DIR"
            ))  # fmt: skip
            return
        held = (*(self.port.file_descriptors() if self.port is not None else ()), self.packed)
        try:
            self.supervisor = _SupervisorProcess(self, order._replace(held=held, environment={}, kept=None))
        except OSError as error:
            self.tell(protocol.NotStarted(f"the supervisor of the ranks cannot be started: {error}"))

    def _end(self, order: protocol.End | protocol.Kill) -> None:
        """Mark the job as failed before any rank is signalled, and continue a stopped supervisor."""
        if isinstance(order, protocol.End) and order.failure is not None:
            with contextlib.suppress(OSError):
                (self.scratch / "failed.json").write_text(json.dumps(order.failure))
        self._pass_on(order)
        if self.supervisor is not None:
            self.supervisor.process.send_signal(signal.SIGCONT)

    # --- from the supervisor

    def _read_while_taken(self) -> None:
        """Read the supervisor, but not while the line is full, as long as there is patience for that."""
        if self.supervisor is not None:
            self.supervisor.read_if(not self.line.holds_up(self.writer.waiting_bytes))

    def relay(self, event: protocol.Event) -> None:
        if self.kept is not None and not self._relay_kept(self.kept, event):
            return
        if isinstance(event, protocol.Output) and self.line.leaves_out(event, self.writer.waiting_bytes):
            return
        for lost in self.line.losses():
            self.tell(lost)
        self.tell(event)

    def _relay_kept(self, kept: RetainedLogs, event: protocol.Event) -> bool:
        """Keep what an event brings. Returns whether the launcher is to have the event."""
        match event:
            case protocol.Output(rank, stream, data):
                return kept.write(rank, stream, data)
            case protocol.Exited(rank):
                for stream, tail in kept.take_tails(rank).items():
                    self.tell(protocol.OutputTail(rank, stream, tail))
            case protocol.Ended():
                for lost in kept.close():
                    self.tell(lost)
        return True

    def supervisor_over(self, code: int, had_last_word: bool) -> None:
        self.supervisor = None
        if had_last_word:
            return
        self._kill_everything()
        for lost in self.kept.close() if self.kept is not None else ():
            self.tell(lost)
        self.tell(protocol.SupervisorGone(code))


class _Line:
    """The state of the line to the launcher: for how long it has been full, and how much output was left out."""

    def __init__(self) -> None:
        self.full_since_s: float | None = None
        self.lossy_until_s = 0.0
        self.lost: dict[tuple[int, str], int] = {}

    def holds_up(self, backlog_bytes: int) -> bool:
        """Return whether ranks have to wait: from a full line to a half empty one, or for `_PATIENCE_S`."""
        now_s = time.monotonic()
        if self.full_since_s is None:
            if backlog_bytes >= _BACKLOG_BYTES and now_s >= self.lossy_until_s:
                self.full_since_s = now_s
        elif backlog_bytes < _BACKLOG_BYTES // 2:
            self.full_since_s = None
        elif now_s >= self.full_since_s + _PATIENCE_S:
            self.full_since_s = None
            self.lossy_until_s = now_s + _LOSSY_S
        return self.full_since_s is not None

    def wait_s(self) -> float | None:
        if self.full_since_s is None:
            return None
        return max(0.05, self.full_since_s + _PATIENCE_S - time.monotonic())

    def leaves_out(self, output: protocol.Output, backlog_bytes: int) -> bool:
        if time.monotonic() >= self.lossy_until_s or backlog_bytes < _BACKLOG_BYTES:
            return False
        key = output.rank, output.stream
        self.lost[key] = self.lost.get(key, 0) + len(output.data)
        return True

    def losses(self) -> list[protocol.OutputLost]:
        """Return the losses since the last call, which the launcher is to hear of before anything else."""
        losses = [
            protocol.OutputLost(rank, stream, lost_bytes, "the line between the hosts did not take them")
            for (rank, stream), lost_bytes in self.lost.items()
        ]
        self.lost.clear()
        return losses


class _SupervisorProcess:
    def __init__(self, agent: Agent, start: protocol.Start) -> None:
        self.agent = agent
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR_BOOT.format(packed=agent.packed)],
            env=agent.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=start.held,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.events = self.process.stdout.fileno()
        # Its end shows in the events.
        self.writer = Writer(self.process.stdin.fileno(), gone=lambda: None)
        self.writer.attach(agent.selector)
        self.decoder: Decoder[protocol.Event] = Decoder(*protocol.EVENTS)
        self.reading = False
        self.had_last_word = False
        self.send(start)

    def send(self, order: protocol.Start | protocol.Order) -> None:
        self.writer.put(encode(order))

    def read_if(self, wanted: bool) -> None:
        if wanted and not self.reading:
            self.agent.selector.register(self.events, selectors.EVENT_READ, self._take_events)
        elif self.reading and not wanted:
            self.agent.selector.unregister(self.events)
        self.reading = wanted

    def _take_events(self) -> None:
        data = os.read(self.events, _CHUNK_BYTES)
        if not data:
            self.hang_up()
            code = self.process.wait()
            if self.agent.supervisor is self:
                self.agent.supervisor_over(code, self.had_last_word)
            return
        for event in self.decoder.feed(data):
            self.had_last_word |= isinstance(event, protocol.Ended | protocol.NotStarted)
            self.agent.relay(event)

    def hang_up(self) -> None:
        self.read_if(False)
        self.writer.detach()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def main(packed: int) -> NoReturn:
    """Be the agent: this is the end of the first program that came over the line."""
    processes.become_subreaper()
    orders, events = take_stdio()
    agent = Agent(packed, orders, events)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # Slurm ends a step so: time to remove what would be left
        signal.signal(signum, lambda signum, _: agent.abandoned(128 + signum))
    with processes.woken_by(dict.fromkeys((processes.ASK_LAUNCHER, processes.KILL_NOW), lambda *_: None)) as read:
        agent.selector.register(read, selectors.EVENT_READ, lambda: agent.pass_signals(read))
        agent.run()
