"""What is said about modules, operators and parameters of a plan with stages."""

import re

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pipeline.explained import explained
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import UsageError

H100 = read_hardware("h100")


@pytest.fixture(scope="module")
def plan():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 128)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))

        def forward(self, x):
            return nn.functional.linear(self.layers(self.embed(x)), self.embed.weight)

    with torch.device("meta"):
        batch = torch.zeros(16, 8, dtype=torch.long), torch.zeros(16, 8, dtype=torch.long)
        captured = captured_step(
            Tied(), lambda m, b: nn.functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), batch, {}
        )
    return make_plan(captured, PlanRequest(Mesh.parse("pp=2,dp=2"), "data", hardware=H100, microbatches=4))


def test_an_operator_says_its_stage_its_microbatch_and_what_crosses(plan):
    first = next(node for node in plan.capture.nodes if plan.stages.of.get(node.name) == 1)
    text = explained(plan, first.name, H100)
    assert "It is in stage 1 of 2, on the ranks pp=1." in text
    assert re.search(r"Each of 4 microbatches takes \S+ .s forward and \S+ .s backward", text)
    [crossing] = [name for name in first.operands if name in plan.graph.producers]
    bytes_of = 4 * plan.capture.values[crossing].shape[-1] * 8 * 16 // (4 * 2)  # of a microbatch, on one of two ranks
    assert f"It reads {crossing} of stage 0: {bytes_of / 1000:.1f} kB of each microbatch cross" in text
    assert "for stage " in text
    assert "There are 2 stages since the mesh says pp=2" in text
    assert "micro" not in re.sub("microbatch(es)?", "", text)
    assert "shared by 2 of 2 devices" in text


def test_a_parameter_says_who_holds_it(plan):
    assert "why: the ranks pp=0, pp=1 compute with it: it is sharded over pp" in explained(plan, "embed.weight", H100)
    assert re.search(r"why: only the ranks pp=\d hold it", explained(plan, "layers.1.0.weight", H100))


def test_a_module_across_stages_says_so_and_every_operator_has_its_stage(plan):
    assert "Its operators are in the stages 0, 1 of 2" in explained(plan, "layers", H100)
    stages = {line.split()[0]: line.split()[1] for line in str(plan).split("\n\n")[2].splitlines()[2:]}
    assert {name: str(stage) for name, stage in plan.stages.of.items()}.items() <= stages.items()
    assert " micro " not in str(plan)
    with pytest.raises(UsageError, match=r"has 2 pipeline stages: save it, and type .*--explain layers"):
        plan.explain("layers")
