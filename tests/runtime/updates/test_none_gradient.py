"""A parameter to which no gradient comes has none under any plan, so that an optimizer leaves it as it is."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from models import Straight
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from whole import splitting_hardware


class Net(nn.Module):
    """``goal`` and ``mask`` require a gradient and get none; ``looks`` makes it a model that is no graph."""

    def __init__(self, looks=False):
        super().__init__()
        self.looks = looks
        self.first, self.goal, self.last = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(4, 8)
        self.mask, self.scale = nn.Linear(4, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = torch.relu(self.first(x))
        with torch.no_grad():
            goal = self.goal(h)  # a target that nobody froze
        y = self.last(h)
        if self.looks and y.sum().item() > 1e9:
            y = y * 2
        return Straight.apply(y * self.mask(h).sigmoid().detach(), self.scale) - goal, self.mask(h)


def loss_of(model, batch):
    difference, mask = model(batch)
    return difference.square().mean(), {"mask": mask, "loud": mask.exp()}


PLANS = {
    "data": {"mode": "data"},
    "split": {"hardware": "split"},
    "gathered again": {"hardware": "split", "memory": 4_000},
    "recomputed": {"mode": "data", "recompute": "last"},
    "fallback": {"looks": True, "mode": "data"},
    "compiled": {"mode": "data", "compile": True},
}


def trained(loss, parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def train(names):
    sw.init()
    found = {}
    for name in names:
        options = dict(PLANS[name])
        torch.manual_seed(0)
        plain, x = Net(options.pop("looks", False)).double(), torch.randn(6, 8, dtype=torch.float64)
        model = copy.deepcopy(plain)
        if "hardware" in options:
            options["hardware"] = splitting_hardware()
        parallel = sw.parallelize(model, loss_of, x, batch="global", **options)
        trained(lambda plain=plain, x=x: loss_of(plain, x)[0], plain.parameters())
        trained(lambda parallel=parallel, x=x: parallel(x)[0], parallel.parameters())
        ours, whole = dict(parallel.named_parameters()), parallel.full_state_dict()
        with_none = sorted(key for key, parameter in ours.items() if parameter.grad is None)
        of_plain = sorted(key for key, parameter in plain.named_parameters() if parameter.grad is None)
        apart = max(float((whole[key] - value).abs().max()) for key, value in plain.state_dict().items())
        split = any(isinstance(parameter, DTensor) for parameter in ours.values())
        again = parallel.plan is not None and bool(parallel.plan.again)
        found[name] = with_none == of_plain, apart, split, again
    return found


@pytest.mark.parametrize(
    "names",
    [["data", "split", "gathered again", "recomputed", "fallback"], pytest.param(["compiled"], marks=pytest.mark.slow)],
)
def test_none_stays_none_and_the_optimizer_leaves_the_parameter(names):
    for found in run_ranks(3, train, names):
        for name, (alike, apart, split, again) in found.items():
            assert alike, name
            assert apart < 1e-12, name
            assert split == ("hardware" in PLANS[name]), name
            assert again == ("memory" in PLANS[name]), name


def test_the_graph_knows_which_values_the_backward_of_the_loss_comes_to():
    captured = captured_step(Net(), loss_of, torch.randn(6, 8), {})
    trained = {value.label for value in captured.of_kind("parameter") if value.needs_gradient}
    assert trained == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert captured.aux_with_gradient == set(captured.aux)  # plain PyTorch knows gradients of both
    for node in captured.nodes:
        flows = any(captured.values[name].needs_gradient for name in node.operands)
        detaches = node.op == "aten.detach.default"
        assert detaches or flows == any(captured.values[name].needs_gradient for name in node.results), node
