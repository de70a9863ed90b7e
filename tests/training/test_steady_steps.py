"""Once a run has begun, no step waits for the device: it is asked for no value, and nothing is copied there at once."""

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.distributed.on_its_way import OnItsWay
from steady import waits_in_a_step

ROWS = 6  # of a batch: of two ranks in parts of equal size, of four not
WARM, LAST = 4, 7


class Watch(sw.Callback):
    """Watches the steps after the first ones, and whether they ask a scaler for its scale."""

    def on_step_end(self, run):
        if run.steps == WARM:
            self._watching = waits_in_a_step()
            self.waits = self._watching.__enter__()
            scale = run.scaler.get_scale
            run.scaler.get_scale = lambda: self.waits.append("get_scale") or scale()
        if run.steps == LAST:
            self._watching.__exit__(None, None, None)
            del run.scaler.get_scale


def steady(name, options, trainer_options, scheduled):
    """What would wait in the steady steps of a trainer, and in an evaluation of several batches."""
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS[name]
    data = TensorDataset(*batch_of(ROWS * LAST * trainer_options.get("accumulate", 1)))
    loader = sw.loader(data, ROWS, shuffle=False)
    parallel = sw.parallelize(make(), loss_fn, batch_of(ROWS), batch="global", **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    if scheduled:
        trainer_options["scheduler"] = sw.cosine_schedule(optimizer, steps=LAST)
    watch = Watch()
    trainer = sw.Trainer(parallel, optimizer, [watch, sw.LossMonitor(), sw.EMA(), sw.NanGuard()], **trainer_options)
    trainer.fit(loader)
    assert trainer.steps == LAST
    batches = list(loader)
    trainer.evaluate(batches)
    with waits_in_a_step() as waits:
        trainer.evaluate(batches)
    return watch.waits, [where.partition(":")[0] for where in waits]


STEADY = [], ["__float__ at runtime/evaluation.py"]  # once, for the mean loss


DATA = {"mode": "data"}
SPLIT = {"mode": "auto", "search": "propagation"}
RUNS = {
    "perceptron": ("perceptron", DATA, {"clip_norm": 1.0, "accumulate": 2}, True),
    "resnet": ("resnet", DATA, {"precision": "bf16"}, False),
    "scaled": ("perceptron", DATA, {"precision": "fp16", "clip_norm": 1.0}, True),
    "transformer": ("transformer", SPLIT, {"clip_norm": 1.0}, False),
}


@pytest.mark.parametrize("name", ["resnet", *(pytest.param(n, marks=pytest.mark.slow) for n in RUNS if n != "resnet")])
def test_no_steady_step_waits(name):
    assert run_ranks(2, steady, *RUNS[name]) == [STEADY] * 2


def test_what_waits_is_found():
    """The mode itself, on functions of the package that ask for values."""
    from shardwright.compiler.lower.operators.draws import randint_below
    from shardwright.training.nonfinite import _is_bad

    with waits_in_a_step() as waits:
        _is_bad(torch.ones(2))
        randint_below(torch.ones(2), torch.tensor(3), torch.int64, 1, (2,), (0,))
        torch.ones(2).tolist()  # of this file
        OnItsWay(torch.ones(())).value()
    assert [where.partition(":")[0] for where in waits] == [
        "__bool__ at training/nonfinite.py",
        "__int__ at compiler/lower/operators/draws.py",
        "__int__ at compiler/lower/operators/draws.py",
    ]
