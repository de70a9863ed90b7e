"""Saves by real processes that are killed, stopped, or die between their file operations."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from faulty_files import Faulty
from ranks import run_ranks
from saved import good_step, no_leftovers, save_step, state_of
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.checkpoint.storage.store import LOCK, SAVING, Retention, Store
from shardwright.distributed.ranks import ProcessRanks
from shardwright.errors import CheckpointError

KEEP_TWO = Retention(latest_k=2)


def _in_a_fork(do):
    """Start a process that calls ``do`` and then ends, whatever comes of it."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
        finally:
            os._exit(3)
    return pid


def _save_for_ever(directory, step, numel):
    while True:
        step += 1
        save_step(Store(directory, retention=KEEP_TWO), step, numel)


def _kill_at_random_instants(directory, kills, seed):
    """Kill a process that saves one checkpoint after the other, again and again; what was found after each kill."""
    chance = random.Random(seed)
    numel, before, spans_s = 400_000, 4, []
    for step in range(1, before + 1):
        start = time.monotonic()
        save_step(Store(directory), step, numel)
        spans_s.append(time.monotonic() - start)
    span_s = 3 * min(spans_s)  # of which the instants are drawn; it follows how fast the machine is now
    interrupted, advanced = 0, 0
    enough = kills / 10  # kills that came in the middle of a save, and that came late enough for one to be done
    for number in range(10 * kills):
        if number >= kills and min(interrupted, advanced) >= enough:
            break
        pid = _in_a_fork(lambda: _save_for_ever(directory, before, numel))  # noqa: B023  # forked at once
        time.sleep(chance.uniform(0, span_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the saving process ended by itself"
        found = good_step(Store(directory))
        assert found >= before
        interrupted += any(name.startswith(SAVING) for name in os.listdir(directory))
        advanced += found > before
        span_s *= 0.9 if found > before else 1.1
        before = found
    save_step(Store(directory, retention=KEEP_TWO), before + 1, numel)
    assert good_step(Store(directory)) == before + 1
    no_leftovers(Store(directory))
    assert len(Store(directory).complete()) == 2
    return interrupted, advanced


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_good_checkpoint_loads_after_kill_9_at_random_instants(tmp_path, kills):
    [(interrupted, advanced)] = run_ranks(1, _kill_at_random_instants, tmp_path, kills, 7, timeout=580)
    assert interrupted >= kills / 10, "the kills came when nothing was being saved"
    assert advanced >= kills / 10, "the kills left no time to save"


def _one_rank_fails(directory, victim, fault, timeout_s):
    """The second save of three ranks, in which the file operations of ``victim`` end in ``fault``."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (directory / f"pid{rank}").write_text(str(os.getpid()))
    save(Store(directory / "runs"), "step-1", _spread(1), {"step": 1}, {}, ProcessRanks(TO_SAVE, timeout_s=60))
    ranks = ProcessRanks(TO_SAVE, timeout_s=timeout_s)
    faults = {"exits": lambda: os._exit(9), "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
    at = "write" if rank else "rename"  # rank 0 in the commit
    files = Faulty(LocalFiles(), at, faults[fault]) if rank == victim else LocalFiles()
    start = time.monotonic()
    try:
        save(Store(directory / "runs", files), "step-2", _spread(2), {"step": 2}, {}, ranks)
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    took_s = time.monotonic() - start
    if fault == "stops" and rank == 0:
        os.kill(int((directory / f"pid{victim}").read_text()), signal.SIGKILL)
    return said, took_s


def _spread(step):
    """Entries enough that each of three ranks writes one."""
    return {**state_of(step), **{("model", f"w{i}"): state_of(step)["model", "weight"] for i in range(5)}}


@pytest.mark.parametrize(
    ("victim", "fault", "timeout_s"),
    [(2, "exits", 100), pytest.param(2, "stops", 12, marks=pytest.mark.slow), (0, "exits", 100)],
    ids=str,
)
def test_a_rank_that_ends_or_stops_is_an_error_of_the_others(tmp_path, victim, fault, timeout_s):
    """No live rank is late by the ``timeout_s`` that a stopped one is waited for."""
    results = run_ranks(3, _one_rank_fails, tmp_path, victim, fault, timeout_s, timeout=110, dying={victim})
    assert results[victim] == (9 if fault == "exits" else -signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        said, took_s = results[rank]
        assert took_s < timeout_s or fault == "stops"  # by the end of the rank, and not by the clock
        if rank == 0:
            assert said.startswith(f"nothing was saved: rank {victim} ended or did not answer within {timeout_s} s")
        elif fault == "exits" and victim:
            assert said == results[0][0]
        else:
            assert f"rank {rank} was saving a checkpoint, and rank 0 did not answer" in said
    store = Store(tmp_path / "runs")
    assert good_step(store) == 1 or victim == 0
    if victim:
        no_leftovers(store)
    save_step(store, 3)
    assert good_step(store) == 3
    no_leftovers(store)


def test_a_second_job_in_the_same_directory_is_refused_by_name(tmp_path):
    run_ranks(1, _second_job, tmp_path)


def _second_job(directory):
    """A process is stopped in the middle of a save; nobody takes its lock or its files until it is dead."""
    save_step(Store(directory), 1)
    stopping = Faulty(LocalFiles(), "finish", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    pid = _in_a_fork(lambda: save_step(Store(directory, stopping), 2))
    os.waitpid(pid, os.WUNTRACED)
    under_way = [name for name in os.listdir(directory) if name.startswith(SAVING)]
    assert under_way
    with pytest.raises(CheckpointError, match=f"another save into .* is under way, by process {pid} on host"):
        save_step(Store(directory), 3)
    assert [name for name in os.listdir(directory) if name.startswith(SAVING)] == under_way
    assert good_step(Store(directory)) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert str(pid) in Path(directory / LOCK).read_text()
    save_step(Store(directory), 4)
    assert good_step(Store(directory)) == 4
    no_leftovers(Store(directory))
