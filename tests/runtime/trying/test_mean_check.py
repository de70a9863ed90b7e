"""Losses that are no means over samples in the mode that runs are refused, and no others."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.runtime.trying.mean_check import problem_with_mean


def test_a_mask_of_every_second_sample_is_no_mean_over_samples():
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    model = torch.nn.Linear(4, 3)

    def masked(batch, seed):
        x, y, mask = batch
        return ((model(x) - y).square().mean(1) * mask).sum() / mask.sum()

    assert problem_with_mean(model, masked, (x, y, torch.ones(12))) is None
    assert "it is no mean over samples" in problem_with_mean(model, masked, (x, y, (torch.arange(12) % 2).float()))


def test_a_mean_whose_parts_cancel_is_one():
    torch.manual_seed(0)
    x, advantages = torch.randn(12, 4), torch.randn(12)
    advantages = (advantages - advantages.mean()) / advantages.std()
    model = torch.nn.Linear(4, 1)

    def policy(batch, seed):
        now = model(batch[0]).squeeze(1)
        return -((now - now.detach()).exp() * batch[1]).mean()

    assert policy((x, advantages), 0).abs() < 1e-7
    assert problem_with_mean(model, policy, (x, advantages)) is None
    assert "no mean" in problem_with_mean(model, lambda batch, seed: policy(batch, 0) * len(batch[0]), (x, x[:, 0] + 1))


def test_roundings_inside_of_the_model_make_no_mean_another():
    torch.manual_seed(0)
    x, y = torch.randn(12, 64), torch.randint(8, (12,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

    def half(batch, seed, reduction="mean"):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[0])
        rounded = logits * (1 + len(logits) % 2 * 2**-8)  # as products of other sizes may be
        return torch.nn.functional.cross_entropy(rounded.float(), batch[1], reduction=reduction)

    assert problem_with_mean(model, half, (x, y)) is None
    assert "no mean" in problem_with_mean(model, lambda batch, seed: half(batch, 0, "sum"), (x, y))


class Coupled(torch.nn.Module):
    """Two layers; between them ``middle(module, x)`` runs."""

    def __init__(self, middle, norm=None):
        super().__init__()
        self.first, self.last, self.norm, self.middle = nn.Linear(4, 8), nn.Linear(8, 3), norm, middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)).relu())


def drop_path(m, x):
    return x / 0.9 * (0.9 + torch.rand(len(x), 1, dtype=x.dtype)).floor() * x.new_empty(len(x), 1).bernoulli_(0.5)


MEANS = {
    "dropout": lambda m, x: F.dropout(F.alpha_dropout(x, 0.1, m.training), 0.3, m.training),
    "drop path": drop_path,
    "noise": lambda m, x: x + torch.randn_like(x) * x.detach().std(1, keepdim=True) + torch.normal(x.abs(), 0.1),
    "choices": lambda m, x: x[torch.arange(len(x)), torch.multinomial(x.softmax(1), 1)[:, 0]].unsqueeze(1) * x,
    "attention": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0],
    "batch norm": lambda m, x: m.norm(x),
    "batch norm without statistics": lambda m, x: nn.BatchNorm1d.forward(m.norm, x),
    "of float64 alone": lambda m, x: x.double().cumsum(1),
}
COUPLED = {
    "in training": lambda m, x: x - x.mean(0) if m.training else x,
    "and dropout": lambda m, x: F.dropout(x, 0.5) - (x.mean(0) if m.training else 0),
    "by the largest": lambda m, x: x / x.detach().abs().max() if m.training else x,
    "by a batch norm that is no module": lambda m, x: F.batch_norm(x, None, None, training=m.training or None),
    "a little": lambda m, x: x + 1e-9 * x.mean(0) if m.training else x,
}


def in_its_mode(middle, dtype, norm=None, autocast=False):
    torch.manual_seed(0)
    model = Coupled(middle, norm).to(dtype)
    batch = torch.randn(12, 4, dtype=dtype), torch.randint(3, (12,))

    def loss_of(batch, seed):
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(batch[0])
        return nn.functional.cross_entropy(logits.float() if autocast else logits, batch[1])

    return problem_with_mean(model, loss_of, batch)


@pytest.mark.parametrize("name", MEANS)
def test_what_draws_or_normalises_by_rank_makes_no_mean_another(name):
    norm = nn.BatchNorm1d(8, track_running_stats="without" not in name)
    assert in_its_mode(MEANS[name], torch.float64, norm) is None
    assert in_its_mode(MEANS[name], torch.float32, norm) is None
    assert (norm.training, norm.running_mean is None) == (True, "without" in name)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_in_training_alone_are_no_mean(name):
    said = in_its_mode(COUPLED[name], torch.float64)
    loss, of_parts = re.search(r"were tried is (\S+), but the mean .* is (\S+): it is no", said).groups()
    assert loss != of_parts
    assert said == in_its_mode(COUPLED[name], torch.float64)  # buffers and random numbers are put back


def test_the_tolerance_is_that_of_the_dtype():
    little = lambda m, x: x + 1e-7 * x.mean(0)  # noqa: E731
    assert in_its_mode(little, torch.float64) is not None
    assert in_its_mode(little, torch.float32) is None
    rounded = lambda m, x: x * (1 + (len(x) % 2) * 2**-8)  # noqa: E731  # as products of other sizes may be
    assert in_its_mode(rounded, torch.float32) is not None
    assert in_its_mode(rounded, torch.float32, autocast=True) is None


class Stateful(nn.Module):
    """Counts its steps in Python, which nobody can capture, for a branch on values."""

    def __init__(self, couples=False, sees=False):
        super().__init__()
        self.layer, self.couples, self.sees, self.steps, self.mean = nn.Linear(4, 3), couples, sees, 0, 1.0

    def forward(self, x):
        y = self.layer(x)
        if y.max() > 1e9:
            y = y / 2
        self.steps += 1
        y = y * self.mean
        if self.sees:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return (y - y.mean(0) if self.couples and self.training else y) / self.steps


def stateful_run():
    sw.init(timeout=60)
    torch.set_default_dtype(torch.float64)
    batch, squares, found = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), [], []

    def loss_fn(model, batch):
        squares.append(1)
        return model(batch["x"]).square().mean() / len(squares) * len(batch["names"]) / len(batch["x"])

    batch = {"x": batch, "names": list("abcdef"), "scale": 1.0, "kind": "train"}
    for options in {}, {"couples": True}, {"sees": True}, {"couples": True, "late": True}:
        torch.manual_seed(0)
        model = Stateful(options.get("couples", False), options.get("sees", False)).train("late" not in options)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
            assert (model.steps, model.mean, squares) == (0, 1.0, [])
            if "late" in options:
                parallel(batch)
                parallel.train()
            found.append([parallel(batch).item() for _ in range(3)])
            short = {"x": batch["x"][:1], "names": ["a"]}
            parallel(short)
        except UsageError as error:
            found.append(str(error))
        squares.clear()
    return found


def test_what_runs_as_it_is_counts_as_one_device_does_or_is_refused():
    torch.manual_seed(0)
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        model, x = Stateful(), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        losses = [(model(x).square().mean() / (step + 1)).item() for step in range(3)]
        torch.set_default_dtype(torch.float32)
    for found, behind, coupled, sees, late in run_ranks(2, stateful_run):
        assert found == pytest.approx(losses, rel=1e-12)
        assert behind.startswith("a rank has no samples of this batch, so that it does not change model.steps")
        assert "it is no mean over samples" in coupled
        assert "and leaves something else for each part of a batch" in sees
        assert "in training mode, the loss of the 3 samples" in late
