"""Graphs are made functional node by node: to the last name as by a second trace, which is left out."""

import pytest
import torch
import torch.nn.functional as F
from graph_models import cases
from torch import nn

from side_by_side import same_graph

CASES = cases()


@pytest.mark.parametrize("name", ["perceptron", "resnet", "transformer", "grouped attention"])
def test_models_need_no_second_trace(name):
    assert same_graph(*CASES[name])


def test_a_model_in_evaluation_needs_none():
    assert same_graph(*CASES["resnet"], kind="evaluation")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        self.seen += 1
        self.seen.mul_(2)
        self.last.copy_(x.detach().mean(0))
        return self.norm(self.layer(x))


def in_place(model, x):
    y = F.dropout(model(x), 0.2)
    y += x  # what dropout gives is new
    y.relu_().mul_(3)
    return (y.reshape(-1, 2, 3).flatten(1) - model.last).square().mean() / model.seen


def in_parts(model, x):
    y = F.dropout(model(x), 0.2, inplace=True)
    y[:, 0].mul_(2)
    shifted = torch.zeros(4, 6)
    shifted[:, 1:] = y[:, :-1].clone()
    shifted[:, 0] = torch.tensor(2.0)
    return (y - shifted).square().mean()


def viewed_before_it_is_used(model, x):
    y = model(x)
    y.mul_(2)
    part = y.reshape(-1)
    return part.sum() + x.reshape(-1).sum() + part.mean()


def viewed_in_another_order(model, x):
    y = model.layer(x)
    y.mul_(2)
    first, last = y[:2], y[2:]
    other = model.norm(x)
    return torch.cat([other, last, first]).square().mean() + first.mean()


@pytest.mark.parametrize("loss_fn", [in_place, in_parts, viewed_before_it_is_used, viewed_in_another_order])
def test_changes_in_place_need_none(loss_fn):
    assert same_graph(Net(), loss_fn, torch.ones(4, 6))


def in_part_of_a_part(model, x):
    y = model(x)
    y[:, 1:][:, 0].mul_(2)
    return y.sum()


def seen_by_a_view(model, x):
    y = x * 2
    part = y[0]
    y.mul_(2)
    return model(y).sum() + part.sum()


def viewed_twice_before_it_is_used(model, x):
    y = model(x)
    y.mul_(2)
    part = y.reshape(-1)
    other = x.reshape(-1).sum()
    return part.view(3, -1).sum() + other + part.mean()


def viewed_and_viewed_again(model, x):
    y = model(x)
    y.mul_(2)
    rows = y.reshape(2, -1)
    other = x.exp()
    return torch.cat([rows, y[:2].view(1, -1), other.reshape(2, -1)]).sum()


def to_another_dtype(model, x):
    y = x * 2
    y.gt_(0)
    return model(y).sum()


UNCERTAIN = [
    in_part_of_a_part,
    seen_by_a_view,
    viewed_twice_before_it_is_used,
    viewed_and_viewed_again,
    to_another_dtype,
]


@pytest.mark.parametrize("loss_fn", UNCERTAIN)
def test_what_is_not_certain_is_traced_again(loss_fn):
    assert not same_graph(Net(), loss_fn, torch.ones(4, 6))
