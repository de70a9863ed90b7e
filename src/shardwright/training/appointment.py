"""Lets ranks agree on a step at which all of them do something, without communication at every step.

A loop comes by *points*, the same on all ranks, between which there are collectives: the ends of its steps. When one
rank wants something of all (it was told to end, or its clock says that time is up), no rank may simply stop at its next
point: another may have passed that one and wait for it in a collective. So:

 1. The rank writes its wish to the job's store. A thread of every rank looks there now and then.
 2. The thread of each rank that finds a wish writes which point its loop has passed last, whatever the loop is doing,
    also while it is blocked in a collective. From then on the loop stops at every point until the next line is known.
 3. The appointment is at the first point that no rank had passed: the largest of these numbers, plus one.

Where nobody wants anything a point costs a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.threads import Thread

_WISH, _PASSED = "wish", "passed"
_LOOK_S = 0.25  # at the store, and 1 ms more for each rank: 1,000 ranks ask it 800 times a second
_ANSWERS_S = 0.01  # between looks while the others' numbers, or the appointment, are awaited


class Appointments:
    """``point()`` is called by the loop on every rank at each of its points; ``wish`` by any thread of any rank.

    ``store`` is the job's, which a rank that is alone needs none of; no other loop of the job has this loop's ``name``.
    ``tick(seconds)`` waits for so long, or less, in the thread, and is where its owner can look at other things. Call
    `close` at the end, from the thread that made it.
    """

    def __init__(
        self, store: Store | None, name: str, rank: int, size: int, tick: Callable[[float], object] | None = None
    ) -> None:
        own = PrefixStore(f"appointments/{name}", store) if store is not None and size > 1 else None
        self._store, self._rank, self._size = own, rank, size
        self._changed = threading.Condition()
        self._wishes: list[str] = []
        self._round = 0
        self._passed = 0
        self._open = False  # somebody has a wish, and this rank has said how far it is
        self._agreed: tuple[int, str] | None = None
        self._closed = threading.Event()
        self._failed: Exception | None = None
        self._tick: Callable[[float], object] = tick or self._closed.wait
        self._thread = Thread(self._look, "shardwright-appointments", daemon=True)
        self._thread.start()

    def wish(self, what: str) -> None:
        """Ask all ranks for ``what`` at a point to come. Of several wishes one comes first, the others after it."""
        with self._changed:
            if what not in self._wishes:
                self._wishes.append(what)

    def point(self) -> str | None:
        """Return what all ranks are to do here, the same on every rank; None where it is to go on."""
        with self._changed:
            here = self._passed + 1
            while self._open and self._agreed is None and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise self._failed
            self._passed = here
            if self._agreed is None or self._agreed[0] != here:
                return None
            what = self._agreed[1]
            self._open, self._agreed = False, None
            self._round += 1
            if what in self._wishes:
                self._wishes.remove(what)
            self._changed.notify_all()
            return what

    def close(self) -> None:
        """Say that no more points come, so that a rank with a wish learns that this one has passed its last."""
        self._closed.set()
        self._thread.join()
        if self._store is not None and not self._open:
            with contextlib.suppress(RuntimeError):  # the store may be gone already, with its rank
                self._store.set(f"{self._round}/{_PASSED}/{self._rank}", str(self._passed))

    def _look(self) -> None:
        look_s = _LOOK_S + self._size / 1000
        try:
            while not self._closed.is_set():
                what = self._wanted()
                if what is not None:
                    self._agree(what)
                    self._until_it_is_over()
                else:
                    self._tick(look_s)
        except Exception as error:  # the store is gone, and with it rank 0: the loop will notice, too
            with self._changed:
                self._failed = error if self._open else None
                self._changed.notify_all()

    def _wanted(self) -> str | None:
        """Return what somebody wishes in this round, the same on all ranks."""
        with self._changed:
            mine = self._wishes[0] if self._wishes else None
        if self._store is None:
            return mine
        key = f"{self._round}/{_WISH}"
        if mine is not None:
            return self._store.compare_set(key, "", mine).decode()
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _agree(self, what: str) -> None:
        with self._changed:
            self._open, passed = True, self._passed
        everyone = [passed]
        if self._store is not None:
            keys = [f"{self._round}/{_PASSED}/{rank}" for rank in range(self._size)]
            self._store.set(keys[self._rank], str(passed))
            while not self._store.check(keys):
                if self._closed.is_set():
                    return
                self._tick(_ANSWERS_S)
            everyone = [int(self._store.get(key)) for key in keys]
        with self._changed:
            self._agreed = (max(everyone) + 1, what)
            self._changed.notify_all()

    def _until_it_is_over(self) -> None:
        before = self._round
        while not self._closed.is_set() and self._round == before:
            self._tick(_ANSWERS_S)
