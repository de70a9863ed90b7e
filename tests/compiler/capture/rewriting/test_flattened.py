"""Linear layers between reshapes that join rows and take them apart: a split batch is not gathered for them."""

import pytest
import torch
from torch import nn

from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from whole import plain, plan_of, run, same

pytestmark = pytest.mark.usefixtures("float64")


def squares(model, batch):
    return model(batch).square().mean()


def collectives_of(model, batch):
    plan = plan_of(model, squares, batch, Mesh.of(ranks=3), "data")
    same(run(plan, model, batch), plain(model, squares, batch))
    parameters = {value.label for value in plan.capture.of_kind("parameter")}
    return [each.collective for each in plan.collectives() if each.cause not in parameters]


@pytest.mark.parametrize("need_weights", [True, *slow(False)])
def test_data_parallel_attention_gathers_no_activations(need_weights):
    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=need_weights)[0]

    found = collectives_of(Attention(8, 2, batch_first=True), torch.randn(6, 3, 8))
    assert [(each.kind, each.axes) for each in found] == [("all_reduce", ("dp",))]  # the loss, over named rows


class Joined(nn.Module):
    """A layer of rows that are joined, whose result is read once more or has other rows."""

    def __init__(self, read_twice, rows):
        super().__init__()
        self.layer, self.read_twice, self.rows = nn.Linear(8, 4), read_twice, rows

    def forward(self, x):
        made = self.layer(x.transpose(0, 1).reshape(-1, 8))
        again = made.sum() if self.read_twice else 0.0
        return made.reshape(*self.rows, 4) + again


@pytest.mark.parametrize(("read_twice", "rows", "kept"), [(False, (3, 5), 0), (True, (3, 5), 1), (False, (5, 3), 0)])
def test_what_is_read_joined_stays_joined(read_twice, rows, kept):
    model, batch = Joined(read_twice, rows), torch.randn(5, 3, 8)
    captured = captured_step(model, squares, batch, {})
    [layer] = [node for node in captured.nodes if node.op == "aten.linear.default"]
    assert (len(captured.values[layer.operands[0]].shape) == 2) == bool(kept)
    collectives_of(model, batch)
