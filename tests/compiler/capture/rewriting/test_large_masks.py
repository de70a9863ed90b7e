"""Masks too large to work out are known by what they are made of; a join of one tensor with nothing is that tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equals_eager import assert_equals_eager
from rows import brief
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.capture.rewriting import known, large_masks
from shardwright.compiler.capture.rewriting.masks import ATTENTION, mask_of
from shardwright.compiler.capture.step import captured_step

LENGTH = 12


class Attention(nn.Module):
    """Attention with the mask that ``mask(rows, columns)`` makes of positions (length, 1) and (1, length)."""

    def __init__(self, mask, cache=None):
        super().__init__()
        self.qkv, self.mask, self.cache = nn.Linear(4, 12), mask, cache

    def forward(self, x):
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        if self.cache is not None:
            key, value = (torch.cat([self.cache(x), part], -2) for part in (key, value))
        at = torch.arange(x.shape[1])
        mask = self.mask(at[:, None], at[None])
        return F.scaled_dot_product_attention(query, key, value, mask).square().sum()


def traced(model):
    return capture(model, lambda model, batch: model(batch), torch.randn(2, LENGTH, 4))


def attention_of(graph):
    captured = rewrite(graph)
    [attention] = [node for node in captured.nodes if ATTENTION.of(node.op)]
    return captured, attention


def shifted(i, j):
    return j <= i - 1


MASKS = {
    "less or equal": (lambda i, j: j <= i, "causal"),
    "greater or equal": (lambda i, j: i >= j, "causal"),
    "less than the next": (lambda i, j: j < i + 1, "causal"),
    "greater, moved": (lambda i, j: i + 5 > j + 4, "causal"),
    "joined and expanded": (lambda i, j: (i.new_ones((), dtype=torch.bool) & (j <= i)).expand(2, 1, -1, -1), "causal"),
    "joined with all": (lambda i, j: (j <= i) & (j < 100), "causal"),
    "all of two": (lambda i, j: (j <= 100 + i) & (i.new_ones(1, LENGTH, dtype=torch.bool)), "none"),
    "one short": (lambda i, j: j <= i + 1, "other"),
    "strictly": (lambda i, j: j < i, "other"),
    "a window": (lambda i, j: (j <= i) & (j > i - 3), "other"),
    "falling keys": (lambda i, j: LENGTH - j <= i, "other"),
    "of rows alone": (lambda i, j: (j <= i) & (i < 4), "other"),
    "not both": (lambda i, j: (j <= i) | (j < 2), "other"),
}


@pytest.mark.parametrize(
    "name",
    brief(MASKS, "less or equal", "greater, moved", "joined and expanded", "all of two", "one short", "a window"),
)
def test_a_mask_that_is_not_worked_out_is_known_by_its_parts(name, monkeypatch):
    mask, kind = MASKS[name]
    graph = traced(Attention(mask))
    monkeypatch.setattr(large_masks, "LARGE", 0)
    monkeypatch.setattr(known, "MOST_BYTES", LENGTH * 8)  # a row of numbers, and no mask
    _, attention = attention_of(graph)
    assert (mask_of(attention) is None) == (kind != "other")
    assert (attention.args[5:] == (True,)) == (kind == "causal")
    # Worked out, it is of the same kind.
    monkeypatch.undo()
    assert attention_of(graph)[1].args == attention.args


def test_a_join_with_an_empty_cache_is_left_out():
    model = Attention(lambda i, j: j <= i, lambda x: torch.zeros(0))
    captured, _ = attention_of(traced(model))
    assert not [node for node in captured.nodes if node.op == "aten.cat.default"]
    x = torch.randn(2, LENGTH, 4)
    assert_equals_eager(captured, model, lambda model, batch: model(batch), x)


@pytest.mark.parametrize(
    "cache",
    [lambda x: x.new_zeros(2, 1, 0, 4, dtype=torch.float64), lambda x: x.new_zeros(2, 1, 1, 4)],
    ids=["of another dtype", "of a row"],
)
def test_other_joins_stay(cache):
    def loss_fn(model, batch):
        return torch.cat([cache(batch), model(batch).unsqueeze(1)], -2).square().sum()

    captured = captured_step(nn.Linear(4, 4), loss_fn, torch.randn(2, LENGTH, 4), {})
    assert [node.op for node in captured.nodes].count("aten.cat.default") == 1
