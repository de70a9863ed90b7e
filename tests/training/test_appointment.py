"""Ranks agree on a point without talking at every step: threads with barriers stand for ranks with collectives."""

import random
import threading
import time

import pytest
import torch.distributed as dist

from shardwright.training.appointment import Appointments


def run(size, points, wishes, seed, collectives=2, until=()):
    """What each rank was told at which point, of so many and ``until`` all of that was told.

    ``wishes``: rank -> (point after which it wishes, what).
    """
    store = dist.HashStore() if size > 1 else None
    barrier = threading.Barrier(size)
    found = [[] for _ in range(size)]

    def rank(number):
        draw = random.Random(seed * 100 + number)
        mine = Appointments(store, "test", number, size)
        point = 0
        while point < points or not {told for _, told in found[number]}.issuperset(until):  # on all ranks alike
            point += 1
            for _ in range(collectives):
                time.sleep(draw.random() * 0.004)
                barrier.wait(60)
            what = mine.point()
            if what is not None:
                found[number].append((point, what))
            for after, wished in wishes.get(number, ()):
                if point == after:
                    mine.wish(wished)
        mine.close()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_all_ranks_keep_every_appointment_at_the_same_point(seed):
    draw = random.Random(seed)
    wishes = {
        rank: [(draw.randrange(1, 60), "save"), (draw.randrange(1, 60), f"of {rank}")]
        for rank in draw.sample(range(4), 2)
    }
    wanted = {what for of_rank in wishes.values() for _, what in of_rank}
    found = run(4, 60, wishes, seed, until=wanted)
    assert found[0] == found[1] == found[2] == found[3]
    assert {what for _, what in found[0]} == wanted


def test_one_rank_alone_needs_no_store():
    assert [what for _, what in run(1, 10, {0: [(3, "save")]}, 0, until={"save"})[0]] == ["save"]


def test_a_wish_after_the_last_point_of_some_keeps_nobody_waiting():
    found = run(3, 5, {1: [(5, "too late")]}, 0)
    assert found == [[], [], []]
    for seed in range(5):
        found = run(3, 6, {2: [(5, "perhaps")]}, seed)
        assert found[0] == found[1] == found[2]
