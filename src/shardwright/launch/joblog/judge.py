"""Decides why an attempt failed: which rank failed first on all hosts, by this host's clock, and why.

A failure is dated by the error file of its rank where there is one (the moment of the exception, with torchelastic's
``@record`` or under our zygote), else by the death of the rank. With the first failure a short while begins in which
others may turn out to have been earlier: each supervisor is asked for the errors of ranks that have not died yet. The
earliest of these failures is the cause, but one that only speaks of a lost peer is ignored as long as there is any
other. Where there is none, hosts that have not answered are waited for, up to their leases: a host that is gone is the
cause of the errors of its peers.

Nothing here reads a clock, writes, or sends: the `Judge` is called with what happens, and returns what is to be done.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

from shardwright.common.schema import SchemaError, from_json
from shardwright.common.words import describe_ranks
from shardwright.launch.host.protocol import Exited
from shardwright.launch.joblog.job import FAILED, INTERRUPTED, SUCCEEDED

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
    """The end of one rank: its exit code, or minus the signal, and the moment since the epoch."""

    rank: int
    code: int
    time_s: float
    signalled: bool = False  # by us, before it ended
    out_of_memory: bool = False
    stderr_tail: bytes = b""
    error: str | None = None  # "ValueError: message", from its error file
    host: str = ""  # where the job has several
    other_cause: str | None = None  # in words, where no rank failed by itself: its host is gone, or ranks hang
    of_torchrun: int | None = None  # where this is the end of a torchrun: which of its ranks the code is of

    @property
    def exit_code(self) -> int:
        """The exit code as a shell has it: 128 + N for signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def only_lost_peer(self) -> bool:
        """Return whether the error only says that a peer was lost, which another rank's failure causes."""
        if self.other_cause is not None:
            return False
        return _LOST_PEER.search(b"\n".join(self.last_lines()) + (self.error or "").encode()) is not None

    def last_lines(self) -> list[bytes]:
        """Return the end of its traceback if it wrote one, else the end of its output."""
        start = self.stderr_tail.rfind(_TRACEBACK)
        return end_of(self.stderr_tail[max(start, 0) :], TRACEBACK_LINES if start >= 0 else _OTHER_LINES)

    def remedy(self) -> list[str]:
        """Return what may be done about the error, where that is known."""
        return [text for pattern, text in _REMEDIES if pattern.search(b"\n".join(self.last_lines()))]

    def cause(self) -> str:
        """Return the cause of the failure in one line, without the rank."""
        if self.of_torchrun is not None:
            return f"rank {self.of_torchrun} of the ranks that torchrun has started {how_it_ended(self.code)}"
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
    """Return the last lines of a rank's output."""
    plain = _TORCH_PREFIX.sub(b"", text.replace(b"\r", b"\n"))
    return [line[:500] for line in plain.split(b"\n") if line.strip()][-lines:]


def signal_name(signum: int) -> str:
    """Return the name of a signal, or its number in words where it has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def how_it_ended(code: int) -> str:
    """Return the end of a process in words, from its exit code, or minus the signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


class _Extra(TypedDict, total=False):
    timestamp_s: float


class _Message(TypedDict, total=False):
    message: str
    extraInfo: _Extra


class _ErrorFile(TypedDict):
    message: str | _Message


def read_error_file(path: Path) -> tuple[str, float] | None:
    """Return message and moment of an error file of torchelastic's format; None if there is none to be read."""
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
    """Return the end of a torchrun as that of the rank that failed first below it, which it names at its end."""
    named = _TORCHRUN.search(end.stderr_tail)
    return end if named is None or end.code <= 0 else replace(end, code=int(named[2]), of_torchrun=int(named[1]))


def first_failure(ends: Iterable[RankEnd]) -> RankEnd:
    """Return the cause among the ends that are failures and that we did not bring about ourselves."""
    failures = [end for end in ends if end.code != 0 and not end.signalled]
    return min(failures, key=lambda end: (end.only_lost_peer, end.time_s, end.rank))


