"""Samples, tokens and the flops of a model, by which a utilisation is known."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.throughput import Throughput, model_flops, tokens_of

H100 = shipped("h100")
ROWS, LENGTH, WIDTH, WORDS = 8, 16, 32, 64


class Net(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if frozen:
            self.tokens.requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids.view(-1, LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


def loss_fn(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@cache
def captured():
    return captured_step(Net(), loss_fn, torch.zeros(ROWS, LENGTH, dtype=torch.long), {})


def test_the_flops_of_a_model_are_those_that_torch_counts():
    model, ids = Net(), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counted, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        loss_fn(model, ids).backward()
    assert model_flops(RuledGraph.of(captured())) == counted.get_total_flops()


def test_tokens_are_the_indices_that_a_table_is_read_by_and_a_batch_of_numbers_has_none():
    capture = captured()
    assert (capture.rows, tokens_of(capture)) == (ROWS, ROWS * LENGTH)
    images = captured_step(nn.Linear(4, 2), lambda m, x: m(x).sum(), torch.ones(6, 4), {})
    assert (images.rows, tokens_of(images)) == (6, 0)


def test_what_is_recomputed_counts_nothing_and_the_peak_is_the_data_sheets():
    capture = captured()
    request = PlanRequest(Mesh.of(dp=4), "data", hardware=H100)
    plan, again = (make_plan(capture, replace(request, recompute=names)) for names in ((), ("layers.*",)))
    found = Throughput.of(plan, H100, 1e-6)
    assert found.rows_s == pytest.approx(ROWS / 1e-6)
    assert found.tokens_s == pytest.approx(ROWS * LENGTH / 1e-6)
    assert found == Throughput.of(again, H100, 1e-6)
    assert found.utilisation == pytest.approx(model_flops(plan.graph) / (1e-6 * 4 * 67e12))
    assert H100.peak_in(torch.bfloat16) == 989e12
    assert shipped("v100").peak_in(torch.bfloat16) == 15.7e12  # which has no products in it
    assert shipped("cpu_host").peak_in(torch.float32) == shipped("cpu_host").flops_in(torch.float32)
