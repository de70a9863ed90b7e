"""The user's own functions that a step runs, and what these name."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.closures import called_function, closure
from shardwright.compiler.capture.tracing.outside.entries import Opened, attributes, inside, of_classes, opened_modules
from shardwright.compiler.capture.tracing.outside.places import Place, follow

_OF_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")


class StepCode:
    """The functions of a step, found once; what stands where they look is found anew each time.

    Args:
        model: or a copy of it, whose modules have the same functions.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn
        self._functions = _functions_of(model, loss_fn)

    @property
    def names(self) -> set[str]:
        """Those of variables and attributes."""
        return {name for function in self._functions for name in _names(function.__code__)}

    def variables(self) -> Iterator[tuple[Place, Any]]:
        """Return the variables in the closure of the loss function, and those of modules that the step names."""
        for name, value in closure(self.loss_fn).items():
            yield Place("closure", "", name), value
        found: set[Place] = set()
        for function in self._functions:
            owner = function.__globals__.get("__name__", "")
            if owner in sys.modules and vars(sys.modules[owner]) is function.__globals__:
                for name in _variables_named(function.__code__):
                    place = Place("global", owner, name)
                    if name in function.__globals__ and not name.startswith("__") and place not in found:
                        found.add(place)
                        yield place, function.__globals__[name]

    def members(self) -> Iterator[tuple[Place, Any]]:
        """Return what functions of the step name in the user's own modules and classes, as ``settings.SCALE``."""
        named = {pair for function in self._functions for pair in _members_of(function.__code__)}
        for place, value in self.variables():
            module = sys.modules.get(value.__module__) if safe.is_a(value, type) else value
            file = safe.attribute(module, "__file__") if safe.is_a(module, ModuleType) else None
            if isinstance(file, str) and sources.is_users(file) and not sources.package_of(file):
                for name in sorted(name for of, name in named if of == place.name and name in vars(value)):
                    yield replace(place, path=name), vars(value)[name]

    def tensors(self, model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield the tensors that attributes and variables lead to, with their places.

        These are attributes of the model's modules and of their classes that are no buffers, variables, what stands in
        these, what modules among the variables hold, and what a step names in the user's own modules and classes.
        """
        seen = opened_modules(model)
        for owner, module in model.named_modules():
            for name, value in (*attributes(module), *of_classes(module)):
                yield from _tensors_inside(Place("attribute", owner, name), value, seen)
        for place, value in (*self.variables(), *self.members()):
            yield from _tensors_inside(place, value, seen)


def _functions_of(model: nn.Module, loss_fn: Callable[..., Any]) -> list[Any]:
    """Return the loss function, each module's forward, and the user's own functions that these call.

    They are methods and hooks of modules, functions that are attributes of modules, and functions of Python modules, as
    far as their names tell.
    """
    kinds = {type(module) for module in model.modules()}
    methods: dict[str, list[Any]] = {}
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
        for name, value in vars(base).items():
            if safe.is_a(value, FunctionType):
                methods.setdefault(name, []).append(called_function(value))
    held = [value for module in model.modules() for _, value in attributes(module) if safe.is_a(value, FunctionType)]
    hooks = [of.values() for module in model.modules() for of in torch_private.hooks_of(module).values()]
    held += [hook for of in hooks for hook in of if safe.is_a(hook, FunctionType)]
    waiting = [called_function(loss_fn), *(called_function(kind.forward) for kind in kinds), *held]
    found: dict[Any, None] = {}
    while waiting:
        function = waiting.pop(0)
        if function in found or function is None or not sources.is_users(function.__code__.co_filename):
            continue
        found[function] = None
        if not sources.package_of(function.__code__.co_filename):
            names = _names(function.__code__)
            named = [*(function.__globals__.get(name) for name in names), *closure(function).values()]
            waiting += [called_function(value) for value in named if safe.is_a(value, FunctionType)]
            waiting += [method for name in names for method in methods.get(name, ())]
    return list(found)


def _names(code: CodeType) -> list[str]:
    """The names of variables and attributes in a function, and in those that are defined in it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


@functools.lru_cache(maxsize=4096)
def _members_of(code: CodeType) -> frozenset[tuple[str, str]]:
    """The attributes that a function asks of variables of Python modules, as ("settings", "SCALE").

    Cached by the code, which never changes and is equal to code of the same instructions, names and lines alone.
    """
    inner = [pair for const in code.co_consts if isinstance(const, CodeType) for pair in _members_of(const)]
    own = [
        (str(variable.argval), str(member.argval))
        for variable, member in pairwise(dis.get_instructions(code))
        if variable.opname in _OF_VARIABLES and member.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]
    return frozenset([*inner, *own])


@functools.lru_cache(maxsize=4096)
def _variables_named(code: CodeType) -> list[str]:
    """The names of variables of Python modules in a function, and in those that are defined in it.

    Cached by the code, as `_members_of`.
    """
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _variables_named(const)]
    own = [str(of.argval) for of in dis.get_instructions(code) if of.opname in _OF_VARIABLES]
    return list(dict.fromkeys([*own, *inner]))


def _tensors_inside(place: Place, value: Any, seen: Opened) -> Iterator[tuple[Place, torch.Tensor]]:
    for path, leaf in inside(value, seen):
        if safe.is_a(leaf, torch.Tensor) and follow(value, path) is leaf:
            yield replace(place, path=".".join(filter(None, (place.path, path)))), leaf
