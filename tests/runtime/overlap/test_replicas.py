"""What several ranks hold alike of a model is refused where a script changes it on one of them alone."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import update_bn

import shardwright as sw
from models import Branching, Transformer, classify, next_token, perceptron_batch, transformer_batch
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.runtime.checks.digests import sum_of_words
from shardwright.runtime.checks.replicas import _difference, _sketch
from shardwright.runtime.updates.optimizer_steps import made_steps


class Normal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
        self.register_buffer("counted", torch.zeros(12))  # for what the script counts on each rank

    def forward(self, x):
        return self.layers(x.flatten(1))


def made(rank, model, options, loss_fn=classify, batch=None):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sw.set_seed(0)
    batch = batch or perceptron_batch(8)
    return sw.parallelize(model(), loss_fn, batch, batch="global", **options), batch


def step(parallel, batch, optimizer):
    optimizer.zero_grad()
    loss = parallel(batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    optimizer.step()


def said(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def another_rate(parallel, batch, rank):
    step(parallel, batch, torch.optim.SGD(parallel.parameters(), lr=0.01 * (rank + 1)))


def on_one_rank(parallel, batch, rank):
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5)
    loss = parallel(batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    if rank == 0:
        optimizer.step()


def a_checkpoint(parallel, batch, rank):
    if rank == 1:
        parallel.module.load_state_dict({name: x * 2 for name, x in parallel.module.state_dict().items()})


def noise(parallel, batch, rank):
    weight = next(iter(parallel.parameters()))
    with torch.no_grad():
        weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(rank))


def noise_after_an_evaluation(parallel, batch, rank):
    parallel.eval()
    with torch.no_grad():
        parallel(batch)
    noise(parallel.train(), batch, rank)


def not_a_number(parallel, batch, rank):
    with torch.no_grad():
        next(iter(parallel.parameters()))[0, rank:2] = torch.nan


def statistics(parallel, batch, rank):
    update_bn([batch[0][4 * rank :][:4]], parallel.module)


def a_frozen_one(parallel, batch, rank):
    last = list(parallel.parameters())[-1].requires_grad_(False)
    with torch.no_grad():
        last[0] += rank


DATA = {"mode": "data"}
WEIGHT = "layers.0.weight of rank 1 differs from that of rank 0, "
CASES = [
    (another_rate, Normal, WEIGHT + "by about "),
    (on_one_rank, Normal, WEIGHT + "by about "),
    (a_checkpoint, Normal, WEIGHT + "by about "),
    (noise, Normal, WEIGHT + "by about "),
    (noise_after_an_evaluation, Normal, WEIGHT + "by about "),
    (not_a_number, Normal, WEIGHT + "with 1 numbers that are NaN or infinite in place of 2"),
    (statistics, Normal, "layers.1.running_mean of rank 1 differs from that of rank 0, by about "),
    (a_frozen_one, Normal, "layers.3.bias of rank 1 differs from that of rank 0, by about "),
    (another_rate, Branching, "layer.weight of rank 1 differs from that of rank 0, by about "),
]


def drifted():
    """What is said of each case: of what a rank does, then of the next call, and of one when all have rank 0's."""
    rank, found = sw.init().rank, []
    models = {model: made(rank, model, DATA) for model in (Normal, Branching)}
    for drift, model, _ in CASES:
        parallel, batch = models[model]
        parallel._turns.seen = 0
        drift(parallel, batch, rank)
        texts = [said(lambda of=parallel, batch=batch: of(batch)) for _ in range(2)]
        with torch.no_grad():
            for tensor in (*parallel.module.parameters(), *parallel.module.buffers()):
                dist.broadcast(tensor, 0)
        found.append((texts, said(lambda of=parallel, batch=batch: of(batch))))
    return found


