"""What ranks hold while they train is what their plan says: the bytes that are kept, and the most that are alive."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.common.torch_private import MemoryOf
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.training.zoo import GPT, resnet18
from whole import Watching

pytestmark = pytest.mark.slow


def network(name, rank):
    """A model, and the half of a batch that a rank has."""
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    if name == "resnet18":
        return resnet18(), torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
    ids = torch.randint(256, (8, 65), generator=generator)
    model = GPT(256, width=128, heads=4, layers=4, sequence_length=64)
    return model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured(name, options):
    """Of the second step: what the plan says and what was there, as pairs of bytes by what they are."""
    torch.set_num_threads(1)
    world = sw.init()
    model, *batch = network(name, world.rank)
    parallel = sw.parallelize(model, loss_fn, batch, batch="local", **options)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters = [local(parameter) for parameter in parallel.parameters()]
    states = [local(tensor) for kept in optimizer.state.values() for tensor in kept.values()]
    always = [*parameters, *states, *parallel.buffers(), *batch]
    leaves = {MemoryOf(tensor) for tensor in always}
    packed = {}

    def pack(tensor):
        if MemoryOf(tensor) not in leaves:
            packed[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Watching(leaves) as watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = parallel(batch)
        loss.backward()
        gradients = sum(local(parameter.grad).nbytes for parameter in parallel.parameters())
        optimizer.step()
    plan, peak = parallel.plan, sum(tensor.nbytes for tensor in always) + watch.peak
    return {
        "parameters": (plan.held.parameters, sum(tensor.nbytes for tensor in parameters)),
        "gradients": (plan.held.gradients, gradients),
        "optimizer": (plan.held.optimizer, sum(tensor.nbytes for tensor in states)),
        "activations": (plan.held.activations, sum(packed.values())),
        "peak": (peak_of(plan, lower(plan, world.rank)).bytes, peak),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "options"), [("resnet18", {"mode": "data"}), ("gpt", {"mode": "auto", "hardware": "h100"})], ids=str
)
def test_two_ranks_hold_what_their_plan_says(name, options):
    for found in run_ranks(2, measured, name, options, timeout=280):
        for kind in ("parameters", "gradients", "optimizer"):
            assert found[kind][0] == found[kind][1], kind
        assert found["activations"][0] == pytest.approx(found["activations"][1], rel=0.1)
        assert found["peak"][0] == pytest.approx(found["peak"][1], rel=0.15)
