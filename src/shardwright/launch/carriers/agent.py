"""What the launcher sends to a host: it checks the host, starts the supervisor there, and stands between the two.

    launcher ── ssh ── sshd ── agent ── supervisor ── ranks

Standard library alone, and nothing of it is installed: it arrives on standard input (`packed`). Beside what it passes
on, it follows orders of its own, each with its answer:

    {"order": "beat", "sent_s": ...}      {"event": "beat", "sent_s": ..., "time_s": ...}    the clock of this host
    {"order": "check", ...}               {"event": "checked", "problems": [...], ...}       see `preflight`
    {"order": "reach", "addresses": [...], "port": ..., "word": ...}   {"event": "reached", "by": {address: interface}}
    {"order": "stage", ...}, {"order": "stage_entry", ...}, {"order": "stage_more", ...}    see `stage`; {"event":
                                          "staging"} once in a while, and what is wrong comes with "checked"
    {"order": "start", "start": {...}, "environment": {...}, "kept": null}
                                          a supervisor's events, and at the end its "ended"; with "kept" see `kept_logs`

After an "ended" it waits for the next start; with the end of its orders it kills what there is and ends. Where the
launcher is silent for the time of the lease it does the same, and so does the supervisor, which hears of each beat.
A supervisor that ends without its last word is told by {"event": "supervisor_gone", "code": ...}.

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

from shardwright.hosts import interfaces
from shardwright.hosts.port import PortLease
from shardwright.launch.carriers.packed import SUPERVISOR_BOOT
from shardwright.launch.host.processes import JOB_VARIABLE, become_subreaper, descendants, kill_all, marked
from shardwright.launch.host.protocol import Decoder, Message, encode
from shardwright.launch.host.stage import StagedFiles, remove_folder
from shardwright.launch.kept.kept_logs import KeptLogs
from shardwright.launch.supervisor import preflight
from shardwright.launch.supervisor.supervisor import take_stdio

_CHUNK_BYTES = 1 << 18
_BACKLOG_BYTES = 1 << 21
_PATIENCE_S = 2.0  # in which a full line holds the ranks up, before what they write is left out
_LOSSY_S = 60.0  # after a loss the line is known to be slow, and nobody waits for it
_KILL_S = 30.0
_TELL_STAGING_S = 1.0


class Agent:
    """``packed`` is the file descriptor of the zip file with this package."""

    def __init__(self, packed: int, orders: int, events: int) -> None:
        self.packed, self.orders, self.events = packed, orders, events
        self.scratch = Path(tempfile.mkdtemp(prefix="shardwright-"))
        self.selector = selectors.DefaultSelector()
        self.decoder = Decoder()
        self.backlog = bytearray()
        self.line = _Line()
        self.lease_s: float | None = None
        self.heard_s = time.monotonic()
        self.environment: dict[str, str] = {}
        self.port: PortLease | None = None
        self.supervisor: _Supervisor | None = None
        self.has_started = False
        self.kept: KeptLogs | None = None
        self.staged: StagedFiles | None = None
        self.told_staging_s = 0.0
        os.set_blocking(events, False)
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
        """The launcher is gone: nobody is left to tell. A supervisor without orders kills everything, too."""
        if self.supervisor is not None:
            self.supervisor.hang_up()
        self._kill_everything()
        if self.staged is not None and not (self.staged.keep and self.has_started):
            remove_folder(self.staged.folder)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)

    def _kill_everything(self) -> None:
        mark = self.environment.get(JOB_VARIABLE)
        kill_all(lambda: descendants(os.getpid()) | (marked(mark) if mark else set()), _KILL_S)

    # --- to the launcher

    def tell(self, message: Message, payload: bytes = b"") -> None:
        if not self.backlog:
            self.selector.register(self.events, selectors.EVENT_WRITE, self._flush)
        self.backlog += encode(message, payload)

    def _flush(self) -> None:
        try:
            del self.backlog[: os.write(self.events, self.backlog[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.abandoned()
        if not self.backlog:
            self.selector.unregister(self.events)

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
        for message, payload in self.decoder.feed(data):
            if payload:
                message["payload"] = payload
            own = getattr(self, f"_order_{message['order']}", None)
            if own is not None:
                own(message)
            elif self.supervisor is not None:
                self.supervisor.send(message)

    def _order_beat(self, message: Message) -> None:
        self.tell({"event": "beat", "sent_s": message["sent_s"], "time_s": time.time()})
        if self.supervisor is not None:
            self.supervisor.send(message)

    def _order_check(self, message: Message) -> None:
        self.lease_s = message["lease_s"]
        self.environment = dict(os.environ) | message["environment"]
        if self.staged is not None:
            self.staged.finish()
            message["wdir"] = message["wdir"] or os.fspath(self.staged.folder)
        answer, self.port, listening = preflight.check(message, self.environment, self.scratch)
        if self.staged is not None:
            answer["staged"] = os.fspath(self.staged.folder)
            answer["problems"] = self.staged.problems or answer["problems"]
        if listening is not None:
            word = message["word"]
            self.selector.register(listening, selectors.EVENT_READ, lambda: interfaces.answer(listening, word))
        self.tell(answer)

    def _order_stage(self, message: Message) -> None:
        self.staged = StagedFiles(message, self.scratch)

    def _order_stage_entry(self, message: Message) -> None:
        assert self.staged is not None
        self.staged.take(message)
        if (now_s := time.monotonic()) >= self.told_staging_s + _TELL_STAGING_S:
            self.told_staging_s = now_s
            self.tell({"event": "staging"})

    _order_stage_more = _order_stage_entry

    def _order_reach(self, message: Message) -> None:
        by = interfaces.reach(message["addresses"], message["port"], message["word"])
        self.tell({"event": "reached", "by": by})

    def _order_start(self, message: Message) -> None:
        self.environment |= message["environment"]
        for left in self.scratch.iterdir():  # by an earlier run
            if not left.is_dir():
                left.unlink()
        self.has_started = True
        try:
            self.kept = _kept_logs(message)
        except OSError as error:
            what = (
                f"the log {error.filename} cannot be written there: {error.strerror}; type --job NAME or --log-dir DIR"
            )
            self.tell({"event": "not_started", "message": what})
            return
        held = self.port.file_descriptors() if self.port is not None else []
        start = message["start"] | {"held": [*held, self.packed]}
        try:
            self.supervisor = _Supervisor(self, start, [*held, self.packed])
        except OSError as error:
            self.tell({"event": "not_started", "message": f"the supervisor of the ranks cannot be started: {error}"})

    def _order_end(self, message: Message) -> None:
        """The mark of a failed job is there before a rank is told to end."""
        if message["failure"] is not None:
            with contextlib.suppress(OSError):
                (self.scratch / "failed.json").write_text(json.dumps(message["failure"]))
        self._pass_on_and_wake(message)

    def _order_kill(self, message: Message) -> None:
        self._pass_on_and_wake(message)

    def _pass_on_and_wake(self, message: Message) -> None:
        if self.supervisor is not None:
            self.supervisor.send(message)
            self.supervisor.process.send_signal(signal.SIGCONT)

    # --- from the supervisor

    def _read_while_taken(self) -> None:
        """Whether the supervisor is read now: not while the line is full, as long as there is patience for that."""
        if self.supervisor is not None:
            self.supervisor.read_if(not self.line.holds_up(len(self.backlog)))

    def relay(self, message: Message, payload: bytes) -> None:
        if self.kept is not None and not self._relay_kept(self.kept, message, payload):
            return
        if message["event"] == "output" and self.line.leaves_out(message, len(self.backlog)):
            return
        for lost in self.line.losses():
            self.tell(lost)
        self.tell(message, payload)

    def _relay_kept(self, kept: KeptLogs, message: Message, payload: bytes) -> bool:
        """Whether the launcher is to have the message."""
        match message["event"]:
            case "output":
                return kept.write(message["rank"], message["stream"], payload)
            case "exited":
                if tail := kept.take_tail(message["rank"]):
                    self.tell({"event": "stderr_tail", "rank": message["rank"]}, tail)
            case "ended":
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
        self.tell({"event": "supervisor_gone", "code": code})


def _kept_logs(order: Message) -> KeptLogs | None:
    kept = order["kept"]
    if kept is None:
        return None
    ranks = [int(rank) for rank in order["start"]["ranks"]]
    return KeptLogs(Path(kept["folder"]), ranks, kept["shown"], kept["begin"])


class _Line:
    """How the line to the launcher keeps up, and what was left out of the ranks' output."""

    def __init__(self) -> None:
        self.full_since_s: float | None = None
        self.lossy_until_s = 0.0
        self.lost: dict[tuple[int, str], int] = {}

    def holds_up(self, backlog_bytes: int) -> bool:
        """From when the line is full until it is half empty, unless that takes too long."""
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

    def leaves_out(self, message: Message, backlog_bytes: int) -> bool:
        if time.monotonic() >= self.lossy_until_s or backlog_bytes < _BACKLOG_BYTES:
            return False
        key = message["rank"], message["stream"]
        self.lost[key] = self.lost.get(key, 0) + message["payload_bytes"]
        return True

    def losses(self) -> list[Message]:
        """To be told before anything else."""
        told: list[Message] = [
            {"event": "output_lost", "rank": rank, "stream": stream, "bytes": count,
             "reason": "the line between the hosts did not take them"}
            for (rank, stream), count in self.lost.items()
        ]  # fmt: skip
        self.lost.clear()
        return told


