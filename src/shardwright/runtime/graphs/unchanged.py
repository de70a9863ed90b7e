"""Compares the model and the Python values that a step reads with those at capture, before each step.

What was put in the place of a parameter is refused; other values, and other hooks, need another program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.closures import called_function, code_digest
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.values import MISSING, NOT_PLAIN, comparable, in_words, same
from shardwright.compiler.rules.register import called, function_of, is_function
from shardwright.distributed.agreement import from_all_ranks
from shardwright.errors import CaptureError, UsageError

_CHANGING = (list, tuple, dict, set, functools.partial, np.ndarray)  # in place, or by what stands in them


class Structure:
    """The modules and parameters of a model as they are now, to notice where a script puts others in their place.

    Costs a look at each member of each module, about 20 us for a thousand of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._members: list[tuple[dict[str, Any], str, Any, str]] = []
        self._modules = dict(model.named_modules())
        self._kinds = [*map(type, self._modules.values())]
        self._counts: list[tuple[dict[str, Any], int, str]] = []
        for path, module in model.named_modules():
            for members in torch_private.members(module):
                self._counts.append((members, len(members), path))
                self._members += [(members, name, m, f"{path}.{name}".lstrip(".")) for name, m in members.items()]
        self._where, self._names = [each[0] for each in self._members], [each[1] for each in self._members]
        self._objects = [each[2] for each in self._members]
        self._counted, self._lengths = [each[0] for each in self._counts], [each[1] for each in self._counts]

    def before(self) -> None:
        """Look at all members at once.

        Raises:
            UsageError: where one was replaced, added or removed, of which the programs would know nothing.
        """
        same = all(map(is_, map(dict.get, self._where, self._names), self._objects))
        if not same or [*map(len, self._counted)] != self._lengths:
            self._refuse()
        if [*map(type, self._modules.values())] != self._kinds:
            self._refuse_kinds()

    def _refuse_kinds(self) -> None:
        for (path, module), kind in zip(self._modules.items(), self._kinds, strict=True):
            if type(module) is not kind:
                raise UsageError(
                    f"{path or 'the model'} was a {kind.__name__} and was made a {type(module).__name__} after "
                    "sw.parallelize, which knows the model as it was before; change the model first and then "
                    "parallelize it (again)"
                )

    def _refuse(self) -> None:
        for members, name, member, path in self._members:
            if members.get(name) is not member:
                raise UsageError(
                    f"{path} of the model was {'replaced' if name in members else 'removed'} after sw.parallelize, "
                    "which knows the one before; change the numbers of parameters in place (with torch.no_grad(): "
                    "parameter.copy_(...)), or change the model first and then parallelize it (again)"
                )
        for members, count, path in self._counts:
            if len(members) != count:
                raise UsageError(
                    f"{path or 'the model'} was given {list(members)[count]} after sw.parallelize, which knows the "
                    "model as it was before; change the model first and then parallelize it (again)"
                )


