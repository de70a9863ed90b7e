"""Functions of users: their variables, what they are bound to, and what they keep from call to call."""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
from contextlib import suppress
from types import CellType, CodeType, MethodType
from typing import Any

import torch
from torch import nn

from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.capture.tracing.outside.safe import is_a
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, plain

CachedFunction = type(functools.cache(len))
_KEEPS = (list, dict)  # what a default of an argument is changed in


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


def closure(loss_fn: Any) -> dict[str, Any]:
    """The variables that a function closes over, by their names, and what it is bound to."""
    found: dict[str, Any] = {}
    loss_fn = _wrapped_by_us(loss_fn)
    while isinstance(loss_fn, functools.partial):
        given = {**{f"argument {i}": value for i, value in enumerate(loss_fn.args)}, **loss_fn.keywords}
        found |= {name: value for name, value in given.items() if plain(value) is NOT_PLAIN}
        loss_fn = loss_fn.func
    if isinstance(loss_fn, MethodType):
        found["self"] = loss_fn.__self__
    elif not inspect.isroutine(loss_fn):
        found["self"] = loss_fn
    found |= _kept_by(called_function(loss_fn))
    for name, cell in cells(loss_fn).items():
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _wrapped_by_us(loss_fn: Any) -> Any:
    """Return the function, object or method that a wrapper of ours or torch's calls, by which users did not bind it."""
    while inspect.isfunction(loss_fn) and hasattr(loss_fn, "__wrapped__"):
        if sources.is_users(loss_fn.__code__.co_filename):
            break
        loss_fn = loss_fn.__wrapped__
    return loss_fn


def _kept_by(function: Any) -> dict[str, Any]:
    """Return what a user's function keeps from call to call: its attributes and the defaults of its arguments."""
    if function is None or not sources.is_users(function.__code__.co_filename):
        return {}
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :] if defaults else ()
    kept = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    own = {name: value for name, value in vars(function).items() if not name.startswith("__")}
    return {name: value for name, value in kept.items() if is_a(value, _KEEPS) or plain(value) is NOT_PLAIN} | own


def cells(loss_fn: Any) -> dict[str, CellType]:
    """Return what a function of the user's closes over, by the names of the variables."""
    function = called_function(loss_fn)
    if function is None or function.__closure__ is None or not sources.is_users(function.__code__.co_filename):
        return {}
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))


def tensors_kept(cached: Any) -> list[torch.Tensor]:
    """Return what a function has returned that keeps it, by `functools.lru_cache`, which tells nobody else."""
    parts = [entry for part in gc.get_referents(cached) for entry in (part.values() if type(part) is dict else [part])]
    links = [gc.get_referents(part) if type(part).__name__ == "_lru_list_elem" else [part] for part in parts]
    return [entry for link in links for entry in link if is_a(entry, torch.Tensor)]


def code_digest(code: CodeType) -> str:
    """A hash of what a function does, without the names of files and the numbers of lines."""
    consts = [code_digest(c) if isinstance(c, CodeType) else repr(_ordered(c)) for c in code.co_consts]
    text = f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {consts}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _ordered(const: Any) -> Any:
    """Sets print in an order that differs between processes."""
    return sorted(map(repr, const)) if isinstance(const, frozenset) else const
