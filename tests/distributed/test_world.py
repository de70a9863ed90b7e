"""The ranks of a job find each other, or say on every rank why not."""

import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from ranks import free_port, run_ranks
from shardwright.distributed import meeting
from shardwright.distributed.devices import gpu_index, host_names
from shardwright.distributed.meeting import Card, Deadline
from shardwright.distributed.world import _by_place
from shardwright.errors import UsageError, WorldError

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def error_of_init(**arguments):
    """What sw.init says when it fails."""
    meeting._READERS_S = 60.0  # of a busy machine
    try:
        world = sw.init(**arguments)
    except WorldError as error:
        return str(error)
    return f"no error: {world}"


def join_and_reduce():
    world = sw.init(timeout=60)
    total = torch.tensor([world.rank + 1.0], dtype=torch.float64)
    dist.all_reduce(total)
    again = sw.init()
    return str(world), total.item(), again is world, world.hosts


@pytest.mark.parametrize("size", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_meet_and_reduce(size):
    backend = "gloo" if size == 1 else "shm"
    for rank, (text, total, same, hosts) in enumerate(run_ranks(size, join_and_reduce)):
        assert text == f"rank {rank} of {size} (local rank {rank} of {size} on {os.uname().nodename}), cpu, {backend}"
        assert total == size * (size + 1) / 2
        assert same
        assert hosts == (os.uname().nodename,) * size


def come_unless(absent, timeout):
    return "absent" if int(os.environ["RANK"]) in absent else error_of_init(timeout=timeout)


def come_in_time(absent, timeout, folder):
    """The time is over when all have come who do, however long that takes."""
    announce, left_s = meeting._announce, Deadline.left_s

    def announced(store, card):
        problem = announce(store, card)
        (folder / str(card.rank)).touch()
        return problem

    def left_for_others_s(deadline):
        if deadline.timeout_s != timeout:
            return left_s(deadline)
        return 0.0 if len(list(folder.iterdir())) == int(os.environ["WORLD_SIZE"]) - len(absent) else 60.0

    meeting._announce, Deadline.left_s = announced, left_for_others_s
    return come_unless(absent, timeout)


def test_missing_ranks_are_named_on_every_rank_that_came(tmp_path):
    said = run_ranks(6, come_in_time, (2, 3, 5), 3, tmp_path)
    host = os.uname().nodename
    for rank in (0, 1, 4):
        assert said[rank] == (
            f"3 of 6 ranks did not come within 3 s: ranks 2-3, 5 (came: ranks 0-1, 4 on {host}); see the logs of "
            "those missing, or raise the time with sw.init(timeout=...)"
        )


def test_a_missing_rank_0_is_named_by_the_others():
    said = run_ranks(2, come_unless, (0,), 0.3)
    assert said[1].startswith("rank 0 did not come to the meeting point 127.0.0.1 port ")
    assert "within 0.3 s" in said[1]


def say_size(sizes):
    rank = int(os.environ["RANK"])
    return error_of_init(rank=rank, world_size=sizes[rank], timeout=60)


def test_ranks_that_disagree_on_the_world_size_say_so():
    said = run_ranks(3, say_size, (3, 3, 4))
    assert len(set(said)) == 1
    assert said[0].startswith("the ranks disagree on the world size: rank ")
    assert "says 3" in said[0]
    assert "rank 2 (process " in said[0]
    assert "says 4" in said[0]


def test_the_first_contradiction_is_what_every_rank_says():
    store, said = dist.HashStore(), {}

    def come(rank, size):
        card = Card(rank=rank, size=size, backend="gloo", host="a", machine="m", pid=1, local_rank=None, gpus=())
        with pytest.raises(WorldError) as raised:
            meeting.roll_call(store, card, Deadline.after(60), serves=False)
        said[rank] = str(raised.value)

    first = threading.Thread(target=come, args=(2, 4))
    first.start()
    store.wait(["first"])
    come(1, 3)
    come(0, 3)
    first.join()
    assert set(said.values()) == {
        "the ranks disagree on the world size: rank 2 (process 1 on a) says 4, rank 1 (process 1 on a) says 3"
    }


def say_backend(backends):
    return error_of_init(backend=backends[int(os.environ["RANK"])], timeout=60)


def test_a_backend_that_nobody_knows():
    with pytest.raises(UsageError, match=r"backend='nccl2' is unknown; choose 'gloo' \(CPU\), 'nccl' \(GPU\), 'mpi' "):
        sw.init(backend="nccl2", rank=0, world_size=1)


def test_ranks_that_disagree_on_the_backend_say_so():
    said = run_ranks(2, say_backend, ("gloo", "cpu:gloo"))
    assert len(set(said)) == 1
    assert "the ranks disagree on the backend" in said[0]
    assert "says cpu:gloo" in said[0]


def say_rank(ranks):
    return error_of_init(rank=ranks[int(os.environ["RANK"])], world_size=len(ranks), timeout=60)


def test_a_rank_that_comes_twice_is_named():
    said = run_ranks(4, say_rank, (0, 1, 2, 1))
    assert len(set(said)) == 1
    assert said[0].startswith("two processes say that they are rank 1: ")


def test_a_taken_port_is_named():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorldError, match=rf"cannot meet at 127.0.0.1:{port}: Address already in use.*MASTER_PORT"):
            sw.init(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)


