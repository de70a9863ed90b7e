"""Flops and bytes, against torch's own counter and by hand."""

import pytest
import torch
from graph_models import cases
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.facts import bytes_moved, flops

CASES = cases()


@pytest.mark.parametrize("name", ["perceptron", "two products", "resnet"])
def test_products_count_as_torch_counts_them(name):
    model, loss_fn, batch = CASES[name]
    captured = capture(model, loss_fn, batch)
    counted = sum(flops(n, captured) for n in captured.nodes if n.op.split(".")[1] in {"linear", "matmul", "conv2d"})
    with FlopCounterMode(display=False) as counter:
        loss_fn(model, batch)
    assert counted == counter.get_total_flops()


def node(captured, op):
    return next(n for n in captured.nodes if n.op.startswith(op))


def test_attention_lstm_and_the_rest():
    transformer, lstm = capture(*CASES["transformer"]), capture(*CASES["lstm"])
    # 2 batches of 2 heads, 8 queries and keys of width 8: scores and values, half of both as the mask is causal
    assert flops(node(transformer, "aten.scaled_dot"), transformer) == 2 * 2 * (2 * 8 * 8 * 8) * 2 // 2
    # 20 steps, two directions, four gates of 7 from 6 inputs and 7 states
    assert flops(node(lstm, "aten.lstm"), lstm) == 2 * 20 * 2 * (4 * 7) * (6 + 7)
    assert flops(node(transformer, "aten.add.Tensor"), transformer) == 2 * 8 * 16
    assert flops(node(transformer, "aten.reshape"), transformer) == 0


def test_bytes():
    captured = capture(*CASES["transformer"])
    linear = node(captured, "aten.linear")
    assert bytes_moved(linear, captured) == 8 * (2 * 8 * 16 + 48 * 16 + 48 + 2 * 8 * 48)
    assert bytes_moved(node(captured, "aten.embedding"), captured) == 8 * (2 * 8 + 2 * 2 * 8 * 16)
    assert bytes_moved(node(captured, "aten.transpose"), captured) == 0
    assert torch.float64.itemsize == 8


@pytest.mark.parametrize(
    ("dtype", "each"),
    [(torch.float32, 4 + 4), (torch.float64, 8 + 8), (torch.bfloat16, (2 + 4) + (4 + 4))],
)
def test_a_cross_entropy_writes_the_log_probabilities_of_all_classes_that_its_backward_reads(dtype, each):
    """Logits of half precision are cast to float32 before."""
    model, batch = torch.nn.Linear(4, 32, bias=False).to(dtype), torch.ones(8, 4, dtype=dtype)
    target = torch.zeros(8, dtype=torch.int64)
    captured = capture(model, lambda model, x: F.cross_entropy(model(x[0]), x[1], reduction="sum"), (batch, target))
    loss = node(captured, "aten.cross_entropy")
    assert bytes_moved(loss, captured) == 8 * 32 * each + 8 * 8 + dtype.itemsize
