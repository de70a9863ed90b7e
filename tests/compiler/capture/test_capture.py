"""What a capture says of a model is what the model does."""

import copy
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graph_models import Perceptron, SmallResNet, Transformer, cases, classes, squares
from torch import nn

from equals_eager import assert_equals_eager, captured_and_checked
from gpu_like import GPU
from rows import brief, slow
from shardwright.compiler.capture.capture import capture, flatten_batch
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.capture.step import captured_step
from shardwright.runtime.graphs.captures import Captures

CASES = cases()


@cache
def captured_case(name):
    """The graph of a case, which no test changes."""
    return capture(*CASES[name])


def operators(captured):
    return [node.op.split(".")[1] for node in captured.nodes]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_equals_the_model_in_training(name):
    model, loss_fn, batch = CASES[name]
    captured = assert_equals_eager(captured_case(name), model, loss_fn, batch)
    named = [node for node in captured.nodes if node.source.startswith("graph_models.py:")]
    assert len(named) >= 0.95 * len(captured.nodes), "operators name the user's line"
    assert_equals_eager(rewrite(captured), model, loss_fn, batch)


@pytest.mark.parametrize("name", brief(CASES, "resnet", "transformer"))
def test_the_graph_equals_the_model_in_evaluation(name):
    model, loss_fn, batch = CASES[name]
    captured = rewrite(capture(model, loss_fn, batch, "evaluation"))
    evaluated = copy.deepcopy(model).eval()
    values = evaluate(captured, dict(model.named_parameters()), dict(model.named_buffers()), flatten_batch(batch))
    output = loss_fn(evaluated, batch)
    loss = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(values[captured.loss], loss, atol=1e-12, rtol=1e-12)
    assert not captured.mutations
    assert not any(value.needs_gradient for value in captured.values.values())
    assert "native_dropout" not in operators(captured)


def test_sources_and_scopes():
    captured = captured_case("perceptron")
    up, relu, _, loss = captured.nodes
    assert up.scope == "up"
    assert up.source.endswith("in forward: return self.down(F.relu(self.up(x)))")
    assert relu.scope == ""
    assert loss.source.endswith("in squares: return F.mse_loss(model(x), y)")
    assert "layers.1.up" in {node.scope for node in captured_case("transformer").nodes}


def test_operators_stay_whole():
    assert operators(captured_case("two products")) == ["matmul", "relu", "matmul", "mse_loss"]
    transformer = captured_case("transformer")
    attention = next(node for node in transformer.nodes if "attention" in node.op)
    assert attention.args[4:6] == (0.1, True)
    assert {"linear", "embedding", "layer_norm", "gelu", "native_dropout", "cross_entropy_loss"} <= set(
        operators(transformer)
    )
    assert not {"clone", "alias", "detach", "view", "_unsafe_view"} & set(operators(transformer))
    assert operators(captured_case("lstm")).count("lstm") == 1


def test_batch_norm_returns_its_statistics():
    captured = captured_case("resnet")
    assert {captured.values[name].label for name in captured.mutations} == set(dict(SmallResNet().named_buffers()))


def test_frozen_batch_norm_stays_frozen_in_training():
    model = SmallResNet().double()
    model.norm.eval()
    captured = captured_and_checked(model, classes, CASES["resnet"][2])
    assert "norm.running_mean" not in {captured.values[name].label for name in captured.mutations}


def test_tied_parameters_are_one_value():
    captured = captured_case("transformer")
    assert captured.tied == {"head.weight": "tokens.weight"}
    users = [node.op for node in captured.nodes if "tokens_weight" in node.operands]
    assert users == ["aten.embedding.default", "aten.linear.default"]


def test_unused_and_frozen_parameters():
    model = Perceptron().double()
    model.unused = nn.Linear(3, 3).double()
    model.up.weight.requires_grad_(False)
    captured = captured_and_checked(model, squares, CASES["perceptron"][2])
    needs = {value.label: value.needs_gradient for value in captured.of_kind("parameter")}
    assert needs["unused.weight"]
    assert not needs["up.weight"]
    assert needs["up.bias"]


