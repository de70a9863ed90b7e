"""Every rule of the table, held against its operator by drawn shapes, meshes and assignments of axes to factors."""

from typing import Any

import pytest
import torch
from rule_cases import CASES, Draw, Make, explore

from rulecheck import check, rule_for
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.table import TABLE, key_of, row_of

# Nothing of these can be split.
UNSPLIT = {f"aten.{name}.default" for name in ("scalar_tensor", "linspace", "eye", "randperm")}
MESHES = [Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=4), Mesh.of(a=6), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3)]


def hold(make: Make, op: str, examples: int) -> int:
    """Check drawn invocations of one operator; how many of them were split."""
    count = 0

    def body(d: Draw) -> None:
        nonlocal count
        invocation = make(d, op)
        mesh = d.pick(MESHES)
        rule = rule_for(invocation)
        assert rule.listed
        strategy = d.strategy(rule, mesh)
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes longer than some operators
        check(invocation, mesh, strategy, rule)
        count += bool(strategy.used)

    explore(examples, body, op)
    return count


def cases_by_row() -> dict[str, list[tuple[str, Make]]]:
    """The cases, together where they have their rule and the function that draws them in common."""
    groups: dict[Any, list[tuple[str, Make]]] = {}
    for op, make in CASES:
        groups.setdefault((row_of(op).rule, make), []).append((op, make))
    return {group[0][0] + (f" and {len(group) - 1} more" if len(group) > 1 else ""): group for group in groups.values()}


@pytest.mark.parametrize("enough", [2, pytest.param(40, marks=pytest.mark.slow)], ids=["brief", "long"])
@pytest.mark.parametrize("group", cases_by_row().values(), ids=cases_by_row())
def test_rule(group, enough):
    examples = max(2, 4 * enough // len(group))
    split = sum(hold(make, op, examples) for op, make in group)
    if split < enough:  # few of what was drawn can be split: more are
        split = sum(hold(make, op, 4 * examples) for op, make in group)
    assert split >= enough or group[0][0] in UNSPLIT, f"split {split} times only"


# Not what one device gives, on purpose: tests/runtime/test_parallel.py holds it against the model on each part.
ELSEWHERE = {"shardwright.batch_norm_per_replica"}


def test_every_row_has_a_case():
    tried = {key_of(op) for op, _ in CASES}
    listed = {key for key, row in TABLE.items() if row.rule is not None}
    assert sorted(listed - tried - ELSEWHERE) == []
