"""What callbacks print, write and find, on several ranks."""

import contextlib
import io

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.errors import TrainingError, UsageError


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


def printed():
    """All that the ranks print in a run with most callbacks."""
    found = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer, data = trainer_of([sw.LossMonitor(2), sw.ProgressBar(3)], loss_fn=with_accuracy)
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
def run():
    return run_ranks(2, printed)


def test_rank_0_prints_the_start_the_losses_and_the_validations(run):
    first, second = run
    lines = first["text"].splitlines()
    assert lines[0] == "global batch: 12 samples on 2 ranks, learning rate: 0.1, precision: float32"
    assert [line.partition(",")[0] for line in lines if "loss is" in line] == ["epoch: 1 step: 2", "epoch: 2 step: 2"]
    validations = [line for line in lines if line.startswith("val")]
    assert [line.split(" | ")[1] for line in validations] == ["epoch: 1", "epoch: 2"]
    assert validations[0].split(" | ")[3].startswith("accuracy: 0.")
    assert second["text"] == ""


def test_an_error_in_a_callback_names_it(run):
    for theirs in run:
        assert theirs["notes"] == ["raised by the callback Broken, in on_step_end"]


class Overflowing(torch.nn.Module):
    """Infinite where a mask makes it so, which is harmless, and NaN for rows that begin with a large number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 12), torch.nn.Linear(12, 12)

    def forward(self, x):
        x = x.flatten(1)
        masked = torch.softmax(self.first(x).masked_fill(x[:, :12] > 0.5, float("-inf")), dim=1)
        return self.second(masked) + torch.log(50.0 - x[:, :1])  # not a number from 50 on


def exploding():
    """What the guard says of an operator in the second step, and of a parameter before the first."""
    return [exploding_at(where) for where in ("operator", "parameter")]


def exploding_at(where):
    model = Overflowing()
    trainer, data = trainer_of([sw.NanGuard()], model=model)
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


def test_the_guard_names_the_first_operator_and_its_rank_or_a_parameter_that_was_not_finite_before():
    for message, of_parameter in run_ranks(3, exploding):
        assert message.startswith("the loss is nan at epoch 1, step 2; first on rank 2: aten.log.default in ")
        assert "test_callbacks.py" in message
        assert "torch.log(50.0 - x[:, :1])" in message
        assert "1 NaN of 4 entries" in message
        assert of_parameter == (
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
        (lambda: sw.ModelCheckpoint("x", every_steps=0), "expected every_steps of at least 1, got 0"),
        (lambda: sw.ModelCheckpoint("x", every_minutes=0), "expected every_minutes of more than 0, got 0"),
        (
            lambda: sw.ModelCheckpoint("x", every_steps=5, top_k=("accuracy", 2, "max")),
            "chooses by a validation, which comes after an epoch; give every_epochs= too",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, message):
    with pytest.raises(UsageError) as refused:
        make()
    assert message in str(refused.value)
