"""Pins: inside a model with shard, from outside with patterns of module paths."""

import pytest
import torch
import torch.nn.functional as F
from graph_models import Perceptron, TwoProducts, cases, squares
from torch import nn

from equals_eager import captured_and_checked
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.pins import apply_pins, shard
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.errors import StrategyError

CASES = cases()
PRODUCTS = CASES["two products"][2]
ROWS = CASES["perceptron"][2]


def pins(captured):
    return {node.name: (node.pin.operands, node.pin.results) for node in captured.nodes if node.pin}


def test_a_pinned_function_pins_every_call():
    model = TwoProducts(shard(torch.matmul, ((2, 4), (4, 1)))).double()
    captured = captured_and_checked(model, squares, PRODUCTS)
    assert pins(captured) == {
        "matmul": (((2, 4), (4, 1)), (None,)),
        "matmul_1": (((2, 4), (4, 1)), (None,)),
    }
    assert pins(rewrite(captured)) == pins(captured)
    assert captured.nodes[0].pin.source.endswith("model = TwoProducts(shard(torch.matmul, ((2, 4), (4, 1)))).double()")
    assert "test_sharded.py" in str(captured.nodes[0].pin)
    plain = capture(TwoProducts().double(), squares, PRODUCTS)
    assert [(n.op, n.operands) for n in captured.nodes] == [(n.op, n.operands) for n in plain.nodes]
    assert captured.digest != plain.digest


def test_free_inputs_and_pinned_results():
    model = TwoProducts(shard(torch.matmul, (None, (1, 4)), ((2, 4),))).double()
    assert pins(captured_and_checked(model, squares, PRODUCTS))["matmul"] == ((None, (1, 4)), ((2, 4),))
    model = TwoProducts(shard(torch.matmul, None, ((8, 1),))).double()
    assert pins(captured_and_checked(model, squares, PRODUCTS))["matmul"] == ((None, None), ((8, 1),))


def test_a_function_of_several_operators():
    def mixed(a, b):
        return torch.relu(a.t()).t() * torch.tanh(b)

    function = shard(mixed, ((2, 1), (4, 1)), ((1, 2),))

    def loss_fn(model, batch):
        return function(model(batch[0]), batch[1]).sum()

    captured = captured_and_checked(Perceptron().double(), loss_fn, ROWS)
    assert pins(captured) == {
        "t": (((2, 1),), (None,)),
        "tanh": (((4, 1),), (None,)),
        "mul": ((None, None), ((1, 2),)),
    }


def test_keywords_and_several_results():
    function = shard(lambda x, *, parts: x.split(parts, dim=1), ((2, 1),), ((2, 1), None))

    def loss_fn(model, batch):
        a, b = function(model(batch[0]), parts=2)
        return (a * b).sum()

    assert pins(captured_and_checked(Perceptron().double(), loss_fn, ROWS)) == {"split": (((2, 1),), ((2, 1), None))}


def test_pins_hold_under_autocast():
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        return F.mse_loss(out.float(), batch[1])

    model = TwoProducts(shard(torch.matmul, ((2, 4), (4, 1))))
    captured = capture(model, loss_fn, tuple(t.float() for t in PRODUCTS))
    assert set(pins(captured)) == {"matmul", "matmul_1"}


def test_a_pinned_module_keeps_its_names():
    class Pinned(Perceptron):
        def __init__(self):
            super().__init__()
            self.up = shard(nn.Linear(8, 16), ((2, 1), (4, 1)))

    model = Pinned().double()
    assert set(dict(model.named_parameters())) == set(dict(Perceptron().named_parameters()))
    assert isinstance(model.up, nn.Linear)
    captured = captured_and_checked(model, squares, ROWS)
    assert pins(captured) == {"linear": (((2, 1), (4, 1), None), (None,))}


