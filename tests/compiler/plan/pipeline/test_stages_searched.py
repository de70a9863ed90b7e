"""The number of stages that is found is never worse than any number on its own, or none."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.staged import StagedPlans
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import UsageError

H100 = replace(read_hardware("h100"), ranks_per_host=1, hides_gradients=0.0)


def step_s(plan):
    return (StagedCosts if plan.stages else Prices)(plan, H100).step_s


def perceptron():
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def classes(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def no_plan_is_needed(graph, request):
    raise AssertionError("a bound is known before any plan")


def test_the_search_for_stages_is_never_worse_than_any_number_of_them():
    with torch.device("meta"):
        batch = torch.randn(1024, 1024), torch.randint(0, 10, (1024,))
        graph = captured_step(perceptron(), classes, batch, {})
    free = PlanRequest(Mesh.of(ranks=4), hardware=H100)
    found = make_plan(graph, replace(free, search_stages=True))
    took = step_s(found)
    assert took < step_s(make_plan(graph, free))
    ruled = RuledGraph.of(graph)
    for mesh, microbatches in (("pp=2,ranks=2", 2), ("pp=2,ranks=2", 4), ("pp=4", 4), ("pp=4", 8)):
        request = replace(free, mesh=Mesh.parse(mesh), microbatches=microbatches)
        alone_s = step_s(make_plan(graph, request))
        assert took <= alone_s * (1 + 1e-9)
        least_s = StagedPlans(ruled, request, no_plan_is_needed).least_s(microbatches)
        plans = StagedPlans(ruled, request, lambda graph, asked: make_plan(graph.capture, asked))
        assert 0.3 * alone_s < least_s <= plans.with_microbatches(microbatches).least_s <= alone_s
    assert [each.stages for each in found.tried] == [1, 2, 4]
    assert min(each.step_s for each in found.tried) == took
    assert [str(each).partition(",")[0].partition(":")[0] for each in found.tried] == ["without stages", "pp=2", "pp=4"]


def test_the_ranks_of_a_stage_are_named_by_what_they_do():
    with torch.device("meta"):
        graph = captured_step(perceptron(), classes, (torch.randn(2**16, 1024), torch.randint(0, 10, (2**16,))), {})
    request = PlanRequest(Mesh.parse("pp=2,ranks=2"), hardware=read_hardware("h100"), microbatches=2)
    assert make_plan(graph, request).shown_mesh == Mesh.parse("pp=2,fsdp=2")


@pytest.mark.slow
def test_hardly_any_other_cut_of_small_models_ends_earlier():
    """Of 20 models with layers of unlike widths: every cut is gone through."""
    exact = []
    for seed in range(20):
        drawn = random.Random(seed)
        widths = drawn.choices([256, 512, 1024, 2048], k=drawn.randint(4, 8))
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        with torch.device("meta"):
            batch = torch.randn(1024, widths[0]), torch.randint(0, 10, (1024,))
            graph = captured_step(nn.Sequential(*layers, nn.Linear(widths[-1], 10)), classes, batch, {})
        count, microbatches = drawn.choice([2, 3]), drawn.choice([2, 4, 8])
        request = PlanRequest(Mesh.of(pp=count), hardware=H100, microbatches=microbatches, schedule="gpipe")
        plan = make_plan(graph, request)
        line_s, operators = StagedCosts(plan, H100).line_s, list(plan.stages.of)
        every = []
        for starts in combinations(range(1, len(operators)), count - 1):
            of = {name: sum(at >= start for start in starts) for at, name in enumerate(operators)}
            every.append(StagedCosts(plan.in_stages(replace(plan.stages, of=of)), H100).line_s)
        exact.append(line_s == pytest.approx(min(every), rel=1e-3))
        assert line_s <= 1.02 * min(every)
    assert sum(exact) >= 18


def test_named_devices_are_not_divided_otherwise():
    graph = captured_step(perceptron(), classes, (torch.randn(4, 1024), torch.zeros(4, dtype=torch.long)), {})
    with pytest.raises(UsageError, match=r"divides devices without names.*dp=4"):
        make_plan(graph, PlanRequest(Mesh.of(dp=4), search_stages=True))
