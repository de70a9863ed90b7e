"""Any number of ranks gives the losses and gradients of one, whichever way the batch is split."""

import os
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.data.loading.batch import Batch
from shardwright.data.order import chunk_range
from shardwright.distributed.seed import RandomNumbers
from shardwright.errors import UsageError, WorldError
from shardwright.runtime.checks.changed_buffers import buffers_restored, digest
from shardwright.runtime.eager_parallel import parallelize_eagerly

TOLERANCE = 1e-12
FEATURES, CLASSES = 6, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.double()

    def forward(self, x):
        return self.body(x)


def cross_entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def penalised(model, batch):
    return cross_entropy(model, batch), model.body[0].weight.square().sum()


def global_batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def part_of(batch, rank, ranks):
    start, stop = chunk_range(len(batch[0]), ranks, rank)
    return Batch((t[start:stop] for t in batch), global_size=len(batch[0]), start=start, stop=stop)


def gradients_of(model):
    return [p.grad.numpy().copy() for p in model.parameters()]


def values_of(model):
    return [p.detach().numpy().copy() for p in model.parameters()]


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def plain_run(sizes):
    """Loss and gradients of every step, and the parameters at the end, as plain PyTorch gives them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        loss = cross_entropy(model, global_batch(size, seed))
        loss.backward()
        steps.append((loss.item(), gradients_of(model)))
        optimizer.step()
    return steps, values_of(model)


KINDS = ("loader", "local", "global")


def every_run(sizes, ranks):
    """Of a batch given in each way, and of the sum of gradients in place of their mean."""
    runs = {kind: parallel_run(sizes, kind, "mean", 0.1) for kind in KINDS}
    return runs | {"sum": parallel_run(sizes, "loader", "sum", 0.1 / ranks)}


def parallel_run(sizes, kind, gradients, lr):
    world = sw.init(timeout=60)
    model = Net()
    if world.rank:
        with torch.no_grad():
            model.body[0].weight.add_(world.rank)  # rank 0's parameters are to count
    take = {"loader": part_of, "local": lambda *a: tuple(part_of(*a)), "global": lambda batch, *_: batch}[kind]
    batches = [take(global_batch(size, seed), world.rank, world.size) for seed, size in enumerate(sizes)]
    chosen = None if kind == "loader" else kind
    parallel = parallelize_eagerly(model, cross_entropy, batches[0], gradients=gradients, batch=chosen)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        loss = parallel(batch)
        loss.backward()
        steps.append((loss.item(), gradients_of(model)))
        optimizer.step()
    return steps, values_of(model)


def assert_same(run, reference, gradient_scale=1.0):
    steps, parameters = run
    expected_steps, expected_parameters = reference
    for (loss, gradients), (expected_loss, expected_gradients) in zip(steps, expected_steps, strict=True):
        assert abs(loss - expected_loss) < TOLERANCE
        for got, expected in zip(gradients, expected_gradients, strict=True):
            assert_close(got, gradient_scale * expected)
    for got, expected in zip(parameters, expected_parameters, strict=True):
        assert_close(got, expected)


# 32 and 5 are uneven on 3 ranks, and 1 leaves two without a sample.
SIZES = (32, 30, 5, 1)


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_losses_gradients_and_parameters_are_those_of_one_device(ranks):
    reference = plain_run(SIZES)
    for runs in run_ranks(ranks, every_run, SIZES, ranks):
        for kind in KINDS:
            assert_same(runs[kind], reference)
        assert_same(runs["sum"], reference, gradient_scale=ranks)


def accumulating_run(gradients):
    world = sw.init(timeout=60)
    model = Net()
    batches = [part_of(global_batch(size, size), world.rank, world.size) for size in (8, 6, 1)]
    parallel = parallelize_eagerly(model, cross_entropy, batches[0], gradients=gradients)
    with parallel.accumulate():
        for batch in batches[:2]:
            parallel(batch).backward()
    local = gradients_of(model)
    parallel(batches[2]).backward()
    return local, gradients_of(model)


@pytest.mark.parametrize(("ranks", "gradients"), [(2, "mean"), pytest.param(3, "sum", marks=pytest.mark.slow)])
def test_accumulation_defers_the_reduction(ranks, gradients):
    model = Net()
    for size in (8, 6, 1):
        cross_entropy(model, global_batch(size, size)).backward()
    runs = run_ranks(ranks, accumulating_run, gradients)
    for _, reduced in runs:
        for got, expected in zip(reduced, gradients_of(model), strict=True):
            scale = ranks if gradients == "sum" else 1
            assert_close(got, scale * expected)
    assert not np.allclose(runs[0][0][0], runs[1][0][0]), "the gradients were reduced inside accumulate()"


def twice_forward():
    sw.init()
    batches = [global_batch(12, seed) for seed in range(3)]
    parallel = parallelize_eagerly(Net(), cross_entropy, batches[0], "data", "mean", "global")
    (parallel(batches[0]) + parallel(batches[1])).backward()
    with parallel.accumulate():
        for loss in [parallel(batches[1]), parallel(batches[2])]:
            loss.backward()
    parallel(batches[0]).backward()
    found = gradients_of(parallel.module)
    first, second = parallel(batches[0]), parallel(batches[1])
    second.backward()
    with parallel.accumulate():
        inside = parallel(batches[2])
    with pytest.raises(UsageError, match="the gradients of this backward would stay as they are on each rank"):
        first.backward()
    with pytest.raises(UsageError, match="both forward and backward inside accumulate"):
        inside.backward()
    with pytest.raises(UsageError, match="would give this rank's share of the gradient alone"):
        torch.autograd.grad(parallel(batches[0]), list(parallel.parameters()))
    return found


def test_two_forwards_before_a_backward_give_the_sum_or_are_refused():
    model = Net()
    for seed in (0, 0, 1, 1, 2):
        cross_entropy(model, global_batch(12, seed)).backward()
    for found in run_ranks(2, twice_forward):
        for got, expected in zip(found, gradients_of(model), strict=True):
            assert_close(got, expected)


def added_up():
    sw.init()
    batch = global_batch(12)
    parallel = parallelize_eagerly(Net(), penalised, batch, "data", "mean", "global")
    loss, penalty = parallel(batch)
    try:
        (loss + penalty).backward()
    except UsageError as error:
        return str(error)
    return gradients_of(parallel.module)


def test_a_penalty_beside_the_loss_is_refused_where_ranks_have_parts_of_it():
    model = Net()
    sum(penalised(model, global_batch(12))).backward()
    for got, expected in zip(run_ranks(1, added_up)[0], gradients_of(model), strict=True):
        assert_close(got, expected)
    for said in run_ranks(2, added_up):
        assert said.startswith("a backward came to what the loss function returned beside the loss, where only the ")


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.used, self.unused = nn.Linear(FEATURES, CLASSES).double(), nn.Linear(2, 2).double()

    def forward(self, x):
        return self.used(x)


def partly_used_run():
    world = sw.init(timeout=60)
    model = PartlyUsed()
    batch = part_of(global_batch(3), world.rank, world.size)
    parallel = parallelize_eagerly(model, cross_entropy, batch)
    for _ in range(2):
        parallel(batch).backward()
    return model.used.weight.grad.numpy(), model.unused.weight.grad


def test_parameters_that_the_loss_does_not_use_get_no_gradient():
    model = PartlyUsed()
    for _ in range(2):
        cross_entropy(model, global_batch(3)).backward()
    for used, unused in run_ranks(4, partly_used_run):
        assert_close(used, model.used.weight.grad)
        assert unused is None


def drawing_loss(model, batch):
    loss = cross_entropy(model, batch) * (1 + 0 * random.random() * np.random.random())
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    return loss


def trial_run():
    world = sw.init(timeout=60)
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)).double()
    kept = model[2].weight.grad = torch.ones_like(model[2].weight)
    before = RandomNumbers()
    parallelize_eagerly(model, drawing_loss, part_of(global_batch(8), world.rank, world.size))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return before.drawn, model[0].num_batches_tracked.item(), gradients == [kept], kept.unique().tolist()


def test_trying_the_loss_function_leaves_no_trace():
    assert run_ranks(2, trial_run) == [(False, 0, True, [1.0])] * 2


# What does not fit: each is a function of the rank that returns the arguments of parallelize.
def frozen(rank):
    model = Net()
    if rank == 1:
        model.requires_grad_(False)
    return model, cross_entropy, global_batch(4), {"batch": "local"}


def vector_loss(rank):
    return Net(), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), global_batch(4), {}


def detached(rank):
    return Net(), (lambda m, b: cross_entropy(m, b).detach() if rank == 1 else cross_entropy(m, b)), global_batch(4), {}


def not_a_tensor(rank):
    return Net(), lambda m, b: cross_entropy(m, b).item(), global_batch(4), {}


def failing(rank):
    x, y = global_batch(4)
    return Net(), cross_entropy, (x[:, 1:] if rank == 1 else x, y), {}


def with_object(rank):
    return Net(), cross_entropy, (*global_batch(4), object()), {}


def ragged(rank):
    x, y = global_batch(4)
    return Net(), cross_entropy, (x, y[:3]), {}


def unrelated(rank):
    return Net(), lambda m, b: b[0].clone().requires_grad_().mean(), global_batch(4), {}


def on_meta(rank):
    return Net().to("meta"), cross_entropy, global_batch(4), {}


def other_model(rank):
    return (nn.Linear(FEATURES, CLASSES + rank).double(), cross_entropy, global_batch(4), {})


def other_arguments(rank):
    return Net(), cross_entropy, global_batch(4), {"gradients": ["mean", "sum"][rank]}


def all_empty(rank):
    return Net(), cross_entropy, tuple(t[:0] for t in global_batch(4)), {}


def nobody_splits(rank):
    return Net(), cross_entropy, global_batch(4), {"batch": None}


def part_of_others(rank):
    return Net(), cross_entropy, part_of(global_batch(6), 1 - rank, 2), {"batch": None}


def part_in_single(rank):
    return Net(), cross_entropy, part_of(global_batch(4), rank, 2), {"mode": "single", "batch": None}


def refused(build):
    world = sw.init(timeout=60)
    model, loss_fn, batch, options = build(world.rank)
    try:
        parallelize_eagerly(model, loss_fn, batch, **({"batch": "local"} | options))
    except UsageError as error:
        dist.barrier()  # the ranks are still in step
        return str(error)
    return "nothing was raised"


REFUSED = [
    (frozen, "rank 1: Net has no parameter that requires a gradient; there is nothing to train"),
    (vector_loss, "rank 0: the loss has shape [4]; expected a scalar, the mean over the samples: loss.mean()"),
    (detached, "rank 1: the loss is not attached to the graph; compute it from model(x), without detach()"),
    (not_a_tensor, "rank 0: the loss function returned float; expected a scalar tensor, or (scalar tensor, aux)"),
    (failing, "rank 1: the sample batch does not fit: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    (with_object, "rank 0: the sample batch does not fit: UsageError: a batch holds object <object object"),
    (ragged, "a batch has tensors of the shapes [[4, 6], [3]]; expected the samples along dim 0 of each"),
    (unrelated, "rank 0: the loss depends on no parameter of the model that requires a gradient"),
    (on_meta, "4 tensors of the model are on the meta device (body.0.weight, body.0.bias, body.2.weight, ...)"),
    (other_model, "the model of rank 1 differs from rank 0's: it has ('weight', (4, 6), 'torch.float64')"),
    (other_arguments, "(mode, gradients, batch) = ('data', 'mean', 'local'), rank 1 with ('data', 'sum', 'local')"),
    (all_empty, "the sample batch is empty on every rank; pass one that holds samples"),
    (nobody_splits, "nobody said how this batch of 4 samples is split over 2 ranks; pass parallelize(..., batch="),
    (part_of_others, "rank 0 of 2 computes samples 0 to 3, but got Batch(samples 3 to 6 of 6: "),
    (part_in_single, "mode='single' computes the whole batch on every rank, but this is one part of it: Batch("),
]


def all_refused():
    return [refused(build) for build, _ in REFUSED]


def test_what_does_not_fit_is_refused_on_all_ranks():
    first, second = run_ranks(2, all_refused)
    assert first == second
    for (_, message), said in zip(REFUSED, first, strict=True):
        assert message in said


class Counting(Net):
    """Counts forwards, and keeps in a buffer of its own what is made of the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.steps += 1
        self.last = self.steps * 2
        return super().forward(x)


