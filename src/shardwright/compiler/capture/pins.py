"""Pins, the strategies that users demand of operators: ``shard`` inside a model, ``pins`` from outside of it.

During a capture the arguments and results of a pinned function pass through two operators that do nothing but carry
the pin. Unlike an annotation of the region, they say which operators inside it take which argument, when the function
is made of several.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from shardwright.common import torch_private, trees
from shardwright.compiler.capture.ir import Capture, Node, Pin, Slices
from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.rules.table import row_of
from shardwright.errors import StrategyError

Strategies = tuple[Slices | None, ...]
F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLE = "one tuple per tensor, one number of slices per dim, as in ((2, 4), (4, 1)) for the two inputs of a matmul"
_ATTRIBUTE = "shardwright_pin"


@torch.library.custom_op("shardwright::pin_operand", mutates_args=())
def _pin_operand(x: torch.Tensor, slices: Sequence[int], source: str) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("shardwright::pin_result", mutates_args=())
def _pin_result(x: torch.Tensor, slices: Sequence[int], source: str) -> torch.Tensor:
    return x.clone()


for _marker in (_pin_operand, _pin_result):
    _marker.register_fake(lambda x, slices, source: torch.empty_like(x))
    _marker.register_autograd(lambda ctx, gradient: (gradient, None, None))

OPERAND_MARKER = "shardwright.pin_operand.default"
RESULT_MARKER = "shardwright.pin_result.default"


def shard(fn: F, in_strategy: Any, out_strategy: Any = None) -> F:
    """``fn`` with a pin: into how many slices each of its tensors is cut when the plan is made.

    Called outside a capture, the result does what ``fn`` does. ``in_strategy`` has one tuple per tensor input and in
    it one number per dim; None leaves an input, or all of them, free. ``out_strategy`` does the same for the results.
    A module is returned as it is, with the pin noted on it: the inputs of its main operator are pinned, which is the
    one that takes the module's own parameters, these being inputs too.

    >>> product = shard(torch.matmul, ((2, 4), (4, 1)))
    >>> product(torch.ones(2, 4), torch.ones(4, 2)).shape
    torch.Size([2, 2])

    Raises:
        StrategyError: where a strategy is none; when called, where it does not fit the tensors.
    """
    source = sources.callers_source()
    request = Request(_strategies(in_strategy, source), _strategies(out_strategy, source), source)
    if isinstance(fn, torch.nn.Module):
        setattr(fn, _ATTRIBUTE, request)
        return fn
    return _Sharded(fn, request)  # type: ignore[return-value]


@dataclass(frozen=True)
class Request:
    """The strategies of a pin as the user wrote them; None where all tensors are free."""

    operands: Strategies | None
    results: Strategies | None
    source: str

    def check(self, strategies: Strategies | None, shapes: Sequence[tuple[int, ...]], what: str) -> None:
        """Refuse strategies that do not fit tensors of these shapes."""
        if strategies is None:
            return
        tuples = _count(len(strategies), "tuple")
        if len(strategies) != len(shapes):
            raise self.error(f"{tuples} for {_count(len(shapes), what)} of shapes {list(shapes)}")
        for slices, shape in zip(strategies, shapes, strict=True):
            if slices is not None and len(slices) != len(shape):
                raise self.error(f"{slices} has {_count(len(slices), 'number')} for a tensor of shape {shape}")

    def error(self, why: str) -> StrategyError:
        """The error of a strategy that does not fit."""
        given = f"{self.operands}" + (f" -> {self.results}" if self.results is not None else "")
        return StrategyError(f"the strategy {given} does not fit: {why}\n  pinned at {self.source}\nGive {_EXAMPLE}.")


@dataclass(frozen=True)
class _Sharded:
    """A function with a pin."""

    fn: Callable[..., Any]
    request: Request

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        request.check(request.operands, _shapes((args, kwargs)), "tensor input")
        if not torch.compiler.is_exporting():
            result = self.fn(*args, **kwargs)
            request.check(request.results, _shapes(result), "tensor result")
            return result
        (args, kwargs), marked = _mark((args, kwargs), request.operands, _pin_operand, request.source)
        result = self.fn(*args, **kwargs)
        if any(torch_private.version(tensor) for tensor in marked):
            raise request.error("the function changes an input in place; pin one that returns a new tensor")
        request.check(request.results, _shapes(result), "tensor result")
        return _mark(result, request.results, _pin_result, request.source)[0]


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for _, leaf in trees.tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _mark(tree: Any, strategies: Strategies | None, marker: Any, source: str) -> tuple[Any, list[torch.Tensor]]:
    """The tree with its pinned tensors passed through ``marker``, and those that it gave."""
    if strategies is None:
        return tree, []
    left = iter(strategies)
    marked: list[torch.Tensor] = []

    def mark(leaf: Any) -> Any:
        slices = next(left) if isinstance(leaf, torch.Tensor) else None
        if slices is None:
            return leaf
        marked.append(marker(leaf, list(slices), source))
        return marked[-1]

    return trees.tree_map(mark, tree), marked


def _strategies(given: Any, source: str) -> Strategies | None:
    """A strategy in the form of tuples."""
    found = _tuples(given)
    if found is None or (isinstance(found, tuple) and all(_is_slices(slices) for slices in found)):
        return found
    raise StrategyError(f"{given!r} is not a strategy\n  pinned at {source}\nGive {_EXAMPLE}.")


def _tuples(given: Any) -> Any:
    return tuple(_tuples(item) for item in given) if isinstance(given, (list, tuple)) else given


def _is_slices(slices: Any) -> bool:
    return slices is None or (
        isinstance(slices, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in slices)
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def module_pins(model: torch.nn.Module) -> dict[str, Request]:
    """The pins that `shard` noted on modules, by module path."""
    named = ((name, vars(module).get(_ATTRIBUTE)) for name, module in model.named_modules())
    return {name: request for name, request in named if request is not None}


def apply_pins(capture: Capture, pins: Mapping[str, Any]) -> Capture:
    """The capture with the main operators of modules pinned.

    ``pins`` maps patterns of module paths (``layers.*.up``, as in a shell) to an in_strategy, or to a pair of
    in_strategy and out_strategy, as `shard` takes them. The operands of a linear layer are the input, the weight and
    the bias; those at the end may be left out. The main operator is the one that takes the module's own parameters,
    or its only one.

    Raises:
        StrategyError: where a pattern matches no module, a module has no main operator, or a strategy does not fit.
    """
    scopes = sorted({node.scope for node in capture.nodes if node.scope})
    for pattern, given in pins.items():
        source = f"pins[{pattern!r}]"
        request = _request(given, source)
        matching = [scope for scope in scopes if fnmatchcase(scope, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, scopes, n=5, cutoff=0.0)
            raise StrategyError(f"{source} matches no module; the closest with operators are {', '.join(close)}")
        for scope in matching:
            capture = pin_module(capture, scope, request)
    return capture


def _request(given: Any, source: str) -> Request:
    found = _tuples(given)
    pair = (
        isinstance(found, tuple)
        and len(found) == 2
        and not all(_is_slices(slices) for slices in found)
        and all(side is None or (isinstance(side, tuple) and all(_is_slices(s) for s in side)) for side in found)
    )
    operands, results = found if pair else (found, None)
    return Request(_strategies(operands, source), _strategies(results, source), source)


def pin_module(capture: Capture, scope: str, request: Request) -> Capture:
    """The capture with the main operator of the module at ``scope`` pinned, in every call of the module."""
    chosen = {node.name for node in _main_operators(capture, scope, request)}
    nodes = tuple(_pinned(node, capture, request) if node.name in chosen else node for node in capture.nodes)
    return replace(capture, nodes=nodes)


def _main_operators(capture: Capture, scope: str, request: Request) -> list[Node]:
    of_scope = [node for node in capture.nodes if node.scope == scope]
    own, taken_as = _own_parameters(capture, scope), dict[str, str]()
    inside = []
    for node in of_scope:
        row = row_of(node.op)
        if row.casts or (row.view and len(node.operands) == 1):
            taken_as[node.results[0]] = taken_as.get(node.operands[0], node.operands[0])
        if not row.casts:
            inside.append(node)
    for node in sorted(inside, key=lambda node: row_of(node.op).view):  # in order, views behind others
        taken = [name for name in (taken_as.get(o, o) for o in node.operands) if name in own]
        if taken:
            return [n for n in inside if n.op == node.op and taken[0] in (taken_as.get(o, o) for o in n.operands)]
    if len({node.op for node in inside}) == 1:
        return inside
    operators = ", ".join(dict.fromkeys(node.op for node in inside)) or "none"
    raise StrategyError(
        f"module {scope} has no main operator to pin: none takes its own parameters, its operators are {operators}\n"
        f"  pinned at {request.source}\nPin the modules in it, or the function with shardwright.shard."
    )


def _own_parameters(capture: Capture, scope: str) -> set[str]:
    named = {value.label: value.name for value in (*capture.of_kind("parameter"), *capture.of_kind("buffer"))}
    labels = itertools.chain(named, capture.tied)
    return {named[capture.tied.get(label, label)] for label in labels if label.rpartition(".")[0] == scope}


def _pinned(node: Node, capture: Capture, request: Request) -> Node:
    if node.pin is not None:
        raise StrategyError(f"{node.name} = {node.op} is pinned twice, at {node.pin.source} and at {request.source}")

    def fitted(strategies: Strategies | None, names: Iterable[str], what: str) -> Strategies:
        shapes = [capture.values[name].shape for name in names]
        given = strategies or ()
        padded = (*given, *(None,) * (len(shapes) - len(given)))
        try:
            request.check(padded, shapes, what)
        except StrategyError as error:
            raise StrategyError(f"{error}\n  operator {node.name} = {node.op}, {node.source}") from None
        return padded

    operands = fitted(request.operands, node.operands, "operand")
    return replace(node, pin=Pin(operands, fitted(request.results, node.results, "result"), request.source))
