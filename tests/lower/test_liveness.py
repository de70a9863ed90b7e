"""The predicted peak of a step is near what simulated ranks measure."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import whole
from models import NETWORKS, Transformer
from shardwright.graph.step import captured_step
from shardwright.lower.liveness import peak_of
from shardwright.lower.lower import lower
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.simulate import simulate
from shardwright.plan.make import make_plan
from shardwright.plan.request import PlanRequest
from shardwright.torch_private import MemoryOf

pytestmark = pytest.mark.networks


class Watching(TorchDispatchMode):
    """Sees every tensor that an operator makes, and the most bytes that were alive at once."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored, self.alive, self.peak = ignored, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and MemoryOf(tensor) not in self.ignored:
                self.alive[MemoryOf(tensor)] = tensor.untyped_storage().nbytes()
        self.alive = {memory: size for memory, size in self.alive.items() if not memory.is_free}
        self.peak = max(self.peak, sum(self.alive.values()))
        return results


def measured(plan, model, batch, monkeypatch):
    """The peak of rank 0, with its parts of the leaves, and without the whole ones."""
    peaks, ignored = {}, {MemoryOf(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch)}

    def watching(mesh, fn):
        def one(comm):
            with Watching(ignored) as watch:
                result = fn(comm)
            peaks[comm.rank] = watch.peak
            return result

        return simulate(mesh, one)

    monkeypatch.setattr(whole, "simulate", watching)
    whole.run(plan, model, batch)
    return peaks[0]


CASES = [
    ("perceptron", 256, {"mode": "data"}),
    pytest.param("resnet", 32, {"mode": "data"}, marks=pytest.mark.slow),
    ("transformer", 32, {"mode": "data"}),
    pytest.param("transformer", 32, {"mode": "auto", "search": "propagation"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "rows", "how"), CASES, ids=str)
def test_the_predicted_peak_is_near_the_measured_one(name, rows, how, monkeypatch):
    torch.manual_seed(0)
    make, loss_fn, batch_of = NETWORKS[name]
    model, batch = Transformer(dropout=0.0) if name == "transformer" else make(), batch_of(rows)
    plan = make_plan(captured_step(model, loss_fn, batch, {}), PlanRequest(Mesh.of(d=2), **how))
    peak = peak_of(plan, lower(plan, 0))
    assert peak.bytes - plan.held.optimizer == pytest.approx(measured(plan, model, batch, monkeypatch), rel=0.15)
    assert peak.bytes >= plan.held.total - plan.held.gradients - plan.held.communication
