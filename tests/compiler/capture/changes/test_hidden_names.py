"""Tensors that composite operators give once more, without saying so, and changes in place of them."""

import re

import pytest
import torch
from torch import nn

from rows import slow
from shardwright.compiler.capture.capture import capture
from shardwright.errors import CaptureError
from whole import like_plain


class Keeps(nn.Module):
    """Changes what it keeps by one name and reads it by another."""

    def __init__(self, step):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.arange(9.0).view(3, 3))
        self.step = step

    def forward(self, x):
        return self.step(self, self.layer(x))


def read_later(model, x):
    other = torch.einsum("ij->ji", model.kept)
    model.kept.mul_(2)
    return x @ other


def changed_by_another_name(model, x):
    torch.einsum("ij->ji", model.kept).mul_(2)
    return x @ model.kept


def changed_by_the_other_name(model, x):
    other = torch.einsum("ij->ji", model.kept)
    model.kept.mul_(other)
    return x @ other


def of_what_was_computed(model, x):
    made = model.kept + 1
    other = torch.einsum("ij->ji", made).diagonal()
    made[0] = 2
    return x * other.sum()


def by_a_named_argument(model, x):
    other = torch.broadcast_tensors(model.kept, torch.ones(3, 3))[0]
    torch.add(model.kept, 1, out=model.kept)
    return x @ other


def in_a_list(model, x):
    other = torch.einsum("ij->ji", model.kept)
    torch._foreach_mul_([model.kept], 2)
    return x @ other


def by_statistics(model, x):
    other = torch.einsum("i->i", model.norm.running_mean)
    return model.norm(x) + other


def never_read_again(model, x):
    return torch.einsum("ij->ji", x + 1).mul_(2).mT @ model.kept


def of_a_copy(model, x):
    other = torch.einsum("ij->ji", model.kept).clone()
    model.kept.mul_(2)
    return x @ other


def captured(step):
    return capture(Keeps(step), lambda model, x: (model(x).sum(), model.kept), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (read_later, "mul_"),
        *slow((changed_by_the_other_name, "mul_"), (of_what_was_computed, "fill_")),
        (changed_by_another_name, "mul_"),
        (in_a_list, "_foreach_mul_"),
        (by_a_named_argument, "add.out"),
        (by_statistics, "batch_norm"),
    ],
)
def test_a_change_of_what_an_operator_gave_without_a_copy_is_refused(step, change):
    hides = "broadcast_tensors" if step is by_a_named_argument else "einsum"
    with pytest.raises(CaptureError) as refused:
        captured(step)
    changing, hiding = str(refused.value).splitlines()
    line = rf"test_hidden_names.py:\d+ in {step.__name__}: "
    assert re.match(rf"aten.{change}[.\w]* changes a tensor in place that has another name, at {line}", changing), (
        changing
    )
    assert re.match(rf"aten.{hides}.default gave .* of it, at {line}.*; write .clone\(\) behind that", hiding), hiding


@pytest.mark.parametrize("step", [never_read_again, of_a_copy])
def test_a_change_that_nothing_sees_is_not(step):
    captured(step)


def twice_in_a_list(model, x):
    torch._foreach_mul_([model.kept, model.kept], 2)
    return x @ model.kept


def by_what_was_changed(model, x):
    torch._foreach_copy_([model.kept[0], model.kept[1]], [model.kept[1], model.kept[0]])
    return x @ model.kept


def by_another_of_the_list(model, x):
    mean, var = model.norm.running_mean, model.norm.running_var
    torch._foreach_add_([mean, var], [var, mean])
    return x + mean + var


@pytest.mark.parametrize("step", [twice_in_a_list, *slow(by_what_was_changed), by_another_of_the_list])
def test_a_change_that_sees_another_one_of_the_same_operator_is_refused(step):
    """Graphs made each of what all were before: two tensors that torch makes equal changed places."""
    said = rf"_foreach_\w+.\w+ changes 2 tensors, and one of them .* at .*_names.py:\d+ in {step.__name__}"
    with pytest.raises(CaptureError, match=said):
        captured(step)


def pieces(model, x):
    torch._foreach_mul_([model.kept[0], model.kept[2]], [model.kept[0], 1 + model.kept[2]])
    return x @ model.kept


def test_pieces_of_a_tensor_that_lie_apart_are_changed_by_one_operator():
    like_plain(Keeps(pieces).double(), lambda m, b: m(b).square().mean(), torch.randn(6, 3).double(), sizes=(2,))
