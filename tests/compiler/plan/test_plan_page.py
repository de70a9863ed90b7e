"""A plan on one page: equal layers once, and the numbers of the page are those of the plan."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.text import joined, template
from shardwright.compiler.report.plans.summary import plan_summary
from shardwright.compiler.report.plans.text_page import plan_page

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
    return float(number) * {"µs": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_a_deep_model_takes_a_page(plan):
    page = plan_page(plan, H100)
    assert len(page.splitlines()) <= 60 < 2 * 60 < len(str(plan).splitlines())
    wordy = plan_page(replace(plan, considered=tuple(f"mesh {i} costs 1 s" for i in range(15))), H100)
    assert len(wordy.splitlines()) <= 57
    assert "\nand " in wordy.split("\n\n")[1]
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
    assert milliseconds(page.split(" takes ")[1].split(":")[0]) == pytest.approx(spent, rel=0.02)
    assert re.search(r"at most [\d.]+ [MG]B are alive at once, in the (forward|backward) of \w+", page)
    collectives = cells(page, "most expensive collectives")
    assert [milliseconds(row[-1]) for row in collectives] == sorted(
        (milliseconds(row[-1]) for row in collectives), reverse=True
    )


def test_the_most_expensive_operators_are_shown_with_the_line_of_the_user(plan):
    rows = cells(plan_page(plan, H100), "most expensive operators")
    of = {(row[0], row[1]): row[2:] for row in rows}
    line, times, shared, _ = of["cat", "layers.0-5"]
    source = (Path(__file__).parents[2] / "support" / "decoder.py").read_text().splitlines()
    assert "torch.cat(" in source[int(line.removeprefix("decoder.py:")) - 1]
    assert (times, shared) == ("12", "64 of 64")


def test_replicated_computation_is_shown_with_its_cost():
    with torch.device("meta"):
        model = torch.nn.Linear(512, 1024)
        captured = captured_step(model, lambda m, b: m(b[0]).square().sum(), (torch.randn(1024, 512),), {})
    request = PlanRequest(Mesh.of(d=4), "single", hardware=H100)
    page = plan_page(make_plan(captured, request), H100)
    told = page[page.index("replicated computation") :].splitlines()
    summary = plan_summary(make_plan(captured, request), H100)
    product = next(row for row in summary.operators if row.operator == "aten.linear.default")
    assert product.replicated_s == pytest.approx(product.computing_s * 3 / 4)
    assert told[1].startswith("  linear in -")
    assert "shared by 1 of 4 devices" in told[1]


def test_programs_read_the_page_as_json(plan):
    found = json.loads(json.dumps(asdict(plan_summary(plan, H100))))
    assert found["devices"] == 64
    assert found["mesh"] == {"dp": 8, "tp": 8}
    assert found["step_s"] == pytest.approx(plan.cost, rel=1e-6)
    assert found["step_s"] == pytest.approx(
        found["computing_s"] + found["communicating_s"] + found["updating_s"] - found["hidden_s"]
    )
    assert found["around_s"] == 0
    assert found["sent_bytes"] == pytest.approx(sum(row["sent_bytes"] for row in found["collectives"]))
    assert found["held_bytes"]["parameters"] == plan.held_bytes()
    assert found["certificate"]["bound"] == plan.bound
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    rows = [found, *(found[table][0] for table in ("modules", "operators", "collectives")), found["certificate"]]
    assert [key for row in rows for key in row if f"`{key}`" not in page] == []


def test_what_a_step_takes_around_its_operators_is_told_where_a_profile_knows_it(plan):
    known = replace(H100, around_s=0.25)
    assert plan_summary(plan, known).step_s == pytest.approx(plan_summary(plan, H100).step_s + 0.25)
    assert "updating parameters, 250 ms around these" in plan_page(plan, known)
    assert "around these" not in plan_page(plan, H100)


def test_modules_are_joined_by_their_numbers():
    assert template("h.3.mlp.0") == "h.*.mlp.*"
    assert template("layer1.conv2") == "layer1.conv2"
    assert joined(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp"]) == "h.0-2,5.mlp"
    assert joined([""]) == "-"
