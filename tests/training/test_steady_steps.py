"""Once a run has begun, no step waits for the device: it is asked for no value, and nothing is copied there at once."""

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from rows import slow
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.errors import UsageError
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


@pytest.mark.parametrize(
    "name", ["perceptron", *(pytest.param(n, marks=pytest.mark.slow) for n in RUNS if n != "perceptron")]
)
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
        PendingNumbers(torch.ones(())).value()
    assert [where.partition(":")[0] for where in waits] == [
        "__bool__ at training/nonfinite.py",
        "__int__ at compiler/lower/operators/draws.py",
        "__int__ at compiler/lower/operators/draws.py",
    ]


class Branches(torch.nn.Module):
    """What no capture follows; the value that it asks for is the model's own."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen += 1  # whose changes ranks compare in each step
        return self.layer(x) if float(x.detach().sum()) < 1e9 else x


def mean_square(model, batch):
    return model(batch).square().mean()


class Waits:
    """The check that stands for the next ones, as on a GPU, and what they wait for."""

    def __init__(self, parallel):
        self.parallel = parallel
        parallel._turns.seen = 98
        for check in (parallel._replicas, parallel._same_batch):
            check._later = True

    def call(self, batch):
        with waits_in_a_step() as waits:
            try:
                self.parallel(batch).backward()
                said = ""
            except UsageError as error:
                said = str(error)
        return said, sorted({where.partition(":")[0] for where in waits})


def compared(kind, what):
    """What is said of the calls 99 to 102 where something differs in call 100, and what they wait for."""
    rank = sw.init().rank
    torch.manual_seed(0)
    model = Branches() if kind == "eager" else torch.nn.Linear(4, 3)
    batch = torch.randn(4, 4)
    parallel = sw.parallelize(model, mean_square, batch, "data", batch="global")
    assert (parallel.plan is None) == (kind == "eager")
    for _ in range(2):
        parallel(batch).backward()
    watched, found = Waits(parallel), []
    for call in range(99, 103):
        if call == 100 and rank == 1 and what == "weights":
            with torch.no_grad():
                next(parallel.parameters())[0] += 1
        found.append(watched.call(batch + 1 if call == 100 and rank == 1 and what == "batch" else batch))
    return found


# What ranks have told each other lies in the memory of the host; what a GPU is asked for comes by `PendingNumbers`.
TOLD = ["__bool__ at runtime/checks/same_batch.py", "tolist at runtime/checks/replicas.py"]


CASES = (("captured", "batch"), ("captured", "nothing"), ("eager", "weights"), ("eager", "batch"), ("eager", "nothing"))
APART = {
    "weights": "what ranks hold alike of the model has drifted apart: ",
    "batch": "with batch='global' every rank passes the same whole batch, but in the call before this one, rank 0 ",
    "nothing": "",
}


@pytest.mark.parametrize(("kind", "what"), [("captured", "weights"), *slow(*CASES)])
def test_ranks_on_gpus_compare_in_the_next_call_what_they_were_asked_for_in_one(kind, what):
    # Where a GPU is told to assert it; and what ranks tell each other of the calls that they have made, not of a GPU.
    own = {"eager": ["__bool__ at runtime/eager.py"], "captured": ["tolist at runtime/checks/same_calls.py"]}[kind]
    for calls in run_ranks(2, compared, kind, what):
        (first, second, (said, waits), last) = [(said, [w for w in waits if w not in own]) for said, waits in calls]
        assert first == second == ("", [])
        assert said.startswith(APART[what])
        if what == "nothing":
            assert (said, waits, last) == ("", TOLD, ("", []))
