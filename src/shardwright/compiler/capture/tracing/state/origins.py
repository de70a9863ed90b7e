"""Traces each tensor of a step to its batch, to parameters, to random numbers, or to what was before it.

All others, such as a mask that is made when it is first needed, are the same in every step of one shape; and so are
those that follow from frozen parameters, and from buffers that the step does not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from shardwright.common import signatures, torch_private
from shardwright.compiler.rules.layers import draws

CHANGES = re.compile(r"__setitem__|__i\w+__|\w*[a-z0-9]_")  # functions that change their operand in place
# Functions that give the numbers of their first operand on another device, or in another dtype.
_MOVES = frozenset({
    "to", "cpu", "cuda", "type", "type_as", "contiguous", "float", "double", "half", "bfloat16", "long", "int", "short",
    "char", "byte", "bool",
})  # fmt: skip


class Origins:
    """Watches one capture."""

    def __init__(self) -> None:
        # Held, so that no others take their places.
        self._storages: dict[int, Any] = {}
        self._buffers: dict[str, tuple[torch.Tensor, int]] = {}  # as they were, and how often they were changed
        self._read: dict[int, frozenset[str]] = {}  # the buffers from which what lies in a storage follows
        self._written: set[int] = set()  # storages in which an operator changed what it was given, and does not say so
        self._model: nn.Module | None = None
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used: dict[int, torch.Tensor] = {}
        self._used_storages: set[int] = set()  # of those that were there before, which transforms of torch.func wrap

    def begin(self, model: nn.Module, batch: Iterable[torch.Tensor]) -> None:
        """A step of the model begins."""
        for tensor in (*(parameter for parameter in model.parameters() if parameter.requires_grad), *batch):
            self._add(tensor)
        self._model = model
        self._buffers = {
            name: (buffer, torch_private.version(buffer))
            for name, buffer in model.named_buffers(remove_duplicate=False)
        }
        for name, (buffer, _) in self._buffers.items():
            self._add(buffer, self._buffers_of(buffer) | {name})

    def after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what a function of torch has returned."""
        given = list(_tensors((*args, *kwargs.values())))
        self._used.update({id(tensor): tensor for tensor in given})
        self._used_storages.update(torch_private.storage_key(tensor) for tensor in given if _was_before(tensor))
        if name in _MOVES and isinstance(result, torch.Tensor) and given and result is not given[0]:
            self._moved[id(result)] = result, self.before_moves(given[0])
        if _changes_statistics(name, args, kwargs):
            self._written |= {torch_private.storage_key(tensor) for tensor in given}
        always = any(map(self._always_follows, given)) or draws_numbers(name)
        buffers = None if always else frozenset[str]().union(*map(self._buffers_of, given))
        if buffers or always:
            changed = [*args[:1], kwargs.get("out")] if CHANGES.fullmatch(name) or "out" in kwargs else []
            for tensor in _tensors((result, *changed)):
                self._add(tensor, buffers)

    def follows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor may be another one in the next step, once this one has ended."""
        return self._always_follows(tensor) or any(map(self._is_changed, self._buffers_of(tensor)))

    def _always_follows(self, tensor: torch.Tensor) -> bool:
        key = torch_private.storage_key(tensor) if torch_private.is_fake(tensor) else None
        return key is None or (key in self._storages and key not in self._read)

    def _buffers_of(self, tensor: torch.Tensor) -> frozenset[str]:
        fake = torch_private.is_fake(tensor)
        return self._read.get(torch_private.storage_key(tensor), frozenset()) if fake else frozenset()

    def _is_changed(self, name: str) -> bool:
        """Return whether the step has changed a buffer in place, or set another in its place."""
        assert self._model is not None
        buffer, version = self._buffers[name]
        now = dict(self._model.named_buffers(remove_duplicate=False)).get(name)
        written = torch_private.version(buffer) != version or torch_private.storage_key(buffer) in self._written
        return now is not buffer or written

    def was_used(self, tensor: torch.Tensor) -> bool:
        """Return whether the step has read a tensor."""
        if id(tensor) in self._used:
            return True
        return _was_before(tensor) and torch_private.storage_key(tensor) in self._used_storages

    def before_moves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that was brought to a device or a dtype as ``tensor``; mostly itself."""
        return self._moved.get(id(tensor), (None, tensor))[1]

    def is_moved(self, before: Any, after: Any) -> bool:
        """Check that ``after`` is ``before`` on another device, or in a dtype that holds all its numbers.

        The same stands there then, whichever a step finds, unless ``before`` was changed in place.
        """
        if not isinstance(before, torch.Tensor) or self.before_moves(after) is not before:
            return False
        if any(before is held and torch_private.version(held) != version for held, version in self._buffers.values()):
            return False
        wider = torch.promote_types(before.dtype, after.dtype) == after.dtype
        if wider and before.is_floating_point() == after.is_floating_point():
            return True
        if torch_private.is_fake(before) or before.is_meta or before.layout != torch.strided:
            return False
        with torch_private.with_values():
            return torch.equal(before.detach().to(after.dtype).to(before.dtype), before.detach())

    def _add(self, tensor: torch.Tensor, buffers: frozenset[str] | None = None) -> None:
        """Note that a tensor follows from some buffers, or from what changes in every step."""
        if not torch_private.is_fake(tensor):
            return
        key, always = torch_private.storage_key(tensor), self._always_follows(tensor)
        self._storages[key] = torch_private.storage_of(tensor)
        if buffers is None:
            self._read.pop(key, None)
        elif not always:
            self._read[key] = self._read.get(key, frozenset()) | buffers


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _was_before(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was there before the step, and has memory."""
    return not torch_private.is_fake(tensor) and tensor.layout == torch.strided


def _changes_statistics(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch changes the running statistics that it is given."""
    trains = kwargs.get("training", args[5] if len(args) > 5 else name != "batch_norm")
    return "moving_av" in name or ("batch_norm" in name and bool(trains))


@lru_cache(maxsize=1024)
def draws_numbers(name: str) -> bool:
    """Return whether a function of torch draws random numbers.

    Cached by the name: ATen's operators and the rules by which some draw are there once torch is imported.
    """
    return any(map(draws, signatures.overloads_of(f"aten.{name}")))
