"""A user's own training loop, run on one device and as a plan says, and compared after each of its steps.

The loop is a generator, so that each run can be looked at between its steps. What a loss function or a loop changes
beside the model, such as a teacher or a counter, is put back before each run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.capture.tracing.outside.closures import called_function
from shardwright.compiler.capture.tracing.outside.code import StepCode
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, plain
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.seed import random_numbers_kept
from shardwright.errors import UsageError
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.verification.compare import (
    ONE_DEVICE,
    PLAIN,
    Comparison,
    Deviation,
    State,
    gradients_of,
    parameters_of,
)
from shardwright.runtime.verification.copies import Copies

Loop = Callable[[ParallelModel, Sequence[Any]], Iterable[Any]]
"""``loop(parallel, batches)`` trains and yields the loss after each of its steps."""


def loops_compared(loop: Loop, copies: Copies, plan: Plan, steps: int, rank: int, *, plain: bool) -> list[Deviation]:
    """The largest deviations of a loop that runs as the plan says from the same on one device and in plain PyTorch.

    Raises:
        UsageError: where the loop is no generator, yields something else than losses, or runs differently long.
    """
    outside = Outside(copies.model, copies.loss_fn, loop)

    def run(make: Callable[[], ParallelModel]) -> list[State]:
        with outside.fresh(copies.torch_dtype), random_numbers_kept(seed=0):
            return states_of(loop, make(), copies.batches_for(steps))

    got = run(lambda: copies.split(plan))
    references = {ONE_DEVICE: copies.one_device} | ({PLAIN: copies.plain} if plain else {})
    return [
        deviation
        for name, make in references.items()
        for deviation in compared(got, run(make), Comparison(copies.dtype, name, 0.0, rank))
    ]


def states_of(loop: Loop, parallel: ParallelModel, batches: Sequence[Any]) -> list[State]:
    """Return what each step of a loop left: whole tensors, copied.

    Raises:
        UsageError: where the loop is no generator, or yields something else than losses.
    """
    steps = loop(parallel, list(batches))
    if not isinstance(steps, Iterator):
        raise UsageError(
            f"{name_of(loop)}(parallel, batches) must yield the loss after each step, it returned "
            f"{type(steps).__name__}; type `yield loss` behind optimizer.step()"
        )
    found = [_state(parallel.module, result, name_of(loop)) for result in steps]
    if not found:
        raise UsageError(f"{name_of(loop)}(parallel, batches) yielded nothing, so that there is nothing to compare")
    return found


def _state(module: nn.Module, result: Any, name: str) -> State:
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"{name} must yield the loss, one number in a tensor; it yielded {type(loss).__name__}")
    kinds = {"loss": loss.reshape(())}, gradients_of(module), dict(module.named_buffers()), parameters_of(module)
    return State(*({name: tensor.detach().clone() for name, tensor in kind.items()} for kind in kinds))


def compared(got: Sequence[State], expected: Sequence[State], comparison: Comparison) -> list[Deviation]:
    """The largest deviation of each kind over all steps.

    Raises:
        UsageError: where the runs have taken different numbers of steps.
    """
    if len(got) != len(expected):
        raise UsageError(
            f"the loop took {len(got)} steps as the plan says and {len(expected)} with {comparison.reference}; how "
            "many there are must not depend on the numbers"
        )
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True), start=1):
        comparison.add(step, ours, theirs, {})
    return [deviation for deviation in comparison.worst.values() if deviation.entries]


class Outside:
    """The state that a loss function and a loop may change beside the model, as it was at first.

    That is tensors, numbers, words, and lists and dicts of these, which either of them closes over or finds among the
    variables of its file, and what modules among these variables hold.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        steps = [StepCode(model, function) for function in functions]
        self._tensors = {id(t): (t, t.detach().clone()) for step in steps for _, t in step.tensors(model)}
        self._values = [
            (place.kind, step.loss_fn, place.name, value, copy.deepcopy(value))
            for step in steps
            for place, value in step.variables()
            if place.kind in ("closure", "global") and plain(value) is not NOT_PLAIN
        ]

    @contextmanager
    def fresh(self, dtype: torch.dtype) -> Iterator[None]:
        """Everything as it was at first, floating-point tensors in ``dtype``; and in their own again afterwards."""
        self._put_back(dtype)
        try:
            yield
        finally:
            self._put_back(None)

    def _put_back(self, dtype: torch.dtype | None) -> None:
        for tensor, first in self._tensors.values():
            wanted = first.to(dtype) if dtype is not None and first.is_floating_point() else first
            tensor.data = wanted.clone()
        for kind, function, name, value, first in self._values:
            _assign(kind, function, name, _refilled(value, first))


def _refilled(value: Any, first: Any) -> Any:
    """The very list or dict, with what it held at first; other values as they were."""
    if isinstance(value, list):
        value[:] = first
    elif isinstance(value, dict):
        value.clear()
        value.update(first)
    else:
        return first
    return value


def _assign(kind: str, function: Callable[..., Any], name: str, value: Any) -> None:
    """Let a name that a function closes over, or that is in its file, stand for a value."""
    called = called_function(function)
    if kind == "closure":
        called.__closure__[called.__code__.co_freevars.index(name)].cell_contents = value
    else:
        called.__globals__[name] = value


def name_of(loop: Loop) -> str:
    """Return the name of a loop, or that of its class."""
    return getattr(loop, "__name__", type(loop).__name__)
