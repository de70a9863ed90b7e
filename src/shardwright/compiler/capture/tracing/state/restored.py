"""Leaves what stands in Python as it was, whatever steps of a model that runs as it is do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside.code import StepCode
from shardwright.compiler.capture.tracing.outside.places import Place, follow
from shardwright.compiler.capture.tracing.outside.values import MISSING
from shardwright.compiler.capture.tracing.state.side_effects import Left


@contextmanager
def python_restored(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[list[str]]:
    """Leave attributes of modules, variables, and what stands in them as they were, but for buffers that stay buffers.

    Yields:
        what at the end gets the places that were changed.
    """
    step, changed = StepCode(model, loss_fn), list[str]()
    left, written = _OfModel(model, step), _Written(model, step)
    try:
        yield changed
        changed += [str(change.place) for change in left.changes()]
    finally:
        left.put_back()
        written.put_back()


class _Written:
    """The tensors that are neither parameters nor buffers, with what is in them."""

    def __init__(self, model: nn.Module, step: StepCode) -> None:
        found = {id(tensor): tensor for _, tensor in step.tensors(model) if not isinstance(tensor, nn.Parameter)}
        kept = [t for t in found.values() if not t.is_meta and not t.is_inference() and t.layout == torch.strided]
        self._before = [(tensor, torch_private.version(tensor), tensor.detach().clone()) for tensor in kept]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, version, copy in self._before:
                if torch_private.version(tensor) != version:
                    tensor.copy_(copy)


class _OfModel(Left):
    """Watches a model itself in place of a copy, so that what its modules hold is put back, too."""

    def __init__(self, model: nn.Module, step: StepCode) -> None:
        super().__init__(model, model, step)
        self._own_places = {place for place, _ in self._own()}

    def _held(self) -> Iterator[tuple[Place, Any]]:
        yield from self._own()
        yield from super()._held()

    def _put(self, place: Place, value: Any) -> None:
        module = follow(self._traced, place.owner) if place.kind == "attribute" else None
        if not isinstance(module, nn.Module):
            super()._put(place, value)
            return
        registered = (*torch_private.members(module), torch_private.buffers_in(module), vars(module))
        holding = next((names for names in registered if place.name in names), None)
        if holding is None and place not in self._own_places:
            super()._put(place, value)
        elif value is MISSING:
            (vars(module) if holding is None else holding).pop(place.name, None)
        else:
            (vars(module) if holding is None else holding)[place.name] = value
