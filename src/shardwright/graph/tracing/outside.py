"""Where values stand that a step reads beside its batch, parameters and buffers, so that each rank finds its own.

A captured graph holds what Python values were when it was made: attributes of modules, variables that the loss function
closes over, and variables of Python modules. Where each of them stands is a `Place`, which any rank can look up again.
"""

from __future__ import annotations

import dis
import functools
import gc
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice, pairwise
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from shardwright import torch_private
from shardwright.graph.tracing import sources


class _Mark:
    """Prints alike on every rank."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


MISSING = _Mark("nothing")
"""What stands at a place that is not there (any more)."""
NOT_PLAIN = _Mark("an object")
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, Enum)
# Torch's own bookkeeping in every module; only the flag of training decides what a forward does.
OF_TORCH = frozenset({*vars(nn.Module()), *vars(nn.Module)}) - {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CachedFunction = type(functools.cache(len))
_KEEPS = (list, dict)  # what a default of an argument is changed in
_OF_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_COMPARED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type)
_FUNCTIONS = (*_COMPARED, MethodType)
_SMALL_BYTES = 4096  # of an array that is compared before each step
_LONGEST = 64  # entries of a list that is compared before each step
_MOST_INSIDE, _DEEPEST = 1000, 12  # entries of a collection that are looked at, and how far inside of each other
MOST_LEAVES = 20_000  # of what stands in one value, at any depth
_CLOSED = (torch.Tensor, type, ModuleType, BuiltinFunctionType)
Entries = list[tuple[Any, Any]]
Opened = MutableMapping[int, tuple[Any, Entries]]
_OPENED = ("argparse", "types")  # of Python itself, whose other objects are taken as they are


@dataclass(frozen=True)
class Place:
    """A name in a module of the model (``owner`` is its path), among what the loss function closes over, or in a Python
    module (``owner`` is its name). ``path`` leads on from there as `follow` goes: "0.weight" of a module."""

    kind: Literal["attribute", "closure", "global"]
    owner: str
    name: str
    path: str = ""

    def __str__(self) -> str:
        tail = f".{self.path}" if self.path else ""
        if self.kind == "attribute":
            return ".".join(filter(None, ("model", self.owner, self.name))) + tail
        if self.kind == "closure":
            return f"{self.name}{tail}, which the loss function closes over"
        return f"{self.name}{tail}, a variable of {self.owner}"

    def now(self, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
        """What stands there on this rank now, or `MISSING`."""
        return follow(self._start(model, loss_fn), self.path)

    def variables(self, model: nn.Module) -> dict[str, Any]:
        """The dictionary in which the name stands, where it stands in one."""
        if self.kind == "attribute":
            module: nn.Module = follow(model, self.owner)
            return vars(module)
        return vars(sys.modules[self.owner]) if self.kind == "global" and self.owner in sys.modules else {}

    def put(self, loss_fn: Callable[..., Any], value: Any) -> None:
        """Let a variable stand for ``value``, a global one for nothing where that is `MISSING`."""
        if self.kind == "global" and value is MISSING:
            del vars(sys.modules[self.owner])[self.name]
        elif self.kind == "global":
            vars(sys.modules[self.owner])[self.name] = value
        if self.kind == "closure" and self.name in (cells := _cells(loss_fn)):
            cells[self.name].cell_contents = value
        elif self.kind == "closure" and self.name in getattr(function := called_function(loss_fn), "__dict__", ()):
            setattr(function, self.name, value)

    def _start(self, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
        if self.kind == "attribute":
            return getattr(follow(model, self.owner), self.name, MISSING)
        if self.kind == "global":
            return vars(sys.modules[self.owner]).get(self.name, MISSING) if self.owner in sys.modules else MISSING
        return _closure(loss_fn).get(self.name, MISSING)


def follow(start: Any, path: str) -> Any:
    """The attribute of an attribute ... of ``start``; of collections, the entry; of functions, what they close over."""
    for name in path.split(".") if path else ():
        start = _entry(start, name)
    return start


def _entry(value: Any, name: str) -> Any:
    number = int(name) if name.isdecimal() else None
    if isinstance(value, dict):
        return value.get(name, value.get(number, MISSING))
    if isinstance(value, (list, tuple, deque)):
        return value[number] if number is not None and number < len(value) else MISSING
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return _closure(value).get(name, MISSING)
    return getattr(value, name, MISSING)


def inside(value: Any, seen: Opened, path: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in collections, modules, functions and objects of users' classes, at any depth, by its path; else
    ``value`` itself.

    Args:
        seen: collections and objects that were looked into, each once, and what stood in them.
    """
    yield from islice(_all_inside(value, seen, path), MOST_LEAVES)