class _Supervisor:
    """The process below this one, and the two streams between."""

    def __init__(self, agent: Agent, start: Message, passed: list[int]) -> None:
        self.agent = agent
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR_BOOT.format(packed=agent.packed)],
            env=agent.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=passed,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.events = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.decoder = Decoder()
        self.backlog = bytearray()
        self.reading = False
        self.had_last_word = False
        os.set_blocking(self.orders, False)
        self.send(start)

    def send(self, message: Message) -> None:
        if not self.backlog:
            self.agent.selector.register(self.orders, selectors.EVENT_WRITE, self._flush)
        self.backlog += encode(message)

    def _flush(self) -> None:
        try:
            del self.backlog[: os.write(self.orders, self.backlog[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # its end shows in the events
            self.backlog.clear()
        if not self.backlog:
            self.agent.selector.unregister(self.orders)

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
        for message, payload in self.decoder.feed(data):
            self.had_last_word |= message["event"] in ("ended", "not_started")
            self.agent.relay(message, payload)

    def hang_up(self) -> None:
        self.read_if(False)
        if self.backlog:
            self.agent.selector.unregister(self.orders)
            self.backlog.clear()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def main(packed: int) -> NoReturn:
    """The end of the first program that came over the line."""
    become_subreaper()
    orders, events = take_stdio()
    agent = Agent(packed, orders, events)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # Slurm ends a step so: time to remove what would be left
        signal.signal(signum, lambda signum, _: agent.abandoned(128 + signum))
    agent.run()
