"""Side effects of a step in Python: what has changed at its end, also inside of collections."""

from __future__ import annotations

import functools
import random
import weakref
from collections import ChainMap, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import is_
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.closures import CachedFunction
from shardwright.compiler.capture.tracing.outside.code import StepCode
from shardwright.compiler.capture.tracing.outside.entries import (
    HOOKS,
    OF_TORCH,
    Entries,
    attributes,
    entries_of,
    in_slots,
    inside,
    opened_modules,
)
from shardwright.compiler.capture.tracing.outside.places import Place, follow
from shardwright.compiler.capture.tracing.outside.values import MISSING, PLAIN, long_and_plain, same

_MOST = 100_000  # entries of an array that are looked at


@dataclass(frozen=True)
class Change:
    """The values at a place before and after a step; `MISSING` where there was none."""

    place: Place
    before: Any
    after: Any


class _Same(list[Any]):
    """Objects that are compared by which they are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and len(self) == len(other) and all(map(is_, self, other))


class Left:
    """Watches one capture. ``traced`` is the copy of ``model`` that runs."""

    def __init__(self, model: nn.Module, traced: nn.Module, step: StepCode) -> None:
        self._traced, self._step = traced, step
        self._buffers = {name for name, _ in traced.named_buffers(remove_duplicate=False)}
        self._modules = opened_modules(model) | opened_modules(traced)
        self._variables = [(place, value, self._opened(value)) for place, value in self._held()]
        self._before = self._look()

    def changes(self) -> Iterator[Change]:
        """Return what is not as it was."""
        now = self._look()
        for place in dict.fromkeys([*self._before, *now]):
            old, new = self._before.get(place, {}), now.get(place, {})
            for path in dict.fromkeys([*old, *new]):
                before, after = old.get(path, (MISSING, None)), new.get(path, (MISSING, None))
                parameters = path and all(map(safe.is_parameter, (before[0], after[0])))
                if not parameters and not _unchanged(before, after):  # a list of them, as the exporter puts others in
                    yield Change(replace(place, path=path), before[0], after[0])

    def put_back(self) -> None:
        """Let variables be as they were, and what generators, arrays, sets and long lists held."""
        changes = [(replace(change.place, path=""), change.after) for change in self.changes()]
        ours = {place for place, _, _ in self._variables}
        places = dict.fromkeys(place for place, after in changes if _is_of_the_trace(after) or place in ours)
        for place, value, opened in self._variables:
            if place in places:
                del places[place]
                self._put(place, value)
                for collection, entries in opened:
                    with suppress(Exception):  # a collection of a user's class may not be as others are
                        _refill(collection, entries)
        for place in places:
            self._put(place, MISSING)
        self._restore()

    def _restore(self) -> None:
        for leaf, state in (found for leaves in self._before.values() for found in leaves.values()):
            if state is not None and not equal_states(state, _state(leaf)):
                with suppress(Exception):  # of a user's class, or of another size now
                    _set_state(leaf, state)

    def _put(self, place: Place, value: Any) -> None:
        """Let a variable, or an attribute of a module's class, stand for ``value``; others are of the copy alone."""
        if place.kind != "attribute":
            with suppress(KeyError):  # gone
                place.put(self._step.loss_fn, value)
            return
        module = follow(self._traced, place.owner)
        owners = [base for base in type(module).__mro__ if place.name in vars(base)]
        if owners and vars(owners[0])[place.name] is not value and place.name not in vars(module):
            delattr(owners[0], place.name)
            if getattr(owners[0], place.name, MISSING) is not value and value is not MISSING:
                setattr(owners[0], place.name, value)

    def _look(self) -> dict[Place, dict[str, tuple[Any, Any]]]:
        """Return what stands at each place, with what can change of it."""
        opened = dict(self._modules)
        return {
            place: {path: (leaf, _state(leaf)) for path, leaf in inside(value, opened)}
            for place, value in self._places()
        }

    def _places(self) -> Iterator[tuple[Place, Any]]:
        """Return what modules hold, and what is held beside the copy of the model."""
        yield from self._own()
        yield from self._held()

    def _own(self) -> Iterator[tuple[Place, Any]]:
        """Attributes of modules, parameters, buffers that were none before, and modules in modules."""
        for owner, module in self._traced.named_modules():
            prefix = f"{owner}." * bool(owner)
            children, parameters = torch_private.members(module)
            buffers = {n: b for n, b in torch_private.buffers_in(module).items() if prefix + n not in self._buffers}
            own = dict(attributes(module))
            for name, value in {**own, **children, **parameters, **buffers}.items():
                yield Place("attribute", owner, name), value

    def _held(self) -> Iterator[tuple[Place, Any]]:
        """Yield what no copy of the model copies, with its place.

        These are variables, what modules share by their class, and functions, as hooks are.
        """
        yield from self._step.variables()
        for owner, module in self._traced.named_modules():
            for name, value in _shared(type(module)).items():
                if name not in vars(module):
                    yield Place("attribute", owner, name), value
            for name in filter(vars(module).get, HOOKS):
                yield Place("attribute", owner, name), vars(module)[name]

    def _opened(self, value: Any) -> list[tuple[Any, Entries]]:
        """The collections and objects in a value, and what stands in each."""
        opened = ChainMap({}, self._modules)
        deque(inside(value, opened), maxlen=0)
        return list(opened.maps[0].values())


