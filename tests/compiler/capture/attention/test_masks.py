"""Masks that are known at capture are left out of attention, and equal plain PyTorch; no other mask is."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equals_eager import assert_equals_eager
from rows import brief, slow
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.capture.rewriting.masks import ATTENTION, mask_of
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.row import named_arguments
from whole import PLANS, like_plain, run, same

BATCH, LENGTH, KEYS = 5, 7, 9


class Attention(nn.Module):
    """Attention of the first ``queries`` positions to all, with the mask that ``mask(x, queries)`` makes."""

    def __init__(self, mask, queries=KEYS, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
        self.mask, self.queries, self.dropout = mask, queries, dropout

    def forward(self, x, *given):
        heads = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        query = query[:, :, : self.queries]
        mask = self.mask(x, self.queries, *given)
        made = F.scaled_dot_product_attention(query, key, value, mask, self.dropout if self.training else 0.0)
        return self.out(made.transpose(1, 2).flatten(2))


def loss_fn(model, batch):
    return model(*batch).square().sum()


def positions(x, queries):
    return torch.arange(queries)[:, None], torch.arange(x.shape[1])[None]


def compared(x, queries):
    i, j = positions(x, queries)
    return j <= i


def of_library(x, queries):
    """As transformers makes it: for the whole batch, of indices and conditions that are joined."""
    i, j = torch.arange(queries) + 0, torch.arange(x.shape[1]) + 0
    i, j = i[None, None, :, None], j[None, None, None, :]
    mask = i.new_ones((), dtype=torch.bool) & (j <= i)
    return mask.expand(x.shape[0], -1, queries, x.shape[1])


def added(x, queries, number=-math.inf):
    return torch.triu(torch.full((queries, x.shape[1]), number, dtype=x.dtype), 1)


def chosen(x, queries):
    seen = torch.tril(torch.ones(x.shape[0], 1, queries, x.shape[1]))
    return torch.zeros(seen.shape, dtype=x.dtype).masked_fill(seen == 0, torch.finfo(x.dtype).min)


def window(x, queries):
    i, j = positions(x, queries)
    return (j <= i) & (j > i - 3)


def of_samples(x, queries):
    mask = compared(x, queries).repeat(x.shape[0], 1, 1, 1)
    return mask | (torch.arange(x.shape[0]) == 2)[:, None, None, None]


def slopes(x, queries):
    i, j = positions(x, queries)
    return (j - i).to(x.dtype).masked_fill(j > i, -math.inf)


def last_aligned(x, queries):
    return torch.ones(queries, x.shape[1], dtype=torch.bool).tril(x.shape[1] - queries)


def weak(x, queries):
    return added(x, queries, -2.0)


CASES = {
    "compared": (compared, KEYS, "causal"),
    "of a library": (of_library, KEYS, "causal"),
    "added": (added, KEYS, "causal"),
    "chosen, the smallest number": (chosen, KEYS, "causal"),
    "fewer queries, from the first on": (compared, LENGTH, "causal"),
    "all": (lambda x, queries: torch.ones(x.shape[0], 1, 1, x.shape[1], dtype=torch.bool), KEYS, "none"),
    "nothing added": (lambda x, queries: torch.zeros(queries, x.shape[1], dtype=x.dtype), KEYS, "none"),
    "fewer queries, up to the last": (last_aligned, LENGTH, "other"),
    "window": (window, KEYS, "other"),
    "one sample that sees all": (of_samples, KEYS, "other"),
    "slopes": (slopes, KEYS, "other"),
    "a small number": (weak, KEYS, "other"),
    "of the batch": (lambda x, queries: compared(x, queries) & (x[:, None, None, :, 0] < 1), KEYS, "other"),
}


def kinds(captured: Capture) -> list[str]:
    """The masks of all attentions of a graph."""
    found = []
    for node in captured.nodes:
        if ATTENTION.of(node.op):
            causal = named_arguments(node.op, node.args, dict(node.kwargs))["is_causal"]
            found.append("other" if mask_of(node) else "causal" if causal else "none")
    return found


@pytest.mark.parametrize(
    "case",
    brief(
        CASES, "compared", "of a library", "added", "chosen, the smallest number", "all",
        "fewer queries, up to the last", "a small number", "of the batch",
    ),
)  # fmt: skip
def test_known_masks_are_left_out_and_no_others(case):
    mask, queries, expected = CASES[case]
    torch.manual_seed(0)
    model, batch = Attention(mask, queries).double(), (torch.randn(BATCH, KEYS, 8, dtype=torch.float64),)
    captured = captured_step(model, loss_fn, batch, {})
    assert kinds(captured) == [expected]
    assert expected == "other" or not any(value.dtype == torch.bool for value in captured.values.values())
    assert_equals_eager(captured, model, loss_fn, batch)


@pytest.mark.parametrize("case", ["of a library", *slow("fewer queries, from the first on", "window")])
def test_ranks_equal_one_device(case):
    mask, queries, _ = CASES[case]
    torch.manual_seed(0)
    model, batch = Attention(mask, queries).double(), (torch.randn(BATCH, KEYS, 8, dtype=torch.float64),)
    like_plain(model, loss_fn, batch, sizes=(3,), tolerance=1e-12)


def test_dropout_is_drawn_by_position_where_the_mask_is_left_out():
    torch.manual_seed(0)
    model = Attention(compared, LENGTH, dropout=0.4).double()
    batch = (torch.randn(BATCH, KEYS, 8, dtype=torch.float64),)
    captured = captured_step(model, loss_fn, batch, {})
    assert kinds(captured) == ["causal"]
    alone = run(make_plan(captured, PlanRequest(Mesh.of(d=1))), model, batch)
    for how in PLANS.values():
        same(run(make_plan(captured, PlanRequest(Mesh.of(d=3), **how)), model, batch), alone, 1e-12)


class Padded(Attention):
    """Attention whose mask looks up the padding of a batch by positions, as transformers does."""

    def __init__(self):
        super().__init__(self._mask)

    @staticmethod
    def _mask(x, queries, padding):
        i, j = torch.arange(queries)[None, None, :, None], torch.arange(x.shape[1])[None, None, None, :]
        rows = torch.arange(x.shape[0])[:, None, None, None]
        return (j <= i) & padding.to(torch.bool)[rows, j]


def padded(size=BATCH):
    padding = (torch.arange(KEYS) < torch.tensor([9, 4, 7, 9, 2, 8])[:size, None]).long()
    return torch.randn(size, KEYS, 8, dtype=torch.float64), padding


@pytest.mark.parametrize("size", [*slow(1), 6])
def test_a_lookup_by_all_positions_is_a_view(size):
    model = Padded().double()
    captured = captured_step(model, loss_fn, padded(size), {})
    assert not any(node.op == "aten.index.Tensor" for node in captured.nodes)
    assert_equals_eager(captured, model, loss_fn, padded(size))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (lambda n: torch.arange(n - 1, -1, -1), lambda n: torch.arange(n)),
        *slow((lambda n: torch.arange(n) // 2, lambda n: torch.arange(n))),
        (lambda n: torch.arange(1, n), lambda n: torch.arange(n)),
        (lambda n: torch.arange(n), None),
    ],
)
def test_other_lookups_stay(rows, columns):
    def look_up(model, batch):
        x = model(batch)
        picked = x[rows(6)] if columns is None else x[rows(6)[:, None], columns(4)]
        return (picked * torch.arange(4)).square().sum()

    model, batch = nn.Linear(3, 4).double(), torch.randn(6, 3, dtype=torch.float64)
    captured = captured_step(model, look_up, batch, {})
    assert any(node.op == "aten.index.Tensor" for node in captured.nodes)
    assert_equals_eager(captured, model, look_up, batch)


def test_a_transposed_lookup_equals_eager():
    def look_up(model, batch):
        return (model(batch)[torch.arange(6)[None, :], torch.arange(4)[:, None]] * torch.arange(6)).square().sum()

    model, batch = nn.Linear(3, 4).double(), torch.randn(6, 3, dtype=torch.float64)
    assert_equals_eager(captured_step(model, look_up, batch, {}), model, look_up, batch)


@cache
def captured_padding():
    """A model with a mask that stays, its batch, its graph, and what one device gives."""
    torch.manual_seed(0)
    model, batch = Padded().double(), padded(6)
    captured = captured_step(model, loss_fn, batch, {})
    return model, batch, captured, run(make_plan(captured, PlanRequest(Mesh.of(d=1))), model, batch)


@pytest.mark.parametrize("how", brief(PLANS, "propagation"))
def test_a_mask_that_stays_is_built_of_the_part_that_a_rank_needs(how):
    model, batch, captured, alone = captured_padding()
    plan = make_plan(captured, PlanRequest(Mesh.of(d=3), **PLANS[how]))
    (mask,) = (name for node in captured.nodes if ATTENTION.of(node.op) and (name := mask_of(node)))
    maker = next(node for node in captured.nodes if mask in node.results)
    layout = plan.graph.rules[maker.name].result_layout(0, plan.strategies[maker.name], plan.mesh)
    whole = captured.values[mask].shape
    assert math.prod(layout.local_shape(whole, plan.mesh, 0)) == math.prod(whole) // 3
    assert not any(transfer.steps for transfer in plan.transfers if transfer.value == mask)
    same(run(plan, model, batch), alone, 1e-12)


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **more, sliding_window=4))
    numbers = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **numbers, n_positions=32))


def language_loss(model, batch):
    return model(**batch).loss


def tokens(rows=6, length=12, **more):
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **more}


@pytest.mark.parametrize("name", ["llama", *slow("gpt2", "mistral")])
def test_padding_that_a_batch_does_not_have_leaves_no_mask(name):
    torch.manual_seed(0)
    model, batch = transformers_model(name).double().eval(), tokens(attention_mask=torch.ones(6, 12, dtype=torch.int64))
    place = list(batch).index("attention_mask")
    traced = capture(model, language_loss, batch, "fine-tuning")
    unknown = rewrite(traced)
    assert kinds(unknown) == ["other"]
    assert unknown.conditions == (frozenset() if name == "mistral" else {(place, 1)})
    known = rewrite(traced, filled={(0, 1), (place, 1), (place, 0)})
    assert kinds(known) == ["other" if name == "mistral" else "causal"]
    assert (known.conditions, known.filled) == (unknown.conditions, unknown.conditions)
    assert_equals_eager(known, model, language_loss, batch, tolerance=1e-6)


def test_masks_that_say_what_is_hidden_hide_nothing_where_they_are_0():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    batch = torch.randn(4, 6, 8, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.bool)

    def encoded(model, batch):
        return model(batch[0], src_key_padding_mask=batch[1]).square().sum()

    traced = capture(layer, encoded, batch)
    assert rewrite(traced).conditions == {(1, 0)}
    known = rewrite(traced, filled={(1, 0)})
    assert kinds(known) == ["none"]
    assert_equals_eager(known, layer, encoded, batch)
    assert kinds(rewrite(traced, filled={(1, 1)})) == ["other"]


def test_tokens_are_not_looked_at_for_what_is_padding_among_them():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.attention = Attention(lambda x, queries, ids: (ids != 3)[:, None, None, :])

        def forward(self, ids, others):
            return self.attention(self.embedding(ids.view(-1, KEYS)), ids) + self.attention(self.embedding(ids), others)

    ids = torch.randint(0, 10, (2, 3, KEYS))
    captured = captured_step(Tokens().double(), lambda model, batch: model(*batch).square().sum(), (*ids,), {})
    assert kinds(captured) == ["other"] * 2
    assert captured.conditions == {(1, 1)}


def test_a_mask_of_two_inputs_is_left_out_where_both_are_known():
    class Twice(Attention):
        def __init__(self):
            super().__init__(lambda x, queries, rows, columns: rows[:, None, :, None].bool() & columns[:, None, None])

    model = Twice().double()
    batch = (torch.randn(3, KEYS, 8, dtype=torch.float64), *torch.ones(2, 3, KEYS, dtype=torch.bool))
    traced = capture(model, loss_fn, batch)
    for filled, expected in (({(1, 1)}, "other"), ({(1, 1), (2, 1)}, "none"), ({(1, 0), (2, 1)}, "other")):
        captured = rewrite(traced, filled=filled)
        assert kinds(captured) == [expected]
        assert captured.conditions == {(1, 1), (2, 1)}
        assert_equals_eager(captured, model, loss_fn, batch)
