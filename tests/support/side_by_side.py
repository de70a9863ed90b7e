"""Runs a whole program with plain PyTorch and with `sw.parallelize`, and measures how far the two are apart.

A program is a generator that trains by what its argument ``parallelize(model, loss_fn, batch)`` returns and yields its
losses. It is the same code both times: the reference calls the loss function on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.errors import ShardwrightError
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.verification.plain import PlainModel
from whole import PLANS

Parallelize = Callable[..., ParallelModel]
Program = Callable[[Parallelize], Iterator[Tensor]]

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Outcome:
    """The losses of a program, and the parameters and buffers of its models at the end."""

    losses: tuple[Tensor, ...]
    state: Mapping[str, Tensor]


def outcome(program: Program, parallelize: Parallelize) -> Outcome:
    """What a program has trained, from the same random numbers every time."""
    sw.set_seed(0)
    models: list[ParallelModel] = []

    def noted(*args: Any, **kwargs: Any) -> ParallelModel:
        models.append(parallelize(*args, **kwargs))
        return models[-1]

    losses = tuple(loss.detach().clone() for loss in program(noted))
    state = {
        f"{number}.{name}": gathered(tensor.detach()).clone()
        for number, model in enumerate(models)
        for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers())
    }
    return Outcome(losses, state)


def deviation(got: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest deviation by the design's measure, and where it is."""
    pairs = [(f"loss {at}", *pair) for at, pair in enumerate(zip(got.losses, expected.losses, strict=True))]
    pairs += [(name, got.state[name], tensor) for name, tensor in expected.state.items()]
    largest = max(float(t.abs().max()) for t in expected.state.values() if t.numel() and t.is_floating_point())
    worst = 0.0, ""
    for name, ours, theirs in pairs:
        if theirs.numel():
            scale = max(float(theirs.abs().max()), 0.0 if name.startswith("loss") else largest)
            apart = float((ours.double() - theirs.double()).abs().max()) / (scale or 1.0)
            worst = max(worst, (apart if apart == apart else float("inf"), name))
    return worst


def descend(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Iterator[Tensor]:
    """A step on each batch, as most programs take them."""
    for batch in batches:
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def compared(program: Program, plans: tuple[str, ...], reference: str = "plain PyTorch") -> dict[str, Any]:
    """On every rank: the deviation under each plan, or the refusal. ``reference`` may be "one device", by our rules."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    if reference == "plain PyTorch":
        expected = outcome(program, lambda model, loss_fn, batch, **_: PlainModel(model, loss_fn))
    else:
        expected = outcome(program, partial(sw.parallelize, mode="single", batch="global"))
    found: dict[str, Any] = {}
    for plan in plans:
        try:
            found[plan] = deviation(outcome(program, partial(sw.parallelize, batch="global", **PLANS[plan])), expected)
        except ShardwrightError as error:
            found[plan] = str(error)
    assert any(not torch.equal(a, expected.losses[0]) for a in expected.losses[1:]), "the program trains nothing"
    return found
