"""Bad batches are refused in words that name the user's tensors and lines, on every rank that would run them."""

import collections
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from gpu_like import OnGpus
from models import Branching, Perceptron, classify, perceptron_batch
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import ShardwrightError, UsageError
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from shardwright.runtime.programs.splitting import Splitting

BAD = {
    "meta": lambda x, y: (x.to("meta"), y),
    "empty": lambda x, y: (x[:0], y[:0]),
    "array": lambda x, y: (x.numpy(), y),
    "other": lambda x, y: collections.UserDict(x=x, y=y),
    "labels": lambda x, y: (x, y.double()),
    "lacking": lambda x, y: (x,),
    "added": lambda x, y: (x, y, y),
    "single": lambda x, y: (x.float(), y),  # the last one: it fails in the program
}


def said(do):
    try:
        return str(do())
    except (ShardwrightError, ValueError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def parallelize_anew(batch):
    return sw.parallelize(Perceptron(), classify, batch, "data", batch="global")(batch)


def refused(how):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    sw.init()
    sw.set_seed(1)
    model = Branching() if how == "eager" else Perceptron()
    options = {"eager": {"mode": "data"}, "split": {"search": "propagation"}}[how]
    x, y = perceptron_batch(8)
    sample = said(lambda: sw.parallelize(model, classify, (x, y.numpy()), batch="global", **options))
    parallel = sw.parallelize(model, classify, (x, y), batch="global", **options)
    found = {name: said(lambda make=make: parallel(make(x, y))) for name, make in BAD.items()}
    y[7] = 12  # of the last rank alone
    found["range"] = said(lambda: parallelize_anew((x, y)))
    return sample, found, said(lambda: parallel((x, y)))


WORDS = {
    "labels": ["CaptureError: the model cannot be captured, at ", "The batch is not like the sample batch: batch[1] is "
               "float64[n], not int64[n]."],
    "single": ["models.py:", "dtype", "batch[0] is float32[n, 2, 12], not float64[n, 2, 12]."],
    "lacking": ["not enough values to unpack", "is not like the sample batch: batch[1] (int64[n]) is missing."],
    "added": ["too many values to unpack", "is not like the sample batch: batch[2] (int64[n]) is new."],
    "meta": ["UsageError: batch[0] is on the meta device, where tensors have no values"],
    "empty": ["UsageError: the batch is empty; expected at least one sample"],
    "array": ["UsageError: batch[0] is a ndarray, of which a program would keep the numbers; pass torch.as_tensor(..."],
    "other": ["UsageError: batch is a UserDict, which cannot be looked into; pass tensors, numbers and words in"],
}  # fmt: skip


def test_batches_that_do_not_fit_are_refused_on_all_ranks():
    everyone = run_ranks(2, refused, "split")
    for sample, found, _ in everyone:
        assert sample.startswith("UsageError: batch[1] is a ndarray, of which a program would keep the numbers")
        for name, words in WORDS.items():
            assert all(word in found[name] for word in words), (name, found[name])
            assert "<program of rank" not in found[name]
    _, found, after = everyone[1]
    assert found["range"].startswith("UsageError: batch[1] holds 12, and there are 12 classes, 0 to 11, at models.py:")
    assert after.startswith("UsageError: an earlier step failed on this rank (mat1 and mat2 must have the same dtype")


def going_on():
    """Rank 1 fails before it has asked for sizes, rank 0 while it waits for the answer; then both have good batches."""
    warnings.simplefilter("ignore")
    rank = sw.init().rank
    model, part = nn.Linear(2, 1), torch.ones(4, 2)
    parallel = sw.parallelize(model, lambda model, x: model(x).mean(), part, "data", batch="local")
    failed = said(lambda: parallel(torch.ones(4, 2, device="meta" if rank else None)))
    return failed, [said(lambda: parallel(torch.ones(4 + 4 * rank, 2))) for _ in range(2)]


def test_a_question_for_sizes_that_a_rank_gave_up_is_answered_by_nobody():
    (waited, first), (failed, second) = run_ranks(2, going_on)
    assert waited.startswith("WorldError: rank 1 failed in call 1 of the model: UsageError: batch is on the meta")
    assert failed.startswith("UsageError: batch is on the meta device")
    for found in first:
        assert found.startswith("UsageError: an earlier step failed on this rank (rank 1 failed in call 1"), found
    answered = "WorldError: ranks answer for different calls of the model (1, 2, rank by rank), since an"
    failed_there = "WorldError: rank 0 failed in call 2 of the model: UsageError: an earlier step failed on"
    assert second[0].startswith((answered, failed_there)), second
    assert "an earlier step failed on this rank" in second[1], second


@pytest.mark.slow
def test_batches_that_do_not_fit_are_refused_without_a_capture():
    for _, found, _ in run_ranks(2, refused, "eager"):
        for name in ("meta", "empty", "array", "other"):
            assert all(word in found[name] for word in WORDS[name]), (name, found[name])


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 5)

    def forward(self, ids):
        return self.head(self.table(ids))


