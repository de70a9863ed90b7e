"""What callbacks print, write and find, on several ranks."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.errors import TrainingError, UsageError
from shardwright.run.callbacks import write_whole


def trainer_of(callbacks=(), mode="data", options=None, model=None, lr=0.1, loss_fn=None, **trainer_options):
    """A trainer of the perceptron and three batches of twelve, ready to fit."""
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(1)
    make, its_loss, batch_of = NETWORKS["perceptron"]
    data = [batch_of(12, seed) for seed in range(3)]
    parallel = sw.parallelize(model or make(), loss_fn or its_loss, data[0], mode, batch="global", **(options or {}))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=lr)
    return sw.Trainer(parallel, optimizer, callbacks, **trainer_options), data


def with_accuracy(model, batch):
    x, y = batch
    logits = model(x)
    return torch.nn.functional.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).sum()}


class Broken(sw.Callback):
    def on_step_end(self, trainer):
        if trainer.steps == 2:
            raise KeyError("what was looked for")


def printed(folder):
    """All that the ranks print in a run with most callbacks, and the files of their checkpoints."""
    found = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        shared, parts = (
            sw.ModelCheckpoint(f"{folder}/a"),
            sw.ModelCheckpoint(f"{folder}/b", every_steps=2, kind="per-rank"),
        )
        trainer, data = trainer_of([sw.LossMonitor(2), sw.ProgressBar(3), shared, parts], loss_fn=with_accuracy)
        trainer.fit(data, epochs=2, validate=data)
    found["text"] = out.getvalue()
    trainer, data = trainer_of([Broken()])
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.fit(data)
        except KeyError as error:
            found["notes"] = error.__notes__
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(2, printed, str(folder)), folder


def test_rank_0_prints_the_start_the_losses_and_the_validations(run):
    (first, second), _ = run
    lines = first["text"].splitlines()
    assert lines[0] == "global batch: 12 samples on 2 ranks, learning rate: 0.1, precision: float32"
    assert [line.partition(",")[0] for line in lines if "loss is" in line] == ["epoch: 1 step: 2", "epoch: 2 step: 2"]
    validations = [line for line in lines if line.startswith("val")]
    assert [line.split(" | ")[1] for line in validations] == ["epoch: 1", "epoch: 2"]
    assert validations[0].split(" | ")[3].startswith("accuracy: 0.")
    assert second["text"] == ""


def test_an_error_in_a_callback_names_it(run):
    for theirs in run[0]:
        assert theirs["notes"] == ["raised by the callback Broken, in on_step_end"]


def test_checkpoints_are_shared_or_per_rank_and_nothing_else_is_left(run):
    files = sorted(str(path.relative_to(run[1])) for path in run[1].rglob("*") if path.is_file())
    per_rank = [f"b/rank_{rank}/step_{step}.pt" for rank in range(2) for step in (2, 4, 6)]
    assert files == ["a/epoch_1.pt", "a/epoch_2.pt", *per_rank]
    state = torch.load(run[1] / "a/epoch_2.pt", weights_only=True)
    assert (state["epoch"], state["steps"]) == (2, 6)
    assert state["model"]["layers.0.weight"].shape == (48, 24)


def split_checkpoint(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        options = {"pins": {"layers.0": ((1, 1), (2, 1), None)}, "mesh": "tp=2"}
        callbacks = [sw.ModelCheckpoint(folder), sw.ModelCheckpoint(folder, kind="per-rank")]
        trainer, data = trainer_of(callbacks, "semi-auto", options)
        trainer.fit(data)
    return {name: tensor.clone() for name, tensor in trainer.parallel.full_state_dict().items()}


def test_a_shared_checkpoint_has_whole_tensors_and_a_rank_s_own_its_parts(tmp_path):
    [expected, _] = run_ranks(2, split_checkpoint, str(tmp_path))
    shared = torch.load(tmp_path / "epoch_1.pt", weights_only=True)
    for name, tensor in expected.items():
        assert torch.equal(shared["model"][name], tensor)
    assert shared["optimizer"]["state"][0]["exp_avg"].shape == (48, 24)
    part = torch.load(tmp_path / "rank_1/epoch_1.pt", weights_only=True)
    assert torch.equal(part["model"]["layers.0.weight"], expected["layers.0.weight"][24:])
    assert part["optimizer"]["state"][0]["exp_avg"].shape == (24, 24)


def test_an_interrupted_write_leaves_no_file_and_the_old_one_whole(tmp_path):
    path = tmp_path / "state.pt"
    path.write_text("old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert os.listdir(tmp_path) == ["state.pt"]
    assert path.read_text() == "old"


class Overflowing(torch.nn.Module):
    """Infinite where a mask makes it so, which is harmless, and NaN for rows that begin with a large number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 12), torch.nn.Linear(12, 12)

    def forward(self, x):
        x = x.flatten(1)
        masked = torch.softmax(self.first(x).masked_fill(x[:, :12] > 0.5, float("-inf")), dim=1)
        return self.second(masked) + torch.log(50.0 - x[:, :1])  # not a number from 50 on


def exploding(mode, options, where):
    model = Overflowing()
    trainer, data = trainer_of([sw.NanGuard()], mode, options, model)
    if where == "parameter":
        with torch.no_grad():
            model.second.bias[3] = float("inf")
    else:
        data[1][0][10, 0, 0] = 60.0  # a row of the last rank's, in the second step
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            trainer.fit(data)
        except TrainingError as error:
            return str(error)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 2)])
def test_the_guard_names_the_first_operator_and_its_rank(ranks, rank):
    for message in run_ranks(ranks, exploding, "data", {}, "operator"):
        assert message.startswith(f"the loss is nan at epoch 1, step 2; first on rank {rank}: aten.log.default in ")
        assert "test_callbacks.py" in message
        assert "torch.log(50.0 - x[:, :1])" in message
        assert f"1 NaN of {12 // ranks} entries" in message


def test_the_guard_names_a_parameter_that_was_not_finite_before():
    for message in run_ranks(2, exploding, "data", {}, "parameter"):
        assert message == (
            "the loss is nan at epoch 1, step 1; first on rank 0: parameter second.bias, "
            "1 infinite of 12 entries before the step"
        )


def stopping(patience):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, data = trainer_of([sw.EarlyStopping(patience)], lr=0.5)
        trainer.fit(data, epochs=40, validate=[NETWORKS["perceptron"][2](12, 99)])
    return trainer.epoch


def test_early_stopping_stops_all_ranks_after_the_same_epoch():
    epochs = run_ranks(2, stopping, 2)
    assert epochs[0] == epochs[1]
    assert 3 <= epochs[0] < 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sw.LossMonitor(0), "LossMonitor(every=...) of at least 1 step, got 0"),
        (lambda: sw.EMA(1.0), "EMA(decay=...) from 0 to below 1, got 1.0"),
        (lambda: sw.EarlyStopping(0), "EarlyStopping(patience=...) of at least 1 validation, got 0"),
        (lambda: sw.ModelCheckpoint("x", kind="all"), "kind='all') is unknown; choose 'shared' or 'per-rank'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, message):
    with pytest.raises(UsageError) as refused:
        make()
    assert message in str(refused.value)
