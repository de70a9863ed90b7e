"""Checks that all ranks make the same calls of a model: with the same batch, and equally often.

A rank that passes another batch than the others would compute a mixture with them, or wait for ever. Talking at every
call would cost as much as a small step. So a rank is silent while it comes to what it came to before. Where it comes to
something else, it waits until all others have come to that, too; and a rank that waits for others for longer than
`PATIENCE_S`, here or in a collective of its step, writes to the job's store what it has come to. The second to write
for the same call sees what the first has written; where that is something else, both know whom they wait for in vain.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.pulse import own_pulse
from shardwright.common.threads import Thread
from shardwright.common.torch_private import job_store
from shardwright.distributed.backends.table import backend_moving
from shardwright.distributed.control import world_group
from shardwright.distributed.ranks import TIMEOUT_S, alone
from shardwright.errors import ShardwrightError, UsageError, WorldError

PATIENCE_S = 0.5  # and 1 ms more for each rank, so that 1,000 that wait for one ask the store 1,300 times a second
_LONGEST_PAUSE_S = 0.02  # and 0.2 ms more for each rank
_KNOW_S = 1.5  # for which a rank that has met an error waits for others that do not know of it
_EXIT_S = 5.0  # for which rank 0, whose store goes with it, waits for others that have not ended, on a busy host too

_END, _REST = "end", "rest"
_ENDED = "ended"  # counts the ranks that have, whatever call they were in when they were interrupted

FIRST = 3
EVERY = 100
"""In these calls ranks compare what they have: in the first ones, and then in one of so many."""

_numbers = itertools.count()
# By world, to whose end they are kept: a model may be gone on one rank when that ends, and not on another.
_all: WeakKeyDictionary[dist.ProcessGroup, list[Lockstep]] = WeakKeyDictionary()


class Turns:
    """Counts the calls of a model, and knows those in which ranks compare what they have: some, or ``always``."""

    def __init__(self, always: bool = False) -> None:
        self.seen, self._always = 0, always
        self.due = False
        """True in a call in which ranks compare."""
        self.due_or_after = False
        """True in the call after one, too: results that a GPU computes in one call are read in the next."""

    def next(self) -> None:
        """Count one more call."""
        self.seen += 1
        before, self.due = self.due, self._always or self.seen <= FIRST or self.seen % EVERY == 0
        self.due_or_after = before or self.due

    @property
    def steady(self) -> bool:
        """Return whether this call is none of the first ones, and few are such as it."""
        return not self._always and self.seen > FIRST


@dataclass(frozen=True)
class _Card:
    """The state that a rank tells of itself.

    ``what`` is equal where two fit together. ``words`` continue "rank 1", or tell why it ``failed``.
    """

    rank: int
    what: str
    words: str
    failed: bool = False

    @property
    def last(self) -> bool:
        """Return whether the rank takes no further part in this call."""
        return self.failed or self.what in (_END, _REST)


class Lockstep:
    """The calls of one model on this rank, which all ranks make together; without ``store``, those of a rank alone."""

    def __init__(self, store: Store | None = None, rank: int = 0, size: int = 1) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._patience = timedelta(seconds=PATIENCE_S + self._size / 1000)
        self._begun: set[dist.Work] = set()  # collectives that are to be waited for, of a backward outside of calls
        self.calls = 0
        """The number of calls that this rank has begun."""
        self._torn = 0  # the last call before which a backward of this rank ended with an error
        self._what, self._words = "", ""
        self._came = False  # whether it is known what this rank comes to in the call that it is in
        self._posted = 0  # the last call of which this rank was the first to write what it came to
        self._counted = ""  # the count of those who came, where all came to something else for the last time
        self._passed = self._together = 0  # the last call of which this rank knows what it came to; and where all came
        self._ended = threading.Event()
        self._aside: threading.Thread | None = None
        self._warned = 0  # the last call of which it was told that another rank comes no more
        self._broken = False  # whether others know already why no further call comes
        self._told: Callable[[], object] = lambda: None  # what was raised, of which the others know; not its frames

    @staticmethod
    def of_all_ranks() -> Lockstep:
        """For the next model of all ranks, which call this together."""
        if alone():
            return Lockstep()
        store = PrefixStore(f"lockstep/{next(_numbers)}", job_store())
        made = Lockstep(store, dist.get_rank(), dist.get_world_size())
        if world_group() not in _all:
            atexit.unregister(_end_all)
            atexit.register(_end_all)  # after `world.leave` was, so that it runs before
        _all.setdefault(world_group(), []).append(made)
        return made

    def call(self) -> AbstractContextManager[Lockstep]:
        """Return what stands around one more call. Where it fails here, those that wait for this rank learn of that."""
        return self

    def __enter__(self) -> Lockstep:
        if self._begun:
            self._tear()
        if self._store is not None and self._posted == self.calls > 0:
            with self._reaching_others():
                self._store.delete_key(f"{self.calls}/first")
        self.calls, self._came, self._broken = self.calls + 1, False, False
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            own_pulse().spoil()
            self._begun.clear()  # of which others learn by this error
            self._fail(error)
            self._what = ""

    def same(self, what: str, words: Callable[[], str]) -> None:
        """Wait for the others where ``what`` this rank has come to is not what it came to before.

        Args:
            words: what that is, for a person; follows "rank 1".

        Raises:
            UsageError: where another rank has come to something else, or has ended.
            WorldError: where another rank has failed.
        """
        self._came = True
        after = " after an error in its last backward" if self._torn == self.calls else ""
        what += after
        if self._store is not None and what != self._what:
            self._what, self._words = what, words() + after
            with self._reaching_others():
                self._wait_for_all(self._store)
            self._together = self.calls
        self._passed = self.calls

    def rest(self, words: str) -> None:
        """Wait until all ranks have come to an end of their calls, after which more may come.

        Args:
            words: why no call comes, for a person; follows "rank 1".

        Raises:
            UsageError: where another rank makes a call.
            WorldError: where another rank has failed.
        """
        with self.call():
            self.same(_REST, lambda: words)

    def _wait_for_all(self, store: Store) -> None:
        if store.add(self._count(), 1) < self._size:
            self._wait_for_others(store)
        if self._counted and self._rank == 0:  # which may serve the store: others may come back to find it gone
            store.delete_key(self._counted)
        self._counted = self._count()

    def _wait_for_others(self, store: Store) -> None:
        look_s = time.monotonic() + self._patience.total_seconds()
        for _ in self._pauses(TIMEOUT_S):
            if store.add(self._count(), 0) == self._size:
                return
            if time.monotonic() > look_s:
                self._look(store)
                store.set("asked", str(self.calls))
                look_s = time.monotonic() + self._patience.total_seconds()
        raise WorldError(f"others have not come to call {self.calls} of the model within {TIMEOUT_S:g} s")

    def run(
        self, collective: Callable[..., dist.Work | None], *tensors: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        """Call a function of torch.distributed, as part of a call, and wait for it.

        Raises:
            UsageError, WorldError: as `same`.
        """
        group = group or world_group()
        in_turns = backend_moving(tensors[0].device.type, str(dist.get_backend(group))).waits_in_turns
        if not in_turns:
            self.answer_aside()
        work = collective(*tensors, group=group, async_op=in_turns)
        if work is not None:
            self.wait(work, in_turns)

    def begun(self, work: dist.Work) -> None:
        """Note a collective that was begun: others learn of the end of a backward that did not wait for it."""
        self._begun.add(work)

    def wait(self, work: dist.Work, in_turns: bool = True) -> None:
        """Wait for a collective; ``in_turns`` where its backend can wait with a time limit, and then again.

        Raises:
            UsageError, WorldError: as `same`.
        """
        self._begun.discard(work)
        if not in_turns:
            work.wait()
            return
        while True:
            try:
                work.wait(self._patience)
                return
            except RuntimeError as error:
                failed = error if work.is_completed() and not work.is_success() else None
            if self._store is not None:
                with self._reaching_others():
                    self._look(self._store)
            if failed is not None:
                raise failed

    def answer_aside(self) -> None:
        """Let a thread answer others, where this one may be in a collective and cannot: they, at least, learn of it."""
        if self._aside is None and self._store is not None:
            self._aside = Thread(partial(self._answer, self._store), daemon=True)
            self._aside.start()

    def _answer(self, store: Store) -> None:
        with suppress(DistError):  # the store has gone, and with it the others
            while not self._ended.wait(self._patience.total_seconds()):
                asked = int(store.get("asked")) if store.check(["asked"]) else 0
                if self._together < asked <= self._passed:  # all others came to something else, as this one did not
                    mine = json.dumps([json.loads(store.get(f"{asked}/first")), asdict(self._card(""))])
                    store.compare_set(f"{asked}/unlike", "", mine)
                self._tell_who_comes_no_more(store, self.calls)

    def _tell_who_comes_no_more(self, store: Store, number: int) -> None:
        """Write to stderr, once for a call, that another rank makes none any more.

        On GPUs nothing can be raised where the program waits for what is never done.
        """
        key = f"{number}/first"
        if number in (0, self._warned) or self._passed != number or not store.check([key]):
            return
        card = _Card(**json.loads(store.get(key)))
        if card.last and card.rank != self._rank:
            self._warned = number
            how = f"failed in it: {card.words}" if card.failed else card.words
            print(
                f"shardwright: rank {self._rank} is in call {number} of the model, and rank {card.rank} {how}; what "
                "this rank waits for will not come: all ranks must make the same calls, as often as each other",
                file=sys.stderr,
                flush=True,
            )

    def lost(self, error: Exception) -> None:
        """Raise what `same` raises, where ``error`` says that the connection to others is lost."""
        if self._store is not None and "Connection" in str(error) and not isinstance(error, ShardwrightError):
            with suppress(DistError):  # of a store that has gone, too
                self._look(self._store)

    def end(self) -> None:
        """Say that this rank makes no more calls."""
        if self._store is None or self._ended.is_set():
            return
        self._ended.set()
        if self._aside is not None:
            self._aside.join()  # the interpreter would end a thread that is in C++ by force
        if self._begun:
            self._tear()
        with suppress(Exception):  # where the store has gone, so have the others
            if not self._broken:
                self._say_end(self._store)
            self._store.add(_ENDED, 1)

    def _say_end(self, store: Store) -> None:
        with self.call():
            self._what, self._words, self._came = _END, f"has ended after {self.calls - 1} calls", True
            self._post(store)

    def wait_until_all(self, count: str, timeout_s: float, but: int = 0) -> None:
        """Wait until all have been counted so, ``but`` for some, or the time is over, or the store has gone."""
        with suppress(DistError):
            for _ in self._pauses(timeout_s):
                if self._store is None or self._store.add(count, 0) >= self._size - but:
                    return

    def _tear(self) -> None:
        """Let the ranks that wait in the last backward know that it has ended here.

        Something begun in it is not waited for; all ranks still come to the next call in the same state.
        """
        self._begun.clear()
        self._torn = self.calls + 1
        own_pulse().spoil()
        if self._store is not None:
            with suppress(Exception):
                self._post(self._store, "its backward ended with an error")
                self._posted = 0  # which stays

    def _count(self) -> str:
        return f"{self.calls}/{hashlib.sha256(self._what.encode()).hexdigest()[:16]}"

    def _look(self, store: Store) -> None:
        """Write what this rank has come to, and raise where another one has come to something else."""
        self._post(store)
        if store.check([f"{self.calls}/unlike"]):
            cards = [_Card(**card) for card in json.loads(store.get(f"{self.calls}/unlike"))]
            error = self._error_of(cards)
            self._told = ref(error)
            self._let_others_know(store, sum(card.what == _END for card in cards))
            raise error

    @contextmanager
    def _reaching_others(self) -> Iterator[None]:
        """Turn the loss of the store's connection into an error that names the call of the model."""
        try:
            yield
        except DistError as error:
            raise WorldError(
                f"this rank waits in call {self.calls} of the model for others that have gone, with the one that "
                "serves the store of the job (rank 0, if the launcher does not)"
            ) from error

    def _let_others_know(self, store: Store, ended: int = 0) -> None:
        """Give the others that have not ended time to read what is wrong: the store may go with this rank."""
        self._broken = True
        store.add(f"{self.calls}/knows", 1)
        self.wait_until_all(f"{self.calls}/knows", _KNOW_S, ended)

    def _post(self, store: Store, failure: str = "") -> None:
        """Write what this rank has come to, and where that does not fit the first to write, the cards of both."""
        card, key = self._card(failure), f"{self.calls}/first"
        known = self._came or card.failed
        if not known and not store.check([key]):
            return
        first = _Card(**json.loads(store.compare_set(key, "", json.dumps(asdict(card))) if known else store.get(key)))
        if first.rank == card.rank:
            self._posted = self.calls
        if first.what != card.what and (known or first.last):
            store.compare_set(f"{self.calls}/unlike", "", json.dumps([asdict(first), asdict(card)]))

    def _card(self, failure: str) -> _Card:
        if failure:
            return _Card(self._rank, failure, failure, failed=True)
        return _Card(self._rank, self._what, self._words) if self._came else _Card(self._rank, "", "makes another")

    def _fail(self, error: Exception) -> None:
        if self._store is not None and error is not self._told():
            with suppress(Exception):
                self._post(self._store, f"{type(error).__name__}: {error}")
                self._posted = 0  # which stays
                self._let_others_know(self._store)

    def _pauses(self, timeout_s: float) -> Iterator[None]:
        """Yield until the time is over, sleeping longer and longer in between."""
        end_s, pause_s = time.monotonic() + timeout_s, 0.0001
        while time.monotonic() < end_s:
            yield
            time.sleep(pause_s)
            pause_s = min(1.3 * pause_s, _LONGEST_PAUSE_S + self._size / 5000)

    def _error_of(self, cards: Sequence[_Card]) -> ShardwrightError:
        """The error that all ranks raise when two of them made different calls."""
        self._what = ""
        for card in cards:
            if card.failed:
                return WorldError(f"rank {card.rank} failed in call {self.calls} of the model: {card.words}")
        first, second = sorted(cards, key=lambda card: card.rank)
        return UsageError(
            f"ranks do not come to call {self.calls} of the model alike: rank {first.rank} {first.words}, rank "
            f"{second.rank} {second.words}; all ranks must make the same calls, as often as each other, and pass the "
            "same whole batch or parts of one (drop_last=True in loaders of unequal length, or take batches from "
            "sw.loader)"
        )


def _end_all() -> None:
    """Tell the others; torch's own groups, by whose end they learn that this rank has gone, end later."""
    models = [model for made in _all.values() for model in made]
    for model in models:
        model.end()
    deadline_s = time.monotonic() + _EXIT_S
    if not dist.is_initialized() or dist.get_rank() or getattr(sys, "last_value", None) is not None:
        return
    for model in models:
        model.wait_until_all(_ENDED, deadline_s - time.monotonic())
