"""A plan on one page: equal layers once, and the numbers of the page are those of the plan."""

import re

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.pricing.hardware import read_hardware
from shardwright.plan.request import PlanRequest
from shardwright.report.plan_page import _joined, _template, plan_page

H100 = read_hardware("h100")


@pytest.fixture(scope="module")
def plan():
    with torch.device("meta"):
        captured = captured_step(Decoder(6, 256, 8, 4, 512, 1024), loss_fn, batch_of(64, 128, 1024), {})
    return make_plan(captured, PlanRequest(Mesh.of(dp=8, tp=8), "auto", "exact", "split", H100))


def cells(page, head):
    """The rows below a head, as lists of cells."""
    lines = page[page.index(f"\n{head}") :].split("\n\n")[0].strip().splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[2:] if not line.startswith("and ")]


def milliseconds(text):
    number, unit = text.split()
    return float(number) * {"ms": 1.0, "s": 1e3}[unit]


def test_a_deep_model_takes_a_page(plan):
    page = plan_page(plan, H100)
    assert len(page.splitlines()) <= 60 < 2 * 60 < len(str(plan).splitlines())
    rows = {row[0]: row[1:] for row in cells(page, "module")}
    assert rows["layers.0-5.gate"][0].startswith("linear (")
    assert not any(re.search(r"layers\.\d+\.", name) for name in rows)


def test_the_numbers_of_the_page_are_those_of_the_plan(plan):
    page = plan_page(plan, H100)
    rows = cells(page, "module")
    spent = sum(milliseconds(row[-4]) + milliseconds(row[-3]) for row in rows)
    assert spent == pytest.approx(plan.cost * 1e3, rel=0.02)
    assert f"each device sends {plan.moved_bytes() / 1e6:.1f} MB per step" in page
    assert f"by its search it costs {plan.cost * 1e3:.4g} ms" in page
    dearest = cells(page, "the dearest collectives")
    assert [milliseconds(row[-1]) for row in dearest] == sorted(
        (milliseconds(row[-1]) for row in dearest), reverse=True
    )


def test_modules_are_joined_by_their_numbers():
    assert _template("h.3.mlp.0") == "h.*.mlp.*"
    assert _template("layer1.conv2") == "layer1.conv2"
    assert _joined(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp"]) == "h.0-2,5.mlp"
    assert _joined([""]) == "-"
