"""What a script changes of split parameters between steps changes the whole, as on one device, or is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shardwright as sw
from ranks import run_ranks
from shardwright.mesh.dtensor import gathered


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def to_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def exchanged(model):
    """Two states that take turns, as of an average and what is trained."""
    weight = model[0].weight
    kept, weight.data = weight.data, torch.ones(16, 8)
    weight.data.mul_(3)
    weight.data, other = kept, weight.data
    weight.data.add_(other)


def columns(model):
    for weight in (model[0].weight, model[2].weight):
        weight[:, 2] = 0.5
        weight[1:3] = weight[0:2] * 2
        weight[weight.abs() < 0.1] = 0
        weight[3:5] += 1
        weight[[0, 5], 3] = torch.arange(2.0)
        weight.data[4] = torch.arange(float(weight.shape[1]))


def initialised(model):
    for weight in (model[0].weight, model[2].weight):
        nn.init.xavier_uniform_(weight)
        weight.add_(torch.randn_like(weight))
        weight.mul_(torch.bernoulli(torch.full_like(weight, 0.5)))
        weight.add_(torch.empty_like(weight).exponential_())
        weight.add_(torch.empty_like(weight).normal_(generator=torch.Generator().manual_seed(3)))
        weight.copy_(F.dropout(weight, 0.3))
    model[0].reset_parameters()


CHANGES = {
    "data": lambda model: setattr(model[2].weight, "data", model[2].weight.softmax(0).data),
    "vector": to_vector,
    "exchanged": exchanged,
    "columns": columns,
    "initialised": initialised,
}


def changed():
    """After each of the changes: parameters by plain PyTorch and split, and the losses of a next step."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    model, batch = net(), (torch.randn(12, 8), torch.randn(12, 6))
    plain = copy.deepcopy(model)
    split = {"0": ((1, 1), (2, 1), None), "2": ((1, 2), (1, 2), None)}
    parallel = sw.parallelize(model, loss_fn, batch, "semi-auto", batch="global", mesh="tp=2", pins=split)
    found = {}
    for name, change in CHANGES.items():
        for each in (plain, model):
            sw.set_seed(7)
            with torch.no_grad():
                change(each)
        same = [gathered(p).equal(q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        found[name] = same, parallel(batch).item(), loss_fn(plain, batch).item()
    return found, refused(parallel, batch)


def refused(parallel, batch):
    weight, found = parallel.module[0].weight, []

    def said(do):
        try:
            do()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    def row():
        with torch.no_grad():
            weight[3].mul_(2)
        parallel(batch)

    found.append(said(row))
    found.append(said(lambda: setattr(weight, "data", torch.ones(8, 8))))
    found.append(said(lambda: weight.__setitem__(0, 1.0)))
    with torch.no_grad():
        assert weight[3].norm() > 0  # what only reads a row is no change
        weight[:, 3].mul_(2)  # nor does this need the parts of several ranks
    found.append(said(lambda: parallel(batch)))
    return found


REFUSED = [
    r"what an index of a split tensor of shape \[16, 8\] gave was changed in place",
    r"a split tensor of float64\[16, 8\] on cpu is given data of float64\[8, 8\] on cpu",
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
    "^$",
]


def test_changes_of_split_parameters_are_those_of_whole_ones():
    for found, said in run_ranks(2, changed):
        for name, (same, loss, expected) in found.items():
            assert all(same), name
            assert loss == pytest.approx(expected, rel=1e-10), name
        for text, words in zip(said, REFUSED, strict=True):
            with pytest.raises(RuntimeError, match=words):
                raise RuntimeError(text)