def meet_in_file(path, timeout):
    rank = int(os.environ["RANK"])
    for name in LAUNCHERS:
        del os.environ[name]
    world = sw.init(init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout)
    dist.barrier()
    return world.rank, world.local_rank, world.local_size, os.path.exists(path)


def test_ranks_meet_by_a_shared_file_and_leave_none_behind(tmp_path):
    path = tmp_path / "meet"
    path.write_text('{"addresses": ["127.0.0.1"], "port": 1}')  # what a job that was killed left behind
    assert run_ranks(2, meet_in_file, path, 60) == [(0, 0, 2, False), (1, 1, 2, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, r"sw.init\(rank=...\) needs world_size=... too"),
        ({"world_size": 2}, r"sw.init\(world_size=...\) needs rank=... too"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not within world_size=2"),
        ({"timeout": 0}, "timeout=0 must be more than 0 seconds"),
        ({"init_method": "udp://a:1"}, "init_method='udp://a:1' is no meeting point; expected tcp://HOST:PORT"),
        ({"init_method": "tcp://host"}, "expected tcp://HOST:PORT"),
    ],
)
def test_arguments_that_make_no_sense(monkeypatch, arguments, message):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=message):
        sw.init(**arguments)


def test_a_world_without_a_meeting_point_says_what_to_set(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="a world of 2 ranks has nowhere to meet; set MASTER_ADDR and MASTER_PORT"):
        sw.init(rank=0, world_size=2)


def another_world():
    sw.init(timeout=60, backend="gloo")
    return error_of_init(backend="mpi"), error_of_init(rank=7, world_size=8), sw.init(backend="gloo").backend


def test_a_second_init_may_not_ask_for_another_world():
    for backend, rank, same in run_ranks(2, another_world):
        assert "sw.init(backend='mpi'), but the world is already there with backend='gloo'" in backend
        assert "sw.init(rank=7), but the world is already there" in rank
        assert same == "gloo"


def adopt():
    dist.init_process_group("gloo")
    world = sw.init()
    return str(world), sw.init() is world


def test_a_process_group_of_the_script_is_adopted():
    for rank, (text, same) in enumerate(run_ranks(2, adopt)):
        assert text.startswith(f"rank {rank} of 2 (local rank {rank} of 2 on ")
        assert same


def card(rank, host="a", machine="m", local_rank=None, gpus=(), **more):
    told = {"size": 9, "backend": "nccl", "pid": 1} | more
    return Card(rank=rank, host=host, machine=machine, local_rank=local_rank, gpus=gpus, **told)


