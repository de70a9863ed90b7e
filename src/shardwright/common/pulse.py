"""Shared memory in which a rank records its progress (step, collective) for the supervisor of its host.

They are memory that the two share, so that they can be read without the rank's help when it is stopped or dead-locked,
and written in a fraction of a microsecond. The memory is a file without a name that the supervisor has open; a rank,
also one that was started as a program of its own, finds it as ``/proc/<supervisor>/fd/<number>``, by `PULSE_VARIABLE`.
Behind these bytes the same file takes the stacks of the rank's threads, which faulthandler writes there at
`STACK_SIGNAL` whatever the rank is busy with.

Where collectives run beside the program, as on GPUs, to call one is to put it at the end of a queue. A thread of the
rank then asks the device how far it has come (`shardwright.distributed.device_reports`), and what is written is the
collective at the front of the queue. Asked by its supervisor, it also leaves here what torch has recorded of its
collectives.

Which collectives the last steps have begun is kept, too: ranks that began others than the rest have left one out, or
called one in another's place, which on GPUs only shows much later.

Without ``--stall-timeout`` nobody reads, and a rank writes into memory of its own. What a rank tells of its steps for
people, loss and seconds, goes another way (`step_lines`).
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from shardwright.common.step_lines import Steps, own_steps, variable_of_this_rank

# In the environment of every process of a job: it survives setsid, double forks and the death of all ancestors.
JOB_VARIABLE = "SHARDWRIGHT_JOB"
PULSE_VARIABLE = "SHARDWRIGHT_PULSE"
# Ignored unless somebody handles it, and hardly anybody does: it tells of out-of-band data on sockets.
STACK_SIGNAL = signal.SIGURG

_LAYOUT = 4
_OPERATION_BYTES = 32
_SITE_BYTES = 256
_LISTENER = struct.Struct("<II")  # the layout, and the pid that writes its stacks at the signal
_COUNTS = struct.Struct("<QQQ")  # signs of life, steps begun, collectives begun
_STATE = struct.Struct(f"<QQQ{_OPERATION_BYTES}s")
_COUNTS_AT = _LISTENER.size
_OPERATION_AT = _COUNTS_AT + _COUNTS.size
_SITE = struct.Struct(f"<Q{_SITE_BYTES}s")  # how far in the step, and the words
_SITE_AT = _OPERATION_AT + _OPERATION_BYTES
# One more than the collectives that the device has not ended, 0 where nobody asks it; whether it has come to the first
# of them; the step of that one.
_DEVICE = struct.Struct("<QQQ")
_DEVICE_AT = _SITE_AT + _SITE.size
_ASKED = struct.Struct("<Q")  # how often the supervisor has asked for what was recorded
_ASKED_AT = _DEVICE_AT + _DEVICE.size
_ANSWER = struct.Struct("<QI")  # the last of these questions that was answered, and the length of the answer
_ANSWER_AT = _ASKED_AT + _ASKED.size
# Of the last two steps that are over: its number, how many collectives it has begun, a checksum of which; 0 for none.
_CALLS = struct.Struct("<QQQQQQ")
_CALLS_AT = _ANSWER_AT + _ANSWER.size
_STAGE = struct.Struct("<Q")  # the pipeline stage of the rank: those of one stage begin the same collectives
_STAGE_AT = _CALLS_AT + _CALLS.size
_USED_BYTES = _STAGE_AT + _STAGE.size
_MOST_CALLS = 1 << 14  # of a step that are kept
_RECORDED_AT = 4096
_STACKS_AT = 1 << 16


class Mark(Protocol):
    """A place in what a device has to do."""

    def query(self) -> bool:
        """Return whether the device has come there."""


class _Queued:
    """A collective that was enqueued on a device: it begins after the event ``begin`` and ends before ``end``."""

    __slots__ = ("begin", "end", "operation", "site", "step")

    def __init__(self, operation: bytes, site: bytes, step: int, begin: Mark) -> None:
        self.operation, self.site, self.step, self.begin = operation, site, step, begin
        self.end: Mark | None = None  # as long as the program is still asking


@dataclass(frozen=True)
class StepCalls:
    """The collectives that a step has begun, in a pipeline stage: how many, and the last with what each was for."""

    step: int
    stage: int
    count: int
    operations: Sequence[tuple[bytes, bytes]]

    @property
    def checksum(self) -> int:
        """Return a number that other operations, or these in another order, would nearly never give."""
        return zlib.crc32(b",".join(operation for operation, _ in self.operations))

    def words(self, number: int) -> str:
        """Return the operation of that number, counted from 0, and what it was for; "nothing" behind the last one."""
        if number >= self.count:
            return "nothing"
        return _named(*self.operations[number - self.count])


class Pulse:
    """The pulse of one rank, written seldom enough for a lock to be left out.

    `note` surrounds a collective; `at` says for what the next ones are.
    """

    __slots__ = (
        "_beats", "_calls", "_collectives", "_entered_s", "_inside", "_mark", "_memory", "_numbered", "_queue", "_site",
        "_spoiled", "_stage", "_steps", "_told_calls", "around", "calls", "steps", "watched",
    )  # fmt: skip

    def __init__(self, memory: bytearray | mmap.mmap, watched: bool, steps: Steps) -> None:
        self.watched, self.steps = watched, steps
        self._entered_s = 0.0  # when the collective was begun or waited for that the program is in
        self.around: Callable[[str], AbstractContextManager[object]] | None = None
        """The context manager around each collective, made from its name and purpose; set while a step is traced."""
        self._inside: AbstractContextManager[object] | None = None
        self._memory = memory
        self._numbered = False
        self._beats, self._steps, self._collectives = _COUNTS.unpack_from(memory, _COUNTS_AT)
        self._mark: Callable[[], Mark] | None = None
        self._queue: deque[_Queued] = deque()
        self._site = NOWHERE
        self._calls: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_CALLS)
        self._told_calls, self._spoiled, self._stage = self._collectives, False, 0
        self.calls: StepCalls | None = None
        """The collectives of the last completed step; None if there is none, or other ranks may have begun others."""

    def beat(self) -> None:
        """Note a sign of life."""
        self._beats += 1
        _COUNTS.pack_into(self._memory, _COUNTS_AT, self._beats, self._steps, self._collectives)

    def begin_step(self, number: int | None = None) -> None:
        """Begin a step; without ``number`` the next one, unless another caller numbers the steps."""
        if number is not None or not self._numbered:
            self._end_calls()
        if number is not None:
            self._numbered, self._steps = True, number
            self.steps.begin(number)
        elif not self._numbered:
            self._steps += 1
            self.steps.begin(self._steps)
        self._beats += 1
        _COUNTS.pack_into(self._memory, _COUNTS_AT, self._beats, self._steps, self._collectives)

    def spoil(self) -> None:
        """Note that the step has ended with an error on this rank: its collectives need not be those of others."""
        self._spoiled = True

    def _end_calls(self) -> None:
        """Keep which collectives the step has begun that is over."""
        count, self._told_calls = self._collectives - self._told_calls, self._collectives
        known = self._steps and not self._spoiled
        self.calls = StepCalls(self._steps, self._stage, count, self._calls) if known else None
        self._calls, self._spoiled = deque(maxlen=_MOST_CALLS), False
        if self.watched:
            before = _CALLS.unpack_from(self._memory, _CALLS_AT)[:3]
            now = (0, 0, 0) if self.calls is None else (self._steps, count, self.calls.checksum)
            _CALLS.pack_into(self._memory, _CALLS_AT, *now, *before)

    def set_steps(self, steps: int) -> None:
        """Set how many steps a resumed run had begun before."""
        self._steps = steps
        self.beat()

    def set_stage(self, stage: int) -> None:
        """Set in which pipeline stage of a model this rank is, at the beginning of its calls.

        The ranks of a stage begin the same collectives. With models of unlike stages those of one step need not be the
        same, nor are those of the steps before told any more.
        """
        if stage != self._stage:
            self._spoiled |= self._collectives > self._told_calls
            self._stage = stage
            _STAGE.pack_into(self._memory, _STAGE_AT, stage)
            _CALLS.pack_into(self._memory, _CALLS_AT, *[0] * 6)

    def at(self, site: bytes) -> None:
        """Set for what the next collectives are; as `site` makes it."""
        self._site = site
        if self._mark is None:
            self._memory[_SITE_AT:_DEVICE_AT] = site

    def note(self, operation: bytes, *, begins: bool = False) -> None:
        """Note that this rank enters a collective, which ``begins`` or is waited for; with b"" that it leaves it."""
        self._beats += 1
        if operation:
            if begins:
                self._collectives += 1
                self._calls.append((operation, self._site))
            self._entered_s = time.perf_counter()
            if self.around is not None:
                self._inside = self.around(_named(operation, self._site))
                self._inside.__enter__()
            if self._mark is not None:
                self._queue.append(_Queued(operation, self._site, self._steps, self._mark()))
                _COUNTS.pack_into(self._memory, _COUNTS_AT, self._beats, self._steps, self._collectives)
                return
        else:
            if self._inside is not None:
                self._inside.__exit__(None, None, None)
                self._inside = None
            if self.steps.communicating_s is not None:
                self.steps.communicating_s += time.perf_counter() - self._entered_s
            if self._mark is not None:
                self._queue[-1].end = self._mark()
                return
        _STATE.pack_into(self._memory, _COUNTS_AT, self._beats, self._steps, self._collectives, operation)

    @contextmanager
    def inside(self, operation: bytes) -> Iterator[None]:
        """Note a collective that begins and ends here."""
        self.note(operation, begins=True)
        try:
            yield
        finally:
            self.note(b"")

    @property
    def follows(self) -> bool:
        """Return whether collectives run on a device whose progress is polled."""
        return self._mark is not None

    def follow(self, mark: Callable[[], Mark]) -> None:
        """Expect collectives to run on a device.

        ``mark`` gives the place after all that it was asked for so far; somebody calls `look` now and then.
        """
        self._mark = mark
        self.look()

    def look(self) -> None:
        """Ask the device how far it has come, and write that."""
        queue, moved = self._queue, False
        while queue and (end := queue[0].end) is not None and end.query():
            queue.popleft()
            moved = True
        first = queue[0] if queue else None
        self._memory[_OPERATION_AT:_SITE_AT] = (first.operation if first else b"").ljust(_OPERATION_BYTES, b"\0")
        if first is not None:
            self._memory[_SITE_AT:_DEVICE_AT] = first.site
        reached, step = (first.begin.query(), first.step) if first else (True, self._steps)
        _DEVICE.pack_into(self._memory, _DEVICE_AT, len(queue) + 1, reached, step)
        if moved:
            self.beat()

    def is_asked(self) -> bool:
        """Return whether the supervisor waits for what was recorded."""
        [asked] = _ASKED.unpack_from(self._memory, _ASKED_AT)
        answered, _ = _ANSWER.unpack_from(self._memory, _ANSWER_AT)
        return bool(asked != answered)

    def answer(self, text: str) -> None:
        """Store a record for the supervisor, as much of it as fits."""
        [asked] = _ASKED.unpack_from(self._memory, _ASKED_AT)
        data = text.encode()[: _STACKS_AT - _RECORDED_AT]
        self._memory[_RECORDED_AT : _RECORDED_AT + len(data)] = data
        _ANSWER.pack_into(self._memory, _ANSWER_AT, asked, len(data))


def site(text: str, position: int) -> bytes:
    """Return the argument of `Pulse.at`: the words, and a number that grows in the course of a step."""
    data = text.encode()
    if len(data) > _SITE_BYTES:
        data = data[: _SITE_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return _SITE.pack(position, data)


NOWHERE = site("", 0)


def _named(operation: bytes, where: bytes) -> str:
    """Return a collective and what it is for in words."""
    words = _text(_SITE.unpack(where)[1])
    return f"{operation.decode()} for {words}" if words else operation.decode()


def own_pulse() -> Pulse:
    """Return the pulse of this process; from now on it answers `STACK_SIGNAL` with its stacks."""
    return open_pulse(variable_of_this_rank(PULSE_VARIABLE))


@cache
def open_pulse(path: str | None) -> Pulse:
    """Return the pulse by the value of `PULSE_VARIABLE`, opened once.

    Where there is no such file, as in a container of its own, what is written is read by nobody.

    Cached by the path for the life of the process: a supervisor makes one file for each start of a rank.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else -1
    except OSError:
        fd = -1
    if path is None or fd < 0:
        return Pulse(bytearray(_USED_BYTES), watched=False, steps=own_steps())
    try:
        memory = mmap.mmap(fd, _STACKS_AT)
    finally:
        os.close(fd)
    layout, listener = _LISTENER.unpack_from(memory)
    if layout != _LAYOUT:  # another version's supervisor
        return Pulse(bytearray(_USED_BYTES), watched=False, steps=own_steps())
    if listener != os.getpid():
        answer_with_stacks(path)
    return Pulse(memory, watched=True, steps=own_steps())


