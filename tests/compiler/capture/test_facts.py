"""Flops and bytes, against torch's own counter and by hand."""

import pytest
import torch
from graph_models import cases
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
