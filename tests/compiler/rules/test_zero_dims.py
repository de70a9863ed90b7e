"""Operators that are told a dim, of tensors that have none: torch takes 0 and -1 for their one element."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_rule_table import overloads
from torch import nn

from rulecheck import Invocation, check, rule_for
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.table import TABLE
from whole import like_plain

DIMS = ("dim", "dims", "dim0", "dim1", "dimension", "start_dim", "end_dim")
SETTINGS = {"dtype": None, "keepdim": False, "half_to_float": False, "unbiased": False, "correction": 0, "stable": True}
NUMBERS = {"k": 1, "size": 1, "step": 1, "split_size": 1, "chunks": 1, "repeats": 2, "p": 2, "ord": 2, "index": 0}
OTHERS = {"shifts": [1], "sizes": [1], "normalization": 0, "forward": True, "onesided": True, "last_dim_size": 1}


def told(argument: Any, dim: Any) -> Any:
    """A value for one parameter of an operator's schema."""
    kind = str(argument.type)
    if argument.name in DIMS:
        return [dim] if "List" in kind else dim
    if argument.name == "index" and kind == "Tensor":
        return torch.tensor(0)
    if kind == "Tensor":
        return torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    if kind == "List[Tensor]":
        return [torch.tensor(0.7, dtype=torch.float64, requires_grad=True)]
    return {**SETTINGS, **NUMBERS, **OTHERS}.get(argument.name, argument.default_value)


def invocations() -> Iterator[Invocation]:
    """Every operator of the table that takes a dim, of a tensor without dims, where torch takes it."""
    ruled = [key for key, row in TABLE.items() if row.rule is not None and key.startswith("aten.")]
    for key, dim in itertools.product(ruled, (0, -1)):
        for op in overloads(key):
            name, overload = op.split(".")
            arguments = getattr(getattr(torch.ops.aten, name), overload)._schema.arguments
            if not any(argument.name in DIMS for argument in arguments):
                continue
            positional = tuple(told(argument, dim) for argument in arguments if not argument.kwarg_only)
            named = {argument.name: told(argument, dim) for argument in arguments if argument.kwarg_only}
            try:
                getattr(getattr(torch.ops.aten, name), overload)(*positional, **named)
            except (RuntimeError, IndexError):
                continue
            yield Invocation(f"aten.{op}", positional, named)


def test_every_rule_takes_what_torch_takes():
    tried, failed = set(), []
    for invocation in invocations():
        tried.add(invocation.op.split(".")[1])
        try:
            rule = rule_for(invocation)
            for partial in ((), ("a",)) if rule.linear_operands else ((),):
                check(invocation, Mesh.of(a=2), rule.strategy({}, partial))
        except Exception as error:
            failed.append(f"{invocation.op}{invocation.args}: {type(error).__name__} {error}")
    assert not failed, "\n".join(failed)
    assert len(tried) > 35


def loss_fn(model, batch):
    """Means and others of tensors without dims, of which each rank has an addend or all."""
    x = (model.weight * batch).sum()
    means = x.mean(-1) + x.mean(0) * x.mean(()) + x.mean(-1, keepdim=True).mean()
    along = x.softmax(-1) + (x / 9).cumsum(0) * x.tanh().cumprod(-1) + x.log_softmax(0) + x.logsumexp(-1)
    least = x.sort(0).values + x.max(-1).values * x.amin(0) + x.prod(0) + x.sum(-1) + x.norm(dim=-1)
    moved = x.transpose(0, -1).squeeze(0).unsqueeze(-1).flatten().mean(-1)
    return means + along.sin() + least.cos() + moved


@pytest.mark.usefixtures("float64")
def test_programs_of_them_give_what_plain_pytorch_gives():
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    like_plain(model, loss_fn, torch.randn(8, 3), (1, 3))
