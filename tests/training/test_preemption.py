"""TERM in the middle of training: all ranks save and leave, or leave at once where the job has failed."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import RankFailed, run_ranks
from shardwright.checkpoint.loading.source import open_source
from shardwright.launch.joblog.job import FAILED_VARIABLE

BIN = Path(sys.executable).parent


class Told(sw.Callback):
    """Some ranks are told to end during some step, and every step takes a moment.

    In the steps ``wished`` all wait until ``saving`` knows that somebody wishes it.
    """

    def __init__(self, ranks, step, saving, wished=(), pause_s=0.02):
        self.ranks, self.step, self.saving, self.wished, self.pause_s = ranks, step, saving, wished, pause_s

    def on_step_end(self, trainer):
        time.sleep(self.pause_s)
        while trainer.steps in self.wished and not self.saving._appointments._open:
            time.sleep(self.pause_s)
        if trainer.steps == self.step and trainer.world.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)


def told_to_end(directory, ranks, steps, wished=(), **options):
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    data = [batch_of(12, seed) for seed in range(5)]
    parallel = sw.parallelize(make(), loss_fn, data[0], "data", batch="global")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    saving = sw.ModelCheckpoint(directory, every_epochs=1000, **options)
    trainer = sw.Trainer(parallel, optimizer, [Told(ranks, 7, saving, wished), saving])
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            trainer.fit(data, epochs=1000, steps=steps)
        except SystemExit as leaving:
            code = leaving.code
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return code, trainer.steps, trainer.epoch, trainer.step, out.getvalue()


@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["one rank", "every rank"])
def test_whoever_is_told_all_ranks_save_after_the_same_step_and_leave(ranks, tmp_path):
    everyone = run_ranks(2, told_to_end, str(tmp_path), ranks, 4000)
    assert {(code, steps) for code, steps, *_ in everyone} == {(143, everyone[0][1])}
    steps, epoch, step, text = everyone[0][1:]
    assert 7 <= steps < 1000, "they leave soon"
    manifest = open_source(tmp_path).manifest
    assert (manifest.info["step"], manifest.info["epoch"]) == (steps, epoch)
    assert f"TERM: saved {tmp_path} after step {step} of epoch {epoch}; leaving with exit code 143" in text


def test_where_the_job_is_marked_as_failed_a_rank_leaves_at_once_and_saves_nothing(tmp_path):
    mark = tmp_path / "failed.json"
    mark.write_text("{}")
    with pytest.raises(RankFailed, match="died with exit code 143"):
        run_ranks(1, told_to_end, str(tmp_path / "run"), (0,), 4000, env={FAILED_VARIABLE: str(mark)})
    assert not list(tmp_path.glob("run/step-*"))


SCRIPT = """
import os, sys, time
import torch
import shardwright as sw
from models import NETWORKS

directory, resume, epochs, last = sys.argv[1:]
torch.set_num_threads(1)
world = sw.init()
sw.set_seed(1)
make, loss_fn, batch_of = NETWORKS["perceptron"]
x, y = batch_of(50)
batches = sw.loader(torch.utils.data.TensorDataset(x, y), 10, num_workers=1)
parallel = sw.parallelize(make(), loss_fn, batches.sample_batch(), "data")


class Slow(sw.Callback):
    def on_step_end(self, trainer):
        time.sleep(0.1)
        while trainer.steps == int(last) and not saving._appointments._open:  # before it has heard of TERM
            time.sleep(0.02)


print("pid", world.rank, os.getpid(), flush=True)
saving = sw.ModelCheckpoint(directory, every_epochs=10_000)
callbacks = [sw.LossMonitor(), Slow(), saving]
trainer = sw.Trainer(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2), callbacks)
if resume == "auto":
    trainer.resume()
trainer.fit(batches, epochs=int(epochs))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def started(script, directory, resume, epochs=4, last=0):
    """A training that goes on behind its step ``last`` only when it is told to end."""
    command = [BIN / "shardwright", "launch", "-n", "2", "--tee", "all", "--grace", "600", script]
    command += [directory, resume, epochs, last]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, command)), cwd=script.parent, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def read_until(process, *patterns):
    """What it has said when each of them was in it."""
    text = ""
    for line in process.stdout:
        text += line
        if all(re.search(pattern, text) for pattern in patterns):
            return text
    raise AssertionError(text)


def losses(text):
    return {(e, s): loss for e, s, loss in re.findall(r"epoch: (\d+) step: (\d+), loss is (\S+)", text)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_term_to_the_launcher_saves_and_the_run_that_goes_on_ends_as_one_that_was_not_ended(script, tmp_path):
    process = started(script, tmp_path / "run", "auto", last=12)
    text = read_until(process, "epoch: 2 step: 2")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == 143, rest
    steps = open_source(tmp_path / "run").manifest.info["step"]
    first = losses(text + rest)
    assert 7 <= steps < 20
    assert len(first) == steps
    assert "leaving with exit code 143" in rest
    assert "had to be killed" not in rest
    second, _ = started(script, tmp_path / "run", "auto").communicate(timeout=100)
    whole, _ = started(script, tmp_path / "whole", "no").communicate(timeout=100)
    assert not first.keys() & losses(second).keys()
    assert {**first, **losses(second)} == losses(whole)
    assert len(losses(whole)) == 20


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_where_a_rank_dies_the_others_leave_at_once_without_saving(script, tmp_path):
    process = started(script, tmp_path / "run", "no", epochs=5000)
    text = read_until(process, "epoch: 1 step: 3", r"pid 0 \d+\n", r"pid 1 \d+\n")
    pids = dict(re.findall(r"pid (\d) (\d+)", text))
    os.kill(int(pids["1"]), signal.SIGKILL)
    rest, _ = process.communicate(timeout=100)  # the grace period is 600 s
    assert process.returncode == 137, rest
    assert "rank 1 failed first" in rest
    assert not list(tmp_path.glob("run/step-*"))