def test_ranks_of_one_host_share_memory_unless_one_was_told_a_backend():
    here, there = card(0, backend="gloo"), card(1, host="b", backend="gloo")
    other, told = card(1, backend="gloo"), card(1, backend="gloo", asked=True)
    on_gpu = card(0, device="cuda"), card(1, device="cuda")
    found = [_by_place(cards) for cards in ((here, other), (here, there), (here, told), (here,), on_gpu)]
    assert [{card.backend for card in cards} for cards in found] == [{"shm"}, {"gloo"}, {"gloo"}, {"gloo"}, {"nccl"}]
    for places, usual in (("aaa", "shm"), ("aabb", "gloo"), ("aab", "gloo"), ("a", "gloo")):
        cards = tuple(card(rank, host=host, backend="gloo") for rank, host in enumerate(places))
        assert {card.backend for card in _by_place(cards)} == {usual}, places


class TestGpus:
    def test_each_rank_takes_the_gpu_of_its_local_rank(self):
        cards = [card(r, host="ab"[r // 2], gpus=("g0", "g1")) for r in range(4)]
        assert [gpu_index(cards, r) for r in range(4)] == [0, 1, 0, 1]

    def test_a_single_visible_gpu_is_taken_where_the_launcher_chose_it(self):
        cards = [card(r, local_rank=r, gpus=(f"g{r}",)) for r in range(4)]
        assert [gpu_index(cards, r) for r in range(4)] == [0, 0, 0, 0]

    def test_more_ranks_than_gpus_is_an_error_on_every_rank(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        cards = [card(0, host="b", gpus=("x",)), *(card(r, gpus=("g4", "g5")) for r in range(1, 4))]
        for rank in range(4):
            with pytest.raises(WorldError) as error:
                gpu_index(cards, rank)
            assert str(error.value) == (
                "a has 3 ranks (ranks 1-3), but they see 2 GPUs (CUDA_VISIBLE_DEVICES=4,5); start at most 2 ranks "
                "there, or pass sw.init(backend='gloo') to train on the CPUs, with device='cuda' beside it to share "
                "GPUs"
            )

    def test_a_device_number_is_found_among_the_visible_ones(self, monkeypatch):
        cards = [card(0, gpus=("g4", "g5"))]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        assert gpu_index(cards, 0, device_id=5) == 1
        with pytest.raises(WorldError, match="DEVICE_ID=1 is none of the visible devices 4, 5"):
            gpu_index(cards, 0, device_id=1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert gpu_index(cards, 0, device_id=1) == 1

    def test_hosts_of_one_name_are_told_apart(self):
        cards = [card(0, machine="11111111-x"), card(1, machine="22222222-x"), card(2, host="b")]
        assert host_names(cards) == ("a/11111111", "a/22222222", "b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_is_an_error():
    with pytest.raises(WorldError, match=r"has 1 ranks \(rank 0\), but they see 0 GPUs"):
        sw.init(backend="nccl", rank=0, world_size=1)


PEER_DIES = """
import os, signal, torch, torch.distributed as dist, shardwright as sw
world = sw.init(timeout=60)
dist.barrier()
if world.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(script, rank, size, port):
    env = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_rank_whose_peer_was_killed_leaves_quietly():
    with free_port() as port:
        ranks = [start(PEER_DIES, r, 2, port) for r in range(2)]
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 0]
    assert said == ["", ""]


def draw(seed, deterministic):
    sw.set_seed(seed, deterministic)
    drawn = random.random(), float(np.random.rand()), torch.rand(1).item()
    return drawn, torch.are_deterministic_algorithms_enabled()


def test_one_seed_gives_every_rank_the_same_numbers():
    drawn = run_ranks(2, draw, 7, False)
    assert drawn[0] == drawn[1]
    assert drawn[0][1] is False
    assert run_ranks(1, draw, 8, False)[0][0] != drawn[0][0]
    assert run_ranks(1, draw, 7, True) == [(drawn[0][0], True)]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UsageError, match=f"seed={seed} must be a whole number from 0 to 4294967295"):
        sw.set_seed(seed)