def test_outside_a_capture_the_function_is_itself():
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 4)
    assert torch.equal(shard(torch.matmul, ((2, 4), (4, 1)), ((2, 1),))(a, b), a @ b)


@pytest.fixture(scope="module")
def transformer():
    return capture(*CASES["transformer"])


def test_pins_by_patterns(transformer):
    pinned = apply_pins(
        transformer, {"layers.*.up": ((2, 1, 1), (4, 1)), "layers.1.norm1": (((2, 1, 1),), ((2, 1, 1),))}
    )
    names = {node.scope: node.pin.operands for node in pinned.nodes if node.pin}
    assert names == {
        "layers.0.up": ((2, 1, 1), (4, 1), None),
        "layers.1.up": ((2, 1, 1), (4, 1), None),
        "layers.1.norm1": ((2, 1, 1), None, None),
    }
    tied = apply_pins(transformer, {"head": ((2, 1, 1), (4, 1))})
    assert [node.op for node in tied.nodes if node.pin] == ["aten.linear.default"]
    (relu,) = (n for n in apply_pins(capture(*CASES["two products"]), {"relu": [[2, 4]]}).nodes if n.pin)
    assert relu.pin.operands == ((2, 4),)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ((2, 4), r"\(2, 4\) is not a strategy"),
        (((2, 0), (4, 1)), r"is not a strategy"),
        (((2, 1.5), (4, 1)), r"is not a strategy"),
        ("ab", r"'ab' is not a strategy"),
        (((2, 4),), r"1 tuple for 2 tensor inputs of shapes \[\(4, 8\), \(8, 4\)\]"),
        (((2, 4), (4,)), r"\(4,\) has 1 number for a tensor of shape \(8, 4\)"),
    ],
)
def test_strategies_that_do_not_fit(strategy, message):
    with pytest.raises(StrategyError, match=message) as error:
        shard(torch.matmul, strategy)(torch.ones(4, 8), torch.ones(8, 4))
    assert "pinned at test_sharded.py:" in str(error.value)
    assert "Give one tuple per tensor, one number of slices per dim" in str(error.value)


def test_results_that_do_not_fit():
    with pytest.raises(StrategyError, match=r"2 tuples for 1 tensor result of shapes \[\(4, 4\)\]"):
        shard(torch.matmul, None, ((2, 1), (2, 1)))(torch.ones(4, 8), torch.ones(8, 4))


PASSED = shard(lambda x: x, None, ((2, 1),))


def test_functions_that_cannot_be_pinned():
    def loss_fn(function):
        return lambda model, batch: function(model(batch[0])).sum()

    with pytest.raises(StrategyError, match="changes an input in place; pin one that returns a new tensor"):
        capture(Perceptron().double(), loss_fn(shard(torch.relu_, ((2, 1),))), ROWS)
    with pytest.raises(StrategyError, match=r"returns what it was given, pinned at .*\nPin a function that computes"):
        capture(Perceptron().double(), lambda model, batch: model(PASSED(batch[0])).sum(), ROWS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers.9.up": ((2, 1, 1),)}, r"pins\['layers.9.up'\] matches no module; the closest .* layers\.\d\.up"),
        ({"layers.0": ((2, 1, 1),)}, "module layers.0 has no main operator to pin: none takes its own parameters"),
        ({"layers.0.up": ((2, 1),)}, r"\(2, 1\) has 2 numbers for a tensor of shape \(2, 8, 16\)"),
        ({"layers.0.up": ((1, 1, 1), (1, 1), (1,), (1,))}, r"4 tuples for 3 operands"),
        ({"*.up": ((2, 1, 1),), "layers.0.*": ((2, 1, 1),)}, "is pinned twice, at"),
        ({"layers.0.up": [2, 4]}, r"\(2, 4\) is not a strategy"),
    ],
)
def test_patterns_that_do_not_fit(given, message, transformer):
    with pytest.raises(StrategyError, match=message):
        apply_pins(transformer, given)
