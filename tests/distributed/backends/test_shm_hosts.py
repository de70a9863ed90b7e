"""The shm backend over several hosts: right results, ends that are told on all of them, and gloo where it is no use.

Ranks of this machine pretend to be on several hosts, by what they say of themselves when they make a group.
"""

import functools
import logging
import os
import signal
import time

import backend_ranks
import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from ranks import run_ranks
from shardwright.common.torch_private import job_store
from shardwright.distributed.backends import hosts_group, shm_meeting
from shardwright.distributed.backends.between.grid import Grid
from shardwright.errors import WorldError

slow = pytest.mark.slow


def init(hosts, timeout=60):
    """Join the others as if this rank were on the host that ``hosts`` has for it."""
    card, mine = shm_meeting._card, hosts[int(os.environ["RANK"])]
    shm_meeting._card = lambda: card() | {"machine": mine, "host": mine}
    sw.init("shm", timeout=timeout)


def collectives(hosts, examples):
    init(hosts)
    backend_ranks.drawn = backend_ranks.settings(backend_ranks.drawn, max_examples=examples)
    reductions = backend_ranks.reduces()
    backend_ranks.moves()
    backend_ranks.messages()
    backend_ranks.order()
    return reductions, type(dist.group.WORLD).__name__


@pytest.mark.parametrize(("hosts", "examples"), [("abab", 3), pytest.param("abcbca", 30, marks=slow)])
def test_collectives(hosts, examples):
    for reductions, group in run_ranks(len(hosts), collectives, hosts, examples, timeout=110):
        assert reductions >= 2
        assert group == "HostsGroup"


def sums(hosts):
    """Of tensors of all lengths that go other ways; what this rank gets, which is what the order of ranks gives."""
    init(hosts)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = Grid.of(hosts).rows
    found = []
    for numel in (1, 5000, 200_003, 3_000_001):  # the last in more stretches than go at once
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(size)]
        within = [functools.reduce(torch.add, [parts[r] for r in row]) for row in rows]
        total = functools.reduce(torch.add, within)
        mine = parts[rank].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, total), numel
        work = dist.all_reduce(parts[rank], dist.ReduceOp.AVG, async_op=True)
        assert work.get_future().wait()[0] is parts[rank]
        assert torch.equal(parts[rank], total / size), numel
        sent = total.clone() if rank == size - 1 else torch.zeros(numel)
        dist.broadcast(sent, size - 1)
        assert torch.equal(sent, total), numel
        gathered = torch.zeros(size * numel)
        dist.all_gather_into_tensor(gathered, mine + rank)
        assert torch.equal(gathered, torch.cat([total + r for r in range(size)])), numel
        found.append(mine.sum().item())
    return found


@pytest.mark.parametrize("hosts", ["abba", pytest.param("abcabc", marks=slow)])
def test_sums_go_in_the_order_of_ranks_and_hosts(hosts):
    assert len(set(map(tuple, run_ranks(len(hosts), sums, hosts, timeout=110)))) == 1


def others_and_groups():
    init("abab")
    backend_ranks.by_others()
    backend_ranks.subgroups()
    stay(4)


@slow
def test_other_callers_and_groups():
    run_ranks(4, others_and_groups, timeout=110)


def stressed(hosts, seconds):
    init(hosts, 120)
    rows = Grid.of(hosts).rows
    return backend_ranks.stress(seconds, list(rows[0]), sorted(rank for row in rows for rank in row[:2]))


@slow
@pytest.mark.timeout(600)
def test_many_in_any_order():
    counts = run_ranks(6, stressed, "aabbcc", 20, timeout=400)
    assert len(set(counts)) == 1
    assert counts[0] > 100


def stay(ranks):
    """Rank 0 serves the store until so many have come here, since they have read there what is wrong."""
    store = job_store()
    store.add("come", 1)
    while dist.get_rank() == 0 and store.add("come", 0) < ranks:
        time.sleep(0.02)