def test_what_is_done_on_one_rank_alone_is_refused_on_all_until_they_are_alike_again():
    ranks = run_ranks(2, drifted)
    assert ranks[0] == ranks[1]
    for ((first, again), mended), (*_, expected) in zip(ranks[0], CASES, strict=True):
        assert first.startswith("what ranks hold alike of the model has drifted apart: " + expected)
        assert "; every rank must change " in first
        assert again.startswith(first.partition(", as ")[0])
        assert mended == ""


SPLIT = {"mode": "auto", "mesh": "dp=2,tp=2", "search": "propagation"}


def drifted_in_parts():
    """What is said where ranks hold parts: of one part on rank 3, of what may be a rounding, of all parts."""
    rank, found = sw.init().rank, []
    parallel, batch = made(rank, Transformer, SPLIT, next_token, transformer_batch(8))
    parameters = dict(parallel.module.named_parameters())
    parts = {name: parameters[name].to_local() for name in ("layers.0.up.weight", "layers.0.down.bias")}
    alike = {name: parameter.to_local().clone() for name, parameter in parameters.items()}
    for name, part in parts.items():
        with torch.no_grad():
            part += 0.1 * (rank == 3)
        found.append(said(lambda: parallel(batch)))
        with torch.no_grad():
            part.copy_(alike[name])
    assert found[-1] == "" == said(lambda: parallel(batch))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.to_local().mul_(1 + 0.1 * (rank == 3))
    parallel._turns.seen = 0
    return *found, said(lambda: parallel(batch))


def test_parts_that_several_ranks_hold_are_compared_among_these():
    ranks = run_ranks(4, drifted_in_parts)
    assert all(found == ranks[0] for found in ranks)
    part, perhaps_rounded, every = ranks[0]
    assert "layers.0.up.weight of rank 3 differs from that of rank 1, by about " in part
    assert perhaps_rounded == ""  # its gradient is computed by each of two ranks for itself, and it is one of many
    assert "tokens.weight of rank 3 differs from that of rank 0, by about " in every
    assert " more of its tensors do; every rank must change parameters alike: with the same lr" in every


def a_step_on_one_rank(parallel, batch, rank, optimizer):
    parallel(batch).backward()
    if rank == 0:
        optimizer.step()


def a_state_on_one_rank(parallel, batch, rank, optimizer):
    if rank == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    step(parallel, batch, optimizer)


def rates_of_each(parallel, batch, rank, optimizer):
    optimizer.param_groups[0]["lr"] = 0.001 * (1 + rank)
    step(parallel, batch, optimizer)


def rates_of_each_for_a_while(parallel, batch, rank, optimizer):
    rates_of_each(parallel, batch, rank, optimizer)
    optimizer.param_groups[0]["lr"] = 0.001
    optimizer.step()


def gradients_of_some(parallel, batch, rank, optimizer):
    parallel(batch).backward()
    if rank == 1:
        parallel.module.tokens.weight.grad = None
    optimizer.step()


def another_class_on_one_rank(parallel, batch, rank, optimizer):
    kind = torch.optim.Adam if rank else torch.optim.AdamW
    step(parallel, batch, kind(parallel.parameters(), lr=1e-3, weight_decay=0.01))


def steps_by_other_ways(parallel, batch, rank, optimizer):
    optimizer.param_groups[0]["foreach"] = bool(rank)
    step(parallel, batch, optimizer)


def rates_worked_out_with_a_rounding(parallel, batch, rank, optimizer):
    rates_of_each(parallel, batch, 1e-12 * rank, optimizer)


ON_PARTS = {
    a_step_on_one_rank: "rank 0 has made 2 of them and rank 1 1; call optimizer.step() on every rank",
    a_state_on_one_rank: "rank 0 was given states 0 times by load_state_dict, and rank 1 once; load them on every rank",
    rates_of_each: "rank 0 made the last one with lr=0.001 and rank 1 with lr=0.002; give optimizers and schedulers",
    rates_of_each_for_a_while: "rank 1 made some otherwise than rank 0, and the last one as it did, with AdamW of ",
    gradients_of_some: "parameters and rank 1 with AdamW of ",
    another_class_on_one_rank: "rank 0 made the last one with AdamW of ",
    steps_by_other_ways: "",
    rates_worked_out_with_a_rounding: "",
}


