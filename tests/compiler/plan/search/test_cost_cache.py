"""Costs that are worked out once for all that are alike are those of each."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import possible, redistribute
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import Target
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.search.problem import CostCache
from shardwright.compiler.rules.notation import parse

MESH = Mesh.of(a=2, b=4, c=2)
OBJECTIVE = Seconds(shipped("cpu_host"))


def alone(value, layout, target):
    if not possible(layout, target.layout):
        return math.inf
    steps = redistribute(layout, target.layout, target.gradient_partial, value.shape, MESH)
    return OBJECTIVE.transfer(value, steps, MESH)


@pytest.mark.parametrize("shape", [(32, 16, 64), (6, 16, 64), (32, 5, 12)], ids=["even", "some parts uneven", "odd"])
def test_every_way_costs_what_it_costs_alone(shape):
    value = Value("x", "result", "x", shape, torch.float32, True)
    rule = parse("~ a b c, a+ -> ~ a b c").bind([shape, (shape[0],)], [shape])
    draw = np.random.default_rng(0)
    strategies = list(rule.strategies(MESH, partial=True))
    some = [strategies[i] for i in draw.permutation(len(strategies))[:24]]
    layouts = tuple(dict.fromkeys(rule.result_layout(0, s, MESH).normalised(shape, MESH) for s in strategies))
    free = (Target(rule.operand_layout(0, s), rule.operand_gradient_partial(0, s, MESH)) for s in some)
    targets = tuple(dict.fromkeys(free))
    known = CostCache(SimpleNamespace(), OBJECTIVE, MESH)
    expected = [[alone(value, layout, target) for target in targets] for layout in layouts]
    assert np.allclose(known.array(value, layouts, targets), expected, rtol=1e-12, atol=0)