def answer_with_stacks(path: str) -> None:
    """Have faulthandler write the stacks of all threads of this process at `STACK_SIGNAL`.

    Where the file cannot be opened, as with too many open files, the process goes on and will have no stacks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)  # open for as long as the process lives
        with open(path, "r+b", buffering=0) as file:
            file.write(_LISTENER.pack(_LAYOUT, os.getpid()))
    except OSError:
        return
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


@dataclass(frozen=True)
class PulseReading:
    """The content of a pulse.

    ``listener`` is the pid that answers with its stacks, 0 for nobody; ``operation`` is the collective that the rank is
    in, empty outside of any; ``site`` says for what its last one was, and ``position`` how far in its step that is. Of
    collectives on a device ``queued`` have been begun and not ended, where somebody asks it (else -1); ``operation`` is
    the first of them, of step ``queued_step``; the device has come to it if ``reached``. ``calls`` has the number of
    collectives and their checksum for the last two steps that are over, by the numbers of these. Ranks of one pipeline
    ``stage`` begin the same collectives.
    """

    listener: int
    beats: int
    steps: int
    collectives: int
    operation: str
    site: str
    position: int = 0
    queued: int = -1
    reached: bool = True
    queued_step: int = 0
    calls: tuple[tuple[int, int, int], ...] = ()
    stage: int = 0

    @property
    def step(self) -> int:
        """The step of the collective, and else the last one that the program has begun."""
        return self.queued_step if self.queued > 0 else self.steps


class PulseFile:
    """The supervisor's end for one rank. Raises `OSError` where no file can be opened."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pulse", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _STACKS_AT)
        os.pwrite(self.fd, _LISTENER.pack(_LAYOUT, 0), 0)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def read(self) -> PulseReading:
        data = os.pread(self.fd, _USED_BYTES, 0)
        _, listener = _LISTENER.unpack_from(data)
        beats, steps, collectives, operation = _STATE.unpack_from(data, _COUNTS_AT)
        position, words = _SITE.unpack_from(data, _SITE_AT)
        queued, reached, step = _DEVICE.unpack_from(data, _DEVICE_AT)
        said = _text(operation), _text(words), position
        there = bool(reached) or not queued  # where nobody asks a device, a collective that was begun is what runs
        last = _CALLS.unpack_from(data, _CALLS_AT)
        calls = tuple(each for each in (last[:3], last[3:]) if each[0])
        [stage] = _STAGE.unpack_from(data, _STAGE_AT)
        return PulseReading(listener, beats, steps, collectives, *said, queued - 1, there, step, calls, stage)

    def ask(self) -> None:
        """Ask the rank for what it has recorded."""
        [asked] = _ASKED.unpack(os.pread(self.fd, _ASKED.size, _ASKED_AT))
        os.pwrite(self.fd, _ASKED.pack(asked + 1), _ASKED_AT)

    def recorded(self) -> str | None:
        """Return the answer; None as long as there is none."""
        [asked] = _ASKED.unpack(os.pread(self.fd, _ASKED.size, _ASKED_AT))
        answered, length = _ANSWER.unpack(os.pread(self.fd, _ANSWER.size, _ANSWER_AT))
        return os.pread(self.fd, length, _RECORDED_AT).decode(errors="replace") if asked == answered else None

    def stacks_bytes(self) -> int:
        return os.fstat(self.fd).st_size - _STACKS_AT

    def take_stacks(self, limit_bytes: int) -> str:
        """Return the stacks that were written since the last time."""
        text = os.pread(self.fd, limit_bytes, _STACKS_AT).decode(errors="replace")
        os.ftruncate(self.fd, _STACKS_AT)
        return text


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")
