"""What ranks write of their calls is compared with what fits: two ranks that share a store, in one process."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from shardwright.distributed import lockstep
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import UsageError, WorldError


class Late:
    """A collective that ends when it was waited for so many times."""

    def __init__(self, times):
        self.times = times

    def wait(self, timeout):
        self.times -= 1
        time.sleep(0.05)
        if self.times >= 0:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.times < 0


def together(*calls):
    """The result of each, all at once, or what it raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def without_sleep(monkeypatch):
    """Of this room alone: other threads of this process may sleep."""
    own = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("rank 0 waits though all have ended"))
    monkeypatch.setattr(lockstep, "time", own)


def ranks():
    store = HashStore()
    return [Lockstep(store, rank, 2) for rank in range(2)]


def test_a_rank_that_waits_before_it_knows_its_batch_is_not_taken_at_its_last_one():
    first, second = ranks()

    def steps(mine, late):
        for what in ("a", "a", "b", "c", "b"):
            with mine.call():
                mine.wait(Late(late))
                mine.same(what, lambda what=what: what)
                mine.wait(Late(1 - late))
        return "alike"

    assert together(lambda: steps(first, 0), lambda: steps(second, 1)) == ["alike", "alike"]


@pytest.mark.parametrize(("others", "text"), [("b", "rank 0 a, rank 1 b;"), (None, "rank 1 has ended after 1 calls")])
def test_who_waits_learns_of_another_call(others, text):
    def calls(mine, last):
        with mine.call():
            mine.same("a", lambda: "a")
        if last is None:
            mine.end()
            return
        with mine.call():
            mine.same(last, lambda: last)
            mine.wait(Late(2000))

    first, second = ranks()
    found = together(lambda: calls(first, "a"), lambda: calls(second, others))
    assert isinstance(found[0], UsageError)
    assert text in str(found[0])
    assert others is None or str(found[1]) == str(found[0])


def test_who_cannot_be_called_out_of_a_collective_answers_aside():
    told = threading.Event()

    def calls(mine, last):
        mine.answer_aside()
        for what in ("a", last):
            with mine.call():
                mine.same(what, lambda what=what: what)
        told.wait(60)  # in a collective on a GPU
        mine.end()

    def other(mine):
        with pytest.raises(UsageError) as error:
            calls(mine, "b")
        told.set()
        mine.end()
        return str(error.value)

    first, second = ranks()
    assert together(lambda: calls(first, "a"), lambda: other(second))[1].startswith(
        "ranks do not come to call 2 of the model alike: rank 0 a, rank 1 b;"
    )


def test_who_waits_learns_of_an_error():
    failed = threading.Event()

    def fails(mine):
        with mine.call():
            failed.set()
            raise KeyError("a")

    def waits(mine):
        with mine.call():
            failed.wait()
            mine.wait(Late(2000))

    first, second = ranks()
    error, told = together(lambda: fails(first), lambda: waits(second))
    assert isinstance(error, KeyError)
    assert isinstance(told, WorldError)
    assert str(told) == "rank 0 failed in call 1 of the model: KeyError: 'a'"


def test_ranks_that_end_in_different_calls_do_not_wait_for_each_other(monkeypatch):
    """As those that are interrupted in the middle of their calls."""
    first, second = ranks()
    for mine, calls in ((first, 1), (second, 2)):
        for _ in range(calls):
            with mine.call():
                pass
        mine.end()
    without_sleep(monkeypatch)
    first.wait_until_all("ended", 60)


def test_ranks_whose_last_call_was_refused_are_not_waited_for(monkeypatch):
    """Nor is the error kept, by whose frames their models would stay."""

    def calls(mine, what):
        with mine.call():
            mine.same(what, lambda: what)
            mine.wait(Late(2000))

    def refused(mine, what):
        with pytest.raises(UsageError, match="do not come to call 1 of the model alike"):
            calls(mine, what)
        mine.end()

    first, second = ranks()
    assert together(lambda: refused(first, "a"), lambda: refused(second, "b")) == [None, None]
    gc.collect()
    assert first._told() is second._told() is None
    without_sleep(monkeypatch)
    first.wait_until_all("ended", 60)