def _is_of_the_trace(value: Any) -> bool:
    return safe.is_a(value, torch.Tensor) and torch_private.is_fake(value)


def _refill(collection: Any, entries: Entries) -> None:
    """Let a collection hold what it did, by the methods of Python's own, as those of its class may do more."""
    now = entries_of(collection)
    if now is not None and len(now) == len(entries) and all(map(_is_entry, now, entries)):
        return
    if safe.is_a(collection, list):
        list.__setitem__(collection, slice(None), [entry for _, entry in entries])
    elif safe.is_a(collection, deque):
        deque.clear(collection)
        deque.extend(collection, [entry for _, entry in entries])
    elif safe.is_a(collection, CachedFunction):
        if any(_is_of_the_trace(entry) for _, entry in now or ()):
            collection.cache_clear()
    elif safe.is_a(collection, nn.Module):
        _refill_module(collection, entries)
    elif safe.is_a(collection, (FunctionType, functools.partial)):
        for name, entry in entries:
            Place("closure", "", name).put(collection, entry)
    elif not safe.is_a(collection, (tuple, MethodType)):
        _refill_object(collection, entries)


def _refill_module(module: nn.Module, entries: Entries) -> None:
    before = {name for name, _ in entries}
    registered: list[dict[str, Any]] = [*torch_private.members(module), torch_private.buffers_in(module)]
    for names in (vars(module), *registered):
        for name in [name for name in names if name not in before and name not in OF_TORCH]:
            del names[name]
    for name, entry in entries:
        next((names for names in registered if name in names), vars(module))[name] = entry


def _refill_object(collection: Any, entries: Entries) -> None:
    slots = {} if isinstance(collection, dict) else dict(in_slots(collection))
    for name in slots:
        object.__delattr__(collection, name)
    values = collection if safe.is_a(collection, dict) else safe.variables(collection)
    kind: Any = OrderedDict if isinstance(values, OrderedDict) else dict
    kind.clear(values)
    for name, entry in entries:
        if collection is not values and isinstance(safe.of_class(type(collection), name), MemberDescriptorType):
            object.__setattr__(collection, name, entry)
        else:
            kind.__setitem__(values, name, entry)


def _is_entry(now: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    (name, value), (name_before, value_before) = now, before
    return value is value_before and (name is name_before or (isinstance(name, int) and bool(name == name_before)))


def _shared(kind: type) -> dict[str, Any]:
    """Return what the instances of a user's class share, but for its functions."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            found |= {n: v for n, v in vars(base).items() if not n.startswith("__") and _is_shared(v)}
    return found


def _is_shared(value: Any) -> bool:
    return safe.is_a(value, CachedFunction) or safe.of_class(type(value), "__get__") is None


@safe.never_raising(None)
def _state(leaf: Any) -> Any:
    """Return what of a leaf can change while it stays the same object."""
    if safe.is_a(leaf, torch.Tensor):
        counts = not isinstance(leaf, nn.Parameter) and not leaf.is_inference()  # parameters are refused by the line
        return torch_private.version(leaf) if counts else None
    if safe.is_a(leaf, random.Random):
        return None if safe.is_a(leaf, random.SystemRandom) else leaf.getstate()
    if safe.is_a(leaf, np.random.Generator):
        return leaf.bit_generator.state
    if safe.is_a(leaf, np.random.RandomState):
        return leaf.get_state()
    if safe.is_a(leaf, np.ndarray) and leaf.size <= _MOST:
        return leaf.dtype, leaf.shape, _Same(leaf.flat) if leaf.dtype.hasobject else leaf.tobytes()
    if long_and_plain(leaf):
        return tuple(safe.entries(leaf))
    if safe.is_a(leaf, (set, frozenset)) and safe.length(leaf) <= _MOST:
        return set.copy(leaf) if safe.is_a(leaf, set) else frozenset(safe.entries(leaf))
    return repr(leaf) if type(leaf).__module__ == "itertools" else None


def _set_state(leaf: Any, state: Any) -> None:
    """Let what stays the same object hold what `_state` has found in it."""
    if isinstance(leaf, random.Random):
        leaf.setstate(state)
    elif isinstance(leaf, np.random.Generator):
        leaf.bit_generator.state = state
    elif isinstance(leaf, np.random.RandomState):
        leaf.set_state(state)
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        leaf[...] = np.frombuffer(state[2], leaf.dtype).reshape(state[1])
    elif isinstance(leaf, list):
        list.__setitem__(leaf, slice(None), state)
    elif isinstance(leaf, set):
        set.clear(leaf)
        set.update(leaf, state)


def _unchanged(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    if safe.is_a(before[0], weakref.ref):  # of LSTMs, to parameters
        return True
    if before[0] is after[0] or (safe.is_a(before[0], PLAIN) and same(before[0], after[0])):
        return equal_states(before[1], after[1])
    copies = safe.is_a(before[0], (set, frozenset, np.ndarray, list, tuple)) and type(before[0]) is type(after[0])
    return copies and before[1] is not None and equal_states(before[1], after[1])


@safe.never_raising(True)
def equal_states(a: Any, b: Any) -> bool:
    """Return whether two states of generators of random numbers, or two collections of plain values, are equal."""
    if a is b:  # as what is not a number, which does not equal itself
        return True
    if isinstance(a, _Same):
        return bool(a == b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(equal_states, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_states(value, b[name]) for name, value in a.items())
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