def test_detach_and_no_grad():
    def loss_fn(model, batch):
        x, y = batch
        out = model(x)
        with torch.no_grad():
            scale = (out * 2).sum()
            with torch.enable_grad():
                inner = (out * 3).mean()
        return F.mse_loss(out, y) * scale + (out.detach() * out).sum() + inner

    captured_and_checked(Perceptron().double(), loss_fn, CASES["perceptron"][2])


def test_in_place_operators_and_views():
    def loss_fn(model, batch):
        x, y = batch
        out = model(x)
        masked = out.clone()
        masked[:, 0] = 0
        masked.mul_(2)
        masked[:, 1:3].add_(y[:, 1:3])
        return masked.square().mean()

    captured = captured_and_checked(Perceptron().double(), loss_fn, CASES["perceptron"][2])
    assert not any(op.endswith("_") for op in operators(captured))


def test_buffers_written_by_the_model():
    class Counting(Perceptron):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)
            self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

        def forward(self, x):
            self.seen += x.shape[0]
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return super().forward(x - self.mean)

    captured = captured_and_checked(Counting().double(), squares, CASES["perceptron"][2])
    assert set(captured.mutations) == {"seen", "mean"}


def test_constants():
    table = torch.arange(4, dtype=torch.float64)

    def loss_fn(model, batch):
        x, y = batch
        return F.mse_loss(model(x) * table + torch.tensor(2.0, dtype=torch.float64), y)

    captured = captured_and_checked(Perceptron().double(), loss_fn, CASES["perceptron"][2])
    assert [value.shape for value in captured.of_kind("constant")] == [(4,), ()]


def test_autocast_within_the_loss():
    def loss_fn(model, batch):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            with torch.no_grad():
                scale = out.abs().max()
        return F.mse_loss(out.float() / scale, y)

    model, batch = Perceptron(), tuple(t.float() for t in CASES["perceptron"][2])
    captured = assert_equals_eager(capture(model, loss_fn, batch), model, loss_fn, batch, tolerance=0)
    assert captured.values["linear"].dtype == torch.bfloat16
    assert captured.nodes[-1].source.endswith("y)")
    assert {node.scope for node in captured.nodes} >= {"up", "down"}


def test_autocast_around_the_capture():
    model, batch = Perceptron(), tuple(t.float() for t in CASES["perceptron"][2])
    plain = capture(model, squares, batch)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, squares, batch)
        output = squares(model, batch)
    values = evaluate(captured, dict(model.named_parameters()), {}, flatten_batch(batch))
    assert torch.equal(values[captured.loss], output)
    assert captured.key == ("training", "bfloat16", ())
    assert captured.digest != plain.digest


def test_meta_fake_and_real_tensors_give_the_same_graph():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, loss_fn, batch = CASES["transformer"]
    with torch.device("meta"):
        empty = Transformer().double()
    meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
    digests = {capture(*given).digest for given in ((empty, loss_fn, meta), (model, loss_fn, fake))}
    assert digests == {captured_case("transformer").digest}


def test_nothing_of_the_model_changes():
    model, loss_fn, batch = CASES["resnet"]
    model.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storages = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    capture(model, loss_fn, batch, "evaluation")
    capture(model, loss_fn, batch)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert storages == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(p.grad is None for p in model.parameters())


def test_the_flat_weights_of_an_lstm_stay_its_own():
    model, loss_fn, batch = CASES["lstm"]
    capture(model, loss_fn, batch)
    assert all(a is b for a, b in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))


class Tuple(tuple):
    __slots__ = ()


@dataclass
class Sample:
    image: torch.Tensor
    extra: dict


torch.export.register_dataclass(Sample)


