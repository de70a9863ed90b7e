"""One program of ours on one host, started here or by ssh, which answers one order after the other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from shardwright.common.words import plain
from shardwright.errors import LaunchError
from shardwright.launch.carriers.agent_connection import why_no_answer
from shardwright.launch.carriers.packed import BOOT, pack, sources
from shardwright.launch.carriers.ssh import login_command
from shardwright.launch.host.agent_protocol import Answer, TooOld
from shardwright.launch.hosts.hosts import Host, is_this_host
from shardwright.launch.options.request import NamedHosts
from shardwright.launch.progress_notes import waiting_for

_ANSWER_S = 15.0
_MOST_BYTES = 1 << 24  # of an answer: more is no answer of ours


class NoAnswer(Exception):
    """A host that does not answer as it should, with the reason."""


@cache
def _packed(module: str) -> tuple[bytes, bytes]:
    """Return what is sent: the folder of the module, and what programs on hosts import.

    Cached by the names of modules, whose sources do not change while a process runs them.
    """
    return pack(sources("cluster/__init__", "cluster/programs", "/".join(module.split(".")[1:-1])), module)


class Probe:
    """The program ``module`` on a host. Without ``batch`` ssh may ask the person at the terminal for a password.

    Raises `LaunchError` where ssh cannot be started here.
    """

    def __init__(self, host: Host, module: str, python: str, connect_timeout_s: float, batch: bool = True) -> None:
        self.host, self.python, self.timeout_s = host, python, connect_timeout_s + _ANSWER_S
        here = is_this_host(host.name) and host.user is None
        command = [python, "-c", BOOT] if here else login_command(host, python, connect_timeout_s, batch)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._batch, self._buffer, self._noise = batch, b"", b""
        sent, mark = _packed(module)
        self._mark: bytes | None = mark
        try:
            said = self._said if batch else None
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0
            )
        except OSError as error:
            self._said.close()
            what = f"{command[0]} cannot be started here: {error}; type `apt-get install openssh-client`"
            raise LaunchError(what) from None
        self._first = sent
        self._writing: threading.Thread | None = None

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises `NoAnswer` where the host does not answer in time, fails, or answers otherwise."""
        self._write(self._first + json.dumps(order).encode() + b"\n")
        self._first = b""
        until_s = time.monotonic() + self.timeout_s if self._batch or self._mark is None else float("inf")
        while True:
            if self._mark is not None and self._mark in self._buffer:
                self._noise, _, self._buffer = self._buffer.partition(self._mark)
                self._mark = None
            if self._mark is None and b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                return self._answer(line)
            if len(self._buffer) > _MOST_BYTES:
                raise NoAnswer("it answered more than an answer can be")
            self._buffer += self._read(until_s)

    def demand(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises `LaunchError`, which names the host, where it does not answer as it should."""
        try:
            return self.ask(order)
        except NoAnswer as error:
            raise LaunchError(f"{self.host.name}: {plain(error)}") from None

    def _write(self, data: bytes) -> None:
        """Write in a thread: a host that has stopped reading is silent, and holds nobody up."""
        assert self._process.stdin is not None
        self._writing = threading.Thread(target=_send, args=(self._process.stdin.fileno(), data), daemon=True)
        self._writing.start()

    def _read(self, until_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        left_s = None if until_s == float("inf") else max(0.0, until_s - time.monotonic())
        if not select.select([descriptor], [], [], left_s)[0]:
            raise NoAnswer(self._why(None))
        if not (data := os.read(descriptor, 1 << 16)):
            raise NoAnswer(self._why(self._end()))
        return data

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NoAnswer("it answered something that is no answer")
        if answer.get("message") == "TooOld":
            raise NoAnswer(self._why(0, {TooOld: TooOld(str(answer.get("python")))}))
        if "failed" in answer:
            raise NoAnswer(str(answer["failed"]))
        return answer

    def _end(self) -> int | None:
        try:
            return self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return None

    def _why(self, code: int | None, answers: Mapping[type, Answer] | None = None) -> str:
        self._said.seek(0)
        said, noise = self._said.read(1 << 14), self._noise or self._buffer
        return why_no_answer(self.host, answers or {}, code, said, noise, self.python, self.timeout_s)

    def close(self) -> None:
        """End the program: it ends by itself when nobody can ask it any more, if it ever began."""
        if self._mark is not None:
            self._process.kill()
        if self._writing is not None:
            self._writing.join(1.0)
        for stream in (self._process.stdin, self._process.stdout, self._said):
            assert stream is not None
            stream.close()
        if self._end() is None:
            self._process.kill()
            self._process.wait()


def _send(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # what has ended is seen by the end of what it says
        while data:
            data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def open_all(where: NamedHosts, module: str, batch: bool = True) -> Iterator[tuple[dict[str, Probe], dict[str, str]]]:
    """Yield the program on each host by the host's name, and why others are silent.

    Without ``batch`` one host is asked after the other, since ssh may ask the person.
    """
    opened: dict[str, Probe] = {}
    silent: dict[str, str] = {}

    def connect(host: Host) -> None:
        path = where.python.on(host.name) or sys.executable
        one = opened[host.name] = Probe(host, module, path, where.timeout_s, batch)
        try:
            one.ask({"order": "hello"})
        except NoAnswer as error:
            silent[host.name] = str(error)

    with ThreadPoolExecutor(max(1, len(where.hosts)) if batch else 1) as pool:
        try:
            names = [host.name for host in where.hosts]
            with waiting_for(f"reaching {', '.join(names)}") if batch else contextlib.nullcontext():
                list(pool.map(connect, where.hosts))
            yield {n: opened[n] for n in names if n not in silent}, {n: silent[n] for n in names if n in silent}
        finally:
            list(pool.map(lambda one: one.close(), opened.values()))
