"""A program of which each distinct call is traced once is the one that torch makes of the whole program."""

import pytest
import torch
from graph_models import SmallResNet, Transformer
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from rows import brief
from shardwright.common import torch_private, trees
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.functional import decompositions
from shardwright.compiler.capture.functional.each_call import each_call


def told(program):
    """Operators with their arguments, what they give and their annotations, and what goes in and out."""
    numbers, found = {}, []
    for node in program.graph.nodes:
        numbers[node] = node.name if node.op == "placeholder" else f"%{len(found)}"
        args = map_arg((node.args, node.kwargs), numbers.__getitem__)
        vals = [
            (val.shape, val.stride(), val.storage_offset(), val.dtype, val.device, val.is_conj())
            for val in trees.tree_leaves(node.meta.get("val"))
            if isinstance(val, Tensor)
        ]
        noted = {key: of for key, of in (node.meta.get("custom") or {}).items() if key.startswith("shardwright")}
        if node.op != "placeholder":
            found.append(repr((node.target, args, vals, noted, node.meta.get("nn_module_stack"))))
    of_name = {node.name: number for node, number in numbers.items()}
    signature = program.graph_signature
    inputs = {spec.arg.name: (spec.kind, spec.target) for spec in signature.input_specs}
    outputs = [(spec.kind, spec.target, of_name.get(getattr(spec.arg, "name", ""))) for spec in signature.output_specs]
    return found, inputs, outputs


@pytest.fixture
def ways(monkeypatch):
    """Of each capture: what it is traced in whole, and call by call; None where it is not."""
    found = []

    def both(program, preserved):
        whole = told(torch_private.run_decompositions(program, preserved))
        made = each_call(program, preserved)
        found.append((whole, None if made is None else told(made)))
        return made

    monkeypatch.setattr(decompositions, "each_call", both)
    return found


class Alike(nn.Module):
    """Calls that are alike but for one thing each: how an operand lies, its dtype, or which operands are one tensor."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(width, width))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.one(x)), F.gelu(self.two(x))
        sums = [u + v, u + u, v + v.contiguous(), u + F.dropout(u, 0.5, False), u + u.to(x.dtype), u * 1, u * 1.0]
        sums += [self.dropout(u), self.dropout(u), self.dropout(v), torch.rand_like(u), torch.rand_like(u)]
        lying = [u.reshape(-1), u.t().reshape(-1), u[1:].reshape(-1), u[:, 1:].reshape(-1), u.int().reshape(-1)]
        lying += [self.table.t().reshape(-1), self.table.reshape(-1), u.t().contiguous().reshape(-1)]
        parts = [*u.chunk(2, 1), *v.chunk(2, 1), *torch.tensor_split(u, (1, 2), 1), *u.unbind(0)]
        complexes = [torch.view_as_complex(torch.stack([u, v], -1)), torch.fft.fft(u).conj(), torch.fft.fft(v)]
        seen = [torch.vstack([u, v]), torch.vstack([u, u]), torch.tensor(3.0) * u, *torch.meshgrid(u[0], v[0])]
        seen += [
            torch.einsum("ij,kj->ik", u, v),
            torch.einsum("ij,kj->ik", u, u),
            torch.view_as_real(complexes[1].resolve_conj()),
        ]
        seen += [torch.eye(len(u)) + torch.arange(len(u)), u.abs().detach(), torch.multiply(u, v)]
        total = sum(each.double().sin().mean() for each in (*sums, *lying, *parts, *seen))
        return total + sum(each.abs().double().mean() for each in complexes)


WORDS, IMAGES = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 3, 16, 16)
NORMED = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5))
INSTANCES = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
CASES = {
    "a transformer": (Transformer(dropout=0.5), WORDS, "training"),
    "it without dropout": (Transformer(dropout=0.5), WORDS, "evaluation"),
    "layers of an LSTM": (nn.LSTM(4, 6, 2), torch.zeros(3, 2, 4), "training"),
    "norms that keep their statistics": (NORMED, IMAGES, "fine-tuning"),
    **{f"{shape}": (Alike(shape[1]), torch.zeros(shape), "training") for shape in ((5, 6), (1, 6), (3, 1))},
}
# Changes in place: of statistics and activations, and of statistics of which no schema says it.
CHANGING = {
    "a convolutional net": (SmallResNet(), IMAGES, "training"),
    "norms of instances": (INSTANCES, torch.zeros(2, 3, 4), "training"),
}


def loss_fn(model, batch):
    made = model(batch)
    return (made[0] if isinstance(made, tuple) else made).square().mean()


@pytest.mark.parametrize("case", brief(CASES, "norms that keep their statistics", "(5, 6)"))
def test_a_program_is_the_same_call_by_call(ways, case):
    model, batch, kind = CASES[case]
    capture(model, loss_fn, batch, kind)
    [(whole, each)] = ways
    assert each == whole


@pytest.mark.parametrize("case", CHANGING)
def test_a_program_with_a_change_in_place_is_traced_in_whole(ways, case):
    model, batch, kind = CHANGING[case]
    capture(model, loss_fn, batch, kind)
    [(_, each)] = ways
    assert each is None
