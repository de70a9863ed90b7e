"""The page of a plan with pipeline stages for a browser: its schedule, its stages and their operators."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from browser import opened
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.pricing.schedule import SCHEDULES
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.plans.comparison import with_known_plans
from shardwright.compiler.report.plans.html import document_of, save_html, stage_events_of
from shardwright.compiler.report.plans.summary import plan_summary

SLOW = replace(read_hardware("h100"), ranks_per_host=1, hides_gradients=0.0)


@pytest.fixture(scope="module")
def request_of():
    return PlanRequest(Mesh.of(ranks=4), hardware=SLOW, search_stages=True)


@pytest.fixture(scope="module")
def plan(request_of):
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)]
        model = nn.Sequential(*layers, nn.Linear(1024, 10))
        batch = torch.randn(1024, 1024), torch.randint(0, 10, (1024,))
        graph = captured_step(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch, {})
    found = make_plan(graph, request_of)
    assert found.stages is not None
    return found


def test_no_group_does_two_things_at_once_and_the_last_one_ends_the_schedule(plan):
    costs = StagedCosts(plan, SLOW)
    groups = stage_events_of(costs)
    assert len(groups) == plan.stages.count
    for group in groups:
        for before, after in itertools.pairwise(group):
            assert before.start_s + before.seconds <= after.start_s + 1e-12
        assert len(group) == 2 * plan.stages.microbatches
    assert max(each.start_s + each.seconds for group in groups for each in group) == pytest.approx(costs.line_s)


def test_other_schedules_of_a_plan_are_the_same_work_and_the_known_plans_have_no_stages(plan, request_of):
    plans = with_known_plans(plan, request_of)
    known = ("data parallel", "tensor parallel", "fully sharded")
    assert [name for name in plans if not name.startswith("schedule ")] == ["this plan", *known]
    assert {f"schedule {name}" for name in SCHEDULES if name != plan.stages.schedule} <= plans.keys()
    for name, other in plans.items():
        if name.startswith("schedule ") and not isinstance(other, str):
            assert other.stages.schedule == name.removeprefix("schedule ")
            assert other.strategies == plan.strategies
            assert plan_summary(other, SLOW).schedule.microbatches == plan.stages.microbatches
            asked = replace(request_of, mesh=plan.named, search_stages=False, schedule=other.stages.schedule)
            searched = make_plan(plan.capture, replace(asked, microbatches=plan.stages.microbatches))
            assert StagedCosts(other, SLOW).step_s == pytest.approx(StagedCosts(searched, SLOW).step_s)
            kinds = {event.kind for group in stage_events_of(StagedCosts(other, SLOW)) for event in group}
            assert kinds == {"forward", "backward", *["weights"] * (name == "schedule zb-h1")}
        if name in known:
            assert (other.stages, other.devices.size) == (None, 4)


def test_in_a_browser_the_schedule_is_drawn_and_leads_to_the_stages(plan, request_of, tmp_path):
    plans = {"this plan": plan, "data": with_known_plans(plan, request_of)["data parallel"]}
    save_html(document_of("net", plans, SLOW), tmp_path / "plan.html")
    count, microbatches = plan.stages.count, plan.stages.microbatches
    with opened(tmp_path / "plan.html") as shown:
        assert shown.locator("#stages tr").count() == 1 + count
        assert shown.locator("#held .held-row").count() == count + 1
        assert shown.locator("#tried .held-row").count() == len(plan.tried)
        assert shown.locator("#schedule path").count() == 2 * microbatches
        assert not shown.locator("#line").is_visible()
        assert shown.locator("#line-keys").inner_text().split()[:2] == ["forward", "backward"]
        shown.hover("#schedule", position={"x": 60, "y": 10})
        assert re.match(r"forward of microbatch 0 in stage 0: \S+ .s, from 0 on", shown.inner_text("#line-said"))
        shown.click("#schedule", position={"x": 60, "y": 10})
        assert shown.locator("#rows tr.chosen .name").inner_text().strip() == "▾stage 0"
        shown.click("#closer")
        assert shown.locator("#schedule path").count() < 2 * microbatches
        shown.click("#unfold")
        shown.locator("#rows tr.operator").first.click()
        assert f"It is in stage 0 of {count}" in shown.inner_text("#detail")
        shown.select_option("#line-of", label="data")
        assert shown.locator("#line").is_visible()
        assert not shown.locator("#schedule").is_visible()
        assert "computes" in shown.inner_text("#line-keys")
