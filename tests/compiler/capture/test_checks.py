"""Branches that only raise are checks of the program, which raises the model's own error; others are refused."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from ranks import run_ranks
from rows import brief
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.tracing.values.checks import Check
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import CaptureError
from whole import plan_of, run

LIMIT = 4


class Unusual(Exception):
    def __init__(self, text, code=3):
        super().__init__(text)
        self.code = code


class Checked(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.layer, self.check = nn.Linear(3, 3), check

    def forward(self, x, labels):
        y = self.layer(x)
        self.check(self, x, y, labels)
        return y


def loss_of(model, batch):
    return model(*batch).square().mean()


def largest_label(m, x, y, labels):
    if labels.max() >= LIMIT:
        raise ValueError(f"expected labels below {LIMIT}, got {labels.max()}")


def by_item(m, x, y, labels):
    if m.training and labels.max().item() >= LIMIT:
        raise ValueError("too large", labels.shape)


def not_and(m, x, y, labels):
    if not (labels.min() >= 0 and labels.max() < LIMIT):
        kind = "labels"
        raise IndexError(kind)


def either(m, x, y, labels):
    if torch.isnan(x).any() or bool(labels.max() >= LIMIT) or x.isinf().any().item():
        raise Unusual("bad batch")


def asserted(m, x, y, labels):
    assert (labels < LIMIT).all(), f"labels of {len(labels)} samples"


def asserted_by_torch(m, x, y, labels):
    torch._assert((labels < LIMIT).all(), "by torch")


def asserted_later(m, x, y, labels):
    torch._assert_async((labels < LIMIT).all(), "by the device")


def otherwise(m, x, y, labels):
    if torch.allclose(labels.clamp(max=LIMIT - 1).to(x.dtype), labels.to(x.dtype)):
        y = y * 2
    else:
        raise RuntimeError("beyond")


def in_a_call(m, x, y, labels):
    with torch.no_grad():
        try:
            largest_label(m, x, y, labels)
        finally:
            x = x + 1


def mean_of_floats(m, x, y, labels):
    assert labels.double().max() < LIMIT


CHECKS = {
    largest_label: (ValueError, "expected labels below 4, got {labels.max()}"),
    by_item: (ValueError, "ValueError('too large', labels.shape)"),
    not_and: (IndexError, "labels"),
    either: (Unusual, "bad batch"),
    asserted: (AssertionError, "labels of 6 samples"),
    asserted_by_torch: (AssertionError, "by torch"),
    asserted_later: (RuntimeError, "by the device"),
    otherwise: (RuntimeError, "beyond"),
    in_a_call: (ValueError, "expected labels below 4, got {labels.max()}"),
    mean_of_floats: (AssertionError, ""),
}


def batch_of(largest=LIMIT - 1):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, largest])


def checked(mode):
    sw.init()
    found = []
    for check in CHECKS:
        torch.manual_seed(0)
        model = Checked(check)
        plain = [loss_of(model, batch_of()).item()]
        try:
            loss_of(model, batch_of(LIMIT))
        except Exception as error:
            plain.append(type(error))
        parallel = sw.parallelize(model, loss_of, batch_of(), mode, batch="global")
        assert parallel.plan is not None
        ours = [parallel(batch_of()).item()]
        try:
            parallel(batch_of(LIMIT))
        except Exception as error:
            ours += [type(error), f"{error}", error.__notes__]
        after = parallel(batch_of()).item()
        collectives = [c.kind for _, _, c in parallel.executions()[0].program.collectives()]
        found.append((plain, ours, after, collectives))
    return found


@pytest.mark.parametrize(("ranks", "mode"), [pytest.param(1, "auto", marks=pytest.mark.slow), (2, "data")])
def test_a_branch_that_only_raises_raises_the_models_own_error_on_all_ranks(ranks, mode):
    for of_rank in run_ranks(ranks, checked, mode):
        for (check, (error, text)), (plain, ours, after, collectives) in zip(CHECKS.items(), of_rank, strict=True):
            assert ours[0] == pytest.approx(plain[0], rel=1e-6)
            assert after == ours[0]
            assert (plain[1], ours[1], ours[2]) == (error, error, text), check
            assert ours[3][0].startswith(f"raised by the model, at {__file__}:")
            if ranks > 1 and check not in (otherwise, either):
                # what a check counts is summed with the loss, and nothing is gathered for it
                assert collectives.count("all_reduce") == len(collectives)


def caught(m, x, y, labels):
    try:
        largest_label(m, x, y, labels)
    except ValueError:
        y.mul_(2)


def both_decide(m, x, y, labels):
    if labels.max() >= LIMIT and x.isnan().any():
        raise ValueError


def does_something(m, x, y, labels):
    if labels.max() >= LIMIT:
        y = y * 2
    elif labels.min() < 0:
        raise ValueError


def returns_before(m, x, y, labels):
    if labels.max() >= LIMIT:
        if x.ndim > 2:
            return
        raise ValueError


def suppressed(m, x, y, labels):
    with pytest.raises(ValueError):
        largest_label(m, x, y, labels)


def loops(m, x, y, labels):
    while labels.max() >= LIMIT:
        raise ValueError


def an_expression(m, x, y, labels):
    return y if labels.max() < LIMIT else y * 2


def a_number(m, x, y, labels):
    if range(labels.max().item()):
        raise ValueError


UNPROVEN = [caught, both_decide, does_something, returns_before, suppressed, loops, an_expression, a_number]


@pytest.mark.parametrize(
    "check", brief(UNPROVEN, caught, both_decide, does_something, returns_before, suppressed, an_expression)
)
def test_what_may_do_something_else_is_refused(check):
    with pytest.raises(CaptureError, match=r"(depends on|needs) the value of a tensor"):
        capture(Checked(check), loss_of, batch_of())


def test_an_error_that_cannot_be_made_again_quotes_the_line():
    error = Check("nowhere:Lost", "bad", "net.py:3 in forward: raise Lost('bad')").raised()
    assert f"{error}" == "the model raises Lost: bad"
    assert error.__notes__ == ["raised by the model, at net.py:3 in forward: raise Lost('bad')"]


def as_a_list(x):
    return x.square().sum(torch.arange(1, len(x.shape)).tolist()).mean()


def of_shapes(x):
    sizes = torch.tensor([list(x.shape)]).repeat(2, 1)
    starts = torch.cat([sizes.new_zeros((1,)), sizes.prod(1).cumsum(0)[:-1]])
    return x.mean() * int(starts[1]) + float(torch.ones_like(x).sum()) + sum(i.item() for i in starts.unbind())


def of_a_branch(x):
    grid = torch.linspace(0, 1, x.shape[0])
    grid[0] = 2.0 if bool((grid >= 0).all()) else 3.0
    return x.mean() * grid.sum() * len(torch.eye(3).numpy())


@pytest.mark.parametrize("of", [as_a_list, of_shapes, of_a_branch])
def test_numbers_of_constants_and_shapes_are_known(of):
    def loss(model, x):
        return of(model(x))

    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    with torch.no_grad():
        expected = loss(model, x)
    found = run(plan_of(model, loss, x, Mesh(()), "single"), model, x)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def written(x):
    steps = torch.zeros(3)
    steps[0] = x.sum().detach()
    return x.mean() * steps[0].item()


def drawn(x):
    return x.mean() * torch.rand(()).item()


def of_the_model(x):
    return x.mean() * F.relu(torch.ones(3) * x.detach().mean()).sum().item()


@pytest.mark.parametrize("of", [written, drawn, of_the_model])
def test_numbers_that_follow_from_something_else_are_refused(of):
    with pytest.raises(CaptureError, match=re.escape("item() needs the value of a tensor")):
        capture(nn.Linear(3, 3), lambda m, x: of(m(x)), torch.randn(4, 3))
