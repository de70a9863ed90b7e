"""The contents of each memory while a step runs twice: of two that are equal, the numbers are, for any batch.

A memory holds the expression that led to it, back to the batch, parameters, buffers and random numbers; operators that
write into it change the expression. What one step has made and another one reads is noted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.common import signatures, torch_private, trees
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, plain

_DRAWN = "random numbers"
_TRAINED = "parameters"  # as one: a step of thousands would hold a set of thousands for each tensor


@dataclass(frozen=True)
class Content:
    """The contents of a memory: the number of the expression that led to them.

    They follow from the memories and the parts of the batch in ``follows``. ``step`` is the one that made them, 0 where
    they were there before.
    """

    expression: int
    follows: frozenset[Hashable]
    step: int
    memory: Any  # held, so that no other takes its place


class Contents:
    """Watches steps of ``model``, one after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [*model.parameters(), *model.buffers()]
        self._numbers: dict[Any, int] = {}  # of expressions
        self._of: dict[int, Content] = {}
        self._memories: list[Any] = []  # that were there before, held for the same reason
        self._step = self._drawn = 0
        self._changing: set[Hashable] = {_DRAWN, _TRAINED}
        self._overwritten: set[int] = set()  # memories that were there before
        self.read: set[int] = set()  # memories that an earlier step has made, of which a later one reads

    def begin(self, batch: Sequence[torch.Tensor]) -> None:
        """A step begins: parameters and buffers are what they are in any, and so is the batch, which is another."""
        self._step, self._drawn = self._step + 1, 0
        self._of = {key: content for key, content in self._of.items() if content.step}
        for tensor in self._held:
            self._found(tensor, follows=_TRAINED if tensor.requires_grad else None)
        for number, tensor in enumerate(batch):
            self._changing.add(("batch", number))
            self._put(tensor, ("batch", number), frozenset({("batch", number)}))

    def call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and note what it makes and changes."""
        given = _tensors((args, kwargs))
        follows = frozenset[Hashable]().union(*map(self.follows, given))
        expression: tuple[Any, ...] = operator, self.described((args, kwargs))
        if torch.Tag.nondeterministic_seeded in operator.tags:
            self._drawn += 1
            expression, follows = (*expression, self._drawn), follows | {_DRAWN}
        if operator is torch.ops.aten.lift_fresh.default and not torch_private.is_fake(args[0]):
            expression, follows = (operator, _value(args[0])), frozenset()
        result = operator(*args, **kwargs)
        known = {torch_private.storage_key(tensor) for tensor in given}
        for number, tensor in enumerate(_tensors(result)):
            if torch_private.storage_key(tensor) not in known:
                self._put(tensor, (number, expression), follows)
        for number, tensor in enumerate(_written(operator, args, kwargs, given)):
            self._write(tensor, ("written", number, expression), follows)
        return result

    def described(self, value: Any) -> Any:
        """Return what can be compared of an argument, or of a result: equal where the numbers in it are."""
        if isinstance(value, torch.Tensor):
            shown = tuple(value.shape), value.dtype, value.requires_grad
            placed = (value.stride(), value.storage_offset()) if value.layout == torch.strided else ()
            return (self._content(value).expression, *shown, *placed)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.described, value))
        if isinstance(value, Mapping):
            return tuple((key, self.described(entry)) for key, entry in value.items())
        is_word = plain(value) is not NOT_PLAIN or isinstance(value, (torch.layout, torch.memory_format))
        return f"{value!r}" if is_word else f"{type(value)}"

    def follows(self, tensor: torch.Tensor) -> frozenset[Hashable]:
        """From what a tensor follows, and itself where an earlier step has made it."""
        content = self._content(tensor)
        if not 0 < content.step < self._step:
            return content.follows
        self.read.add(torch_private.storage_key(tensor))
        return content.follows | {torch_private.storage_key(tensor)}

    def changes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is another one in every step."""
        return not self._changing.isdisjoint(self._content(tensor).follows)

    def expression(self, tensor: torch.Tensor) -> int:
        """Equal for memories that hold the same."""
        return self._content(tensor).expression

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was there before the steps, and they have written into its memory."""
        return not self._content(tensor).step and torch_private.storage_key(tensor) in self._overwritten

    def is_left(self, tensor: torch.Tensor) -> bool:
        """Return whether a step has made a tensor, another one than others have."""
        return self.changes(tensor) and bool(self._content(tensor).step)

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether the last step has made a tensor."""
        return self._content(tensor).step == self._step

    def _content(self, tensor: torch.Tensor) -> Content:
        key = torch_private.storage_key(tensor)
        if key not in self._of:  # whoever holds it may change it
            self._changing.add(key)
            self._found(tensor)
        return self._of[key]

    def _found(self, tensor: torch.Tensor, *, follows: Hashable = None) -> None:
        """Note a tensor that was there before, by itself, where there is nothing else from which it follows."""
        key = torch_private.storage_key(tensor)
        number = self._numbers.setdefault(key, len(self._numbers))
        self._memories.append(torch_private.storage_of(tensor))
        self._of[key] = Content(number, frozenset({follows or key}), 0, self._memories[-1])

    def _put(self, tensor: torch.Tensor, expression: Hashable, follows: frozenset[Hashable]) -> None:
        number = self._numbers.setdefault(expression, len(self._numbers))
        memory = torch_private.storage_of(tensor)
        self._of[torch_private.storage_key(tensor)] = Content(number, follows, self._step, memory)

    def _write(self, tensor: torch.Tensor, expression: Hashable, follows: frozenset[Hashable]) -> None:
        content = self._content(tensor)
        number = self._numbers.setdefault(expression, len(self._numbers))
        if not content.step:
            self._changing.add(torch_private.storage_key(tensor))
            self._overwritten.add(torch_private.storage_key(tensor))
        changed = replace(content, expression=number, follows=content.follows | follows)
        self._of[torch_private.storage_key(tensor)] = changed


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _written(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[torch.Tensor]
) -> Iterable[torch.Tensor]:
    """The tensors into which an operator writes: all of them where its schema may hide some."""
    if not torch_private.is_certain(operator) or signatures.keeps_statistics(operator):
        return given
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in signatures.written_operands(operator)]
    return _tensors(found)


def _value(tensor: torch.Tensor) -> Hashable:
    """Return what a tensor holds that is written in the code, on whatever device."""
    with torch_private.with_values():
        held = tensor.cpu()  # in a name while its bytes are read
    memory = torch_private.storage_of(held)
    return tensor.dtype, tuple(tensor.shape), ctypes.string_at(memory.data_ptr(), memory.nbytes())
