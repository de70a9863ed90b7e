"""What operators give for tensors without values, and composite operators as their parts: found once for equal
arguments, since the layers of a model call the same operators again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from shardwright import torch_private
from shardwright.rules.table import key_of

_FOUND: dict[str, Any] = {}
_MOST = 10_000
TRAINED = "shardwright_trained"
"""The mark of nodes that are parameters with a gradient, by which some operators choose their parts."""


@dataclass(frozen=True)
class _Like:
    """A tensor, as far as what is made of it can depend on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trained: bool


def once(what: str, call: fx.Node, find: Callable[[], Any]) -> Any:
    """What ``find`` finds out of the operator and the arguments of ``call``; kept for calls that are like it."""
    args, kwargs = map_arg((call.args, call.kwargs), lambda node: _like(node.meta["val"], TRAINED in node.meta))
    key = f"{what} {call.target} {args!r} {kwargs!r}"  # as a text: 1, 1.0 and True are equal
    if key not in _FOUND:
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        _FOUND[key] = find()
    return _FOUND[key]


def _like(val: Any, trained: bool = False) -> Any:
    if isinstance(val, torch.Tensor):
        return _Like(tuple(val.shape), tuple(val.stride()), val.dtype, val.device, trained)
    return [_like(item) for item in val] if isinstance(val, (list, tuple)) else val


def result_of(operator: Any, call: fx.Node, args: tuple[Any, ...]) -> Any:
    """What ``operator`` returns for ``args``, which are arguments of ``call``."""

    def found() -> Any:
        mode = torch_private.fake_mode()
        given, kwargs = map_arg((args, call.kwargs), lambda node: _empty(node, mode))
        with mode, torch.no_grad():
            return operator(*given, **kwargs)

    return once(f"{operator} of", call, found)


def _empty(node: fx.Node, mode: Any) -> torch.Tensor:
    """A tensor without values like the one that ``node`` gives."""
    val = node.meta["val"]
    made = torch_private.empty_like_on(val, val.device, mode)
    return made.requires_grad_(TRAINED in node.meta)


def traced(call: fx.Node, *, returns: bool) -> fx.Graph:
    """The parts of the composite operator of ``call``, as a graph whose placeholders are the call's tensors in order.

    The parts may be composite themselves, and may change tensors in place. ``returns`` says whether the graph returns
    what the operator does, else nothing.
    """
    mode = torch_private.fake_mode()
    inputs = call.all_input_nodes
    parts = torch_private.parts_of(call.target)

    def run(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        args, kwargs = map_arg((call.args, call.kwargs), lambda node: given[node])
        result = parts(*args, **kwargs)
        return result if returns else []

    graph = torch_private.trace_above_autograd(run, *(_empty(node, mode) for node in inputs)).graph
    for placeholder, node in zip(graph.nodes, inputs, strict=False):
        if TRAINED in node.meta:
            placeholder.meta[TRAINED] = True
    for part in graph.nodes:
        if torch_private.is_operator(part.target):
            part.args = torch_private.without_defaults(part.target, part.args)
    return graph


def taken_apart() -> Mapping[Any, Callable[..., Any]]:
    """How operators that have no rule are written by others, where torch itself computes them so."""
    composite = torch_private.composite_operators()
    return {operator: parts for operator, parts in composite.items() if key_of(str(operator)) is None}


@lru_cache(maxsize=4096)
def is_taken_apart(operator: Any) -> bool:
    """Whether a graph has the parts of an operator in its place."""
    if not torch_private.is_composite(operator):
        return False
    return not torch_private.may_stay_whole(operator) or (
        key_of(str(operator)) is None and torch_private.may_be_taken_apart(operator)
    )
