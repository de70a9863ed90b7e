"""Saves beside the training loop: what is copied, one at a time, errors at the next step, the end of the process."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from faulty_files import Faulty
from ranks import run_ranks
from saved import good_step, no_leftovers, save_step, state_of
from shardwright.checkpoint.asynchronous import AsyncSaver, own_ranks
from shardwright.checkpoint.files import LocalFiles
from shardwright.checkpoint.ranks import OneRank
from shardwright.checkpoint.store import Store
from shardwright.errors import CheckpointError


class Slow(LocalFiles):
    """Files of which the first is not made before ``go`` is set."""

    def __init__(self):
        self.go = threading.Event()

    def create(self, path, size_bytes=0):
        assert self.go.wait(20)
        return super().create(path, size_bytes)


def test_the_state_is_saved_as_it_was_when_save_returned(tmp_path):
    files = Slow()
    state = state_of(1)
    with AsyncSaver(Store(tmp_path, files), OneRank()) as saver:
        saver.save("step-1", state, {"step": 1}, {})
        assert saver.saving
        state["model", "weight"].fill_(99)  # the next optimizer step
        saver.check()
        assert Store(tmp_path).latest() is None
        files.go.set()
        manifest = saver.wait()
        assert manifest is not None
        assert manifest.info["step"] == 1
        assert not saver.saving
        assert saver.wait() is None
    assert good_step(Store(tmp_path)) == 1


def test_strided_and_odd_tensors_are_copied_as_they_are(tmp_path):
    big = torch.arange(30.0).reshape(5, 6)
    state = {("t",): big.t(), ("row",): big[2, 1:4], ("scalar",): torch.tensor(2.0), ("none",): torch.empty(0, 3),
             ("flag",): torch.tensor([True]), ("half",): torch.ones(3, dtype=torch.bfloat16)}  # fmt: skip
    wanted = {path: tensor.clone() for path, tensor in state.items()}
    with AsyncSaver(Store(tmp_path), OneRank()) as saver:
        saver.save("s", state, {}, {})
        big.fill_(-1)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "s", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    for (name,), tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_one_save_is_under_way_at_a_time(tmp_path):
    files = Slow()
    with AsyncSaver(Store(tmp_path, files), OneRank()) as saver:
        saver.save("step-1", state_of(1), {"step": 1}, {})
        threading.Timer(0.2, files.go.set).start()
        saver.save("step-2", state_of(2), {"step": 2}, {})
        assert good_step(Store(tmp_path), "step-1") == 1
    assert list(Store(tmp_path).complete()) == ["step-1", "step-2"]


def test_the_memory_of_the_copy_is_kept(tmp_path):
    with AsyncSaver(Store(tmp_path), OneRank()) as saver:
        saver.allocate(state_of(1, 1000))
        at = saver._arena.memory.data_ptr()
        assert saver._arena.memory.numel() == 4032
        for step in (1, 2):
            saver.save(f"step-{step}", state_of(step, 1000), {"step": step}, {})
            assert saver._arena.memory.data_ptr() == at
        saver.wait()
        assert good_step(Store(tmp_path)) == 2
        saver.save("step-3", state_of(3, 3000), {"step": 3}, {})
        assert saver._arena.memory.numel() == 12032
    assert saver._arena.memory.numel() == 0


def _full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("surfaces", ["check", "wait", "save", "close"])
def test_an_error_surfaces_at_the_next_call_once(tmp_path, surfaces):
    save_step(Store(tmp_path), 1)
    failing = Faulty(LocalFiles(), 20, _full)
    saver = AsyncSaver(Store(tmp_path, failing), OneRank())
    saver.save("step-2", state_of(2), {"step": 2}, {})
    saver._save.join(20)
    call = {"save": lambda: saver.save("step-3", state_of(3), {"step": 3}, {})}.get(surfaces, getattr(saver, surfaces))
    with pytest.raises(CheckpointError, match="No space left on device"):
        call()
    assert good_step(Store(tmp_path)) == 1
    no_leftovers(Store(tmp_path))
    saver.check()
    saver.save("step-4", state_of(4), {"step": 4}, {})
    saver.close()
    assert good_step(Store(tmp_path)) == 4


def test_what_cannot_be_saved_surfaces_too(tmp_path):
    with AsyncSaver(Store(tmp_path), OneRank()) as saver:
        saver.save("s", {("x",): object()}, {}, {})
        with pytest.raises(CheckpointError, match="the entry x is a object"):
            saver.wait()


def test_a_synchronous_save_beside_one_under_way_is_refused(tmp_path):
    files = Slow()
    with AsyncSaver(Store(tmp_path, files), OneRank()) as saver:
        saver.save("step-1", state_of(1), {"step": 1}, {})
        while not any(name.startswith(".saving") for name in os.listdir(tmp_path)):
            saver.check()
        with pytest.raises(CheckpointError, match=f"another save into .* is under way, by process {os.getpid()}"):
            save_step(Store(tmp_path), 2)
        files.go.set()


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_end_of_the_process_waits_for_the_save(tmp_path, fails):
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from saved import state_of
        from shardwright.checkpoint.asynchronous import AsyncSaver
        from shardwright.checkpoint.files import LocalFiles
        from shardwright.checkpoint.ranks import OneRank
        from shardwright.checkpoint.store import Store
        import time

        class Slow(LocalFiles):
            def create(self, path, size_bytes=0):
                time.sleep(0.02)
                if {fails} and path.endswith(".metadata"):
                    raise OSError(28, "No space left on device", path)
                return super().create(path, size_bytes)

        saver = AsyncSaver(Store({str(tmp_path / "runs")!r}, Slow()), OneRank())
        saver.save("step-1", state_of(1), {{"step": 1}}, {{}})
        assert saver.saving
        print("the last line")
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert ended.stdout == "the last line\n"
    if fails:
        assert "a checkpoint was under way when this process ended: No space left on device" in ended.stderr
        assert Store(tmp_path / "runs").latest() is None
    else:
        assert ended.stderr == ""
        assert good_step(Store(tmp_path / "runs")) == 1


def _train_and_save(directory):
    """All-reduces of the training go on between the same ranks while a save is under way."""
    dist.init_process_group("gloo")
    saver = AsyncSaver(Store(directory), own_ranks(timeout_s=30))
    weight = torch.zeros(1000)
    sums = []
    for step in range(1, 31):
        gradient = torch.ones(1000) * (dist.get_rank() + 1)
        dist.all_reduce(gradient)
        weight += gradient / 3
        sums.append(float(weight.sum()))
        if step % 10 == 0:
            saver.save(f"step-{step}", {**state_of(step), ("model", "trained"): weight}, {"step": step}, {})
        saver.check()
    saver.close()
    dist.destroy_process_group()
    return sums


def test_training_goes_on_between_ranks_that_save(tmp_path):
    results = run_ranks(2, _train_and_save, tmp_path)
    assert results[0] == results[1] == [1000.0 * step for step in range(1, 31)]
    store = Store(tmp_path)
    assert list(store.complete()) == ["step-10", "step-20", "step-30"]
    assert [good_step(store, name) for name in store.complete()] == [10, 20, 30]


def _one_rank_dies(directory):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    save_ranks = own_ranks(timeout_s=60)
    files = Faulty(LocalFiles(), 5, lambda: os._exit(9)) if rank == 1 else LocalFiles()
    saver = AsyncSaver(Store(directory, files), save_ranks)
    state = {**state_of(1), **{("model", f"w{i}"): state_of(1)["model", "weight"] for i in range(3)}}
    saver.save("step-1", state, {"step": 1}, {})
    try:
        saver.close()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_dies_beside_the_loop_is_told_by_the_other(tmp_path):
    said, code = run_ranks(2, _one_rank_dies, tmp_path, dying={1})
    assert code == 9
    assert said.startswith("nothing was saved: rank 1 ended or did not answer within 60 s")
    assert Store(tmp_path).latest() is None
    no_leftovers(Store(tmp_path))
