"""Tables whose gradients are sparse: the same numbers under any plan, dense where ranks sum or cut them."""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from whole import like_plain

pytestmark = pytest.mark.usefixtures("float64")


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(12, 4, sparse=True, mode="sum"), nn.Embedding(12, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.bag(x) + self.table(x[:, 0]))


def loss_fn(model, batch):
    return model(batch).square().mean()


def test_any_plan_gives_what_plain_pytorch_gives():
    torch.manual_seed(0)
    like_plain(Tables(), loss_fn, torch.randint(0, 12, (8, 3)), (1, 3))


def trained(pins, kind):
    """Losses of three steps under a plan that stores tables split, and of plain PyTorch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(0)
    model, batch = Tables(), torch.randint(0, 12, (8, 3))
    plain = copy.deepcopy(model)
    parallel = sw.parallelize(model, loss_fn, batch, "semi-auto", batch="global", mesh="d=2", pins=pins)
    found = []
    for each, call in ((plain, lambda: loss_fn(plain, batch)), (parallel, lambda: parallel(batch))):
        optimizer, losses = kind(list(each.parameters())[: 3 if kind is not torch.optim.SparseAdam else 2]), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = call()
            loss.backward()
            try:
                optimizer.step()
            except UsageError as error:
                return str(error)
            losses.append(loss.item())
        found.append(losses)
    return found


SPLIT = {"table": ((2, 1), (1,))}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_tables_that_are_stored_split_are_trained():
    for plain, split in run_ranks(2, trained, SPLIT, sgd):
        assert split == pytest.approx(plain, rel=1e-10)


def test_an_optimizer_of_sparse_gradients_alone_is_told_what_serves():
    for said in run_ranks(2, trained, SPLIT, torch.optim.SparseAdam):
        assert "use torch.optim.Adam, which also moves" in said
