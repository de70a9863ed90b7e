"""Where each rank normalises by its own rows, the running statistics of all norms are summed at the end, at once."""

import copy

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from whole import communicated, planned, run


class Norms(nn.Module):
    """One norm is used twice, so that its first running statistics are read within the step."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=0.3), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.last(self.twice(self.twice(self.first(x)).square()).tanh())


def loss_fn(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 12), (3, 10), (4, 6)], ids=["even", "uneven", "an empty part"])
def test_running_statistics_are_the_mean_over_ranks_and_wait_for_nobody_in_between(ranks, rows, monkeypatch):
    torch.manual_seed(0)
    model, batch = Norms().double(), torch.randn(rows, 5).double()
    captured = captured_step(model, loss_fn, batch, {}, batch_norm="per-replica")
    plan = make_plan(captured, PlanRequest(Mesh.of(d=ranks), "data"))
    texts = [instruction.call.source for instruction in lower(plan, 0).instructions]
    assert sum(text.startswith("kernels.batch_norm_per_replica(") for text in texts) == 1
    assert sum(text.startswith("kernels.batch_norm_of_replica(") for text in texts) == 3
    assert [text.count("out") for text in texts if text.startswith("kernels.sum_in_place(")] == [6]
    assert texts[-1].startswith("kernels.sum_in_place(")
    assert communicated(plan, model, batch, monkeypatch) == planned(plan)

    found, expected = run(plan, model, batch), {name: torch.zeros_like(b) for name, b in model.named_buffers()}
    loss, gradients = 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for part in batch.split(-(-rows // ranks)):  # as parts are cut; the last of six rows on four ranks is empty
        one, share = copy.deepcopy(model), len(part) / rows
        (loss_fn(one, part) * share).backward()
        loss += loss_fn(copy.deepcopy(model), part).item() * share
        for name, buffer in one.named_buffers():
            expected[name] = buffer if name.endswith("tracked") else expected[name] + buffer * share
        gradients = {name: gradients[name] + p.grad for name, p in one.named_parameters()}
    torch.testing.assert_close(found["loss"].item(), loss, rtol=1e-12, atol=1e-14)
    for name, buffer in expected.items():
        torch.testing.assert_close(found[f"buffer {name}"], buffer, rtol=1e-12, atol=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[f"gradient of {name}"], gradient, rtol=1e-9, atol=1e-13)
