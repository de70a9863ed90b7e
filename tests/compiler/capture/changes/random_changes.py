"""Modules of a few views, copies, computations and changes in place, drawn one after the other from tables.

Whatever a step makes it keeps by a name, changes by any name, and reads by all of them at its end.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Instruction = tuple[str, int, int]  # a name in a table, and the numbers of two tensors


def number(x: Tensor) -> Tensor:
    """A number that depends on every entry of a tensor."""
    return (x.double() * torch.arange(1.0, 1 + x.numel()).reshape(x.shape).cos()).sum()


MADE: Mapping[str, Callable[["Net", Tensor], Tensor]] = {
    "same": lambda net, x: nn.Identity()(x),
    "dropout": lambda net, x: F.dropout(x, 0.5, False),
    "dropout of nothing": lambda net, x: F.dropout(x, 0.0),
    "dropout2d": lambda net, x: F.dropout2d(x.reshape(1, 1, 1, -1), 0.5, False),
    "alpha dropout": lambda net, x: F.alpha_dropout(x, 0.5, False),
    "contiguous": lambda net, x: x.contiguous(),
    "contiguous copy": lambda net, x: x.mT.contiguous(),
    "to": lambda net, x: x.to(x.dtype),
    "to another": lambda net, x: x.to(torch.float32),
    "type_as": lambda net, x: x.type_as(net.a),
    "double": lambda net, x: x.double(),
    "reshape": lambda net, x: x.reshape(-1),
    "reshape copy": lambda net, x: x.mT.reshape(-1),
    "flatten": lambda net, x: x.flatten(),
    "expand": lambda net, x: x.expand(x.shape),
    "expand more": lambda net, x: x.expand(2, *x.shape),
    "squeeze": lambda net, x: x.squeeze(),
    "unsqueeze": lambda net, x: x.unsqueeze(0),
    "chunk": lambda net, x: x.chunk(2)[0],
    "one chunk": lambda net, x: x.chunk(1)[0],
    "unsafe chunk": lambda net, x: torch.unsafe_chunk(x, 2)[0],
    "split": lambda net, x: x.split(2)[-1],
    "tensor_split": lambda net, x: torch.tensor_split(x, 2)[1],
    "unbind": lambda net, x: x.unbind()[0],
    "unfold": lambda net, x: x.unfold(0, 2, 1),
    "diagonal": lambda net, x: x.diagonal(),
    "real": lambda net, x: torch.real(x),
    "conj": lambda net, x: torch.conj_physical(x),
    "positive": lambda net, x: +x,
    "detach": lambda net, x: x.detach(),
    "data": lambda net, x: x.data,
    "transpose": lambda net, x: x.mT,
    "movedim": lambda net, x: x.movedim(0, -1),
    "select": lambda net, x: x[0],
    "slice": lambda net, x: x[1:],
    "steps": lambda net, x: x[..., ::2],
    "index": lambda net, x: x[torch.tensor([0])],
    "atleast_3d": lambda net, x: torch.atleast_3d(x),
    "broadcast": lambda net, x: torch.broadcast_tensors(x, torch.zeros(()))[0],
    "meshgrid": lambda net, x: torch.meshgrid(x.flatten()[:2], x.flatten()[:2], indexing="ij")[0],
    "einsum": lambda net, x: torch.einsum("ij->ji", x),
    "pad": lambda net, x: F.pad(x, (0, 0)),
    "crop": lambda net, x: F.pad(x, (0, -1)),
    "interpolate": lambda net, x: F.interpolate(x.reshape(1, 1, -1), size=x.numel()),
    "sum_to_size": lambda net, x: x.sum_to_size(x.shape),
    "repeat": lambda net, x: x.repeat(*[1] * x.ndim),
    "clone": lambda net, x: x.clone(),
    "mul": lambda net, x: x * 1.5,
    "clamp": lambda net, x: x.clamp(-1, 1),
    "layer": lambda net, x: net.layer(x),
    "norm": lambda net, x: net.norm(x),
    "mean of norm": lambda net, x: net.norm.running_mean,
    "weight": lambda net, x: net.layer.weight.detach(),
    "a": lambda net, x: net.a,
    "b": lambda net, x: net.b,
}


def part_of(net: "Net", x: Tensor, y: Tensor) -> None:
    x[:1] = number(y)


def masked(net: "Net", x: Tensor, y: Tensor) -> None:
    x[x > 0.3] = 0.25


def all_of(net: "Net", x: Tensor, y: Tensor) -> None:
    x[:] = y


def column_of(net: "Net", x: Tensor, y: Tensor) -> None:
    x[..., -1] *= 2


def averaged(net: "Net", x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.9).add_(y.mean(), alpha=0.1)


def set_anew(net: "Net", x: Tensor, y: Tensor) -> None:
    net.a = net.a * 0.9 + number(y).detach()


def set_as(net: "Net", x: Tensor, y: Tensor) -> None:
    net.b = x.detach()


def exchanged(net: "Net", x: Tensor, y: Tensor) -> None:
    net.a, net.b = net.b, net.a


def as_out(net: "Net", x: Tensor, y: Tensor) -> None:
    torch.mul(number(y).detach().expand_as(x), 2.0, out=x)


CHANGED: Mapping[str, Callable[["Net", Tensor, Tensor], Any]] = {
    "add_": lambda net, x, y: x.add_(number(y)),
    "mul_": lambda net, x, y: x.mul_(y),
    "copy_": lambda net, x, y: x.copy_(y),
    "copy_ of a number": lambda net, x, y: x.copy_(number(y).detach()),
    "fill_": lambda net, x, y: x.fill_(0.5),
    "relu_": lambda net, x, y: F.relu(x, inplace=True),
    "dropout_": lambda net, x, y: F.dropout(x, 0.5, False, inplace=True),
    "masked_fill_": lambda net, x, y: x.masked_fill_(x > 0.3, 0.1),
    "index_put_": lambda net, x, y: x.index_put_((torch.tensor([0, 0]),), number(y), accumulate=True),
    "index_fill_": lambda net, x, y: x.index_fill_(0, torch.tensor([0]), 3.0),
    "scatter_": lambda net, x, y: x.scatter_(0, torch.zeros_like(x, dtype=torch.int64)[:1], 2.0),
    "fill_diagonal_": lambda net, x, y: x.fill_diagonal_(7.0),
    "lerp_": lambda net, x, y: x.detach().lerp_(y.detach(), 0.1),
    "by a view": lambda net, x, y: x.mT.add_(number(y)),
    "by data": lambda net, x, y: x.data.mul_(0.9).add_(number(y).detach(), alpha=0.1),
    "foreach": lambda net, x, y: torch._foreach_mul_([x, net.b], 1.5),
    "norm alone": lambda net, x, y: net.norm(y),
    "instance norm": lambda net, x, y: F.instance_norm(y.view(1, 3, -1), net.norm.running_mean, net.norm.running_var),
    **{do.__name__: do for do in (part_of, masked, all_of, column_of, averaged, set_anew, set_as, exchanged, as_out)},
}


class Net(nn.Module):
    """Runs instructions; ``numbers`` of an instruction count the tensors that there are by then."""

    def __init__(self, program: Sequence[Instruction]) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("a", torch.arange(9.0).reshape(3, 3) / 5 - 0.7)
        self.register_buffer("b", torch.arange(9.0).reshape(3, 3).flip(1) / 4 - 1)
        self.program = program

    def forward(self, x: Tensor) -> list[Tensor]:
        tensors = [self.a, self.b, x + 0, self.layer(x)]
        for name, first, second in self.program:
            x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
            if name in MADE:
                tensors.append(MADE[name](self, x))
            else:
                CHANGED[name](self, x, y)
        return tensors


def loss_of(net: Net, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    tensors = net(x)
    used = sum(parameter.sum() for parameter in net.parameters())
    return sum((number(tensor) * (at + 1) for at, tensor in enumerate(tensors)), 0.0 * used), tensors[::2]
