"""Programs on a GPU that is not there: every value in its dtype, nothing on another device, and nobody waits for it."""

from functools import cache

import pytest
import torch

from gpu_like import LIKE_A_GPU, OnGpus, gpu_autocast, on_gpu, step_on_gpu
from models import NETWORKS
from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.operators import kernels
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import LoweringError

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SEARCHES = {"data": ("data", {}), "propagation": ("auto", {"search": "propagation"}), "exact": ("auto", {})}


@cache
def captured(name, precision):
    make, loss_fn, batch = NETWORKS[name]
    dtype = PRECISIONS[precision]
    with gpu_autocast(), torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        return captured_step(on_gpu(make()), loss_fn, batch(24), {})


def check(name, precision, search, mesh, ranks):
    mode, options = SEARCHES[search]
    plan = make_plan(captured(name, precision), PlanRequest(mesh, mode, **options))
    for rank in ranks:
        values, waits = step_on_gpu(plan, rank)
        assert waits == []
        for label, value in plan.capture.values.items():
            if label in values:
                assert (values[label].dtype, values[label].device) == (value.dtype, LIKE_A_GPU), label


@pytest.mark.parametrize("name", [*slow("perceptron"), "transformer"])
def test_programs_of_networks_run_on_gpus(name):
    check(name, "bf16", "propagation", Mesh.of(d=4), [0])


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "search"), [("fp16", "data"), ("float32", "exact")])
def test_convolutions_on_two_axes_run_on_gpus_in_other_precisions(precision, search):
    check("resnet", precision, search, Mesh.of(a=2, b=3), range(6))


def test_what_a_gpu_cannot_take_is_refused():
    comm = OnGpus(Mesh.of(d=2), 0)
    with pytest.raises(LoweringError, match="a tensor on cpu is to be moved by the GPUs of xla:0"):
        comm.all_gather(torch.tensor((0, 4)), ("d",))
    with pytest.raises(LoweringError, match="nccl cannot sum tensors of float8_e4m3fn"):
        OnGpus(Mesh.of(d=2), 0, torch.device("cpu")).all_reduce(torch.ones(2).to(torch.float8_e4m3fn), ("d",))


# Numbers out of range, in an embedding that is split


def looked_up(guard, first_row, ids):
    weight = torch.arange(6.0).reshape(3, 2)[:, :1].requires_grad_()
    return kernels.embedding(weight, torch.tensor(ids), -1, first_row, 6, guard, 2)


@pytest.mark.parametrize("wrong", [-1, 6, 1 << 40])
def test_a_guarded_embedding_gives_no_numbers_for_ids_out_of_range(wrong):
    guard = Guard(on=True)
    parts = [looked_up(guard, first, [[0, wrong], [5, 2]]) for first in (0, 3)]
    assert torch.equal((parts[0] + parts[1]).isnan().squeeze(-1), torch.tensor([[False, True], [False, False]]))
    assert list(guard.known()) == [(2, wrong), (2, wrong)]
    assert list(guard.known()) == []
    fine = looked_up(guard, 0, [[0, 1]]) + looked_up(guard, 3, [[0, 1]])
    assert fine.flatten().tolist() == [0.0, 2.0]
    assert list(guard.known()) == []
