"""Dumps say what a plan does, and nothing that it does not."""

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.pins import shard
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.ir import strategies_text


@pytest.mark.parametrize(("mode", "obeys"), [("single", False), ("data", False), ("semi-auto", True), ("auto", True)])
def test_an_operator_is_called_pinned_where_the_mode_obeys_pins(mode, obeys):
    model = shard(nn.Linear(4, 4), ((1, 1), (2, 1), (2,)))
    captured = rewrite(capture(model, lambda model, x: model(x).square().mean(), torch.zeros(4, 4)))
    plan = make_plan(captured, PlanRequest(Mesh.of(ranks=2), mode))
    [line] = [line for line in strategies_text(plan).splitlines() if "linear(" in line]
    assert ("{pinned}" in line) == obeys
    assert ("{in_strategy: ((1, 1), (2, 1), (2,))}" in line) == obeys
    assert ("(pinned)" in str(plan)) == obeys
    assert ("which fixes its strategy" in plan.explain("linear")) == obeys
