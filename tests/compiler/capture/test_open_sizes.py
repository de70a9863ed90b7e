"""A capture with open sizes gives the graph that is captured for any batch, or says where it was decided by a size."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from graph_models import cases
from torch import nn

from rows import slow
from shardwright.common.trees import tree_flatten, tree_unflatten
from shardwright.compiler.capture.capture import Capturing, capture, flatten_batch
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.errors import CaptureError


class Reader(nn.Module):
    """Attention with positions, a causal mask and one of padding, and means over what is not masked."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.register_buffer("positions", torch.randn(1, 64, 8))
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids, lengths):
        _, length = ids.shape
        x = self.tokens(ids) * math.sqrt(8) + self.positions[:, :length]
        padding = torch.arange(length)[None] < lengths[:, None]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, causal & padding[:, None, None]).transpose(1, 2).flatten(2)
        return self.head(x + x.cumsum(1) / torch.arange(1, length + 1)[None, :, None] + x[:, -1:] * length**0.5)


def reading(model, batch):
    out = model(batch["ids"], batch["lengths"])
    each = F.cross_entropy(out.transpose(1, 2), batch["next"], reduction="none")
    mask = (torch.arange(each.shape[1])[None] < batch["lengths"][:, None]).to(each.dtype)
    smooth = F.mse_loss(out[:, 1:], out[:, :-1]) + out.mean()
    return (each * mask).sum() / mask.sum() + smooth, {"tokens": each.numel(), "out": out}


def sentences(rows, length):
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"ids": ids, "lengths": torch.ones(rows, dtype=torch.long), "next": ids}


def opened(model, loss_fn, batch, *open_dims):
    return Capturing(model, loss_fn, batch, open_dims=open_dims)


def assert_follow(model, loss_fn, open_capture, batches):
    for batch in batches:
        shapes = [tuple(tensor.shape) for tensor in flatten_batch(batch)]
        following, captured = open_capture.at(shapes), capture(model, loss_fn, batch)
        assert str(following) == str(captured)
        assert following.digest == captured.digest
        assert following.aux_spec == captured.aux_spec
        assert rewrite(following).digest == rewrite(captured).digest


def test_graphs_of_other_lengths_follow():
    model = Reader()
    open_capture = opened(model, reading, sentences(3, 6), [0, 1], [0], [0, 1])
    assert_follow(model, reading, open_capture, [sentences(4, 17)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "grouped attention", "lstm", "perceptron"])
def test_graphs_of_other_batches_follow(name):
    model, loss_fn, batch = cases()[name]
    open_capture = opened(model, loss_fn, batch, *[[0] for _ in flatten_batch(batch)])
    assert_follow(model, loss_fn, open_capture, [resized(batch, rows) for rows in (2, 3, 7)])


def resized(batch, rows):
    leaves, spec = tree_flatten(batch)
    return tree_unflatten([leaf[:1].expand(rows, *leaf.shape[1:]).clone() for _, leaf in leaves], spec)


def branch(model, batch):
    if batch.shape[1] > 16:
        batch = batch[:, :16]
    return model(batch).mean()


def loop(model, batch):
    return sum(model(batch[:, i]).sum() for i in range(batch.shape[1]))


def in_words(model, batch):
    factor = {"10": 2.0}.get(f"{batch.shape[1]}", 1.0)
    return model(batch).mean() * factor


def number(model, batch):
    return model(batch).mean() * math.sqrt(batch.shape[1])


def slope(model, batch):
    batch = batch.clone().requires_grad_()
    return torch.autograd.grad(model(batch).sum(), batch, create_graph=True)[0].mean() + model(batch).mean()


def test_sizes_stay_closed_where_the_loss_function_takes_a_gradient():
    with pytest.raises(CaptureError, match="sizes cannot be left open where the loss function takes a gradient"):
        opened(nn.Linear(4, 4), slope, torch.zeros(2, 8, 4), [0, 1])


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (branch, "only for batch.shape[1] <= 16, at test_open_sizes.py:{} in branch: if batch.shape[1] > 16:"),
        *slow(
            (loop, "only for batch.shape[1] == 8, at test_open_sizes.py:"),
            (number, "only for batch.shape[1] == 8, at test_open_sizes.py:"),
        ),
        (in_words, "only for batch.shape[1] == 8"),
    ],
)
def test_what_python_decides_by_a_size_is_noted(loss_fn, said):
    model = nn.Linear(4, 4)
    open_capture = opened(model, loss_fn, torch.zeros(2, 8, 4), [0, 1])
    assert_follow(model, loss_fn, open_capture, [torch.zeros(3, 8, 4)])
    said = re.escape(said.format(branch.__code__.co_firstlineno + 1))
    for length in (10, 20):
        if loss_fn is not branch or length > 16:
            with pytest.raises(CaptureError, match=said):
                open_capture.at([(2, length, 4)])


def test_sizes_that_are_not_open_must_be_the_same():
    open_capture = opened(nn.Linear(4, 4), branch, torch.zeros(2, 8, 4), [1])
    with pytest.raises(CaptureError, match="sizes differ that are not open"):
        open_capture.at([(3, 8, 4)])
    with pytest.raises(CaptureError, match="other numbers of dims"):
        open_capture.at([(2, 8, 4, 1)])