class Largest(Counting):
    """Keeps the largest number that it has met."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().max())
        return super().forward(x)


class Summing(Largest):
    """Adds up behind torch's back."""

    def forward(self, x):
        self.largest.data += x.detach().sum()
        return Counting.forward(self, x)


def counted():
    """What two ranks are told of models that change buffers, tried on batches of which nothing can be seen."""
    sw.init()
    x, y = global_batch(8)
    nothing, whole = (torch.zeros_like(x), y), (x, y)
    told = []
    for model, sample, batch in (
        (Counting(), nothing, whole),
        (Largest(), nothing, whole),
        (Summing(), nothing, whole),
        (Largest(), (x[:1], y[:1]), whole),
        (Counting(), whole, (x[:1], y[:1])),
    ):
        parallel = parallelize_eagerly(model, cross_entropy, sample, batch="global")
        state = model.steps.item(), model.last
        try:
            parallel(whole if isinstance(model, Largest) else sample).backward()
            parallel(batch).backward()
            told.append((*state, model.steps.item(), model.last.item()))
        except UsageError as error:
            told.append(str(error))
        dist.barrier()  # the ranks are still in step
    return told


def test_buffers_that_forwards_change_become_the_same_on_all_ranks_or_are_refused():
    first, second = run_ranks(2, counted)
    assert first == second
    counting, *others, empty = first
    assert counting == (0, None, 2, 4)
    for said in others:
        assert "the forward changes the buffer largest by the samples of each rank, of which Distributed" in said
    assert "the forward changes the buffer last, but not on rank 1, which has no samples of this batch" in empty