def test_batches_of_any_form():
    x, y = CASES["perceptron"][2]
    forms = {
        ("0", "1"): (Tuple((x, y)), lambda b: b),
        ("x", "y"): ({"x": x, "y": y}, lambda b: (b["x"], b["y"])),
        ("image", "extra.label.0"): (Sample(x, {"label": [y], "scale": 1}), lambda b: (b.image, b.extra["label"][0])),
        ("0", "1.0"): (Tuple((x, Tuple((y,)))), lambda b: (b[0], b[1][0])),
        ("batch",): (x, lambda b: (b, b[:, :4])),
    }
    for labels, (batch, pair) in forms.items():
        captured = captured_and_checked(
            Perceptron().double(), lambda model, b, pair=pair: squares(model, pair(b)), batch
        )
        assert tuple(value.label for value in captured.of_kind("input")) == labels
        assert [t.shape for t in flatten_batch(batch)] == [x.shape, y.shape][: len(labels)]


def test_leaves_that_are_no_tensors_belong_to_the_key():
    x, y = CASES["perceptron"][2]

    def loss_fn(model, batch):
        return squares(model, batch["pair"]) * batch["scale"]

    model = Perceptron().double()
    captured = captured_and_checked(model, loss_fn, {"pair": (x, y), "scale": 3})
    assert captured.key == ("training", "", ("scale=3",))
    assert captured.digest != capture(model, loss_fn, {"pair": (x, y), "scale": 4}).digest


def test_predict_gives_what_comes_beside_the_loss():
    model, loss_fn, batch = CASES["transformer"]
    captured = capture(model, loss_fn, batch, "predict")
    assert captured.loss == ""
    assert not {"cross_entropy_loss", "native_dropout"} & set(operators(captured))
    values = evaluate(captured, dict(model.named_parameters()), {}, flatten_batch(batch))
    aux = captured.aux_spec.unflatten([values[name] for name in captured.aux])
    expected = loss_fn(copy.deepcopy(model).eval(), batch)[1]
    torch.testing.assert_close(aux["logits"], expected["logits"], atol=1e-12, rtol=1e-12)
    assert aux["tokens"] == 16


def test_a_capture_can_be_sent():
    model, loss_fn, batch = CASES["transformer"]
    captured = captured_case("transformer")
    received = pickle.loads(pickle.dumps(captured))
    assert received.digest == captured.digest
    assert_equals_eager(received, model, loss_fn, batch)


def test_one_module_called_twice():
    class Twice(Perceptron):
        def forward(self, x):
            return self.down(F.relu(self.up(x)) + F.relu(self.up(x * 2)))

    captured = captured_and_checked(Twice().double(), squares, CASES["perceptron"][2])
    assert [node.scope for node in captured.nodes if node.op == "aten.linear.default"] == ["up", "up", "down"]


def test_it_prints_itself():
    text = str(captured_case("perceptron"))
    assert "parameter %up_weight: up.weight float64[16, 8]" in text
    assert "%linear float64[4, 16] = aten.linear.default(%batch_0, %up_weight, %up_bias)  # up | " in text


def test_dead_operators_are_gone():
    def loss_fn(model, batch):
        x, y = batch
        torch.randn(3)
        x.sum() * 2
        return F.mse_loss(model(x), y)

    captured = capture(Perceptron(), loss_fn, tuple(t.float() for t in CASES["perceptron"][2]))
    assert operators(captured) == ["linear", "relu", "linear", "mse_loss"]


def test_no_path_of_this_machine_is_in_the_graph():
    assert str(Path(__file__).parent) not in str(captured_case("resnet"))


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        places = torch.arange(4, device=x.device)
        return self.norm(self.linear(x)) * (places if x.device.type == "cuda" else places + 1)


def squared_outputs(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("where", [*slow("cpu"), "meta"])
def test_the_graph_is_that_of_a_model_on_the_gpu(where):
    with torch.device(where):
        model, x = Asking(), torch.zeros(6, 8)
    there = captured_step(model, squared_outputs, x, {}, device=GPU)
    here = captured_step(model, squared_outputs, x, {})
    assert len(here.nodes) == len(there.nodes) + 1  # what the CPU adds to
    assert all(tensor.device.type == where for tensor in (*model.parameters(), *model.buffers()))
    known = Captures(model, squared_outputs, {}, device=GPU)
    assert known.of("training", x).digest == there.digest
