"""Gradients on their way between the ranks: begun in one order everywhere, and waited for once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.common.torch_private import backward_number

Wait = Callable[[], None]


class Turns:
    """The buckets of one forward, which begin from the last one of the program to the first.

    Their gradients may come in another order, and not alike on all ranks. Where a backward has no gradients for some
    bucket, those that wait for its turn begin when the first one is waited for.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._backward: int | None = None
        self._next = -1
        self._ready: dict[int, Callable[[], None]] = {}

    def ready(self, number: int, begin: Callable[[], None]) -> None:
        """The gradients of a bucket are there: call ``begin`` when it is its turn."""
        if (backward := backward_number()) != self._backward:
            self._backward, self._next = backward, self._count - 1
            self._ready.clear()  # of a backward that has ended with an error
        self._ready[number] = begin
        while self._next in self._ready:
            self._ready.pop(self._next)()
            self._next -= 1

    def rest(self) -> None:
        """Begin all that are ready; no others will come."""
        for number in sorted(self._ready, reverse=True):
            self._ready.pop(number)()


class Flight:
    """What is under way of the gradients of one bucket, between the two functions that it consists of."""

    def __init__(self, turns: Turns, number: int) -> None:
        self.keys: Sequence[str] = ()
        self._turns, self._number = turns, number
        self._wait: Wait | None = None

    def start(self, keys: Sequence[str], begin: Callable[[], Wait]) -> None:
        """Begin to reduce the gradients of these parameters, when it is their turn."""
        self.keys = keys

        def take_off() -> None:
            self._wait = begin()

        self._turns.ready(self._number, take_off)

    def land(self) -> None:
        """Wait until they are reduced."""
        self._turns.rest()
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