def goes(how):
    """Rank 3 goes, while the others wait for it; what they are told, and after how long."""
    init("aabb")
    hosts_group._GRACE_S = 40.0  # who waits beside rank 3 is the first to tell, also where it is slow
    rank = dist.get_rank()
    dist.broadcast(torch.ones(2), 0)
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return backend_ranks.until(lambda: job_store().add("come", 0) == 3)
    if how == "stalls":
        dist.group.WORLD.lane.timeout_s = 3.0  # from here on, since ranks may take longer to meet
    found = backend_ranks.told_of_the_end()
    stay(3)
    return found


def test_a_rank_that_ends_is_named_on_all_hosts():
    for said, _ in run_ranks(4, goes, "killed", dying=(3,))[:3]:
        assert "rank 3" in said


@slow
def test_a_rank_that_stalls_is_named_on_all_hosts():
    found = run_ranks(4, goes, "stalls", stay=True)[:3]
    assert all("longer than the 3 s of sw.init(timeout=...): rank 3 last came to number" in said for said, _ in found)
    assert max(took_s for _, took_s in found) > 2.5  # others are told when the first of them has waited for so long


def unlike(how):
    """What all are told where the ranks of one host, or one of them, do not call what the others do."""
    init("aabb")
    rank = dist.get_rank()
    calls = {
        "sizes": lambda: dist.all_reduce(torch.ones(3 + rank // 2)),
        "large sizes": lambda: dist.all_reduce(torch.ones(200_000 + rank // 2)),
        "a large and a small one": lambda: dist.all_reduce(torch.ones(200_000 if rank // 2 else 3)),
        "one": lambda: dist.all_reduce(torch.ones(3)) if rank else dist.barrier(),
        "rows": lambda: dist.all_gather([torch.ones(r + (r == 0) * (rank // 2)) for r in range(4)], torch.ones(rank)),
        "parts": lambda: dist.all_to_all_single(
            torch.ones(4), torch.ones(5 if rank == 3 else 4), None, [2, 1, 1, 1] if rank == 3 else None
        ),
    }
    with pytest.raises(WorldError) as error:
        calls[how]()
    stay(4)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sizes", "rank 0 called all_reduce of 3 elements of float32 by SUM, rank 2 called all_reduce of 4 elements"),
        pytest.param("large sizes", "called all_reduce of 200000 elements of float32 by SUM, rank ", marks=slow),
        pytest.param("a large and a small one", "called all_reduce of 3 elements of float32 by SUM, rank ", marks=slow),
        pytest.param("one", "rank 0 called barrier, rank ", marks=slow),
        pytest.param("rows", "all_gather of several sizes of float32 with [0, 1, 2, 3], rank 2 called", marks=slow),
        pytest.param("parts", "rank 3 sends 8 bytes to rank 0, which awaits 4 from it", marks=slow),
    ],
)
def test_ranks_that_do_not_call_the_same_are_named(how, message):
    first, *others = run_ranks(4, unlike, how)
    assert message in first
    assert all(other == first for other in others)


def by_gloo(hosts):
    logging.getLogger("shardwright.shm").setLevel(logging.INFO)
    heard = []
    logging.getLogger("shardwright.shm").addFilter(lambda record: heard.append(record.getMessage()))
    init(hosts)
    total = torch.ones(2)
    dist.all_reduce(total)
    return type(dist.group.WORLD).__name__, total.tolist(), heard


@slow
def test_hosts_without_as_many_ranks_take_gloo():
    for hosts, counts in (("aab", "a has 2, b has 1"), ("ab", "a has 1, b has 1")):
        found = run_ranks(len(hosts), by_gloo, hosts)
        assert [total for _, total, _ in found] == [[len(hosts)] * 2] * len(hosts)
        assert [name for name, _, _ in found] == ["ProcessGroup"] * len(hosts)
        assert counts in found[0][2][0]