def _all_inside(value: Any, seen: Opened, path: str) -> Iterator[tuple[str, Any]]:
    entries = entries_of(value) if path.count(".") < _DEEPEST else None
    if entries is None:
        yield path, value
    elif id(value) not in seen:
        seen[id(value)] = value, entries
        for number, (name, entry) in enumerate(entries):
            shown = _shown(name, number)
            yield from _all_inside(entry, seen, f"{path}.{shown}" if path else shown)


def _shown(name: Any, number: int) -> str:
    """A key as a part of a path: tensors and objects would print long, and have another address in each copy."""
    short = plain(name) is not NOT_PLAIN or isinstance(name, str)
    return f"{name}" if short else f"{type(name).__name__}@{number}"


def long_and_plain(value: Any) -> bool:
    """Whether a value is a long list of numbers or words, which is looked at as one."""
    numbered = isinstance(value, (list, tuple)) and _LONGEST < len(value) <= MOST_LEAVES
    return numbered and all(isinstance(entry, PLAIN) for entry in value)


def entries_of(value: Any) -> Entries | None:
    """What stands in a collection or an object by which names; None for what is not looked into."""
    if isinstance(value, (*PLAIN, *_CLOSED)) or long_and_plain(value):
        return None
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= _MOST_INSIDE else None
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value)) if len(value) <= _MOST_INSIDE else None
    if isinstance(value, nn.Module):
        registered = (*torch_private.members(value), torch_private.buffers_in(value))
        return [*attributes(value), *(entry for names in registered for entry in names.items())]
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return list(_closure(value).items())
    if isinstance(value, CachedFunction):
        return list(enumerate(_tensors_kept(value)))
    room = type(value).__module__.partition(".")[0]
    if room in ("torch", "numpy", "shardwright") or (room in sys.stdlib_module_names and room not in _OPENED):
        return None
    slotted = any(vars(base).get("__slots__") for base in type(value).__mro__)
    if not slotted and not hasattr(value, "__dict__"):
        return None
    return [*getattr(value, "__dict__", {}).items(), *in_slots(value)]


def is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class, which is neither a collection nor a function."""
    known = (torch.Tensor, nn.Module, dict, list, tuple, deque, set, frozenset, *_FUNCTIONS, functools.partial)
    return not isinstance(value, known) and entries_of(value) is not None


def in_slots(value: Any) -> Entries:
    """What stands in the ``__slots__`` of an object."""
    found: Entries = []
    for base in type(value).__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                with suppress(AttributeError):  # not set
                    found.append((name, slot.__get__(value)))
    return found


def plain(value: Any) -> Any:
    """A value that can be compared, where it is a number, a word, or a short collection of these; else `NOT_PLAIN`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple, dict)) and len(value) <= _LONGEST:
        entries = [plain(entry) for entry in (value.items() if isinstance(value, dict) else value)]
        if all(entry is not NOT_PLAIN for entry in entries):
            return (type(value).__name__, *entries)
    return NOT_PLAIN


def comparable(value: Any, depth: int = 0) -> Any:
    """The same for functions and classes too, which are what they are, for small arrays, and for sets of these."""
    if isinstance(value, (*PLAIN, *_COMPARED)):
        return value
    if isinstance(value, functools.partial):
        return comparable([value.func, value.args, value.keywords], depth)
    if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) <= _LONGEST and depth < _DEEPEST:
        given = value.items() if isinstance(value, dict) else value
        entries = [comparable(entry, depth + 1) for entry in given]
        if all(entry is not NOT_PLAIN for entry in entries):
            ordered = sorted(entries, key=in_words) if isinstance(value, (set, frozenset)) else entries
            return (type(value).__name__, *ordered)
    if isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject:
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    return NOT_PLAIN