def other_steps_of_parts():
    rank, found = sw.init().rank, []
    options = {"mode": "auto", "mesh": "tp=2", "search": "propagation"}
    parallel, batch = made(rank, Transformer, options, next_token, transformer_batch(8))
    alike = [parameter.to_local().clone() for parameter in parallel.parameters()]
    for drift in ON_PARTS:
        with torch.no_grad():
            for parameter, part in zip(parallel.parameters(), alike, strict=True):
                parameter.to_local().copy_(part)
        parallel._turns.seen, parallel._replicas._made_before = 0, made_steps()
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        step(parallel, batch, optimizer)
        drift(parallel, batch, rank, optimizer)
        found.append([said(lambda: parallel(batch)) for _ in range(2)])
    return found


def test_other_steps_of_parts_that_each_rank_holds_alone_are_refused():
    ranks = run_ranks(2, other_steps_of_parts)
    assert ranks[0] == ranks[1]
    for (said, again), expected in zip(ranks[0], ON_PARTS.values(), strict=True):
        assert said == again
        assert expected in said
        assert bool(expected) == bool(said)


def single():
    rank = sw.init().rank
    parallel, batch = made(rank, Normal, {"mode": "single"})
    another_rate(parallel, batch, rank)
    return said(lambda: parallel(batch)), parallel._replicas.due


def test_ranks_that_train_for_themselves_are_not_compared():
    assert run_ranks(2, single) == [("", False)] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [7, 5000, 2**13])
def test_a_digest_sees_numbers_at_other_places(dtype, size, monkeypatch):
    monkeypatch.setattr("shardwright.runtime.checks.digests.PIECE", 2**11)
    generator = torch.Generator().manual_seed(size)
    numbers = torch.arange(size).to(dtype)[torch.randperm(size, generator=generator)]
    others = [numbers.flip(0), numbers.roll(1), numbers.roll(1024), numbers[torch.randperm(size, generator=generator)]]
    swapped, other = numbers.clone(), int((numbers != numbers[0]).nonzero()[0])
    swapped[0], swapped[other] = numbers[other], numbers[0]
    others.append(swapped)
    sums = [int(sum_of_words(each, numbers.device)) for each in (numbers, numbers.clone(), *others)]
    assert sums[0] == sums[1]
    assert all(torch.equal(each, numbers) for each, found in zip(others, sums[2:], strict=True) if found == sums[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_a_sketch_tells_roundings_from_changes(dtype, monkeypatch):
    """Also in tensors of more entries than are looked at together."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr("shardwright.runtime.checks.replicas.PIECE", 2**13)
    numbers = torch.randn(2**15 + 5000, generator=generator, dtype=torch.float64) * 100
    some = numbers.to(dtype)
    rounded = some * 1 if dtype == torch.int64 else some * (1 + 4 * torch.finfo(dtype).eps)
    changed = some.clone()
    changed[-150:] *= 2
    assert _sketch(some) == _sketch(some.clone())
    assert len(set(map(abs, _sketch(some).projections))) == len(_sketch(some).projections)
    assert _difference(_sketch(changed), _sketch(some), 1 if dtype.itemsize > 2 else 0.1).startswith("by about 0.0")
    if dtype != torch.int64:
        assert _difference(_sketch(rounded), _sketch(some), 1) == ""
        some[3] = torch.inf
        assert (
            _difference(_sketch(changed), _sketch(some), 1) == "with 0 numbers that are NaN or infinite in place of 1"
        )
    assert _difference(_sketch(some[1:]), _sketch(some), 1).startswith("being ")
