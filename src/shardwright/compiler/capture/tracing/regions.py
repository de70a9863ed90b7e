"""Inline the regions that the exporter makes of ``autocast`` and ``no_grad``, with the casts that autocast would do.

Made functional as they are, regions lose where gradients are off, the lines of their operators and their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardwright.common import signatures, torch_private, trees
from shardwright.compiler.capture.functional.decompositions import decomposed
from shardwright.compiler.capture.functional.hidden_aliases import changed_by
from shardwright.compiler.capture.tracing.sources import source_of
from shardwright.compiler.rules.table import Column, column
from shardwright.errors import CaptureError

_POSITIONS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}  # where the region stands in the arguments
NO_GRADIENT = "shardwright_no_gradient"  # the key of the annotation that gradients are off where an operator is called
_Casts = Mapping[int, torch.dtype]  # operand, by its position among the tensors of a node -> to what it is cast
# On which devices the kernel of an operator calls others that autocast casts, which tensors without values do not show.
_CASTS_WITHIN: Column[str] = column(("bilinear", "cpu"))
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Autocast:
    """One ``torch.autocast`` that is on, or off, in a region."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool = True

    def region(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Place:
    """The place to which operators are copied: before a node of a graph, under some autocast.

    ``kept`` are the parameters, and their casts so far, by whether gradients are off: autocast casts each once.
    """

    graph: Graph
    before: Node
    autocast: Autocast | None = None
    parameters: frozenset[Node] = frozenset()
    kept: dict[tuple[Node, torch.dtype, str], Node] = field(default_factory=dict)


def inline(program: torch.export.ExportedProgram) -> None:
    """Replace every region of ``program`` by its operators, in place.

    Raises:
        CaptureError: for an operator that computes under autocast what no casts of its operands lead to.
    """
    owner = program.graph_module
    graph, of_program = owner.graph, program.graph_signature.inputs_to_parameters
    _note_all_users(graph)
    parameters = frozenset(node for node in graph.nodes if node.op == "placeholder" and node.name in of_program)
    for node in [node for node in graph.nodes if _position(node) is not None]:
        outputs = _copy_called(owner, node, list(node.args), Place(graph, node, parameters=parameters))
        for user in list(node.users):
            inner = outputs[int(user.args[1])]
            program.graph_signature.replace_all_uses(user.name, inner.name)
            user.replace_all_uses_with(inner)
            graph.erase_node(user)
        graph.erase_node(node)
    for node in reversed(graph.nodes):
        if not node.users and not _does_something(node):
            graph.erase_node(node)


def _note_all_users(graph: Graph) -> None:
    """Let every node know its readers.

    The exporter forgets some in front of a region, and torch then fails to erase these.
    """
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)


def is_without_gradient(node: Node) -> bool:
    """Return whether gradients are off where an operator is called."""
    return bool((node.meta.get("custom") or {}).get(NO_GRADIENT, False))


def _does_something(node: Node) -> bool:
    """Return whether a node is needed though nothing reads its result."""
    return node.is_impure() or any(changed_by(node)) or _begins_or_ends_vmap(node)


def _begins_or_ends_vmap(node: Node) -> bool:
    """Return whether a node is a bracket around what ``torch.vmap`` runs, of which nothing reads a result."""
    return getattr(node.target, "__name__", "") in ("_vmap_increment_nesting", "_vmap_decrement_nesting")


def _position(node: Node) -> int | None:
    return _POSITIONS.get(getattr(node.target, "__name__", ""))


def _copy_called(owner: GraphModule, node: Node, args: Sequence[Any], place: Place) -> Any:
    """Copy the region of ``owner`` that ``node`` calls; ``args`` are the call's, in terms of the graph copied to."""
    position = _position(node)
    assert position is not None
    if position == _POSITIONS["wrap_with_autocast"]:
        place = replace(place, autocast=Autocast(*args[:3]))
    held = node.args[position]
    assert isinstance(held, Node)
    region: GraphModule = getattr(owner, str(held.target))
    return copy_operators(region, region.graph, args[position + 1 :], place)


