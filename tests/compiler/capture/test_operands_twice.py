"""An operator that is called with one tensor twice and then with two tensors of its shape computes both."""

import pytest
import torch
from torch import nn

from shardwright.compiler.mesh.mesh import Mesh
from whole import plan_of, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cell, self.gated = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


# Composite operators, which torch decomposes by what they are called with.
OPERATORS = {
    "tensordot": lambda m, u, v: torch.tensordot(u, v, ([1], [1])),
    "inner": lambda m, u, v: torch.inner(u, v),
    "kron": lambda m, u, v: torch.kron(u, v),
    "chain_matmul": lambda m, u, v: torch.linalg.multi_dot([u, v.T, u]),
    "vstack": lambda m, u, v: torch.vstack([u, v]) * torch.arange(8.0).unsqueeze(1),
    "dstack": lambda m, u, v: torch.dstack([u, v]).cumsum(-1),
    "meshgrid": lambda m, u, v: torch.stack(torch.meshgrid(u[:, 0], v[:, 1], indexing="ij")),
    "cartesian_prod": lambda m, u, v: torch.cartesian_prod(u[:, 0], v[:, 1]) * torch.tensor([1.0, 2.0]),
    "cdist": lambda m, u, v: torch.cdist(u, v + 1, p=1.0),
    "pairwise_distance": lambda m, u, v: nn.functional.pairwise_distance(u, v),
    "LSTMCell": lambda m, u, v: m.cell(u, (u, v))[0],
    "GRUCell": lambda m, u, v: m.gated(u, v),
    "a cell on its own state": lambda m, u, v: m.cell(v, m.cell(u))[1],
}


def loss_fn(model, x):
    u, v = model(x)
    made = {
        name: sum(operator(model, *pair).sin().sum() for pair in ((u, u), (u, v), (v, u), (v, v)))
        for name, operator in OPERATORS.items()
    }
    return sum(made.values()), made


@pytest.mark.usefixtures("float64")
def test_one_tensor_twice_and_then_two():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    loss, made = loss_fn(model, x)
    loss.backward()
    found = run(plan_of(model, loss_fn, x, Mesh(()), "single"), model, x)
    for (name, expected), of_graph in zip(made.items(), (found[n] for n in found if n.startswith("aux")), strict=True):
        assert torch.allclose(of_graph, expected, rtol=1e-12), name
    assert torch.allclose(found["loss"], loss, rtol=1e-12)
    for label, parameter in model.named_parameters():
        gradient = found.get(f"gradient of {label}")
        assert (gradient is None) == (parameter.grad is None), label
        assert gradient is None or torch.allclose(gradient, parameter.grad, rtol=1e-12), label
