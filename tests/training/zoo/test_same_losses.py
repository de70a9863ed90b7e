"""Every model of the zoo, trained by its configuration on 1 to 4 ranks: the same loss at every step as on one device.

One device is a loop by hand in plain PyTorch or, where dropout draws random numbers, mode single on one rank. Batches
of 10 are uneven on 3 and 4 ranks. Models are narrow; depths, stems, normalisation, dropout and optimizers are as
shipped, except that GPT has two layers.

Both ResNets begin with their blocks as shortcuts (``zero_init``), as the shipped ResNet-50 does. The shipped ResNet-18
does not, and enlarges rounding so that nothing is left to compare: in plain PyTorch alone, at these widths, the order
of the rows in each batch moved its loss by 8e-10 of itself over 50 steps in float64 (2e-2 with batches of 6), and by
1e-4 over 5 steps in float32; with ``zero_init`` by 9e-15 and 1e-7. `test_models.py` compares one step of it, and of
the other stem.
"""

import contextlib
import functools
import io
import itertools
import tempfile

import pytest
import torch

import shardwright as sw
from ranks import run_ranks
from shardwright.data.digits import write_digits

IMAGES = [
    "data.root={cifar10}", "data.flip=false", "data.crop=2", "data.batch_size_per_rank=null", "data.batch_size=10",
    "model.width=6", "model.zero_init=true",
]  # fmt: skip
TOKENS = ["model.width=24", "model.layers=2", "data.sequence_length=16", "data.batch_size=10"]
# name -> the shipped configuration, and what makes it small.
MODELS = {
    "quickstart": ("quickstart", ["data.batch_size=10", "data.inputs=24", "data.outputs=12", "train.epochs=10"]),
    "perceptron": ("mnist_mlp", ["data.root={mnist}", "data.batch_size=10", "model.hidden=[32,24]"]),
    "resnet18": ("cifar10_resnet18", IMAGES),
    "resnet50": ("cifar10_resnet50", IMAGES),
    "gpt learned tied": ("gpt_char", TOKENS),
    "gpt learned untied": ("gpt_char", [*TOKENS, "model.tied=false"]),
    "gpt rotary tied": ("gpt_char", [*TOKENS, "model.positions=rotary"]),
    "gpt rotary untied": ("gpt_char", [*TOKENS, "model.positions=rotary", "model.tied=false"]),
    "gpt without dropout": ("gpt_char", [*TOKENS, "model.dropout=0"]),
}
MODES = {
    "data": ["parallel.mode=data"],
    "auto": ["parallel.mode=auto"],
    "auto by propagation": ["parallel.mode=auto", "parallel.search=propagation"],  # splits what auto finds too small
}
PRECISE = {"float64": (50, 1e-10), "float32": (5, 1e-5)}  # -> steps, and the relative deviation that a loss may have
CASES = list(itertools.product(MODES, PRECISE))
ALL = [pytest.param(name, ranks, marks=pytest.mark.slow) for name in MODELS for ranks in (1, 2, 3, 4)]


class Losses(sw.Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer):
        self.seen.append(trainer.loss.item())


def overrides_of(name, how, dtype, folders):
    return [
        *(override.format(**folders) for override in MODELS[name][1]), *how,
        f"system.dtype={dtype}", f"train.steps={PRECISE[dtype][0]}", "eval.enabled=false",
    ]  # fmt: skip


def by_configuration(name, cases, folders):
    """(mode, dtype) -> the losses of every step on this rank, and whether the plan splits any operator."""
    import shardwright.training.zoo.train as zoo

    torch.set_num_threads(1)
    found = {}
    for mode, dtype in cases:
        losses = Losses()
        zoo._callbacks = lambda *_, losses=losses: [losses]
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as output:
            overrides = overrides_of(name, MODES.get(mode, [f"parallel.mode={mode}"]), dtype, folders)
            trainer = zoo.train(MODELS[name][0], [*overrides, f"train.output_dir={output}"])
        splits = any(strategy.used for strategy in trainer.parallel.plan.strategies.values())
        found[mode, dtype] = losses.seen, splits
    return found


def by_hand(name, folders):
    """dtype -> the losses of the same run as plain PyTorch has it, with neither a plan nor a trainer."""
    from shardwright.training.zoo.tables import make_loss, make_model, make_optimizer, make_schedule
    from shardwright.training.zoo.train import prepare

    torch.set_num_threads(1)
    found = {}
    for dtype, (steps, _) in PRECISE.items():
        experiment = prepare(MODELS[name][0], overrides_of(name, MODES["data"], dtype, folders))
        config, kind = experiment.config, getattr(torch, dtype)
        sw.set_seed(config.system.seed)
        model = make_model(config.model, experiment.data).to(kind).train()
        loss_fn = make_loss(config.loss, kind)
        batches = sw.loader(experiment.data.train, config.data.batch_size, seed=config.system.seed)
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.optimizer.lr)
        schedule = make_schedule(config.scheduler, optimizer, config.train.epochs * len(batches), len(batches))
        found[dtype] = []
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), steps):
            optimizer.zero_grad()
            loss = loss_fn(model, tuple(batch))
            loss.backward()
            if config.train.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
            optimizer.step()
            schedule.step()
            found[dtype].append(loss.item())
    return found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The data's folders, and a function: name -> dtype -> losses."""
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("mnist", "cifar10")}
    for name, folder in folders.items():
        write_digits(folder, name)

    @functools.cache
    def losses(name):
        if not name.startswith("gpt") or name.endswith("without dropout"):
            return run_ranks(1, by_hand, name, folders, timeout=280)[0]
        [alone] = run_ranks(1, by_configuration, name, [("single", dtype) for dtype in PRECISE], folders, timeout=280)
        return {dtype: alone["single", dtype][0] for dtype in PRECISE}

    return folders, losses


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), ALL)
def test_every_step_loses_the_same(name, ranks, one_device):
    folders, losses = one_device
    everyone = run_ranks(ranks, by_configuration, name, CASES, folders, timeout=880)
    for mode, dtype in CASES:
        steps, tolerance = PRECISE[dtype]
        alone = losses(name)[dtype]
        assert len(alone) == steps
        for theirs, splits in (found[mode, dtype] for found in everyone):
            worst = max(abs(a - b) / abs(b) for a, b in zip(theirs, alone, strict=True))
            print(f"{name}, {ranks} ranks, {mode}, {dtype}: {worst:.1e}")  # pytest -rP shows them
            assert worst < tolerance
            assert splits or ranks == 1 or mode == "auto", "this test needs a plan that splits something"
