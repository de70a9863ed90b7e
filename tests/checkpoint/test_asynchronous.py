"""Saves beside the training loop: what is copied, one at a time, errors at the next step, the end of the process."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from faulty_files import Faulty
from ranks import run_ranks
from saved import good_step, no_leftovers, save_step, state_of
from shardwright import checkpoint
from shardwright.checkpoint.loading.load import load
from shardwright.checkpoint.saving.asynchronous import AsyncSaver, own_ranks
from shardwright.checkpoint.saving.image import ROOM_BYTES, Copy, Image, room_of
from shardwright.checkpoint.saving.save import TO_SAVE
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.checkpoint.storage.store import Store
from shardwright.checkpoint.whole_run.run_state import Run
from shardwright.distributed.ranks import OneRank
from shardwright.errors import CheckpointError


class Slow(LocalFiles):
    """Files of which the first is not made before ``go`` is set."""

    def __init__(self):
        self.go = threading.Event()

    def create(self, path):
        assert self.go.wait(60)
        return super().create(path)


def test_the_state_is_saved_as_it_was_when_save_returned(tmp_path):
    files = Slow()
    state = state_of(1)
    with closing(AsyncSaver(Store(tmp_path, files), OneRank(TO_SAVE))) as saver:
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
    with closing(AsyncSaver(Store(tmp_path), OneRank(TO_SAVE))) as saver:
        saver.save("s", state, {}, {})
        big.fill_(-1)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "s", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    for (name,), tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_one_save_is_under_way_at_a_time(tmp_path):
    files = Slow()
    with closing(AsyncSaver(Store(tmp_path, files), OneRank(TO_SAVE))) as saver:
        saver.save("step-1", state_of(1), {"step": 1}, {})
        threading.Timer(0.2, files.go.set).start()
        saver.save("step-2", state_of(2), {"step": 2}, {})
        assert good_step(Store(tmp_path), "step-1") == 1
    assert list(Store(tmp_path).complete()) == ["step-1", "step-2"]


# Copying while the next forward and backward compute


class Copies(list):
    """Notes when the thread has copied, for which it waits for `go`, and a little longer."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()

    def finish(self, copy, finish=Copy.finish):
        assert self.go.wait(60)
        time.sleep(0.2)
        finish(copy)
        self.append("copied")


def copy_slowly(monkeypatch):
    copies = Copies()
    monkeypatch.setattr(Copy, "finish", lambda copy: copies.finish(copy))
    return copies


@pytest.fixture
def copies(monkeypatch):
    return copy_slowly(monkeypatch)


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def _clones(run):
    return {path: v.detach().clone() for path, v in run.state().items() if isinstance(v, torch.Tensor)}


def _saved(directory, clones):
    """Whether a checkpoint has these tensors, to the bit."""
    wanted = {path: torch.full_like(tensor, -7) for path, tensor in clones.items()}
    load(directory, wanted, strict=False)
    return all(torch.equal(wanted[path], tensor) for path, tensor in clones.items())


@pytest.mark.slow
def test_a_training_loop_saves_what_was_there_at_the_call(tmp_path, copies):
    """The forward changes the statistics of the batch norm, the step the rest, and the average after it."""
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    run, then = Run(model, optimizer, ema=average), {}
    optimizer.register_step_pre_hook(lambda *_: copies.append("step"))
    for step in range(1, 5):
        for _ in range(2):  # accumulated
            model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        checkpoint.save(tmp_path, model, optimizer, step=step, ema=average, asynchronous=True)
        then[step] = _clones(run)
    checkpoint.wait(model)
    assert copies == ["step", *["copied", "step"] * 3, "copied"]
    for step, clones in then.items():
        assert _saved(tmp_path / f"step-{step:08d}", clones), step
    assert not torch.equal(then[1]["model", "1.running_mean"], then[2]["model", "1.running_mean"])
    assert not torch.equal(then[1]["ema", "module.0.weight"], then[2]["ema", "module.0.weight"])


def test_what_is_changed_too_early_is_an_error_and_no_checkpoint(tmp_path, copies):
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, model, optimizer, step=1, asynchronous=True)
    checkpoint.wait(model)
    copies.go.clear()
    checkpoint.save(tmp_path, model, optimizer, step=2, asynchronous=True)
    with torch.no_grad():
        model[2].bias.zero_()
    copies.go.set()
    with pytest.raises(
        CheckpointError, match=r"nothing was saved: model\.2\.bias was changed .*checkpoint\.wait_copied"
    ):
        checkpoint.wait(model)
    assert Store(tmp_path).latest() == "step-00000001"
    no_leftovers(Store(tmp_path))
    checkpoint.save(tmp_path, model, optimizer, step=3, asynchronous=True)
    checkpoint.wait_copied()
    then = _clones(Run(model))
    with torch.no_grad():
        model[2].bias.fill_(3)
    checkpoint.wait(model)
    assert _saved(tmp_path / "step-00000003", then)


def test_weights_that_a_forward_changes_are_copied_at_once(tmp_path, copies):
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    then = _clones(Run(model))
    checkpoint.save(tmp_path, model, optimizer, step=1, asynchronous=True)
    model(torch.arange(5))
    assert not torch.equal(model[0].weight, then["model", "0.weight"])
    checkpoint.wait(model)
    assert _saved(tmp_path / "step-00000001", then)


