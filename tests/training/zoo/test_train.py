"""`shardwright train`: every shipped configuration runs, the same on several ranks as on one, under every launcher."""

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ranks import run_ranks
from shardwright.checkpoint.loading.source import open_source
from shardwright.cli import cli
from shardwright.data.digits import write_digits
from shardwright.data.images import RandomDataWarning
from shardwright.launch.host.program import Program
from shardwright.training.zoo.config import load_config, shipped_names

BIN = Path(sys.executable).parent

# What makes each shipped configuration small: three steps on few samples, the shape of everything as it is.
SHORT = ["train.steps=3", "train.log_every=1", "system.dtype=float64"]
NARROW = ["model.width=8", "data.flip=false", "data.crop=2", "data.root={cifar10}", "eval.batch_size=180"]
SMALL = {
    "mnist_mlp": ["data.root={mnist}"],
    "cifar10_resnet18": [*NARROW, "data.batch_size=12"],
    "cifar10_resnet50": [*NARROW, "data.batch_size_per_rank=null", "data.batch_size=12"],
    "gpt_char": ["model.width=32", "model.layers=1", "data.batch_size=8"],
    "quickstart": [],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("mnist", "cifar10")}
    for name, folder in found.items():
        write_digits(folder, name)
    return {name: str(folder) for name, folder in found.items()}


def run(name, overrides, output):
    """What a run prints on this rank, and its losses with all their digits."""
    import shardwright.training.callbacks as callbacks
    from shardwright.training.zoo.train import train

    torch.set_num_threads(1)
    losses = []
    line = callbacks.loss_line
    callbacks.loss_line = lambda epoch, step, loss: losses.append(loss) or line(epoch, step, loss)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            trainer = train(name, [*overrides, f"train.output_dir={output}"])
    finally:
        callbacks.loss_line = line
    return out.getvalue(), losses, trainer.evaluation


# The others train in tests of their own: the perceptron under every launcher, the quick start on its page.
QUICK = ("gpt_char",)


def run_shipped(names, folders, output):
    return {
        name: run(name, [*SHORT, *(o.format(**folders) for o in SMALL[name])], f"{output}/{name}") for name in names
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(SMALL), marks=pytest.mark.slow)], ids=["quick", "every"])
def test_a_shipped_configuration_trains_on_two_ranks_as_on_one(names, request, tmp_path):
    assert sorted(SMALL) == shipped_names()
    folders = {} if names == QUICK else request.getfixturevalue("folders")
    one, two = (run_ranks(n, run_shipped, names, folders, str(tmp_path / str(n)), timeout=140)[0] for n in (1, 2))
    for name in names:
        compare(one[name], two[name], tmp_path / "2" / name)


def compare(one, two, output):
    """What a run on one rank and one on two printed, lost, found and saved."""
    assert len(one[1]) == 3
    assert two[1] == pytest.approx(one[1], rel=1e-10)
    assert two[2].loss == pytest.approx(one[2].loss, rel=1e-9)
    assert two[2].metrics == pytest.approx(one[2].metrics, abs=1e-12)
    assert two[2].samples == one[2].samples
    config = load_config(f"{output}/config.yaml")
    assert config.train.steps == 3
    checkpoints = output / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step-00000003\n"
    assert (checkpoints / "step-00000003/config.yaml").read_text() == (output / "config.yaml").read_text()
    assert re.search(r"^global batch: \d+ samples on 2 ranks, learning rate: ", two[0], re.MULTILINE)
    assert re.search(r"^val \| epoch: 1 \| loss: \d+\.\d{4}", two[0], re.MULTILINE)


def with_everything(output):
    overrides = [
        "train.precision=bf16", "train.accumulate=2", "train.clip_norm=0.1", "train.ema_decay=0.9", "train.epochs=2",
        "train.early_stopping_patience=5", "train.log_every=1", "train.checkpoint=asynchronous",
        "optimizer.scale_lr=linear", "optimizer.base_batch=8", "model.frozen=[w2]",
        "scheduler.name=polynomial", "scheduler.warmup_epochs=1",
    ]  # fmt: skip
    return run("quickstart", overrides, output)[0]


def test_what_a_configuration_can_ask_for_works_together(tmp_path):
    text = run_ranks(2, with_everything, str(tmp_path))[0]
    assert "learning rate: 0.2 x 32 / 8 = 0.8 (optimizer.scale_lr: linear)" in text
    assert "global batch: 32 samples (2 x 16) on 2 ranks, learning rate: 0.8, precision: bf16" in text
    manifest = open_source(tmp_path / "checkpoints").manifest
    state = {entry.path[2] for entry in manifest.entries.values() if entry.path[:2] == ("optimizer", "state")}
    assert state <= {"w"}  # w2 is frozen
    assert manifest.info["step"] == 4


RANDOM = """
data: {type: random, samples: 24, test_samples: 11, shape: [3, 8, 8], batch_size: 8}
model: {name: perceptron, hidden: [8]}
"""


def on_random_data(config, output):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, evaluation = run(config, ["train.epochs=1"], output)
    return [str(w.message) for w in caught if w.category is RandomDataWarning], evaluation.samples


@pytest.mark.slow
def test_random_data_need_no_file_and_say_what_to_expect(tmp_path):
    (tmp_path / "random.yaml").write_text(RANDOM)
    for messages, samples in run_ranks(2, on_random_data, str(tmp_path / "random.yaml"), str(tmp_path / "run")):
        assert "one half" in messages[0]
        assert samples == 11


MPIRUN = [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", BIN / "shardwright"]


def test_with_a_number_of_ranks_it_launches_itself_on_so_many(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = []
    monkeypatch.setattr("shardwright.launch.start.launch", lambda job: jobs.append(job) or 0)
    words = ["--config", "quickstart", "-o", "train.epochs=1"]
    done = CliRunner().invoke(cli, ["train", "-n", "2", *words])
    assert done.exit_code == 0, done.output
    assert [(job.ranks, job.program) for job in jobs] == [(2, Program("module", ("shardwright", "train", *words)))]


# test_mnist_mlp.py runs a script under every launcher.
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [[BIN / "shardwright", "train", "-n", "2"], [*MPIRUN, "train"]], ids=["train -n", "mpirun"]
)
def test_it_runs_on_two_ranks(command, tmp_path):
    arguments = ["--config", "quickstart", "-o", "train.epochs=1", "-o", "parallel.mode=data"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^epoch: 1 step: (\d), loss is \d", done.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    assert done.stdout.count("val | epoch: 1 | loss: ") == 1
    assert "global batch: 16 samples on 2 ranks," in done.stdout
    assert (tmp_path / "train_output/quickstart/config.yaml").is_file()
