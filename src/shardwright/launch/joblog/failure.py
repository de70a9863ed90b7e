"""Which rank failed first, and why: the cause told apart from its echoes.

A rank's failure is dated by its error file where it has one (the moment of the exception, with torchelastic's
``@record`` or under our zygote), else by its death. Among the failures of a short while the earliest is the cause,
except that one which only speaks of a lost peer is an echo as long as there is any other.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from shardwright.common.schema import SchemaError, from_json

TRACEBACK_LINES = 12
_OTHER_LINES = 5
_TRACEBACK = b"Traceback (most recent call last):"
_LOST_PEER = re.compile(
    rb"Connection (reset|closed|refused)|[Cc]onnection was (reset|closed|likely closed)|Broken pipe|"
    rb"DistNetworkError|DistBackendError|remote process exited|[Ss]ocket [Tt]imeout|peer.{0,20}(gone|closed|reset)|"
    rb"Timed out waiting|recvValue failed|sendBytes failed|"
    rb"rank \d+ (\(process \d+\) has ended, while rank|has left the group of) "  # the shm backend
)
_TORCHRUN = re.compile(rb"^Root Cause .*?^ *rank +: (\d+).*?^ *exitcode +: (-?\d+)", re.MULTILINE | re.DOTALL)
# What people are told beside an error that does not say it itself.
_REMEDIES = (
    (
        re.compile(rb"only supported with GPUs, no GPUs found|doesn't have NCCL built in"),
        "nccl moves tensors of GPUs, and there is none for this rank: use gloo in its place",
    ),
    (
        re.compile(rb"[Tt]oo many open files"),
        "a process may open too few files: type `ulimit -n 65536` in the shell that launches the job, or what "
        "`ulimit -Hn` allows",
    ),
    (
        re.compile(
            rb"out of shared memory|unable to \w+ .{0,200}(shared memory|torch_\d)|/dev/shm|SemLock[^|]*No space left",
            re.DOTALL,
        ),
        "/dev/shm of this host has too little room, by which loaders hand over batches: type `mount -o "
        "remount,size=2G /dev/shm`, start the container with `--shm-size=2g`, or use num_workers=0",
    ),
)
_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?", re.MULTILINE)  # torch marks tracebacks so, once ranks have a group


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. ``code`` is its exit code, or minus the signal; ``time_s`` since the epoch."""

    rank: int
    code: int
    time_s: float
    signalled: bool = False  # by us, before it ended
    out_of_memory: bool = False
    stderr_tail: bytes = b""
    error: str | None = None  # "ValueError: message", from its error file
    host: str = ""  # where the job has several
    loss: str | None = None  # no rank, but the end of all that were on a host, in words
    of_torchrun: int | None = None  # where this is the end of a torchrun: which of its ranks the code is of

    @property
    def exit_code(self) -> int:
        """The exit code as a shell has it: 128 + N for signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_echo(self) -> bool:
        """Whether nothing is known of the failure but the loss of a peer."""
        if self.loss is not None:
            return False
        return _LOST_PEER.search(b"\n".join(self.last_lines()) + (self.error or "").encode()) is not None

    def last_lines(self) -> list[bytes]:
        """The end of its traceback if it wrote one, else the end of what it wrote."""
        start = self.stderr_tail.rfind(_TRACEBACK)
        return end_of(self.stderr_tail[max(start, 0) :], TRACEBACK_LINES if start >= 0 else _OTHER_LINES)

    def remedy(self) -> list[str]:
        """What may be done about it, where that is known."""
        return [text for pattern, text in _REMEDIES if pattern.search(b"\n".join(self.last_lines()))]

    @property
    def has_traceback(self) -> bool:
        return _TRACEBACK in self.stderr_tail

    def cause(self) -> str:
        """The cause of the failure in one line, without the rank."""
        if self.of_torchrun is not None:
            how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
            return f"rank {self.of_torchrun} of the ranks that torchrun has started {how}"
        if self.out_of_memory:
            return "killed by the kernel for lack of memory (SIGKILL); give the ranks less to hold, or the host more"
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        lines = self.last_lines()
        error = self.error
        if error is None and lines and re.match(rb"[\w.]+(Error|Exception|Interrupt|Warning|Exit)\b", lines[-1]):
            error = lines[-1].decode(errors="replace")
        return f"exit code {self.code}" + (f", {error.splitlines()[0][:300]}" if error else "")


def end_of(text: bytes, lines: int) -> list[bytes]:
    """The last lines of what a rank wrote."""
    plain = _TORCH_PREFIX.sub(b"", text.replace(b"\r", b"\n"))
    return [line[:500] for line in plain.split(b"\n") if line.strip()][-lines:]


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class _Extra(TypedDict, total=False):
    timestamp_s: float


class _Message(TypedDict, total=False):
    message: str
    extraInfo: _Extra


class _ErrorFile(TypedDict):
    """What torchelastic writes of an error."""

    message: str | _Message


def read_error_file(path: Path) -> tuple[str, float] | None:
    """The message and the moment of an error file of torchelastic's format; None if there is none that can be read."""
    try:
        written_s = path.stat().st_mtime
        message = from_json(path.read_bytes(), _ErrorFile)["message"]
    except (OSError, SchemaError):
        return None
    if isinstance(message, str):
        return message, written_s
    said_s = message.get("extraInfo", {}).get("timestamp_s", written_s)
    return message.get("message", ""), said_s


def torchrun_end(end: RankEnd) -> RankEnd:
    """The end of a torchrun as that of the rank that failed first below it, which it names in its last words."""
    named = _TORCHRUN.search(end.stderr_tail)
    return end if named is None or end.code <= 0 else replace(end, code=int(named[2]), of_torchrun=int(named[1]))


def first_failure(ends: Iterable[RankEnd]) -> RankEnd:
    """The cause among the ends that are failures and that we did not bring about ourselves."""
    failures = [end for end in ends if end.code != 0 and not end.signalled]
    return min(failures, key=lambda end: (end.is_echo, end.time_s, end.rank))


def describe_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
