"""Going on from damaged checkpoints, with torch's loaders, with models that cannot be captured, and after a stop."""

import contextlib
import io
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.errors import CheckpointError, DamageError, UsageError


class Branching(torch.nn.Module):
    """Cannot be captured: it looks at a value. Its dropout is torch's."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = torch.nn.Linear(24, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.3)

    def forward(self, x):
        y = self.drop(self.norm(self.layer(x.flatten(1))))
        return y if y.sum().item() > -1e9 else y * 2


def trainer_of(directory, callbacks=(), model=None, batch_norm="global", **options):
    torch.set_num_threads(1)
    world = sw.init()
    sw.set_seed(world.rank if batch_norm == "per-replica" else 1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    dataset = TensorDataset(*batch_of(40))
    batches = sw.loader(dataset, 8)
    parallel = sw.parallelize(
        model or make(), loss_fn, batches.sample_batch(), "data", batch="local", batch_norm=batch_norm
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    saving = sw.ModelCheckpoint(directory, **options)
    return sw.Trainer(parallel, optimizer, [*callbacks, saving]), batches, dataset


class Losses(sw.Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer):
        self.seen.append(trainer.loss.item())


def quietly(do, *arguments, **options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            result = do(*arguments, **options)
        except Exception as error:
            result = error
    return result, out.getvalue()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damaged(folder):
    """What resume does as more and more of three checkpoints is damaged."""
    found = {}
    directory = folder / "run"
    trainer, batches, _ = trainer_of(directory)
    quietly(trainer.fit, batches, 3)
    names = ["step-00000005", "step-00000010", "step-00000015"]
    assert sorted(path.name for path in directory.glob("step-*")) == names
    trainer, *_ = trainer_of(directory)
    found["whole"] = *quietly(trainer.resume, f"{directory}/"), trainer.steps
    large = max((directory / names[2]).glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(large, large.stat().st_size // 2)
    trainer, *_ = trainer_of(directory)
    for name, where in (("path", directory / names[2]), ("nowhere", folder / "no"), ("newest", "auto")):
        found[name] = *quietly(trainer.resume, where), trainer.steps
    flip(directory / names[1] / "checkpoint.json", 200)
    trainer, *_ = trainer_of(directory)
    found["two"] = *quietly(trainer.resume), trainer.steps
    flip(directory / names[0] / "checkpoint.json", 200)
    found["all"] = *quietly(trainer.resume), trainer.steps
    trainer, *_ = trainer_of(folder / "empty")
    found["none"] = *quietly(trainer.resume), trainer.steps
    return found


def on_one_rank(folder):
    """What becomes of damaged checkpoints, of torch's loaders, and of streams."""
    loaders = with_torchs_loader(f"{folder}/loaders", shuffle=False)
    return damaged(folder), loaders, stream_runs(folder / "streams")


@pytest.fixture(scope="module")
def found_on_one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    [found] = run_ranks(1, on_one_rank, folder)
    return folder, *found


def test_a_damaged_checkpoint_is_named_and_auto_goes_on_from_the_one_before(found_on_one_rank):
    tmp_path, found, _, _ = found_on_one_rank
    assert found["whole"] == ("step-00000015", f"resume: {tmp_path}/run/step-00000015: epoch 3, 15 steps\n", 15)
    name, text, steps = found["newest"]
    assert (name, steps) == ("step-00000010", 10)
    assert "step-00000015 is damaged: __0_0.distcp: bytes" in text
    assert f"Going on from the checkpoint before it\nresume: {tmp_path}/run/step-00000010: epoch 2, 10 steps" in text
    error, _, steps = found["path"]
    assert isinstance(error, DamageError)
    assert "step-00000010 is the newest other one that has all its bytes" in str(error)
    assert steps == 0
    assert isinstance(found["nowhere"][0], CheckpointError)
    assert "no checkpoint in" in str(found["nowhere"][0])
    name, text, steps = found["two"]
    assert (name, steps) == ("step-00000005", 5)
    assert "step-00000010 is no complete checkpoint and is passed over: its manifest is damaged" in text
    error, _, _ = found["all"]
    assert isinstance(error, CheckpointError)
    assert "all checkpoints in" in str(error)
    assert found["none"][0] is None
    assert "beginning anew" in found["none"][1]


