"""Gradients that `accumulate` keeps unreduced, of which torch's optimizers and hooks know nothing.

A step without them would be another one than that of one device, and so would one with those that a script has dropped
by ``optimizer.zero_grad()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.common import torch_private
from shardwright.errors import UsageError


class Unreduced(ABC):
    """The keeper of unreduced gradients of a model's parameters; optimizers ask all keepers."""

    def __init__(self) -> None:
        self._named: Mapping[str, nn.Parameter] = {}

    def ask_for(self, model: nn.Module) -> None:
        """Be asked by optimizers of the parameters of ``model``, as they are stored now."""
        _watch_optimizers()
        self._named = dict(model.named_parameters(remove_duplicate=False))
        _all.add(self)

    def begin(self) -> None:
        """Be told of gradients that are dropped, from now on until none is kept."""
        if not _dropping:
            _dropping.append(ExitStack())
            _dropping[0].enter_context(_drops_told())

    @property
    @abstractmethod
    def kept(self) -> Collection[str]:
        """The names of the parameters whose gradients are kept."""

    @abstractmethod
    def drop(self, names: Iterable[str]) -> None:
        """Keep those of these parameters no more."""

    def kept_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The names of the optimizer's parameters whose gradients are kept."""
        if not self.kept:
            return []
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [name for name in self.kept if name in self._named and id(self._named[name]) in updated]

    def hooked(self, names: Iterable[str]) -> str:
        """The name of one of these parameters that has a hook on its gradient, empty where none has."""
        return next((name for name in names if name in self._named and torch_private.has_hook(self._named[name])), "")


_all: WeakSet[Unreduced] = WeakSet()
_dropping: list[ExitStack] = []  # one, as long as `_drops_told`


@cache
def _watch_optimizers() -> None:
    """Be asked before each step of an optimizer. Cached so that it is done once."""
    register_optimizer_step_pre_hook(_refuse_unreduced)


@contextmanager
def _drops_told() -> Iterator[None]:
    """Let ``optimizer.zero_grad()`` drop what is kept of its parameters, too."""

    @wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        before["zero_grad"](optimizer, *args, **kwargs)
        for each in _all:
            each.drop(each.kept_of(optimizer))
        _end()

    with torch_private.patched("zero_grad", zero_grad=zero_grad) as before:
        yield


def _end() -> None:
    """Leave torch as it is where nothing is kept any more."""
    if _dropping and not any(each.kept for each in _all):
        _dropping.pop().close()


def _refuse_unreduced(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Asked before each step.

    Raises:
        UsageError: where it would be made without a part of the gradient, or by this rank's own.
    """
    for each in _all:
        if names := each.kept_of(optimizer):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(
                f"this {type(optimizer).__name__} makes a step while accumulate() keeps gradients of {names[0]}{more} "
                "that are not reduced between ranks yet; call the model and backward() for the last batch of a step "
                "outside of accumulate(), or drop what is kept: parallel.zero_grad()"
            )
    _end()
