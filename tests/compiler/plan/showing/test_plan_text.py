"""What `print(plan)` says."""

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
from rows import slow
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.report.ir import strategies_text
from whole import plan_of


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 16, bias=False)
        self.w = torch.nn.Parameter(torch.zeros(16, 16))
        self.matmul = sw.shard(torch.matmul, ((2, 4), (4, 1)))

    def forward(self, x):
        return self.matmul(self.up(x), self.w)


def rows(text, first_column):
    """The rows of the table whose head begins so, as lists of cells."""
    lines = text.split(f"{first_column} ", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell for cell in line.split("  ") if cell] for line in lines]


def test_a_plan_shows_strategies_collectives_and_bytes_per_module():
    batch = torch.zeros(16, 32), torch.zeros(16, 16)
    plan = plan_of(Net(), lambda model, b: F.mse_loss(model(b[0]), b[1]), batch, Mesh.of(d=8), "semi-auto")
    text = str(plan)
    assert text.startswith("plan: mode semi-auto, search propagation, mesh d=8 cut into d.0=2 d.1=2 d.2=2, 8 devices\n")
    operators = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows(text, "operator")}
    assert operators["matmul (pinned)"][:3] == ["(2,4) (4,1)", "(2,1)", "d.1·d.2"]
    assert operators["matmul (pinned)"][-1].startswith("test_plan_text.py:")
    assert operators["linear"][-2] == "up"
    collectives = [[cell.strip() for cell in row] for row in rows(text, "collective")]
    assert len(collectives) == len(list(plan.collectives()))
    assert ["reduce_scatter", "forward", "d.1·d.2", "(0, 1, 2, 3)", "matmul", "384 B"] in collectives
    held = {row[0].strip(): row[1].strip() for row in rows(text, "\nmodule")}
    assert held == {"-": "256 B", "up": "512 B"}
    forward, backward = (sum(p.bytes for p in plan.collectives() if p.direction == d) for d in ("forward", "backward"))
    sent = f"sends {size(plan.moved_bytes())} per step ({size(forward)} forward, {size(backward)} backward)"
    assert f"each device {sent} and holds 768 B of parameters" in text


def size(number):
    return f"{number / 1000:.1f} kB" if number >= 1000 else f"{number:.0f} B"


def test_operators_without_a_rule_are_named():
    batch = (torch.zeros(8, 4, 4),)
    plan = plan_of(torch.nn.Linear(4, 4), lambda m, b: torch.linalg.det(m(b[0])).sum(), batch, Mesh.of(d=2), "data")
    assert "without a rule, run whole on every device: aten._linalg_det.default" in str(plan)


@pytest.mark.parametrize(
    ("mode", "obeys"), [*slow(("single", False), ("auto", True)), ("data", False), ("semi-auto", True)]
)
def test_an_operator_is_called_pinned_where_the_mode_obeys_pins(mode, obeys):
    model = sw.shard(torch.nn.Linear(4, 4), ((1, 1), (2, 1), (2,)))
    plan = plan_of(model, lambda m, x: m(x).square().mean(), torch.zeros(4, 4), Mesh.of(ranks=2), mode)
    [line] = [line for line in strategies_text(plan).splitlines() if "linear(" in line]
    assert ("{pinned}" in line) == obeys
    assert ("(pinned)" in str(plan)) == obeys
    assert ("which fixes its strategy" in plan.explain("linear")) == obeys
