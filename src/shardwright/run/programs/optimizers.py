"""What torch's optimizers must be told of parameters that are DTensors, before each of their steps.

Those that were made before the parameters were split are given the new ones. Those whose arithmetic torch cannot split
are given whole gradients, or refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import UsageError
from shardwright.mesh.dtensor import gathered
from shardwright.plan.pricing.optimizers import WHOLE_GRADIENTS

# Parameters that were replaced -> what they were replaced by.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Optimizers whose fused kernels torch cannot run on DTensors (no sharding rule in 2.13).
_UNFUSABLE = (torch.optim.SGD, torch.optim.Adagrad)


def note_successor(parameter: Tensor, successor: nn.Parameter) -> None:
    """Let every optimizer of ``parameter`` update ``successor`` in its place, from its next step on."""
    _replaced[parameter] = successor


@cache
def watch_optimizers() -> None:
    """Look at every optimizer before its step; once per process."""
    register_optimizer_step_pre_hook(_before_step)


_known: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # how many parameters were looked at


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """What the step is to be called with, None where it stays as it is."""
    _give_successors(optimizer)
    _refuse_unsplittable(optimizer)
    if not isinstance(optimizer, WHOLE_GRADIENTS):
        return None
    _make_whole(optimizer)

    def whole_after(given: Any) -> Any:
        """A closure, which computes gradients inside of the step, has them whole when it returns."""
        if not callable(given):
            return given

        def closure() -> Any:
            loss = given()
            _make_whole(optimizer)
            return loss

        return closure

    return tuple(map(whole_after, args)), {name: whole_after(value) for name, value in kwargs.items()}


def _give_successors(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made before its parameters were split update those that took their place.

    Raises:
        UsageError: where it has state already, which belongs to whole parameters.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) == count:
        return
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            successor = _replaced.get(parameter)  # type: ignore[no-untyped-call]
            if successor is None:
                continue
            if optimizer.state.get(parameter):
                raise UsageError(
                    f"this {type(optimizer).__name__} has made steps with parameters that sw.parallelize has split "
                    "since; make it after sw.parallelize, from the parameters of what that returns, and load its state "
                    "with sw.checkpoint"
                )
            group["params"][at] = successor
    _known[optimizer] = count


def _refuse_unsplittable(optimizer: torch.optim.Optimizer) -> None:
    """Say before the step what torch's own error would not.

    Raises:
        UsageError: where an optimizer that torch cannot run on DTensors is to update some.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not any(isinstance(parameter, DTensor) for parameter in group["params"]):
            continue
        if group.get("fused") and isinstance(optimizer, _UNFUSABLE):
            raise UsageError(
                f"{name}(fused=True) cannot update parameters that are split between ranks: torch has no fused "
                f"{name} for DTensors; use {name}(..., foreach=True)"
            )
        if isinstance(optimizer, torch.optim.Rprop):
            raise UsageError(
                f"{name} cannot update parameters that are split between ranks: it writes by masks, which torch's "
                "DTensors cannot; use another optimizer, or sw.parallelize(mode='data'), which splits no parameter"
            )


def _make_whole(optimizer: torch.optim.Optimizer) -> None:
    """Gather the gradients of split parameters, and what is kept for them, on every rank; the parameters stay split."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(parameter.grad, DTensor):
                parameter.grad = _whole(parameter.grad)
            kept = optimizer.state.get(parameter, {})
            kept.update({key: _whole(value) for key, value in kept.items() if isinstance(value, DTensor)})


def _whole(tensor: DTensor) -> DTensor:
    replicated = [Replicate()] * tensor.device_mesh.ndim
    return DTensor.from_local(
        gathered(tensor), tensor.device_mesh, replicated, shape=tensor.shape, stride=tensor.stride()
    )
