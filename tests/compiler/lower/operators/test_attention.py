"""Attention with dropout, block by block, is what it was when the scores of all queries were made at once."""

import math

import pytest
import torch

from shardwright.compiler.lower.operators import attention
from shardwright.compiler.lower.operators.draws import dropout
from shardwright.compiler.lower.operators.kernels import attention_with_dropout
from whole import Watching

HEADS = (2, 4, 11, 4)
SCORES = (4, 8, 22, 13)  # of all ranks
AT = (2, 4, 11, 0)


def at_once(query, key, value, mask, p, is_causal, scale, random_key, shape, offsets):
    """The same with all scores in memory."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(offsets[-2])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    probabilities = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return dropout(probabilities, p, random_key, shape, offsets) @ value


def seen_by_some():
    mask = torch.rand(2, 1, 11, 13) < 0.5
    mask[:, :, 5] = False  # a query that sees no key
    return mask


CASES = {
    "plain": (4, None, False),
    "causal": (4, None, True),
    "groups": (2, None, False),
    "causal groups": (1, None, True),
    "a mask of all": (4, lambda: torch.rand(13) < 0.9, False),
    "a mask with heads": (2, lambda: torch.rand(4, 11, 13) < 0.9, False),
    "a mask and a blind query": (4, seen_by_some, False),
    "learned positions": (2, lambda: torch.randn(1, 4, 11, 13, dtype=torch.float64, requires_grad=True), False),
}


@pytest.mark.parametrize("most", [40, 1 << 30])
@pytest.mark.parametrize("case", CASES)
def test_blocks_do_not_show(case, most, monkeypatch):
    monkeypatch.setattr(attention, "_MOST_CPU", most)
    monkeypatch.setattr(attention, "_FEWEST_ROWS", 4)
    heads, mask, causal = CASES[case]
    torch.manual_seed(0)
    given = [torch.randn(HEADS, dtype=torch.float64), *torch.randn(2, 2, heads, 13, 4, dtype=torch.float64)]
    mask = mask and mask()
    found = []
    for function in (attention_with_dropout, at_once):
        leaves = [*(x.clone().requires_grad_() for x in given), mask]
        result = function(*leaves, 0.3, causal, None, 7, SCORES, AT)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found.append([result.detach(), *torch.autograd.grad(result.square().sum(), wanted)])
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_it_is_right_where_a_backward_is_called_within_autocast():
    x = torch.randn(2, 2, 8, 4, dtype=torch.float64, requires_grad=True)
    result = attention_with_dropout(x, x, x, None, 0.2, False, None, 1, (2, 2, 8, 8), (0, 0, 0, 0)).sum()
    expected = torch.autograd.grad(result, x, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(result, x)[0], expected)


def test_no_device_holds_all_scores(monkeypatch):
    monkeypatch.setattr(attention, "_MOST_CPU", 1 << 13)
    x = torch.randn(1, 4, 256, 4, requires_grad=True)
    scores = (1, 4, 256, 256)

    with Watching() as watch:
        attention_with_dropout(x, x, x, None, 0.1, False, None, 3, scores, (0, 0, 0, 0)).sum().backward()
    assert watch.peak < math.prod(scores) * 4 / 2


@pytest.mark.parametrize(
    ("leading", "queries", "blocks"), [((8, 12), 256, 1), ((4, 12), 1024, 6), ((1, 12), 1024, 2), ((2, 2), 4096, 8)]
)
def test_small_causal_attention_on_a_gpu_is_one_block(leading, queries, blocks):
    scores = attention._Scores(0.1, True, 1.0, 0, (*leading, queries, queries), (0,) * 4)
    limits = attention._MOST_GPU, attention._FEWEST_GPU
    found = list(scores.blocks(leading, queries, queries, *limits))
    assert len(found) == blocks
    seen = torch.zeros(*leading, queries, dtype=torch.int8)
    for at in found:
        seen[at] += 1
    assert bool((seen == 1).all())
