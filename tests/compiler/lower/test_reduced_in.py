"""The dtype and the place in which gradients are summed: the parameter's, in buckets, also under autocast."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import data_parallel, fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import UsageError
from whole import plain, run

ROWS, WIDTH = 128, 192


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))
    return model, (torch.randn(ROWS, WIDTH), torch.randint(16, (ROWS,)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def in_half(of=loss_fn):
    def within(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return of(model, batch)

    return within


class Views(nn.Module):
    """A weight that is read through views alone, one through two casts, and one that is read in part."""

    def __init__(self):
        super().__init__()
        self.turned, self.flat = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(24))
        self.cast, self.long = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(9, 6))

    def forward(self, x):
        y = x @ self.turned.t().contiguous().t() + x @ self.flat.view(6, 4)
        return (y * self.cast.double().float()).sum(1) + (x * self.long[: len(x)].sum(0)).sum(1)


def buckets(model, of, batch, mesh, **options):
    captured = captured_step(model, of, batch, {}, **options)
    program = lower(make_plan(captured, PlanRequest(mesh, "data")), 0)
    joined = [sorted(value.label for value, _ in one.moves) for one in program.instructions if one.kind == "bucket"]
    alone = [one.moves[0][0].label for one in program.instructions if one.enters]
    return joined, alone, program


@pytest.mark.parametrize("name", ["perceptron", pytest.param("transformer", marks=pytest.mark.slow)])
def test_buckets_are_the_same_with_and_without_autocast(name):
    make, of, batch = NETWORKS[name]
    model, given = make(), batch(8)
    full, half = (buckets(model, each, given, Mesh.of(d=2)) for each in (of, in_half(of)))
    assert half[:2] == full[:2]
    assert half[0]


def test_a_parameter_that_is_read_through_views_is_in_a_bucket():
    model, batch = Views(), torch.randn(5, 6)
    joined, alone, program = buckets(model, lambda m, x: m(x).square().mean(), batch, Mesh.of(d=2))
    assert joined == [["cast", "flat", "turned"]]
    assert len(alone) == 1  # the gradient of a part of a parameter is smaller than the parameter's
    [long] = [i for i in program.instructions if i.enters]
    assert long.moves[0][0].label != "long"


def errors(found, exact):
    names = [name for name in exact if name.endswith("weight")]
    return torch.stack([(found[name] - exact[name]).norm() / exact[name].norm() for name in names])


def as_ddp(model, batch, size):
    """The gradients of torch's DistributedDataParallel: the mean of those of all ranks, each in float32."""
    ranks = [plain(model, in_half(), tuple(x.chunk(size)[rank] for x in batch)) for rank in range(size)]
    return {name: sum(each[name] for each in ranks) / size for name in ranks[0]}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("known", [data_parallel, fully_sharded])
def test_gradients_under_autocast_are_no_worse_than_those_of_ddp(known, size):
    model, batch = network()
    exact = plain(model, loss_fn, batch)
    plan = known(RuledGraph.of(captured_step(model, in_half(), batch, {})), PlanRequest(Mesh.of(d=size)))
    ours, ddp = errors(run(plan, model, batch), exact), errors(as_ddp(model, batch, size), exact)
    assert bool((ours <= ddp * 1.001).all()), (ours, ddp)
    rounded = captured_step(model, in_half(), batch, {}, reduce_dtype=torch.bfloat16)
    plan = known(RuledGraph.of(rounded), PlanRequest(Mesh.of(d=size)))
    assert bool((errors(run(plan, model, batch), exact) > ddp).all())


def test_a_sharded_parameter_is_gathered_as_it_is_computed_with():
    model, batch = network()
    size = WIDTH * WIDTH
    for dtype, reduced in ((None, 4), (torch.bfloat16, 2)):
        captured = captured_step(model, in_half(), batch, {}, reduce_dtype=dtype)
        plan = fully_sharded(RuledGraph.of(captured), PlanRequest(Mesh.of(d=2)))
        moved = [(p.direction, p.collective.kind, p.collective.bytes) for p in plan.collectives()]
        assert moved.count(("forward", "all_gather", 2 * size)) == 2
        assert moved.count(("backward", "reduce_scatter", reduced * size)) == 2
        assert moved.count(("backward", "all_gather", 2 * size)) >= 1  # resharded after the forward
        assert not [one for one in moved if one[1] == "all_gather" and one[2] == 4 * size]


def trained_in(dtype, accumulated):
    sw.init()
    model, batch = network()
    parallel = sw.parallelize(
        model, loss_fn, batch, mode="data", batch="global", precision="bf16", reduce_dtype=dtype, checks="full"
    )
    if accumulated:
        with parallel.accumulate():
            parallel(batch).backward()
    parallel(batch).backward()
    return {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "accumulated"),
    [
        (torch.bfloat16, True),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_sum_in_the_dtype_that_they_are_told(dtype, accumulated):
    model, batch = network()
    exact, ddp = plain(model, loss_fn, batch), as_ddp(model, batch, 2)
    for found in run_ranks(2, trained_in, dtype, accumulated):
        found = {name: gradient / (1 + accumulated) for name, gradient in found.items()}
        differ = [not torch.allclose(found[name], ddp[name], rtol=1e-4, atol=1e-7) for name in found]
        assert any(differ) == (dtype is not None)
        assert bool((errors(found, exact) < 2 * errors(ddp, exact)).all())


def refused():
    sw.init()
    found = []
    for options in ({"precision": "half"}, {"reduce_dtype": torch.int32}):
        with pytest.raises(UsageError) as error:
            sw.parallelize(*network()[:1], loss_fn, network()[1], **options)
        found.append(str(error.value))
    return found


def test_what_is_unknown_is_refused():
    [(precision, dtype)] = run_ranks(1, refused)
    assert "precision='half' is unknown; choose one of 'float32', 'bf16', 'fp16'" in precision
    assert "reduce_dtype=torch.int32 is unknown; choose one of torch.float64, torch.float32" in dtype


def test_a_copy_of_the_model_is_not_changed_by_precision():
    """As it is asked for here, whatever is around the call."""
    model, batch = network()
    [found] = run_ranks(1, computed_in)
    expected = [plain(copy.deepcopy(model), of, batch)["loss"] for of in (in_half(), loss_fn)]
    assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in expected], rel=1e-6)


def computed_in():
    sw.init()
    model, batch = network()
    losses = []
    for precision, around in (("bf16", False), ("float32", True)):
        parallel = sw.parallelize(model, loss_fn, batch, mode="single", precision=precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            losses.append(parallel(batch).detach())
    return losses
