"""Means as sums over a global count: exact, and no mean is left."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from graph_models import Perceptron
from torch import nn

from equals_eager import assert_equals_eager
from rows import slow
from shardwright.compiler.capture.capture import capture, flatten_batch
from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.compiler.capture.ir import Pin
from shardwright.compiler.capture.operators import resolve
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.errors import CaptureError

WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


def rewritten(loss, target, model=None):
    model = model or Perceptron().double()
    batch = (torch.randn(6, 8, dtype=torch.float64), target)

    def loss_fn(model, batch):
        return loss(model(batch[0]), batch[1])

    captured = rewrite(capture(model, loss_fn, batch))
    assert_equals_eager(captured, model, loss_fn, batch)
    return [node.op for node in captured.nodes]


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
        lambda x, y: F.huber_loss(x, y, delta=0.3),
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=WEIGHTS),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=WEIGHTS, pos_weight=WEIGHTS),
        pytest.param(
            lambda x, y: F.kl_div(x.log_softmax(-1), y, log_target=False),
            marks=pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
        ),
        lambda x, y: F.soft_margin_loss(x, y),
        lambda x, y: F.mse_loss(x, y[:1].expand(6, 4)),
        lambda x, y: (x - y).square().mean(0).sum(),
        lambda x, y: (x - y).square().mean(dim=(0, -1), keepdim=True).sum(),
        lambda x, y: (x * y).float().mean(dtype=torch.float64),
        lambda x, y: F.mse_loss(x, y, reduction="none").mean(),
    ],
)
def test_means_become_sums_and_equal_eager(loss):
    ops = rewritten(loss, torch.rand(6, 4, dtype=torch.float64))
    assert not any(op.startswith("aten.mean") for op in ops)
    assert "aten.div.Tensor" in ops


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_other_reductions_are_kept(reduction):
    ops = rewritten(lambda x, y: F.mse_loss(x, y, reduction=reduction).sum(), torch.rand(6, 4, dtype=torch.float64))
    assert "aten.div.Tensor" not in ops


@pytest.mark.parametrize(
    ("label_smoothing", "weight", "ignore_index"),
    [(0.1, WEIGHTS, 1), (0.0, None, -100), *slow((0.1, None, -100), (0.0, WEIGHTS, -100), (0.0, None, 1))],
)
def test_cross_entropy_of_class_indices(label_smoothing, weight, ignore_index):
    def loss(x, y):
        return F.cross_entropy(x, y, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)

    ops = rewritten(loss, torch.tensor([0, 1, 2, 3, 1, 0]))
    assert ops[-3:] == ["shardwright.cross_entropy_sum", "shardwright.cross_entropy_count", "aten.div.Tensor"]


@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_cross_entropy_of_probabilities(weight):
    target = torch.rand(6, 4, dtype=torch.float64).softmax(-1)
    ops = rewritten(lambda x, y: F.cross_entropy(x, y, weight, label_smoothing=0.1), target)
    assert ops[-2:] == ["shardwright.cross_entropy_sum", "aten.div.Tensor"]


@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_negative_log_likelihood(weight):
    ops = rewritten(
        lambda x, y: F.nll_loss(x.log_softmax(-1), y, weight, ignore_index=1), torch.tensor([0, 1, 2, 3, 1, 0])
    )
    assert ops[-2:] == ["shardwright.cross_entropy_count", "aten.div.Tensor"]


def test_cross_entropy_with_positions():
    rewritten(
        lambda x, y: F.cross_entropy(x.view(3, 2, 4).transpose(1, 2), y, WEIGHTS, ignore_index=2),
        torch.tensor([[0, 1], [2, 3], [1, 2]]),
    )


def test_cross_entropy_of_one_sample_is_left_whole():
    assert (
        rewritten(lambda x, y: F.cross_entropy(x[0], y[0]), torch.tensor([2, 1]))[-1]
        == "aten.cross_entropy_loss.default"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x):
            return x * self.scale

    x = torch.full((300, 300), 3.0, dtype=dtype)  # a sum in float16 would be infinite
    for loss in (lambda m, b: m(b).mean(), lambda m, b: F.mse_loss(m(b), b * 0)):
        model = Scale()
        captured = rewrite(capture(model, loss, x))
        values = evaluate(captured, dict(model.named_parameters()), {}, flatten_batch(x))
        assert values[captured.loss].dtype == dtype
        assert values[captured.loss] == loss(model, x)


def test_a_rewrite_that_goes_wrong_is_found():
    captured = capture(Perceptron(), lambda m, b: m(b).sum(), torch.ones(2, 8))
    first, second, *rest = captured.nodes
    with pytest.raises(CaptureError, match=r"relu = aten\.relu\.default reads linear before it is made"):
        check(dataclasses.replace(captured, nodes=(second, first, *rest)))
    with pytest.raises(CaptureError, match="makes linear a second time"):
        check(dataclasses.replace(captured, nodes=(first, *captured.nodes)))
    with pytest.raises(CaptureError, match="the output nowhere is made by no operator"):
        check(dataclasses.replace(captured, loss="nowhere"))
    with pytest.raises(CaptureError, match=r"has 1 operands, and its arguments name \[\]"):
        check(dataclasses.replace(captured, nodes=(first, dataclasses.replace(second, args=()), *rest)))
    with pytest.raises(CaptureError, match="two operators are called linear"):
        check(dataclasses.replace(captured, nodes=(first, dataclasses.replace(second, name="linear"), *rest)))
    with pytest.raises(CaptureError, match="linear, which is not a result of the graph"):
        check(dataclasses.replace(captured, values={k: v for k, v in captured.values.items() if k != "linear"}))
    with pytest.raises(CaptureError, match="is pinned with another number of tensors: pinned at here"):
        check(dataclasses.replace(captured, nodes=(dataclasses.replace(first, pin=Pin((), (), "here")), second, *rest)))
    with pytest.raises(CaptureError, match="linear is changed, and is not a buffer"):
        check(dataclasses.replace(captured, mutations={"linear": captured.loss}))
    with pytest.raises(CaptureError, match=r"'aten\.nothing' is no operator; torch's are written like"):
        resolve("aten.nothing")
