"""What is told of a plan with stages, operator by operator, adds up to its stages and its step; in numbers as JSON."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pipeline.prices import StagedPrices, prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.plans.summary import plan_summary

H100 = read_hardware("h100")


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        return captured_step(Decoder(4, 64, 8, 4, 128, 256), loss_fn, batch_of(32, 32, 256), {})


@pytest.fixture(scope="module")
def plan(captured):
    return make_plan(
        captured, PlanRequest(Mesh.parse("pp=4,dp=2,tp=2"), "auto", "recursive", hardware=H100, microbatches=8)
    )


def test_operators_and_redistributions_add_up_to_the_stages(plan):
    prices, cut = StagedPrices(plan, H100), plan.stages
    found = [0.0] * cut.total
    for node in plan.capture.nodes:
        if node.name in cut.of:
            inside = prices.inside.get(node.name)
            found[cut.of[node.name]] += prices.computes_s[node.name] + (inside.seconds if inside else 0.0)
    for transfer, moved in prices.moving:
        reader = transfer.consumers[0][0]
        if reader in cut.of and not plan.capture.values[transfer.value].of_parameter:
            found[cut.of[reader]] += moved.seconds
    assert found == pytest.approx([cut.microbatches * stage.both_s for stage in prices.of_stages.stages])
    assert {axis for moved in prices.moved for axis in moved.axes} == {"dp", "tp"}


def test_the_parts_of_a_step_add_up(plan):
    for of in (plan, replace(plan, stages=replace(plan.stages, schedule="gpipe"))):
        prices = prices_of(of, H100)
        parts = prices.computing_s, prices.communicating_s, prices.updating_s, prices.waiting_s
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(prices.step_s)


def test_a_plan_with_stages_is_told_in_numbers(plan):
    found = json.loads(json.dumps(asdict(plan_summary(plan, H100))))
    stages, schedule = found["stages"], found["schedule"]
    assert found["mesh"] == {"pp": 4, "dp": 2, "tp": 2}
    assert [stage["group"] for stage in stages] == [0, 1, 2, 3]
    assert sum(stage["operators"] for stage in stages) == len(plan.stages.of)
    assert found["held_bytes"] == max((stage["held_bytes"] for stage in stages), key=lambda held: held["total"])
    assert (schedule["name"], schedule["microbatches"], schedule["held_microbatches"]) == ("1f1b", 8, [4, 3, 2, 1])
    busiest = max(stage["forward_s"] + stage["backward_s"] for stage in stages)
    assert schedule["bubble"] == pytest.approx(1 - 8 * busiest / schedule["line_s"])
    linears = [row for row in found["operators"] if row["operator"] == "aten.linear.default"]
    assert max(row["parts"] for row in linears) == 4  # and not times microbatches
    page = (Path(__file__).parents[4] / "docs" / "planning.md").read_text()
    assert [key for row in (found, schedule, stages[0]) for key in row if f"`{key}`" not in page] == []


def test_the_numbers_of_stages_that_were_tried_stay_with_the_plan(captured):
    slow = replace(H100, ranks_per_host=1, hides_gradients=0.0)
    plan = make_plan(captured, PlanRequest(Mesh.of(ranks=4), hardware=slow, search_stages=True))
    tried = plan_summary(plan, slow).tried_stages
    assert [each.stages for each in tried] == [1, 2, 4]
    assert min(each.step_s for each in tried) == prices_of(plan, slow).step_s
    assert Plan.from_json(plan.to_json(), plan.graph) == plan


@pytest.mark.slow
def test_parameters_that_the_ranks_of_a_stage_shard_are_gathered_once_in_a_step():
    with torch.device("meta"):
        captured = captured_step(Decoder(4, 256, 8, 4, 512, 256), loss_fn, batch_of(32, 8, 256), {})
    request = PlanRequest(Mesh.parse("pp=2,dp=4"), "auto", hardware=H100, microbatches=2)
    took = []
    for plan in (make_plan(captured, request), make_plan(captured, replace(request, memory=25_000_000))):
        prices, gathered_s = StagedPrices(plan, H100), [0.0, 0.0]
        for transfer, moved in prices.moving:
            if "all_gather forward" in moved.kinds:
                assert plan.capture.values[transfer.value].of_parameter
                for group in plan.read_by_stages[transfer.value]:
                    gathered_s[group] += moved.seconds  # with the scatter of its gradient
        took.append((max(gathered_s), prices.of_stages.exchange_s))
    (no_gather_s, replicated_s), (gathered_s, sharded_s) = took
    assert no_gather_s == 0.0
    assert gathered_s > replicated_s
    assert gathered_s <= sharded_s <= gathered_s + replicated_s
