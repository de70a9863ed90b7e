"""What optimizers keep for the parameters that they update.

An optimizer that works entry by entry keeps tensors like the parameter, whose parts are split as it is, and a few
numbers. How many is not written down here: the optimizer makes a step on a parameter of fifteen entries, and what it
then keeps is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps: tensors like each parameter, and bytes for each parameter beside them."""

    name: str
    per_entry: int
    per_parameter_bytes: int

    def bytes_for(self, parameter_bytes: int) -> int:
        """What is kept for the part of a parameter that has so many bytes."""
        return self.per_entry * parameter_bytes + self.per_parameter_bytes


def updated_times(per_entry: int) -> int:
    """How often as many bytes as a parameter has are read and written by a step that looks at everything once.

    >>> updated_times(2)  # parameter, gradient and two states are read, all but the gradient written
    7
    """
    return 3 + 2 * per_entry


ADAMW = OptimizerStates("adamw", 2, 4)
"""What plans count where nobody says which optimizer there will be."""

# Optimizers that torch's DTensors fail in (Adafactor squares partial norms in place) or round otherwise (Muon iterates
# matrix products in bfloat16). With whole gradients they compute what one device does, and keep whole tensors.
WHOLE_GRADIENTS = (torch.optim.Adafactor, torch.optim.Muon)
_LEFT_OUT = frozenset({"capturable", "fused"})  # these refuse the device of the probe, and keep nothing more


def states_of(given: OptimizerStates | Optimizer | type[Optimizer] | str) -> OptimizerStates:
    """What the optimizer keeps that a user names: ``"adamw"``, a class of torch's, or an optimizer with its settings.

    >>> states_of("sgd"), states_of(torch.optim.Adam)
    (OptimizerStates(name='sgd', per_entry=0, per_parameter_bytes=0), \
OptimizerStates(name='adam', per_entry=2, per_parameter_bytes=4))

    Raises:
        UsageError: where there is no such optimizer, or what it keeps is not split as its parameters are.
    """
    if isinstance(given, OptimizerStates):
        return given
    if isinstance(given, str):
        return _named(given.lower())
    if isinstance(given, Optimizer):
        kind = type(given)
        makers = [partial(kind, **_accepted(kind, {**given.defaults, **group})) for group in given.param_groups]
        return max((_probed(kind, make) for make in makers), key=lambda states: states.per_entry)
    if isinstance(given, type) and issubclass(given, Optimizer):
        return _probed(given, given)
    raise UsageError(f"optimizer is {given!r}; expected a name as 'adamw', a class of torch.optim or an optimizer")


def _known() -> dict[str, type[Optimizer]]:
    classes = (found for found in vars(torch.optim).values() if isinstance(found, type))
    return {found.__name__.lower(): found for found in classes if issubclass(found, Optimizer)}


def _named(name: str) -> OptimizerStates:
    known = _known()
    if name not in known:
        names = ", ".join(sorted(set(known) - {"optimizer"}))
        raise UsageError(f"there is no optimizer {name!r} in torch.optim; the names are {names}")
    return _probed(known[name], known[name])


def _accepted(kind: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that the class takes: its groups hold others too."""
    taken = set(inspect.signature(kind).parameters) - _LEFT_OUT
    return {name: value for name, value in settings.items() if name in taken and name != "params"}


def _probed(kind: type[Optimizer], make: Callable[[list[nn.Parameter]], Optimizer]) -> OptimizerStates:
    """What an optimizer keeps after a step."""
    name = kind.__name__.lower()
    reason = "what it keeps is not split as its parameters are" if issubclass(kind, WHOLE_GRADIENTS) else ""
    kept: list[Tensor] = []
    try:
        if not reason:
            kept = _kept_after_a_step(make)
    except Exception as error:
        reason = f"it makes no step on one parameter: {error}"
    like = sum(tensor.numel() == _ENTRIES for tensor in kept)
    if any(tensor.numel() not in (1, _ENTRIES) for tensor in kept):
        reason = "it keeps tensors of other shapes than its parameters"
    if reason:
        raise UsageError(
            f"what {kind.__name__} keeps for its parameters cannot be counted: {reason}; leave optimizer= out, or name "
            "one that works entry by entry, as optimizer='adamw'"
        )
    return OptimizerStates(name, like, sum(tensor.nbytes for tensor in kept if tensor.numel() == 1))


_ENTRIES = 15


def _kept_after_a_step(make: Callable[[list[nn.Parameter]], Optimizer]) -> list[Tensor]:
    with torch.device("cpu"), torch.enable_grad():
        parameter = nn.Parameter(torch.ones(3, _ENTRIES // 3, dtype=torch.float32))
        optimizer = make([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
