"""What autocast does to an operator on CPUs and GPUs, a graph has as casts: the same operators, in the same dtypes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpu_like import gpu_autocast, on_gpu
from models import NETWORKS
from shardwright.compiler.capture.capture import capture, flatten_batch
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.errors import CaptureError

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _as_if_there_was_a_gpu():
    with gpu_autocast():
        yield


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class States(nn.Module):
    """What an LSTM gives under autocast is in half precision on a CPU: its dtype decides, and is cast from."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("points", torch.randn(4, 8))

    def forward(self, x):
        out, (hidden, cell) = self.layer(x)
        out = out * (2 if out.dtype == torch.float32 else 3)
        far = torch.cdist(self.points, hidden[0]).sum(1, keepdim=True)
        return (
            self.head(out[:, -1]) + out.float().exp().mean((1, 2))[:, None] + far * cell[0, :, :3].logsumexp(1)[:, None]
        )


def classified(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def likelihood(model, batch):
    x = model(batch[0])
    return F.nll_loss(x.log_softmax(1), batch[1]) + x.softmax(1).sum(1).mean() + x.sum()


def joined(model, batch):
    x = model(batch[0])
    return torch.einsum("bi,bj->ij", x, x).cumsum(0).norm() + F.cosine_similarity(x, x.tanh()).sum()


def sequences():
    return torch.randn(4, 5, 6), torch.tensor([0, 2, 1, 1])


def rows():
    return torch.randn(4, 6), torch.tensor([0, 2, 1, 1])


STEPS = {
    "classifier": (lambda: nn.Linear(6, 3), classified, rows),
    "likelihood": (lambda: nn.Linear(6, 3), likelihood, rows),
    "joined": (lambda: nn.Linear(6, 3), joined, rows),
    "lstm": (lambda: Recurrent(nn.LSTM), classified, sequences),
    "states": (States, classified, sequences),
    "gru": (lambda: Recurrent(nn.GRU), classified, sequences),
    "rnn": (lambda: Recurrent(nn.RNN), classified, sequences),
    **{name: (make, loss_fn, lambda batch=batch: batch(4)) for name, (make, loss_fn, batch) in NETWORKS.items()},
}


FAST = {("classifier", torch.bfloat16), ("likelihood", torch.float16), ("gru", torch.float16)}
ON_GPU = [
    pytest.param(name, dtype, marks=() if (name, dtype) in FAST else pytest.mark.slow, id=f"{name}-{dtype}")
    for name in STEPS
    for dtype in HALVES
]


@pytest.mark.parametrize(("name", "dtype"), ON_GPU)
def test_steps_on_a_gpu_are_captured(name, dtype):
    make, loss_fn, batch = STEPS[name]
    model = on_gpu(make())
    with torch.autocast("cuda", dtype):
        captured = capture(model, loss_fn, batch())
    assert captured.values[captured.loss].dtype == torch.float32
    assert {node.dtype for node in captured.values.values() if node.kind == "result"} >= {dtype, torch.float32}


QUICK = ("classifier", "joined")
ON_CPU = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STEPS]


@pytest.mark.parametrize("name", ON_CPU)
def test_steps_on_a_cpu_give_what_autocast_gives(name):
    make, loss_fn, batch = STEPS[name]
    torch.manual_seed(0)
    model, given = make(), batch()
    for module in model.modules():
        module.dropout = module.p = 0.0  # drawn otherwise
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = loss_fn(copy.deepcopy(model), given)
        except RuntimeError as error:
            pytest.skip(f"torch itself fails on this machine: {error}")
        captured = capture(model, loss_fn, given)
    expected = expected[0] if isinstance(expected, tuple) else expected
    parameters = dict(model.named_parameters())
    values = evaluate(captured, parameters, dict(model.named_buffers()), flatten_batch(given))
    assert torch.equal(values[captured.loss], expected)
    trained = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = loss_fn(trained, given)
    (output[0] if isinstance(output, tuple) else output).backward()
    values[captured.loss].backward()
    for label, parameter in trained.named_parameters():
        assert torch.equal(parameters[label].grad, parameter.grad), label


def test_what_casts_within_its_kernel_is_refused_unless_autocast_is_off():
    """Tensors without values show no casts there: the graph would be more exact than torch."""
    model, batch = nn.Bilinear(4, 5, 3), (torch.randn(6, 4), torch.randn(6, 5))

    def products(model, batch):
        return model(*batch).square().sum()

    def outside(model, batch):
        with torch.autocast("cpu", enabled=False):
            return products(model, batch)

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(CaptureError) as refused:
            capture(model, products, batch)
        captured = capture(model, outside, batch)
    said = "aten.bilinear.default computes in another dtype under autocast by casts within it, which cannot be captured"
    assert str(refused.value).startswith(f"{said}, at test_autocast.py:")
    assert "call it where autocast is off: with torch.autocast('cpu', enabled=False)" in str(refused.value)
    values = evaluate(captured, dict(model.named_parameters()), {}, flatten_batch(batch))
    assert torch.equal(values[captured.loss], products(model, batch))
