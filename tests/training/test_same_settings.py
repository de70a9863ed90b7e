"""What all ranks must have alike is refused before training where one has it otherwise: folders, callbacks, options."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.training.same_settings import refuse_unlike_settings
from shardwright.training.zoo.config import load_config


def loss_fn(model, batch):
    return model(batch).square().mean()


class Own(sw.Callback):
    """A callback of a user's, which some ranks have and which may differ."""

    def __init__(self, name):
        self.name = name


# By rank: what a script with f"{rank}", or `if rank == 0`, gives to each.
CALLBACKS = {
    "checkpoints of each rank": lambda rank, at: [sw.ModelCheckpoint(f"{at}/{rank}")],
    "checkpoints of each rank, written in the background": (
        lambda rank, at: [sw.ModelCheckpoint(f"{at}/{rank}", asynchronous=True)]
    ),
    "a second checkpoint": lambda rank, at: [sw.ModelCheckpoint(at), sw.ModelCheckpoint(f"{at}/{rank}")],
    "checkpoints of rank 0": lambda rank, at: [sw.ModelCheckpoint(at)][rank:],
    "checkpoints of rank 1": lambda rank, at: [sw.ModelCheckpoint(at)][: rank],
    "how often": lambda rank, at: [sw.ModelCheckpoint(at, every_steps=1 + rank)],
    "records of each rank": lambda rank, at: [sw.Recorder(f"{at}/{rank}")],
    "traces of each rank": lambda rank, at: [sw.Tracer(f"{at}/{rank}", [1])],
    "an average of rank 0": lambda rank, at: [sw.EMA()][rank:],
    "averages": lambda rank, at: [sw.EMA(0.5 + rank / 10)],
    "patience": lambda rank, at: [sw.EarlyStopping(1 + rank)],
}  # fmt: skip
REFUSED = {
    "checkpoints of each rank": (
        "ranks disagree about ModelCheckpoint(directory=...): rank 0 has 'AT/0', rank 1 has 'AT/1'; what all ranks do "
        "together goes into one folder, so that one of each rank's own would stay empty; give every rank the same"
    ),
    "checkpoints of each rank, written in the background": "ModelCheckpoint(directory=...): rank 0 has 'AT/0'",
    "a second checkpoint": "ranks disagree about ModelCheckpoint 2(directory=...): rank 0 has 'AT/0', rank 1",
    "checkpoints of rank 0": (
        "rank 0 has the callback ModelCheckpoint and rank 1 has not; it needs all ranks: make it on every rank, and "
        "not under `if rank == 0`"
    ),
    "checkpoints of rank 1": "rank 1 has the callback ModelCheckpoint and rank 0 has not",
    "how often": "ModelCheckpoint(every_steps=...): rank 0 has 1, rank 1 has 2; give every rank the same",
    "records of each rank": "ranks disagree about Recorder(folder=...): rank 0 has 'AT/0', rank 1 has 'AT/1'",
    "traces of each rank": "ranks disagree about Tracer(folder=...)",
    "an average of rank 0": "rank 0 has the callback EMA and rank 1 has not",
    "averages": "EMA(decay=...): rank 0 has 0.5, rank 1 has 0.6",
    "patience": "EarlyStopping(patience=...): rank 0 has 1, rank 1 has 2",
}
CALLS = {
    "save": lambda rank, at, parallel, trainer: sw.checkpoint.save(f"{at}/{rank}", parallel, step=1),
    "save another step": lambda rank, at, parallel, trainer: sw.checkpoint.save(at, parallel, step=rank),
    "save in the background": lambda rank, at, parallel, trainer: (
        sw.checkpoint.save(f"{at}/{rank}", parallel, step=1, asynchronous=True)
    ),
    "load": lambda rank, at, parallel, trainer: sw.checkpoint.load(f"{at}/{rank}", parallel),
    "load a plain file": lambda rank, at, parallel, trainer: sw.checkpoint.load(f"{at}/{rank}.pth", parallel),
    "newest": lambda rank, at, parallel, trainer: sw.checkpoint.newest(f"{at}/{rank}"),
    "resume": lambda rank, at, parallel, trainer: trainer([]).resume(f"{at}/{rank}"),
    "resume by itself": lambda rank, at, parallel, trainer: trainer([sw.ModelCheckpoint(f"{at}/{rank}")]).resume(),
    "accumulate": lambda rank, at, parallel, trainer: trainer([], accumulate=1 + rank).fit([torch.ones(2, 2)]),
    "a configuration": lambda rank, at, parallel, trainer: refuse_unlike_settings(
        replace(config := load_config("mnist_mlp"), train=replace(config.train, output_dir=f"{at}/{rank}")), ["data"]
    ),
}  # fmt: skip


def refusals(at):
    """What every way to give the ranks other things is answered with, in order."""
    torch.set_num_threads(1)
    rank = sw.init().rank
    sw.set_seed(1)
    parallel = sw.parallelize(nn.Linear(2, 2), loss_fn, torch.ones(2, 2), "data", batch="global")

    def trainer(callbacks, **options):
        return sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), callbacks, **options)

    ways = {name: lambda of=of: trainer(of(rank, at)).fit([torch.ones(2, 2)]) for name, of in CALLBACKS.items()}
    ways |= {name: lambda call=call: call(rank, at, parallel, trainer) for name, call in CALLS.items()}
    said = {}
    for name, way in ways.items():
        try:
            way()
        except UsageError as error:
            said[name] = str(error)
        sw.checkpoint.wait(parallel)
    trainer(
        [sw.ModelCheckpoint(f"{at}/all"), *[sw.LossMonitor(), sw.Recorder(f"{at}/all"), Own(rank)][: 3 - rank]]
    ).fit([torch.ones(2, 2)])
    return said, sw.checkpoint.newest(f"{at}/all")


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    first, second = run_ranks(2, refusals, str(folder))
    assert first == second
    return *first, folder


@pytest.mark.parametrize("name", REFUSED)
def test_callbacks_that_differ_between_ranks_are_refused_before_training(refused, name):
    said, _, folder = refused
    assert REFUSED[name].replace("AT", str(folder)) in said[name]


@pytest.mark.parametrize("name", CALLS)
def test_folders_and_settings_that_differ_between_ranks_are_refused(refused, name):
    assert refused[0][name].startswith("ranks disagree about ")