@pytest.mark.parametrize("change", ["delete", "cast", "empty"])
def test_what_is_done_to_buffers_hides_no_error_and_is_taken_back(change):
    class Changing(Counting):
        def forward(self, x):
            self.last = torch.ones(2)
            if change == "delete":
                del self.steps
            elif change == "cast":
                self.steps = self.steps.double()
            else:
                self.steps = None
            if fails:
                raise ValueError("no luck")

    model = Changing()
    for fails in (True, False):
        with nullcontext() if not fails else pytest.raises(ValueError, match="no luck"):
            with buffers_restored(model) as changed:
                model(torch.zeros(1, FEATURES))
            assert changed == {"steps", "last"}
        assert dict(model.named_buffers()) == {"steps": torch.zeros(())}
        assert model.last is None


def test_digests_tell_values_places_and_types_apart():
    values = [
        torch.zeros(3),
        torch.zeros(4),
        torch.tensor([1, 0, 1]),
        torch.tensor([0, 2, 0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([2.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor(-0.0, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64).conj(),
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        None,
    ]
    cpu = torch.device("cpu")
    seen = {digest({"a": value}, cpu).item() for value in values} | {digest({}, cpu).item()}
    assert len(seen) == len(values) + 1
    assert all(number == int(number) and 0 <= number < 2**20 for number in seen)
    assert digest({"a": values[4].clone(), "b": None}, cpu) == digest({"b": None, "a": values[4]}, cpu)


def other_whole_batches():
    world = sw.init()
    parallel = parallelize_eagerly(Net(), cross_entropy, global_batch(4), batch="global")
    with pytest.raises(UsageError, match="every rank passes the same whole batch, but rank 0 passed float64"):
        parallel(global_batch(4, seed=world.rank))


def test_other_whole_batches_are_refused():
    run_ranks(2, other_whole_batches)


def test_parallelize_needs_a_world():
    assert os.environ.get("RANK") is None
    with pytest.raises(WorldError, match=r"there is no world yet; call sw.init\(\) first"):
        parallelize_eagerly(Net(), cross_entropy, global_batch(4))
