"""The launcher's end of the line to an agent (`agent`): its first word among noise, heartbeats, its clock, its end.

Each side sends a heartbeat four times in a lease, and anything that comes counts. The agent and the supervisor each
kill the ranks where the launcher falls silent; the launcher ends the job where an agent does. Heartbeats carry times,
from which the clock of each host is known.
"""

from __future__ import annotations

import contextlib
import ctypes  # noqa: F401  # imported before a fork of this process needs it
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from shardwright.launch.carriers.connection import Connection
from shardwright.launch.carriers.packed import LOWEST_PYTHON
from shardwright.launch.host.agent_protocol import (
    AGENT_EVENTS,
    AgentEvent,
    Answer,
    Checked,
    Clock,
    Hello,
    Reached,
    Staging,
    TooOld,
)
from shardwright.launch.host.processes import die_with_parent
from shardwright.launch.host.protocol import Event, Heartbeat, SupervisorGone
from shardwright.launch.host.stream import Decoder
from shardwright.launch.hosts.hosts import Host
from shardwright.launch.joblog.judge import how_it_ended, signal_name

_CLOSE_S = 5.0
_SAID_BYTES = 1 << 14
_NOISE_BYTES = 1 << 16
_CLOCK_SAMPLES = 8
_SSH_FAILED = 255  # also where what it has started was killed by a signal
_NO_BINDING = "lacks support for cpu binding"
A = TypeVar("A", bound=Answer)