def in_words(value: Any) -> str:
    """What `comparable` gives, alike in every process."""
    if isinstance(value, torch.device):
        return value.type  # ranks of one host have one each
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _FUNCTIONS):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    return f"{value!r}"


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: a whole number and a float make different graphs."""
    return a is b or (type(a) is type(b) and bool(a == b))


def _tensors_kept(cached: Any) -> list[torch.Tensor]:
    """What a function has returned that keeps it, by `functools.lru_cache`, which tells nobody else."""
    parts = [entry for part in gc.get_referents(cached) for entry in (part.values() if type(part) is dict else [part])]
    links = [gc.get_referents(part) if type(part).__name__ == "_lru_list_elem" else [part] for part in parts]
    return [entry for link in links for entry in link if isinstance(entry, torch.Tensor)]


def variables(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    """What the loss function closes over, and the variables of Python modules that functions of the step name."""
    for name, value in _closure(loss_fn).items():
        yield Place("closure", "", name), value
    found: set[Place] = set()
    for function in step_functions(model, loss_fn):
        owner = function.__globals__.get("__name__", "")
        if owner in sys.modules and vars(sys.modules[owner]) is function.__globals__:
            for name in _variables_named(function.__code__):
                place = Place("global", owner, name)
                if name in function.__globals__ and not name.startswith("__") and place not in found:
                    found.add(place)
                    yield place, function.__globals__[name]


def members_named(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    """What functions of the step name in the user's own Python modules and classes, as ``settings.SCALE``."""
    named = {pair for function in step_functions(model, loss_fn) for pair in _members_of(function.__code__)}
    for place, value in variables(model, loss_fn):
        module = sys.modules.get(value.__module__) if isinstance(value, type) else value
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file is not None and sources.is_users(file) and not sources.package_of(file):
            for name in sorted(name for of, name in named if of == place.name and name in vars(value)):
                yield replace(place, path=name), vars(value)[name]


def step_functions(model: nn.Module, loss_fn: Callable[..., Any]) -> list[Any]:
    """The loss function and each module's forward, and what these call of the user's own: methods of modules, functions
    that are attributes of modules, and functions of Python modules; as far as their names tell."""
    kinds = {type(module) for module in model.modules()}
    methods: dict[str, list[Any]] = {}
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                methods.setdefault(name, []).append(called_function(value))
    held = [value for module in model.modules() for _, value in attributes(module) if isinstance(value, FunctionType)]
    hooks = [of.values() for module in model.modules() for of in torch_private.hooks_of(module).values()]
    held += [hook for of in hooks for hook in of if isinstance(hook, FunctionType)]
    waiting = [called_function(loss_fn), *(called_function(kind.forward) for kind in kinds), *held]
    found: dict[Any, None] = {}
    while waiting:
        function = waiting.pop(0)
        if function in found or function is None or not sources.is_users(function.__code__.co_filename):
            continue
        found[function] = None
        if not sources.package_of(function.__code__.co_filename):
            names = _names(function.__code__)
            named = [function.__globals__.get(name) for name in names]
            named += _cells_of(function)
            waiting += [called_function(value) for value in named if isinstance(value, FunctionType)]
            waiting += [method for name in names for method in methods.get(name, ())]
    return list(found)


