"""A batch without padding runs a program whose attention takes no mask, on all ranks or on none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.runtime.graphs.filled import filled_of

ROWS, LENGTH = 6, 5


class Padded(nn.Module):
    """Causal attention that sees no padding."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x, padding):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        i = torch.arange(x.shape[1])
        mask = (i[None, :] <= i[:, None]) & padding[:, None, None, :].bool()
        return self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2))


def loss_fn(model, batch):
    return model(batch["x"], batch["padding"]).square().mean()


def batches():
    """Whole batches: without padding, with padding in the last row, in the first, and without."""
    found, generator = [], torch.Generator().manual_seed(0)
    for padded in (None, ROWS - 1, 0, None):
        padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        if padded is not None:
            padding[padded, 3:] = 0
        x = torch.randn(ROWS, LENGTH, 8, dtype=torch.float64, generator=generator)
        found.append({"x": x, "padding": padding})
    return found


def masks_of(parallel):
    """How often each program has run, by whether its attention takes a mask."""
    found = {}
    for execution in parallel.executions():
        masked = "__and__" in execution.program.source
        found[masked] = found.get(masked, 0) + sum(execution.runs.values())
    return found


def trained(how, mode, first):
    """Losses and weights of some steps, those of plain PyTorch, and which programs have run."""
    torch.set_num_threads(1)
    world = sw.init()
    sw.set_seed(0)
    model = Padded().double()
    plain = copy.deepcopy(model)
    mine = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)

    def part(batch):
        return batch if how == "global" else {name: tensor[mine] for name, tensor in batch.items()}

    order = batches() if first == "plain" else batches()[::-1][1:]
    parallel = sw.parallelize(model, loss_fn, part(order[0]), mode=mode, batch=how)
    results = []
    for one in (parallel, plain):
        optimizer, losses = torch.optim.SGD(one.parameters(), 0.1), []
        for batch in order:
            loss = one(part(batch)) if one is parallel else loss_fn(plain, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    return *results, parallel.full_state_dict(), plain.state_dict(), masks_of(parallel)


@pytest.mark.parametrize(
    ("ranks", "how", "mode", "first"),
    [(2, "local", "data", "plain"), pytest.param(3, "local", "auto", "padded", marks=pytest.mark.slow)],
)
def test_steps_equal_plain_pytorch_whether_or_not_a_batch_is_padded(ranks, how, mode, first):
    for ours, expected, state, plain, masks in run_ranks(ranks, trained, how, mode, first):
        assert ours == pytest.approx(expected, rel=1e-12)
        for name, tensor in plain.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-12)
        assert masks == ({False: 2, True: 2} if first == "plain" else {True: 2, False: 1})


def planned_before(folder):
    """Which programs have run by the plan of a batch with padding, which is used as it is given."""
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(0)
    plain, padded, *_ = batches()
    sw.parallelize(Padded().double(), loss_fn, padded, batch="global").plan.save(f"{folder}/plan.json")
    parallel = sw.parallelize(Padded().double(), loss_fn, plain, batch="global", plan=f"{folder}/plan.json")
    parallel(plain)
    return masks_of(parallel)


def test_a_plan_for_padded_batches_serves_one_without_padding(tmp_path):
    assert run_ranks(1, planned_before, str(tmp_path)) == [{True: 0, False: 1}]


def test_what_a_batch_holds_is_seen_of_whole_numbers_on_the_cpu_alone():
    ones = torch.ones(3, 4, dtype=torch.int64)
    mixed = ones.clone()
    mixed[2, 3] = 0
    batch = [ones, mixed, ones.bool() & False, ones.double(), ones.to("meta"), torch.tensor(1), ones[:0]]
    assert filled_of(batch) == {(0, 1), (2, 0), (6, 0), (6, 1)}
    assert filled_of(batch, {(0, 1), (0, 0), (1, 1)}) == {(0, 1)}


def padded_on_one():
    """Pass a batch to a model planned for whole batches, which is padded on rank 1 alone; return the refusal."""
    world = sw.init()
    plain, padded, *_ = batches()
    parallel = sw.parallelize(Padded().double(), loss_fn, plain, mode="data", batch="global")
    for _ in range(5):  # of which the first are compared whole
        parallel(plain)
    with pytest.raises(sw.UsageError) as refused:
        parallel(padded if world.rank == 1 else plain)
    return str(refused.value)


def test_a_batch_that_is_padded_on_one_rank_alone_is_refused_in_words_that_differ():
    passed = "float64[6, 5, 8], int64[6, 5]"
    for text in run_ranks(2, padded_on_one):
        assert (
            f"rank 0 passes a batch of {passed}, tensor 2 holding 1 in every entry, rank 1 passes a batch of {passed};"
            in text
        )