def test_averages_are_copied_at_once_where_a_scaler_may_skip_the_step(tmp_path, copies):
    model = _network()
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu")
    checkpoint.save(tmp_path, model, optimizer, step=1, ema=average, scaler=scaler, asynchronous=True)
    then = _clones(Run(model, optimizer, ema=average))
    average.module[0].weight.data.zero_()
    with torch.no_grad():
        average.module[0].bias.zero_()
    checkpoint.wait(model)
    assert _saved(tmp_path / "step-00000001", then)


def test_an_error_of_the_copy_surfaces_and_lets_the_next_step_go_on(tmp_path, monkeypatch):
    def broken(copy):
        raise MemoryError("no memory for a row-major copy")

    monkeypatch.setattr(Copy, "finish", broken)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, model, optimizer, step=1, asynchronous=True)
    optimizer.step()
    with pytest.raises(CheckpointError, match="MemoryError: no memory for a row-major copy"):
        checkpoint.wait(model)
    assert Store(tmp_path).latest() is None


def test_a_loop_that_ends_before_the_copy_ends_with_a_whole_checkpoint(tmp_path, copies):
    state = {("model", "weight"): torch.full((8,), 1.0), ("run", "step"): 1}
    saver = AsyncSaver(Store(tmp_path), OneRank(TO_SAVE))
    copies.go.clear()
    saver.save("step-1", state, {"step": 1}, {}, steady=state.keys())
    assert not copies
    copies.go.set()
    saver.close()
    assert good_step(Store(tmp_path)) == 1
    checkpoint.wait_copied()  # nothing is left to wait for


def _full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("surfaces", ["check", "save", "close"])
def test_an_error_surfaces_at_the_next_call_once(tmp_path, surfaces):
    save_step(Store(tmp_path), 1)
    failing = Faulty(LocalFiles(), 17, _full)
    saver = AsyncSaver(Store(tmp_path, failing), OneRank(TO_SAVE))
    saver.save("step-2", state_of(2), {"step": 2}, {})
    saver._save.join(60)
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
    with closing(AsyncSaver(Store(tmp_path), OneRank(TO_SAVE))) as saver:
        saver.save("s", {("x",): object()}, {}, {})
        with pytest.raises(CheckpointError, match="the entry x is a object"):
            saver.wait()


def test_a_synchronous_save_beside_one_under_way_is_refused(tmp_path):
    files = Slow()
    with closing(AsyncSaver(Store(tmp_path, files), OneRank(TO_SAVE))) as saver:
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
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support" / "files")!r})
        from saved import state_of
        from shardwright.checkpoint.saving.asynchronous import AsyncSaver
        from shardwright.checkpoint.storage.files import LocalFiles
        from shardwright.checkpoint.saving.save import TO_SAVE
        from shardwright.distributed.ranks import OneRank
        from shardwright.checkpoint.storage.store import Store
        import threading, time
        go = threading.Event()

        class Slow(LocalFiles):
            def create(self, path):
                go.wait()
                time.sleep(0.02)
                if {fails} and path.endswith(".metadata"):
                    raise OSError(28, "No space left on device", path)
                return super().create(path)

        saver = AsyncSaver(Store({str(tmp_path / "runs")!r}, Slow()), OneRank(TO_SAVE))
        saver.save("step-1", state_of(1), {{"step": 1}}, {{}})
        assert saver.saving
        print("the last line")
        go.set()
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert ended.stdout == "the last line\n"
    if fails:
        assert "a checkpoint was under way when this process ended: " in ended.stderr
        assert ": No space left on device (" in ended.stderr
        assert Store(tmp_path / "runs").latest() is None
    else:
        assert ended.stderr == ""
        assert good_step(Store(tmp_path / "runs")) == 1


def _train_and_save(directory):
    """All-reduces of the training go on between the same ranks while a save is under way."""
    dist.init_process_group("gloo")
    saver = AsyncSaver(Store(directory), own_ranks(timeout_s=60))
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


class Driver:
    """As much of a GPU's driver as pins memory; ``error`` is what it answers."""

    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, size, flags):
        assert (address % 4096, flags) == (0, 0)
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        assert Path("/proc/self/maps").read_text().count(f"{address:x}-"), "it is still there"
        del self.pinned[address]
        return 0


def test_memory_that_is_pinned_has_the_size_that_is_asked_for_and_is_given_back(monkeypatch):
    """Torch's own would have the next power of two, twice as much here."""
    driver, image = Driver(), Image()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    for size in ((1 << 20) + 1, (5 << 20) + 1):
        image._make_room(size, pinned=True)
        assert driver.pinned == {image.memory.data_ptr(): size + ROOM_BYTES}
        assert not image.memory.count_nonzero()
    del image
    assert driver.pinned == {}
    driver.error = 2
    forgotten = []
    runtime = SimpleNamespace(cudaGetLastError=lambda: forgotten.append(2))
    monkeypatch.setattr("shardwright.checkpoint.saving.image._runtime", lambda: runtime)
    with pytest.warns(UserWarning, match=r"5 MB of memory for saves cannot be pinned \(CUDA error 2\): each save"):
        assert room_of(5_000_000, True).nbytes == 5_000_000
    assert forgotten == [2]
