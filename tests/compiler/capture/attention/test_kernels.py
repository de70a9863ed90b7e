"""Kernels of attention that a step chooses by sdpa_kernel compute it on ranks, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_mask, flex_attention

from equals_eager import assert_equals_eager
from rows import brief, slow
from shardwright.common.torch_private import attention_backends
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import CaptureError
from whole import PLANS, plain, run, same

MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION


class Chosen(nn.Module):
    """Attention once by the kernels that are chosen, and once by any."""

    def __init__(self, *backends, causal=False, dropout=0.0, **options):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.backends, self.options = list(backends), options
        self.arguments = {"is_causal": causal, "dropout_p": dropout}

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backends, **self.options):
            made = F.scaled_dot_product_attention(query, key, value, **self.arguments)
        return F.scaled_dot_product_attention(made, key, value)


def loss_fn(model, x):
    return model(x).square().sum()


def batch():
    return torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def seen(monkeypatch):
    """The kernels that are allowed in each call of attention."""
    found, called = [], F.scaled_dot_product_attention

    def noting(*args, **kwargs):
        found.append([backend.name for backend in attention_backends()])
        return called(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    return found


@pytest.mark.parametrize("causal", [*slow(False), True])
@pytest.mark.parametrize("how", brief(PLANS, "propagation"))
def test_they_compute_on_ranks(how, causal, seen):
    torch.manual_seed(0)
    model, x = Chosen(MATH, causal=causal).double(), batch()
    captured = captured_step(model, loss_fn, x, {})
    plan = make_plan(captured, PlanRequest(Mesh.of(d=2), **PLANS[how]))
    seen.clear()
    found = run(plan, model, x)
    assert seen == [["MATH"]] * 2  # the other attention of each rank is torch's own operator
    same(found, plain(model, loss_fn, x), 1e-12)
    assert len(attention_backends()) == 5


def test_the_first_ones_are_taken_first():
    model = Chosen(MATH, FLASH, set_priority=True).double()
    captured = captured_step(model, loss_fn, batch(), {})
    chosen = [dict(node.kwargs).get("backends") for node in captured.nodes if "attention" in node.op]
    assert chosen == [("MATH", "FLASH_ATTENTION"), None]
    assert_equals_eager(captured, model, loss_fn, batch())


def test_what_is_chosen_around_the_step_is_no_part_of_it():
    model = Chosen(MATH).double()
    with sdpa_kernel(MATH):
        captured = captured_step(model, loss_fn, batch(), {})
        assert attention_backends() == [MATH]
    assert [dict(node.kwargs).get("backends") for node in captured.nodes if "attention" in node.op] == [("MATH",), None]


def test_layers_of_torch_are_computed_by_them():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def chosen(model, x):
        with sdpa_kernel(MATH):
            return model(x, x, x, need_weights=False)[0].square().sum()

    captured = captured_step(layer, chosen, batch(), {})
    assert [dict(node.kwargs).get("backends") for node in captured.nodes if "dot_product" in node.op] == [("MATH",)]
    assert_equals_eager(captured, layer, chosen, batch())


class Flexible(nn.Module):
    """Attention by flex_attention, or as its refusal says."""

    def __init__(self, causal, flex):
        super().__init__()
        self.qkv, self.causal, self.flex = nn.Linear(8, 24), causal, flex

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.flex:
            return flex_attention(query, key, value, score_mod=self.causal)
        mask = create_mask(self.causal, None, None, x.shape[1], x.shape[1], device=x.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_flex_attention_is_refused_with_what_to_use():
    def causal_scores(score, b, h, i, j):
        return torch.where(i >= j, score, -float("inf"))

    said = r"(?s)flex_attention cannot be captured, at .*return flex_attention\(.*create_mask\(mask_mod"
    with pytest.raises(CaptureError, match=said):
        captured_step(Flexible(causal_scores, flex=True), loss_fn, batch().float(), {})
    model = Flexible(lambda b, h, i, j: i >= j, flex=False).double()
    captured = captured_step(model, loss_fn, batch(), {})
    assert not any(value.dtype == torch.bool for value in captured.values.values())
    assert_equals_eager(captured, model, loss_fn, batch())


def test_dropout_of_chosen_kernels_is_refused():
    with pytest.raises(CaptureError, match=r"(?s)chooses MATH for attention with dropout, at .*Leave sdpa_kernel out"):
        captured_step(Chosen(MATH, dropout=0.1), loss_fn, batch().float(), {})
