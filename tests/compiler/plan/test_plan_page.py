"""A plan on one page: equal layers once, and the numbers of the page are those of the plan."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.common.words import in_thousands, in_time
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.text import joined, template
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.plan.timing.throughput import Throughput
from shardwright.compiler.report.plans.summary import plan_summary
from shardwright.compiler.report.plans.text_page import plan_page

H100 = read_hardware("h100")


@pytest.fixture(scope="module")
def plan():
    with torch.device("meta"):
        captured = captured_step(Decoder(4, 256, 8, 4, 512, 1024), loss_fn, batch_of(64, 128, 1024), {})
    return make_plan(captured, PlanRequest(Mesh.of(dp=8, tp=8), "auto", "exact", "split", H100))


@pytest.fixture(scope="module")
def page(plan):
    return plan_page(plan, H100)


@pytest.fixture(scope="module")
def summary(plan):
    return plan_summary(plan, H100)


def cells(page, head):
    """The rows below a head, as lists of cells."""
    lines = page[page.index(f"\n{head}") :].split("\n\n")[0].strip().splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[2:] if not line.startswith("and ")]


def milliseconds(text):
    number, unit = text.split()
    return float(number) * {"µs": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_a_deep_model_takes_a_page(plan, page):
    assert len(page.splitlines()) <= 60 < 2 * 60 < len(str(plan).splitlines())
    wordy = plan_page(replace(plan, considered=tuple(f"mesh {i} costs 1 s" for i in range(15))), H100)
    assert len(wordy.splitlines()) <= 57
    assert "\nand " in wordy.split("\n\n")[1]
    rows = {row[0]: row[1:] for row in cells(page, "module")}
    assert rows["layers.0-3.gate"][0].startswith("linear (")
    assert not any(re.search(r"layers\.\d+\.", name) for name in rows)


def test_the_numbers_of_the_page_are_those_of_the_plan(plan, page):
    rows = cells(page, "module")
    spent = sum(milliseconds(row[-4]) + milliseconds(row[-3]) for row in rows) - Prices(plan, H100).hidden_s * 1e3
    assert spent == pytest.approx(plan.cost * 1e3, rel=0.02)
    assert f" communicating {plan.moved_bytes() / 1e6:.1f} MB, " in page
    assert f"and this one costs {plan.cost * 1e3:.4g} ms (gap " in page
    assert milliseconds(page.split(" takes ")[1].split(" on ")[0]) == pytest.approx(spent, rel=0.02)
    assert re.search(r"at most [\d.]+ [MG]B are alive at once, in the (forward|backward) of \w+", page)
    collectives = cells(page, "most expensive collectives")
    assert [milliseconds(row[-1]) for row in collectives] == sorted(
        (milliseconds(row[-1]) for row in collectives), reverse=True
    )


def test_the_most_expensive_operators_are_shown_with_the_line_of_the_user(page):
    rows = cells(page, "most expensive operators")
    of = {(row[0], row[1]): row[2:] for row in rows}
    line, times, shared, _ = of["cat", "layers.0-3"]
    source = (Path(__file__).parents[2] / "support" / "decoder.py").read_text().splitlines()
    assert "torch.cat(" in source[int(line.removeprefix("decoder.py:")) - 1]
    assert (times, shared) == ("8", "64 of 64")


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


def test_programs_read_the_page_as_json(plan, summary):
    found = json.loads(json.dumps(asdict(summary)))
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
    tables = [found[table][0] for table in ("stored", "modules", "operators", "collectives")]
    rows = [found, *tables, found["certificate"], found["throughput"]]
    assert [key for row in rows for key in row if f"`{key}`" not in page] == []


def head_of(page):
    """The answers of the head by their questions."""
    found, question = {}, ""
    for line in page.split("\n\n")[0].split("\nmeshes considered")[0].splitlines():
        question, _, text = line.partition(": ") if not line.startswith("  ") else (question, "", line.strip())
        found.setdefault(question, []).append(text)
    return found


def test_the_first_ten_lines_say_what_to_run_how_fast_it_is_and_what_binds(plan, page, summary):
    done, head = Throughput.of(plan, H100, plan.cost), head_of(page)
    assert list(head) == ["plan", "run", "speed", "memory", "binds", "what if", "proof"]
    assert sum(map(len, head.values())) < 10
    assert head["plan"] == ["mode auto, search exact, mesh dp=8 tp=8, 64 devices on 8 hosts"]
    [run] = head["run"]
    assert "computes in float32 (in bfloat16 about " in run
    assert "of float32 parameters: " in run
    shares = re.findall(r"([\d.]+)% (replicated|sharded over [\w·]+)", run)
    assert sum(float(share) for share, _ in shares) == pytest.approx(100, abs=0.2)
    assert run.endswith("no activation checkpointing")
    first, second, _ = head["speed"]
    assert first.startswith("a step of 64 samples takes ")
    assert f"{in_thousands(64 * 128 / summary.step_s)} tokens/s, {in_thousands(128 / summary.step_s)} a device" in first
    assert second.startswith(f"model FLOPs utilisation {done.utilisation:.1%} of 67 TFLOP/s; ")
    assert f"{in_time(summary.exposed_s)} of communication exposed" in second
    assert "type --what-if to plan it again" in head["what if"][0]


def test_what_binds_is_what_takes_longest_and_the_memory_that_a_plan_needs(plan):
    def binds(plan, **hardware):
        known = replace(H100, **hardware)
        return plan_summary(plan, known).binds, head_of(plan_page(plan, known))["binds"][0]

    found, told = binds(plan, flops=(("float32", 1e9),))
    assert found == ("compute",)
    assert re.match(r"computing, (9\d\.\d|100\.0)% of the step \(products (9\d\.\d|100\.0)%", told)
    assert "no limit of memory was given" in told
    found, told = binds(plan, memory_bandwidth=1e7)
    assert (found, told.split(",")[0]) == (("compute",), "computing")
    assert "(memory traffic " in told
    slow = tuple(replace(link, curve=Curve((Segment(0, 1e-3, 1e6),))) for link in H100.links)
    found, told = binds(plan, links=slow)
    assert (found, told.split(",")[0]) == (("links",), "the links")
    again = make_plan(plan.capture, PlanRequest(Mesh.of(dp=8), "data", hardware=H100, recompute=("layers.*",)))
    once = again.computing_again(frozenset(), frozenset()).held.total
    for limit, binding in ((once - 1, True), (2 * once, False)):
        found, told = binds(replace(again, memory=limit))
        assert (found[1:] == ("memory",), "; memory binds, too: " in told) == (binding, binding)
        assert "what is recomputed and gathered again takes " in told


def test_more_alive_at_once_than_a_device_may_hold_is_said(plan, summary):
    limits = {limit: replace(plan, memory=limit) for limit in (summary.peak_bytes, summary.peak_bytes - 10**6)}
    told = {limit: head_of(plan_page(of, H100))["memory"][0] for limit, of in limits.items()}
    assert [": 1.0 MB too much, so type a --memory that is smaller by that" in text for text in told.values()] == [0, 1]
    assert plan_summary(limits[summary.peak_bytes - 10**6], H100).binds[1:] == ("memory",)


def test_a_batch_of_images_has_samples():
    with torch.device("meta"):
        captured = captured_step(torch.nn.Linear(4, 2), lambda m, x: m(x).sum(), torch.ones(6, 4), {})
    made = make_plan(captured, PlanRequest(Mesh.of(d=2), "data", hardware=H100))
    assert " samples/s, " in head_of(plan_page(made, H100))["speed"][0]


def test_what_a_step_takes_around_its_operators_is_told_where_a_profile_knows_it(plan, page, summary):
    known = replace(H100, around_s=0.25)
    assert plan_summary(plan, known).step_s == pytest.approx(summary.step_s + 0.25)
    assert "updating parameters, 250 ms around these" in plan_page(plan, known)
    assert "around these" not in page


def test_modules_are_joined_by_their_numbers():
    assert template("h.3.mlp.0") == "h.*.mlp.*"
    assert template("layer1.conv2") == "layer1.conv2"
    assert joined(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp"]) == "h.0-2,5.mlp"
    assert joined([""]) == "-"
