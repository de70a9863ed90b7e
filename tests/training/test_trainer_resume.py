"""A run that was interrupted and goes on, on as many ranks or others, ends as one that was not."""

import contextlib
import io

import pytest
import torch

import shardwright as sw
from models import Transformer, next_token, transformer_batch
from ranks import run_ranks

BATCH, EPOCHS = 4, 3
EVEN, UNEVEN = 24, 21  # samples: 6 batches an epoch and 3 steps of two batches, the last batch whole or of one sample


class Noted(sw.Callback):
    """What a run was given and found: the samples of every step, and the losses by epoch and step."""

    def __init__(self):
        self.samples, self.losses, self._of_step = [], [], []

    def on_loss(self, trainer, batch, loss):
        self._of_step += batch[-1][:, 0].tolist()

    def on_step_end(self, trainer):
        self.samples.append((trainer.epoch, trainer.step, self._of_step))
        self._of_step = []
        self.losses.append((trainer.epoch, trainer.step, trainer.loss.item()))


class Interrupted(Exception):
    pass


class Interrupting(sw.Callback):
    """Dies after so many steps of the whole run, without a word to anybody."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, trainer):
        if trainer.steps == self.steps:
            raise Interrupted


def numbered_loss(model, batch):
    ids, targets, _ = batch
    return next_token(model, (ids, targets))


def train(directory, mode="data", options=None, interrupt=None, samples=EVEN, resume="auto"):
    """One process's part of a run with dropout, an EMA, a schedule and accumulation."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    ids, targets = transformer_batch(samples)
    dataset = torch.utils.data.TensorDataset(ids, targets, torch.arange(samples)[:, None])
    batches = sw.loader(dataset, BATCH, seed=5)
    parallel = sw.parallelize(Transformer(dropout=0.2), numbered_loss, batches.sample_batch(), mode, **(options or {}))
    batches = sw.loader(dataset, BATCH, seed=5, plan=parallel.plan)
    test = sw.loader(dataset, 7, evaluate=True, plan=parallel.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    schedule = sw.cosine_schedule(optimizer, steps=9, warmup_steps=2)
    noted = Noted()
    saving = sw.ModelCheckpoint(directory, every_steps=1)
    dying = [Interrupting(interrupt)] if interrupt else []
    callbacks = [saving, noted, sw.EMA(0.5), sw.LossMonitor(), *dying]  # the order makes no difference
    trainer = sw.Trainer(parallel, optimizer, callbacks, scheduler=schedule, accumulate=2)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        name = trainer.resume(resume) if resume else None
        with contextlib.suppress(Interrupted):
            trainer.fit(batches, EPOCHS, validate=test)
    state = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    return {
        "name": name, "losses": noted.losses, "samples": noted.samples, "evaluation": trainer.evaluation,
        "state": state, "rate": optimizer.param_groups[0]["lr"], "text": out.getvalue(),
    }  # fmt: skip


def uninterrupted(directory, samples):
    """The run on one rank, from end to end."""
    return run_ranks(1, train, str(directory), "data", {}, None, samples, None)[0]


TENSOR = ("semi-auto", {"pins": {"layers.*.up": ((1, 1, 1), (2, 1), None)}, "mesh": "tp=2"})


def in_parts(directory, parts, samples):
    """Each part: ranks, after which step it dies (None: at the end), and how it is split."""
    found = []
    for ranks, interrupt, mode, options in parts:
        found.append(run_ranks(ranks, train, str(directory), mode, options, interrupt, samples, timeout=110))
    return found


def check(parts, whole, samples):
    """The parts together are the whole: every sample once, the same losses, the same end."""
    losses = [entry for part in parts for entry in part[0]["losses"]]
    kept, again = {}, 0
    for epoch, step, loss in losses:
        again += (epoch, step) in kept
        kept[epoch, step] = loss
    assert list(kept) == [(epoch, step) for epoch, step, _ in whole["losses"]]
    for (epoch, step), loss in kept.items():
        expected = next(value for e, s, value in whole["losses"] if (e, s) == (epoch, step))
        assert loss == pytest.approx(expected, rel=1e-10), (epoch, step)
    for epoch in range(1, EPOCHS + 1):
        steps = {}
        for part in parts:
            here = {}
            for rank in part:
                for e, step, given in rank["samples"]:
                    if e == epoch:
                        here.setdefault(step, set()).update(given)
            steps |= here
        assert sorted(sample for given in steps.values() for sample in given) == list(range(samples))
    last = parts[-1][0]
    for name, tensor in whole["state"].items():
        torch.testing.assert_close(last["state"][name], tensor, rtol=1e-8, atol=1e-11)
    assert last["evaluation"].loss == pytest.approx(whole["evaluation"].loss, rel=1e-10)
    assert last["rate"] == pytest.approx(whole["rate"], rel=1e-12)
    return again


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_middle_of_an_epoch_goes_on_with_the_next_sample_on_other_ranks(tmp_path):
    parts = in_parts(tmp_path / "parts", [(3, 2, "data", {}), (1, 5, "data", {}), (2, None, *TENSOR)], EVEN)
    whole = uninterrupted(tmp_path / "whole", EVEN)
    # The step that a part died in was never at rest, so that it is made again by the next.
    assert check(parts, whole, EVEN) == 2
    assert [part[0]["name"] for part in parts] == [None, "step-00000001", "step-00000004"]
    assert f"resume: no checkpoint in {tmp_path}/parts; beginning anew" in parts[0][0]["text"]
    assert "step-00000001: epoch 1, 1 steps" in parts[1][0]["text"]
    assert "epoch: 2 step: 2, loss is" in parts[2][0]["text"]
    assert not any(rank["text"] for part in parts for rank in part[1:])
