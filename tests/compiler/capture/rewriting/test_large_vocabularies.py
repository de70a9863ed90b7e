"""Losses over large vocabularies hold logits in float32 of some rows alone, with the numbers of plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rows import slow
from shardwright.compiler.capture import operators
from shardwright.compiler.capture.operators import cross_entropy_sum
from shardwright.compiler.capture.rewriting import logits
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from whole import plain, plan_of, run, same


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor in float32 has that is made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(x)]
        self.numbers = max([self.numbers, *(x.numel() for x in tensors if x.dtype == torch.float32)])
        return result


@pytest.mark.networks
def test_a_llama_makes_no_whole_logits_in_float32():
    transformers = pytest.importorskip("transformers")
    words, rows = logits.LARGE, 64
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=words, **sizes, use_cache=False))

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=batch, labels=batch).loss

    batch = torch.randint(words, (2, rows // 2))
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=1), "data")
    whole = [value for value in plan.capture.values.values() if value.shape[-1:] == (words,)]
    assert {value.dtype for value in whole} == {torch.bfloat16}
    with Largest() as ours:
        found = run(plan, model, batch)
    with Largest() as theirs:
        expected = plain(model, loss_fn, batch)
    assert ours.numbers < rows * words <= theirs.numbers
    for name in ("loss", "gradient of lm_head.weight"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", operators.HALF)
@pytest.mark.parametrize(
    "settings", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}, {"weight": torch.linspace(0.1, 2, 5)}]
)
def test_rows_at_a_time_give_the_gradient_of_all_at_once_to_the_bit(monkeypatch, dtype, settings):
    monkeypatch.setattr(operators, "_MOST_CPU", 5 * 3 * 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, 3, generator=generator).mul(4).to(dtype)
    target = torch.randint(5, (7, 3), generator=generator)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Largest() as made:
        found = cross_entropy_sum(ours, target, **settings)
        (found / 3).backward()
    assert made.numbers == 5 * 3 * 2, "two rows of seven"
    expected = F.cross_entropy(theirs.float(), target, reduction="sum", **settings)
    (expected / 3).backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(ours.grad, theirs.grad)


def network(reduction="mean", and_logits=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12, bias=False))

    def loss_fn(model, batch):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            made = model(x).float()
            loss = F.cross_entropy(made.flatten(0, 1), y.flatten(), reduction=reduction)
        return (loss, made) if and_logits else loss

    return model, loss_fn, (torch.randn(4, 3, 6), torch.randint(12, (4, 3)))


def dtypes_of_losses(capture):
    losses = [node for node in capture.nodes if "cross_entropy" in node.op and "count" not in node.op]
    return [capture.values[node.operands[0]].dtype for node in losses]


@pytest.mark.parametrize(
    ("classes", "options", "expected"),
    [
        *slow((12, {}, torch.bfloat16)),
        (12, {"reduction": "sum"}, torch.bfloat16),
        (13, {}, torch.float32),
        (12, {"and_logits": True}, torch.float32),
    ],
    ids=["mean", "sum", "few classes", "the cast is also returned"],
)
def test_casts_of_large_vocabularies_that_losses_alone_read_are_left_out(monkeypatch, classes, options, expected):
    monkeypatch.setattr(logits, "LARGE", classes)
    model, loss_fn, batch = network(**options)
    captured = captured_step(model, loss_fn, batch, {})
    assert dtypes_of_losses(captured) == [expected]
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=1), "data")
    ours = {name: value for name, value in run(plan, model, batch).items() if not name.startswith("aux")}
    same(ours, plain(model, loss_fn, batch), 1e-6)


def test_ranks_that_have_some_of_the_classes_each_compute_in_float32(monkeypatch):
    """What each sums of the gradient of its operand is rounded to bfloat16 once more."""
    model, loss_fn, batch = network()
    pins = {"2": ((1, 1, 1), (2, 1))}
    expected = run(plan_of(model, loss_fn, batch, Mesh.of(t=2), "semi-auto", pins), model, batch)
    monkeypatch.setattr(logits, "LARGE", 12)
    plan = plan_of(model, loss_fn, batch, Mesh.of(t=2), "semi-auto", pins)
    [loss] = [one for one in lower(plan, 0).instructions if one.call.function == "kernels.cross_entropy"]
    assert loss.node is not None
    assert plan.capture.values[loss.node.operands[0]].dtype == torch.bfloat16
    same(run(plan, model, batch), expected, 0)