class Remembered:
    """The plain values that a captured step has read, and the hooks of modules, as they are on this rank now."""

    def __init__(self, capture: Capture, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._capture, self._module, self._loss_fn = capture, module, loss_fn
        self._values = {place: self._now(place) for place in capture.frozen}
        self._quick: list[tuple[dict[str, Any], str, Any]] = []
        self._others: list[Place] = []
        for place in capture.frozen:
            variables = {} if place.path else place.variables(module)
            value = variables.get(place.name, MISSING)
            if not place.path and _stays(value, self._values[place]):
                self._quick.append((variables, place.name, value))
            else:
                self._others.append(place)
        for each in module.modules():  # whose forward a script may put another in the place of
            self._quick.append((vars(each), "forward", vars(each).get("forward", MISSING)))
        self._where, self._names = [each[0] for each in self._quick], [each[1] for each in self._quick]
        self._objects = [each[2] for each in self._quick]
        self._hooks = [(hooks, tuple(hooks.values()), text) for text, hooks in _hooks_in(module)]
        self._empty = [hooks for hooks, there, _ in self._hooks if not there]
        self._filled = [(hooks, there) for hooks, there, _ in self._hooks if there]

    def holds(self) -> bool:
        """Return whether nothing has changed; called before each step, for hundreds of values."""
        if any(self._empty) or not all(_are(hooks.values(), there) for hooks, there in self._filled):
            return False
        if not all(map(is_, map(dict.get, self._where, self._names, repeat(MISSING)), self._objects)):
            for variables, name, value in self._quick:
                if (now := variables.get(name, MISSING)) is not value and not _alike(now, value):
                    return False
        return all(same(self._now(place), self._values[place]) for place in self._others)

    def differing(self, other: Remembered) -> list[Place]:
        """The places where two programs remember different values."""
        return [p for p, value in self._values.items() if not same(value, other._values.get(p, MISSING))]

    def changed(self) -> dict[str, Any]:
        """Return what is not what it was, as it is now, by where it stands."""
        now = {place: self._now(place) for place in self._values}
        values = {str(place): now[place] for place, value in self._values.items() if not same(now[place], value)}
        return values | {text: _names(hooks) for hooks, there, text in self._hooks if not _are(hooks.values(), there)}

    def agree(self) -> None:
        """Compare what the program holds of Python between all ranks, which call this together.

        Raises:
            UsageError: on every rank, where some rank has another value, or other numbers in a tensor, than rank 0.
        """
        shown = {str(place): in_words(value) for place, value in self._values.items()}
        inside = {str(place) for place in self._values if place.path}
        shown |= {text: f"{_names(hooks)}" for hooks, _, text in self._hooks}
        for place in self._capture.outside.values():
            shown[str(place)] = _shown(place.now(self._module, self._loss_fn))
        for op in sorted({node.op for node in self._capture.nodes if is_function(node.op)}):
            shown[f"the code of {called(op)}"] = _code(op)
        everyone = from_all_ranks(shown)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                # What rank 0 alone has, as a logger, decides nothing of a graph; the inside of an object is by itself.
                absent = name in inside and theirs[name] == in_words(MISSING)
                if theirs[name] != value and value != in_words(NOT_PLAIN) and not absent:
                    raise UsageError(
                        f"ranks disagree about {name}, which the step reads: rank 0 has {value}, rank {rank} has "
                        f"{theirs[name]}; every rank needs the same (call sw.set_seed before making what is random)"
                    )

    def _now(self, place: Place) -> Any:
        value = place.now(self._module, self._loss_fn)
        return value if value is MISSING else comparable(value)


def _stays(value: Any, known: Any) -> bool:
    """Return whether the identity of an object tells that nothing has changed, as it cannot change in place.

    Args:
        known: what `comparable` says of it.
    """
    entries = safe.entries(value) if safe.is_a(value, tuple) and not safe.variables(value) else [[]]
    flat = not any(safe.is_a(entry, _CHANGING) for entry in entries)
    return value is known or flat or (known is NOT_PLAIN and value is not MISSING)


def _alike(one: Any, other: Any) -> bool:
    """Return whether a value is as another one, or an object in everything that it holds."""
    held = comparable(other)
    if held is NOT_PLAIN and type(one) is type(other) and safe.variables(other):
        one, held = safe.variables(one), comparable(safe.variables(other))
    return held is not NOT_PLAIN and same(comparable(one), held)


def _are(these: Collection[Any], those: Collection[Any]) -> bool:
    """Check that collections hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


def _hooks_in(model: nn.Module) -> Iterator[tuple[str, Mapping[int, Callable[..., Any]]]]:
    for path, module in model.named_modules():
        for kind, hooks in torch_private.hooks_of(module).items():
            yield f"the {kind} of {path or 'the model'}", hooks


def _names(hooks: Mapping[int, Callable[..., Any]]) -> list[str]:
    return [safe.attribute(hook, "__qualname__", type(hook).__qualname__) for hook in hooks.values()]


def _code(op: str) -> str:
    """Return what a user's function with a backward of its own does."""
    try:
        function = function_of(op)
    except CaptureError:
        return "no class of this name"
    methods = [called_function(getattr(function, name)) for name in ("forward", "setup_context", "backward", "vjp")]
    return " ".join(code_digest(method.__code__) for method in methods if method is not None)


def _shown(value: Any) -> str:
    """A tensor by its shape and two sums, which differ where its numbers do."""
    if not safe.is_a(value, torch.Tensor):
        return safe.words(value)
    numbers = value.detach().double().flatten()
    weighted = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device) * numbers
    return f"a tensor of shape {list(value.shape)} with sum {numbers.sum():.12g} and weighted sum {weighted.sum():.12g}"