def copy_operators(owner: Any, graph: Graph, inputs: Sequence[Any], place: Place) -> Any:
    """Copy every operator of ``graph``, whose regions belong to ``owner``, to ``place``; return its outputs."""
    copied: dict[Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            copied[node] = next(given)
        elif node.op == "get_attr":
            copied[node] = None  # a nested region, copied where it is called
        elif node.op == "output":
            return map_arg(node.args[0], lambda n: copied[n])
        elif _position(node) is not None:
            copied[node] = _copy_called(owner, node, [map_arg(arg, lambda n: copied[n]) for arg in node.args], place)
        elif isinstance(node.args[0] if node.args else None, Node) and isinstance(copied[node.args[0]], (tuple, list)):
            copied[node] = copied[node.args[0]][node.args[1]]  # an output of what was copied in several nodes
        else:
            with place.graph.inserting_before(place.before):
                new = place.graph.node_copy(node, lambda n: copied[n])
            if new.target is getitem:
                several, index = new.args
                new.meta["val"] = several.meta["val"][index]  # type: ignore[union-attr]
            copied[node] = new if cast_operands(new, place) else _apart(new, place)
    raise AssertionError("a graph ends with its output")


def _apart(node: Node, place: Place) -> Any:
    """The parts of a composite operator in its place, each with the casts that autocast does to it.

    Raises:
        CaptureError: where torch does not compute it by others.
    """
    assert place.autocast is not None
    if not torch_private.is_composite(node.target):
        raise _refusal(node, place.autocast)
    with torch.no_grad(), place.autocast.region():
        graph = decomposed(node)
    for part in graph.nodes:
        part.meta = {**node.meta, "val": part.meta.get("val")}
    outputs = copy_operators(None, graph, node.all_input_nodes, place)
    place.graph.erase_node(node)
    return outputs


def _refusal(node: Node, autocast: Autocast) -> CaptureError:
    return CaptureError(
        f"{node.target} computes in another dtype under autocast by casts within it, which cannot be captured, at "
        f"{source_of(node)}\nCast its inputs by hand, and call it where autocast is off: "
        f"with torch.autocast({autocast.device_type!r}, enabled=False)."
    )


def cast_operands(node: Node, place: Place) -> bool:
    """Make the casts that autocast does to the operands of ``node`` operators of their own, before it.

    False, and nothing done, where the operator would then not compute the same in the same dtypes.

    Raises:
        CaptureError: where that shows in its values alone.
    """
    autocast, operands = place.autocast, _operands(node)
    if autocast is None or not autocast.enabled or not signatures.is_operator(node.target):
        return True
    if not operands:
        return True
    if _CASTS_WITHIN.of(str(node.target)) == autocast.device_type and any(_is_cast(n, autocast) for n in operands):
        raise _refusal(node, autocast)
    found = _casts(node, operands, autocast)
    if found is None:
        return False
    casts, result = found
    for i, dtype in casts.items():
        node.replace_input_with(operands[i], _cast(operands[i], dtype, node, place))
    # Where an operand has come of other operators than those that were traced, it may have another dtype.
    if _dtypes(result) != _dtypes(node.meta.get("val")):
        node.meta["val"] = result
    return True


def _cast(operand: Node, dtype: torch.dtype, node: Node, place: Place) -> Node:
    """A cast of ``operand`` before ``node``; that of a parameter serves the whole region."""
    key = operand, dtype, str(node.meta.get("custom", {}).get(NO_GRADIENT))
    if key in place.kept:
        return place.kept[key]
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(torch.ops.aten._to_copy.default, (operand,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
    if operand in place.parameters:
        place.kept[key] = cast
    return cast


def _operands(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _casts(node: Node, operands: Sequence[Node], autocast: Autocast) -> tuple[_Casts, Any] | None:
    """The casts of operands after which an operator computes what it computes under autocast, and its result then.

    None if there are none.

    Most operators cast their operands. Some are told to compute in float32, or cast what they make on their way: then
    all operands have the dtype of the result.
    """
    with torch.no_grad():
        with autocast.region():
            wanted = _computed(node, operands, {})
        for casts in (wanted.casts, _like_results(operands, wanted)):
            with suppress(Exception):  # of operands whose dtypes do not fit together
                found = _computed(node, operands, casts)
                if (found.made, _dtypes(found.result)) == (wanted.made, _dtypes(wanted.result)):
                    return casts, found.result
    return None


def _like_results(operands: Sequence[Node], wanted: _Computed) -> _Casts:
    """All operands that autocast may cast, to the dtype of the first result."""
    dtypes = [dtype for dtype in _dtypes(wanted.result) if dtype.is_floating_point]
    return {
        i: dtypes[0]
        for i, operand in enumerate(operands)
        if dtypes and _may_be_cast(operand) and operand.meta["val"].dtype != dtypes[0]
    }


def _is_cast(operand: Node, autocast: Autocast) -> bool:
    return _may_be_cast(operand) and operand.meta["val"].dtype != autocast.dtype


def _may_be_cast(operand: Node) -> bool:
    """Return whether autocast casts such a tensor at all."""
    dtype: torch.dtype = operand.meta["val"].dtype
    return dtype.is_floating_point and dtype != torch.float64


def _dtypes(of: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in trees.tree_leaves(of) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Computed:
    """The operators of a call, recorded.

    ``casts``: to which dtype it cast each of some tensors, by position.
    ``made``: the operators that made new tensors of others, without overload, each with the dtypes of its results;
    without casts and copies.
    ``result``: what the call returned.
    """

    casts: dict[int, torch.dtype]
    made: list[tuple[str, tuple[torch.dtype, ...]]]
    result: Any


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


def _calls_of(tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> _Computed:
    """Return what ``call`` does beneath autograd and autocast, and how it casts ``tensors``, which have no storage."""
    casts: dict[int, torch.dtype] = {}
    made: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def noting(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        if operator is torch.ops.aten._to_copy.default:
            for i, tensor in enumerate(tensors):
                if tensor is args[0] and i not in casts:
                    casts[i] = result.dtype
        elif operator not in _COPIES and signatures.makes_new(operator) and _tensors_in((args, kwargs)):
            results = _tensors_in(result)
            if results:
                made.append((operator.name().partition(".")[0], tuple(tensor.dtype for tensor in results)))
        return result

    modes = [torch_private.mode_of(tensor) for tensor in tensors if torch_private.is_fake(tensor)]
    with modes[0] if modes else nullcontext(), torch_private.OperatorMode(noting):  # what is made of nothing
        result = call()
    return _Computed(casts, made, result)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _computed(node: Node, operands: Sequence[Node], casts: _Casts) -> _Computed:
    """Return what an operator computes for tensors without values, once they are cast."""
    vals = {
        operand: operand.meta["val"].to(casts[i]) if i in casts else operand.meta["val"].detach()
        for i, operand in enumerate(operands)
    }
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: vals.get(n, n.meta["val"]))
    with kernels_to_trace(node.target.overloadpacket.__name__):  # type: ignore[union-attr]
        return _calls_of(list(vals.values()), lambda: node.target(*args, **kwargs))  # type: ignore[operator]


def kernels_to_trace(function: str) -> AbstractContextManager[None]:
    """Return in what a function of that name is traced with tensors without values."""
    return torch_private.traceable_recurrent_layers() if function in _RECURRENT else nullcontext()