SETTLE_S = 0.2
_ANSWER_S = 2.0  # from a supervisor of this host, which may have been stopped


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt, with the status of its job; ``cause`` in words, where it failed."""

    status: str
    exit_code: int
    cause: str | None = None


class Judge:
    """The known ends of the ranks of an attempt, and what follows from them.

    ``hosts`` names the host of each rank, where there are several; ``stderr_tail`` gives the end of what a rank wrote.
    Moments that are passed in (``now_s``) are of the monotonic clock, all else is in seconds since the epoch.
    """

    def __init__(
        self, ranks: int, stderr_tail: Callable[[int], bytes] = lambda rank: b"", hosts: Mapping[int, str] | None = None
    ) -> None:
        self.ranks, self.stderr_tail, self.hosts = ranks, stderr_tail, hosts or {}
        self.started: set[int] = set()
        self.ends: dict[int, RankEnd] = {}
        self.errors: dict[int, tuple[str, float]] = {}  # of ranks that may not have ended yet
        self.lost_hosts: list[RankEnd] = []
        self.cause: RankEnd | None = None
        self.ending = False  # the ranks have been told to end
        self.interrupted: int | None = None  # by the signal that began to end the ranks
        self.told_to_end: int | None = None  # by a signal, also where a failure had begun to end them
        self.not_started: str | None = None  # why the ranks could not be started
        self._settle_at_s: float | None = None
        self._waits: dict[str, float] = {}  # hosts that were asked and have not answered: until when they may

    # --- what happens

    def rank_started(self, rank: int) -> bool:
        """Note that a rank has started. Returns whether all have started with it."""
        self.started.add(rank)
        return len(self.started) == self.ranks

    def ended(self, end: RankEnd) -> bool:
        """Record that a rank has ended. Returns whether the errors of all hosts are now needed (`settle`)."""
        self.ends[end.rank] = end
        return end.code != 0 and self.undecided

    def interrupt(self, signum: int) -> Literal["end", "abandon", "kill", "nothing"]:
        """End the job by a signal; returns what becomes of the ranks, abandoned where none has started."""
        self.told_to_end = signum
        if self.ending:
            return "kill" if signum == signal.SIGINT else "nothing"
        self.interrupted, self.ending = signum, True
        self._settle_at_s = None
        return "end" if self.started else "abandon"

    def host_lost(self, end: RankEnd, ranks: Iterable[int]) -> Literal["settle", "not started", "say", "nothing"]:
        """Note the loss of the host of these ranks; returns what is to be done: with "say", no more than to say so."""
        if self.interrupted is not None or self.cause is not None:
            abandoned = self.interrupted is not None and not self.started
            return "say" if self.hosts and not abandoned else "nothing"
        if not self.started.intersection(ranks):
            return "not started"
        self.lost_hosts.append(end)
        self.answered(end.host, {})
        return "settle"

    def settle(self, asked: Iterable[tuple[str, float | None]], now_s: float) -> None:
        """Begin to settle the first failure; ``asked`` are the hosts whose errors were requested, with their leases."""
        self._settle_at_s = now_s + SETTLE_S
        self._waits = {name: now_s + (_ANSWER_S if lease_s is None else lease_s) for name, lease_s in asked}

    def answered(self, host: str, errors: Mapping[int, tuple[str, float]]) -> None:
        """Note the errors that the ranks of a host have written down; a host that is lost never answers."""
        self.errors |= errors
        self._waits.pop(host, None)

    # --- what follows

    @property
    def undecided(self) -> bool:
        """Return whether nothing has begun to end the job."""
        return not self.ending and self._settle_at_s is None and self.cause is None

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until it may be time to judge."""
        return max(0.0, self._settle_at_s - now_s) if self._settle_at_s is not None else None

    def decide(self, now_s: float, gone: Collection[int] = ()) -> RankEnd | None:
        """Return the cause, if it is time to name it. From the ranks in ``gone`` nothing more will come."""
        all_ended = len(self.ends.keys() | gone) == self.ranks
        if self.ending or self.cause is not None or self._settle_at_s is None:
            return None
        if now_s < self._settle_at_s and not all_ended:
            return None
        dying = [
            RankEnd(rank, 1, time_s, stderr_tail=self.stderr_tail(rank), error=text, host=self.hosts.get(rank, ""))
            for rank, (text, time_s) in self.errors.items()
            if rank not in self.ends
        ]
        cause = first_failure([*self.ends.values(), *dying, *self.lost_hosts])
        awaited = [until_s for until_s in self._waits.values() if until_s > now_s]
        if cause.only_lost_peer and awaited and not all_ended:
            self._settle_at_s = now_s + SETTLE_S
            return None
        self.blame(cause)
        return cause

    def blame(self, cause: RankEnd) -> None:
        """Make this the cause of the failure; from now on the ranks are being ended."""
        self.cause, self.ending = cause, True
        self._settle_at_s = None

    def headline(self, cause: RankEnd) -> str:
        if cause.other_cause is not None:
            return cause.other_cause
        where = f" on {cause.host}" if cause.host else ""
        return f"rank {cause.rank}{where} failed first: {cause.cause()}"

    def details(
        self, cause: RankEnd, log: Callable[[int, str], str], stdout_tail: Callable[[int], bytes] = lambda rank: b""
    ) -> list[str]:
        """Return lines beside the headline: the end of what was written, who returned early, who failed after."""
        lines = []
        if cause.rank >= 0:
            errors = cause.last_lines()
            printed = [] if _TRACEBACK in cause.stderr_tail else end_of(stdout_tail(cause.rank), TRACEBACK_LINES)
            for stream, said in (("stderr", errors), ("stdout", printed)):
                if said or (stream == "stderr" and not printed):
                    lines += [f"    {line.decode(errors='replace')}" for line in said]
                    lines.append(f"its log: {log(cause.rank, stream)}")
            lines += cause.remedy()
        for end in sorted(self.ends.values(), key=lambda end: end.time_s):
            if end.code == 0:
                before_s = cause.time_s - end.time_s
                lines.append(
                    f"rank {end.rank} returned 0, {abs(before_s):.3f} s {'before' if before_s > 0 else 'after'}"
                )
        echoes = [end.rank for end in self.ends.values() if end.code != 0 and end is not cause]
        if echoes:
            lines.append(f"after it failed {describe_ranks(echoes)}")
        lines += [end.other_cause for end in self.lost_hosts if end is not cause and end.other_cause is not None]
        return lines

    def outcome(self) -> Outcome:
        """Return the outcome of the attempt, once no host has anything more to tell."""
        if self.cause is not None:
            end = self.ends.get(self.cause.rank, self.cause)
            code = (self.cause if end.signalled or end.code == 0 else end).exit_code
            return Outcome(FAILED, code, self.headline(self.cause))
        if self.interrupted is not None:
            return Outcome(INTERRUPTED, 128 + self.interrupted)
        if self.not_started is not None:
            return Outcome(FAILED, 1, self.not_started)
        return Outcome(SUCCEEDED, 0)


def rank_end(event: Exited, ahead_s: float, stderr_tail: bytes, host: str) -> RankEnd:
    """Return the end of a rank, by our clock, which that of its host is ahead of."""
    end = RankEnd(
        event.rank, event.code, event.time_s - ahead_s, signalled=event.signalled, out_of_memory=event.out_of_memory,
        stderr_tail=stderr_tail, host=host,
    )  # fmt: skip
    if event.error is None:
        return end
    text, happened_s = event.error
    return replace(end, error=text, time_s=min(end.time_s, happened_s - ahead_s))