def run_of(loss_fn, batch, wrong, mesh=None, pins=None, rank=0):
    """Run the program of ``rank`` for a batch with other numbers than it was captured with."""
    capture = captured_step(Table(), loss_fn, batch, pins or {})
    mode = "semi-auto" if pins else "single"
    plan = make_plan(capture, PlanRequest(mesh or Mesh.of(ranks=1), mode, inputs="whole"))
    program = lower(plan, rank)
    parameters = [
        torch.zeros(v.shape)[plan.leaves[v.name].local_slice(v.shape, plan.mesh, rank)]
        for v in capture.of_kind("parameter")
    ]
    constants = [capture.constants[v.name] for v in capture.of_kind("constant")]
    execution = Execution(program, capture, None, torch.device("cpu"), GradientReduction())
    execution(StepArguments(parameters, [], wrong, constants, 0, 0))


FIVE = "there are 5 classes, 0 to 4, at test_bad_input.py"
SIX = "there are 6 rows in the table, 0 to 5, at test_bad_input.py"
ALONG = "there are 5 entries along dim 1, 0 to 4, at test_bad_input.py"


def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=9, reduction="sum")


def weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1] + 1, torch.ones(5))


CASES = [
    (lambda m, b: F.cross_entropy(m(b[0]), b[1]), 5, f"batch[1] holds 5, and {FIVE}"),
    (summed, -1, f"batch[1] holds -1, and {FIVE}"),
    (lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1]), 7, f"batch[1] holds 7, and {FIVE}"),
    (weighted, 4, f"an index made from batch[1] holds 5, and {FIVE}"),
    (lambda m, b: (m(b[0]) * F.one_hot(b[1], 5)).sum(), 5, f"batch[1] holds 5, and {FIVE}"),
    (lambda m, b: m(b[0]).gather(1, b[1][:, None]).sum(), 5, f"an index made from batch[1] holds 5, and {ALONG}"),
    (lambda m, b: m(b[0])[torch.arange(3), b[1]].sum(), -6, f"batch[1] holds -6, and {ALONG}"),
    (lambda m, b: m(b[1]).sum(), 6, f"batch[1] holds 6, and {SIX}"),
]


@pytest.mark.parametrize(("loss_fn", "wrong", "text"), CASES)
def test_an_index_out_of_range_is_named_with_its_tensor_and_line(loss_fn, wrong, text):
    ids, labels = torch.tensor([0, 5, 3]), torch.tensor([0, 3, 3])
    with pytest.raises(UsageError) as caught:
        run_of(loss_fn, (ids, labels), [ids, torch.tensor([0, wrong, 2])])
    assert str(caught.value).startswith(text), str(caught.value)


def test_an_index_out_of_a_table_that_is_split_is_named():
    ids = torch.tensor([0, 5, 3, 1])
    pins = {"table": ((2, 1), (1,))}
    with pytest.raises(UsageError) as caught:
        run_of(lambda m, b: m(b).sum(), ids, [torch.tensor([0, 6, 3, 1])], Mesh.of(tp=2), pins, rank=1)
    assert str(caught.value).startswith(f"batch holds 6, and {SIX}")


def test_an_operator_that_fails_names_the_line_and_what_it_got():
    def loss_fn(model, batch):
        return torch.linalg.cholesky(batch[1]).sum() + model(batch[0]).sum()

    ids, matrix = torch.zeros(3, dtype=torch.long), torch.eye(3)
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        run_of(loss_fn, (ids, matrix), [ids, -matrix])
    where = "in aten.linalg_cholesky.default of the loss function, which got float32[3, 3], at test_bad_input.py:"
    assert where in str(caught.value)


def test_a_gpu_tells_of_an_index_out_of_range_when_it_has_come_to_it(monkeypatch):
    """Of a split table on a GPU, where torch would end the process: the step goes on, and the next one is refused."""
    monkeypatch.setattr("shardwright.runtime.programs.execute.Guard", lambda on: Guard(on=True))
    mesh, ids = Mesh.of(tp=2), torch.tensor([0, 5, 3])
    capture = captured_step(Table(), lambda m, b: m(b).square().mean(), ids, {"table": ((2, 1), (1,))})
    plan = make_plan(capture, PlanRequest(mesh, "semi-auto", inputs="whole"))
    own = {v.name: plan.leaves[v.name].local_shape(v.shape, mesh, 1) for v in capture.of_kind("parameter")}
    execution = Execution(lower(plan, 1), capture, OnGpus(mesh, 1, ids.device), ids.device, GradientReduction())

    def step(ids):
        return execution(StepArguments([torch.ones(shape) for shape in own.values()], [], [ids], [], 0, 0))[0]

    assert step(ids).isfinite()
    assert step(torch.tensor([0, -4, 3])).isnan()
    with pytest.raises(UsageError) as caught:
        step(ids)
    assert str(caught.value).startswith(f"in an earlier step batch holds -4, and {SIX}")
    assert step(ids).isfinite()


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.12.1", False), ("3.0.0a0", False)])
def test_parameters_are_sharded_by_a_torch_that_can_alone(monkeypatch, version, refused):
    monkeypatch.setattr(torch, "__version__", version)
    mesh, model = Mesh.of(d=2), torch.nn.Linear(4, 4)
    with (
        pytest.raises(UsageError, match=r"2\.12 or newer is needed, and this is 2\.11\.0\+cu130.*type pip install")
        if refused
        else nullcontext()
    ):
        made = Splitting.of(model, {"weight": Layout.split(2, {0: ["d"]})}, mesh, torch.device("cpu"))
        assert made.splits
    assert not Splitting.of(model, {"weight": Layout.replicated(2)}, mesh, torch.device("cpu")).splits