class AgentConnection(Connection):
    """The line to an agent: by ssh or srun, with an ``environment`` of its own, or to one that was started here."""

    def __init__(
        self, host: Host, command: Sequence[str], sent: tuple[bytes, bytes], lease_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, preexec_fn=partial(_die_with, os.getpid()), env=environment,
        )  # fmt: skip
        super().__init__(process, host.name, lease_s)
        assert process.stderr is not None
        self.host = host
        self.errors = process.stderr.fileno()
        os.set_blocking(self.errors, False)
        self.said = bytearray()  # the end of what ssh and the host's shell said
        self.noise = bytearray()  # what came before the agent's first word
        self.answers: dict[type, Answer] = {}
        self.exit_code: int | None = None
        self._mark: bytes | None = sent[1]
        self._decoder: Decoder[AgentEvent] = Decoder(*AGENT_EVENTS)
        self._clocks: deque[tuple[float, float]] = deque(maxlen=_CLOCK_SAMPLES)
        self._beat_at_s = 0.0
        self._gone_code: int | None = None
        self._writer.put(sent[0])
        self._stream: Iterator[bytes] | None = None
        self.streamed_bytes = 0
        self.stream_error: OSError | None = None

    def attach(self, selector: selectors.BaseSelector, on_events: Callable[[], None]) -> None:
        super().attach(selector, on_events)
        selector.register(self.errors, selectors.EVENT_READ, self._take_said)

    def detach(self) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self.errors)
        super().detach()

    def has(self, kind: type[Answer]) -> bool:
        """Return whether the agent has given such an answer."""
        return kind in self.answers

    def answer(self, kind: type[A]) -> A:
        """Return an answer of the agent, of those that it `has` given."""
        answer = self.answers[kind]
        assert isinstance(answer, kind)
        return answer

    def send_stream(self, pieces: Iterator[bytes]) -> None:
        """Send encoded messages, which are taken one by one as the other end takes them.

        Where they fail, ``stream_error`` says why. Until then nothing else goes between them but heartbeats.
        """
        self._stream = pieces
        self.send(Heartbeat(time.time()))

    @property
    def streamed(self) -> bool:
        """Return whether there was a stream: then the host is busy for as long as it is heard of."""
        return self._stream is not None

    def _more(self) -> bytes:
        if self._stream is None or self.stream_error is not None:
            return b""
        try:
            piece = next(self._stream, b"")
        except OSError as error:
            self.stream_error = error
            return b""
        self.streamed_bytes += len(piece)
        return piece

    def _take_said(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.errors, _SAID_BYTES)
            self.said += data
            del self.said[:-_SAID_BYTES]
            if not data and self._selector is not None:
                with contextlib.suppress(KeyError):  # it was read to its end before
                    self._selector.unregister(self.errors)

    def tick(self) -> float | None:
        """Send a heartbeat, if it is time for one."""
        assert self.lease_s is not None
        now_s = time.monotonic()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self.lease_s / 4
            self.send(Heartbeat(time.time()))
        return self._beat_at_s - now_s

    def _decode(self, data: bytes) -> list[Event]:
        if self._mark is not None:
            self.noise += data
            before, mark, after = self.noise.partition(self._mark)
            if not mark:
                del self.noise[: -_NOISE_BYTES - len(self._mark)]
                return []
            self.noise, self._mark, data = before, None, bytes(after)
            self._take_said()
            self.said.clear()  # a shell's warning before the agent's first word tells nothing of how the line ends
        return [event for message in self._decoder.feed(data) if (event := self._event(message)) is not None]

    def _event(self, message: AgentEvent) -> Event | None:
        match message:
            case Clock(sent_s, time_s):
                # As in NTP: the host read its clock in the middle of the way there and back, give or take half of it.
                now_s = time.time()
                self._clocks.append((now_s - sent_s, time_s - (sent_s + now_s) / 2))
                self.clock_ahead_s = min(self._clocks)[1]
                if len(self._clocks) < _CLOCK_SAMPLES // 2:
                    self.send(Heartbeat(time.time()))
            case Hello() | TooOld() | Checked() | Reached():
                self.answers[type(message)] = message
            case Staging():
                pass
            case _:
                if isinstance(message, SupervisorGone):
                    self._gone_code = message.code
                return message
        return None

    @property
    def may_live_s(self) -> float:
        """The lease and the time to notice its end, unless the agent has reported that it killed the ranks."""
        assert self.lease_s is not None
        return 0.0 if self._gone_code is not None else 1.25 * self.lease_s + 0.5

    def wake(self) -> None:
        """Do nothing: the agent wakes its supervisor with every order to end."""

    def abandon(self) -> None:
        """Cut the line: the agent loses its orders with it, and kills everything."""
        self.process.kill()

    def why_lost(self, run_id: str, not_ours: set[int]) -> tuple[int, str]:
        if (gone := self._gone_code) is not None:
            return gone, f"the supervisor of the ranks on {self.name} {how_it_ended(gone)}"
        if self.silent_too_long:
            self.process.kill()
            return 1, f"nothing was heard from {self.name} for {self.lease_s:g} s: the host or the line to it is down"
        code = self.wait()
        last = self.said_lines()[-1:]
        if code == _SSH_FAILED and not last:  # where the line breaks, ssh says so at its usual LogLevel
            return 1, f"the agent of {self.name}, which stands there above the ranks, was killed by a signal"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return 1, f"the connection to {self.name} ended ({how}{': ' if last else ''}{''.join(last)})"

    def said_lines(self) -> list[str]:
        """Return the output of ssh or srun and of the host's shell, without srun's warning of missing CPU binding."""
        lines = [line.strip() for line in self.said.decode(errors="replace").splitlines()]
        return [line for line in lines if line and _NO_BINDING not in line]

    def wait(self) -> int:
        """Wait for the end of the process, read its last output, and return its exit code."""
        try:
            code = self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._take_said()
        return code

    def hang_up(self) -> None:
        self.detach()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def close(self) -> None:
        self.hang_up()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _die_with(parent: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


WHEELS = "https://download.pytorch.org/whl"
"""The address of the builds of torch for each CUDA, and for none."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def why_no_answer(
    host: Host, answers: Mapping[type, Answer], exit_code: int | None, said: bytes, noise: bytes, python: str,
    spent_s: float,
) -> str:  # fmt: skip
    """Return one line; ``exit_code`` is of ssh, None where it still runs, ``noise`` came before any answer."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if isinstance(old := answers.get(TooOld), TooOld):
        lowest = ".".join(map(str, LOWEST_PYTHON))
        return f"{python} is Python {old.python} there, expected {lowest} or newer; type --python PATH"
    if exit_code is None:
        what = "answered, but then fell silent" if Hello in answers else "did not answer"
        return f"it {what} within {spent_s:g} s; try `ssh -o BatchMode=yes {host.login} true`"
    if exit_code == _SSH_FAILED:
        return _why_ssh_failed(host, "\n".join(lines), last)
    if exit_code == _NOT_FOUND:
        return f"there is no {python} there ({last}); type --python PATH, one that each host has"
    if exit_code == _NOT_EXECUTABLE:
        return f"{python} cannot be run there ({last}); type --python PATH, one that each host has"
    heard = noise.decode(errors="replace").strip().splitlines()[-1:]
    tail = last or "".join(heard) or "it said nothing"
    return f"{python} ended there with exit code {exit_code} before the checks were through: {tail}"


def _why_ssh_failed(host: Host, said: str, last: str) -> str:
    target = host.login
    for words, text in (
        (
            ("IDENTIFICATION HAS CHANGED",),
            f"its host key is not the one in known_hosts: the host was installed anew, or it is not that host; where "
            f"you know why, type `ssh-keygen -R {host.name}` and `ssh {target} true`",
        ),
        (
            ("Host key verification failed", "host key is known"),
            f"its host key is not known here; type `ssh {target} true` once and compare it",
        ),
        (("Permission denied",), f"ssh may not log in ({last}); type `ssh-copy-id {target}`"),
        (("Could not resolve hostname",), "there is no host of that name; look at the spelling, or in ~/.ssh/config"),
        (("Connection refused",), f"no sshd answers there ({last}); start it: `systemctl start sshd`"),
        (
            ("timed out", "No route to host", "Network is unreachable", "Host is down"),
            f"it cannot be reached ({last}); is it up? `ping {host.name}`",
        ),
    ):
        if any(word in said for word in words):
            return text
    return f"ssh failed: {last or 'it said nothing'}; try `ssh -o BatchMode=yes {target} true`"


def compare(checked: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the problems of each host that differs from the first; versions in ``checked`` may be None.

    >>> compare({"a": {"python": "3.11.2", "torch": "2.13.0", "shardwright": None},
    ...          "b": {"python": "3.12.0", "torch": None, "shardwright": None}})
    {'a': [], 'b': ['Python 3.12.0 there, but 3.11.2 on a; type --python PATH with the same version on each host']}
    """
    problems: dict[str, list[str]] = {name: [] for name in checked}
    if not checked:
        return problems
    (first, reference), *others = checked.items()
    for name, versions in others:
        if versions["python"].split(".")[:2] != reference["python"].split(".")[:2]:
            problems[name].append(
                f"Python {versions['python']} there, but {reference['python']} on {first}; type --python PATH with the "
                "same version on each host"
            )
        for package in ("torch", "shardwright"):
            mine, theirs = versions[package], reference[package]
            if mine is not None and theirs is not None and mine != theirs:
                problems[name].append(
                    f"{package} {mine} there, but {theirs} on {first}; install one version: "
                    f"`pip {' '.join(pip_words(package, theirs))}`"
                )
    return problems


def pip_words(package: str, version: str) -> list[str]:
    """Return the arguments of pip that install this version; one with a local part is in the index of its wheels alone.

    >>> pip_words("torch", "2.13.0+cpu")
    ['install', 'torch==2.13.0+cpu', '--index-url', 'https://download.pytorch.org/whl/cpu']
    """
    local = version.partition("+")[2]
    index = ["--index-url", f"{WHEELS}/{local}"] if package == "torch" and local else []
    return ["install", f"{package}=={version}", *index]
