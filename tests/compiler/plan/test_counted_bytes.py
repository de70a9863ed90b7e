"""The bytes that lowered programs of a GPT send, under the plans that everybody knows and the one that is found."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.training.zoo import GPT

pytestmark = pytest.mark.networks
WIDTH, SEQUENCE, ROWS = 1024, 1024, 64


def captured(pins=None):
    """Two layers as GPT-2 has them and 50,304 words, in float32, on a global batch of 64."""
    with torch.device("meta"):
        model = GPT(50304, WIDTH, 16, 2, SEQUENCE, tied=False)
        ids = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return captured_step(model, loss_fn, (ids, ids), pins or {})


def sent_megabytes(plan):
    """What the program of one rank sends in a step, every collective around a ring."""
    program = lower(plan, 0)
    return sum(collective.sent_bytes(program.mesh) for _, _, collective in program.collectives()) / 1e6


def test_data_parallel_programs_send_the_gradients_alone():
    plan = make_plan(captured(), PlanRequest(Mesh.of(d=8), "data"))
    assert sent_megabytes(plan) == pytest.approx(904.86, abs=0.01)


@pytest.mark.slow
def test_programs_of_the_found_plan_send_two_thirds_of_them():
    plan = make_plan(captured(), PlanRequest(Mesh.of(d=8), "auto", hardware=read_hardware("h100")))
    assert sent_megabytes(plan) <= 596.13


@pytest.mark.parametrize(
    ("mesh", "megabytes"),
    [pytest.param(Mesh.of(tp=8), 4699, marks=pytest.mark.slow), (Mesh.of(dp=2, tp=4), 2146)],
    ids=str,
)
def test_tensor_parallel_programs_send_what_megatron_does(mesh, megabytes, monkeypatch):
    """Columns, then rows of the weights, and words of the vocabulary at both ends; the rest with the fewest bytes."""
    rows, tp = mesh.sizes.get("dp", 1), mesh.sizes["tp"]
    columns, back = ((rows, 1, 1), (tp, 1)), ((rows, 1, tp), (1, tp))
    pins = {f"*.attention.{name}": columns for name in "qkv"} | {"*.up": columns, "head": columns}
    pins |= {"*.attention.out": back, "*.down": back, "tokens": ((tp, 1), (rows, 1))}
    monkeypatch.setitem(SEARCHES, "exact", replace(SEARCHES["exact"], objective=SEARCHES["propagation"].objective))
    inputs = {"0": (rows, 1), "1": (rows, 1)}
    request = PlanRequest(mesh, "semi-auto", "exact", inputs, axes=mesh)
    plan = make_plan(captured(pins), request)
    hidden_mb = ROWS // rows * SEQUENCE * WIDTH * 4 / 1e6
    reduced_mb = 10 * 2 * (tp - 1) / tp * hidden_mb  # four a layer, one at each end
    assert reduced_mb < sent_megabytes(plan) <= megabytes