def eager(directory, epochs, patience=None):
    """A run of what cannot be captured; per rank losses are the same, buffers and dropout are not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = Losses()
        trainer, batches, _ = trainer_of(directory, [losses], Branching(), batch_norm="per-replica")
        quietly(trainer.resume)
        quietly(trainer.fit, batches, epochs)
    told = [str(w.message) for w in caught if w.category is sw.checkpoint.RandomState]
    return losses.seen, {k: v.clone() for k, v in trainer.parallel.state_dict().items()}, told


@pytest.mark.slow
def test_what_cannot_be_captured_goes_on_with_its_own_dropout_on_as_many_ranks(tmp_path):
    whole = run_ranks(2, eager, str(tmp_path / "whole"), 3)
    first = run_ranks(2, eager, str(tmp_path / "parts"), 1)
    second = run_ranks(2, eager, str(tmp_path / "parts"), 3)
    assert first[0][0] + second[0][0] == whole[0][0]
    for name, tensor in whole[0][1].items():
        assert torch.equal(second[0][1][name], tensor)
    other = run_ranks(3, eager, str(tmp_path / "parts"), 4)
    assert len(other[0][0]) == 5
    assert "the random generators of 2 ranks, which differed; 3 ranks get new ones" in other[0][2][0]
    assert not other[1][2]


def with_torchs_loader(directory, shuffle):
    losses, found = Losses(), []
    for resuming in (False, True):
        trainer, _, dataset = trainer_of(directory, [losses], every_steps=3)
        sampler = DistributedSampler(dataset, trainer.world.size, trainer.world.rank)
        how = {"shuffle": True} if shuffle else {"sampler": sampler}
        loader = DataLoader(dataset, batch_size=8, **how)
        if resuming:
            quietly(trainer.resume, f"{directory}/step-00000003")
            losses.seen.clear()
        result, _ = quietly(trainer.fit, loader, 2)
        found.append((result, list(losses.seen)))
    return found


def test_torchs_loaders_go_on_in_an_epoch_where_their_order_is_known(found_on_one_rank):
    _, _, (whole, rest), _ = found_on_one_rank
    assert len(whole[1]) == 10
    assert rest == (None, whole[1][3:])


@pytest.mark.slow
def test_torchs_loaders_are_refused_in_the_middle_of_an_epoch_that_they_shuffle(tmp_path):
    [[_, (refused, _)]] = run_ranks(1, with_torchs_loader, str(tmp_path), True)
    assert isinstance(refused, UsageError)
    assert "is from the middle of epoch 1, after 3 steps, and DataLoader cannot be set to the sample" in str(refused)


class AtItsLastBatch(sw.Callback):
    """Dies when the last batch of the first epoch is saved, of which a stream does not say that it is the last."""

    def at_rest(self, run):
        if run.steps == 5 and run.under_way:
            raise KeyboardInterrupt


def stream_run(directory, interrupted):
    losses = Losses()
    dying = [AtItsLastBatch()] if interrupted else []
    trainer, _, dataset = trainer_of(directory, [losses], every_steps=1)
    trainer.callbacks = (*trainer.callbacks, *dying)
    quietly(trainer.resume)
    with contextlib.suppress(KeyboardInterrupt):
        quietly(trainer.fit, sw.loader(lambda: iter(dataset), 8), 2)
    return losses.seen, trainer.epoch, trainer.steps


def stream_runs(folder):
    """Without an interruption, and interrupted and going on."""
    return [stream_run(f"{folder}/{name}", cut) for name, cut in (("whole", False), ("parts", True), ("parts", False))]


def test_a_stream_goes_on_after_the_last_batch_of_an_epoch(found_on_one_rank):
    *_, (whole, cut, rest) = found_on_one_rank
    assert (len(cut[0]), len(whole[0])) == (5, 10)
    assert (cut[0] + rest[0], *rest[1:]) == whole