def _names(code: CodeType) -> list[str]:
    """The names of variables and attributes in a function, and in those that are defined in it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def names_of_step(model: nn.Module, loss_fn: Callable[..., Any]) -> set[str]:
    """The names of variables and attributes in functions of the step."""
    return {name for function in step_functions(model, loss_fn) for name in _names(function.__code__)}


@functools.lru_cache(maxsize=4096)
def _members_of(code: CodeType) -> frozenset[tuple[str, str]]:
    """The attributes that a function asks of variables of Python modules, as ("settings", "SCALE")."""
    inner = [pair for const in code.co_consts if isinstance(const, CodeType) for pair in _members_of(const)]
    own = [
        (str(variable.argval), str(member.argval))
        for variable, member in pairwise(dis.get_instructions(code))
        if variable.opname in _OF_VARIABLES and member.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]
    return frozenset([*inner, *own])


@functools.lru_cache(maxsize=4096)
def _variables_named(code: CodeType) -> list[str]:
    """The names of variables of Python modules in a function, and in those that are defined in it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _variables_named(const)]
    own = [str(of.argval) for of in dis.get_instructions(code) if of.opname in _OF_VARIABLES]
    return list(dict.fromkeys([*own, *inner]))


def tensors(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, torch.Tensor]]:
    """Tensors at such places: attributes of the model's modules that are no buffers, variables, what stands in these,
    and what modules among the variables hold."""
    seen = opened_modules(model)
    for owner, module in model.named_modules():
        for name, value in attributes(module):
            yield from _tensors_inside(Place("attribute", owner, name), value, seen)
    for place, value in variables(model, loss_fn):
        yield from _tensors_inside(place, value, seen)


def opened_modules(model: nn.Module) -> dict[int, tuple[Any, Entries]]:
    """The modules of a model, as what `inside` has seen."""
    return {id(module): (module, []) for module in model.modules()}


def _tensors_inside(place: Place, value: Any, seen: Opened) -> Iterator[tuple[Place, torch.Tensor]]:
    for path, leaf in inside(value, seen):
        if isinstance(leaf, torch.Tensor) and follow(value, path) is leaf:
            yield replace(place, path=path), leaf


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What users have set on a module, and its flag of training: no parameters, buffers and modules."""
    return [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]


def called_function(callable_: Any) -> Any:
    """The Python function that runs when an object is called, None where there is none."""
    callable_ = inspect.unwrap(callable_)
    while isinstance(callable_, functools.partial):
        callable_ = callable_.func
    if isinstance(callable_, nn.Module):
        callable_ = type(callable_).forward
    elif not inspect.isroutine(callable_):
        callable_ = type(callable_).__call__
    function = inspect.unwrap(getattr(callable_, "__func__", callable_))
    return function if inspect.isfunction(function) else None


def code_digest(code: CodeType) -> str:
    """A hash of what a function does, without the names of files and the numbers of lines."""
    consts = [code_digest(c) if isinstance(c, CodeType) else repr(_ordered(c)) for c in code.co_consts]
    text = f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {consts}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _ordered(const: Any) -> Any:
    """Sets print in an order that differs between processes."""
    return sorted(map(repr, const)) if isinstance(const, frozenset) else const


def _closure(loss_fn: Any) -> dict[str, Any]:
    """The variables that a function closes over, by their names, and what it is bound to."""
    found: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        given = {**{f"argument {i}": value for i, value in enumerate(loss_fn.args)}, **loss_fn.keywords}
        found |= {name: value for name, value in given.items() if plain(value) is NOT_PLAIN}
        loss_fn = loss_fn.func
    if isinstance(loss_fn, MethodType):
        found["self"] = loss_fn.__self__
    elif not inspect.isroutine(loss_fn):
        found["self"] = loss_fn
    found |= _kept_by(called_function(loss_fn))
    for name, cell in _cells(loss_fn).items():
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _kept_by(function: Any) -> dict[str, Any]:
    """What a user's function keeps from call to call: defaults of its arguments, which may be changed in place, and its
    attributes."""
    if function is None or not sources.is_users(function.__code__.co_filename):
        return {}
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :] if defaults else ()
    kept = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    own = {name: value for name, value in vars(function).items() if not name.startswith("__")}
    return {name: value for name, value in kept.items() if isinstance(value, _KEEPS) or plain(value) is NOT_PLAIN} | own


def _cells_of(function: FunctionType) -> list[Any]:
    """What a function closes over, as far as it is assigned."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _cells(loss_fn: Any) -> dict[str, CellType]:
    function = called_function(loss_fn)
    if function is None or function.__closure__ is None or not sources.is_users(function.__code__.co_filename):
        return {}
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
