"""Inline the regions that the exporter makes of ``autocast`` and ``no_grad``, with the casts that autocast would do.

Made functional as they are, regions lose where gradients are off, the lines of their operators and their modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardwright import torch_private
from shardwright.errors import CaptureError

_POSITIONS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}  # where the region stands in the arguments


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    dtype: torch.dtype | None
    enabled: bool

    def region(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class _Place:
    """Where operators are copied to: before a node of a graph, under some autocast."""

    graph: Graph
    before: Node
    autocast: _Autocast | None = None


def inline(program: torch.export.ExportedProgram) -> None:
    """Replace every region of ``program`` by its operators, in place.

    Raises:
        CaptureError: for an operator of which autocast casts something that is not an operand.
    """
    owner = program.graph_module
    graph = owner.graph
    for node in [node for node in graph.nodes if _position(node) is not None]:
        outputs = _copy_called(owner, node, list(node.args), _Place(graph, node))
        for user in list(node.users):
            inner = outputs[int(user.args[1])]
            program.graph_signature.replace_all_uses(user.name, inner.name)
            user.replace_all_uses_with(inner)
            graph.erase_node(user)
        graph.erase_node(node)
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure() and not _begins_or_ends_vmap(node):
            graph.erase_node(node)


def _begins_or_ends_vmap(node: Node) -> bool:
    """Whether a node is a bracket around what ``torch.vmap`` runs, of which nothing reads a result."""
    return getattr(node.target, "__name__", "") in ("_vmap_increment_nesting", "_vmap_decrement_nesting")


def _position(node: Node) -> int | None:
    return _POSITIONS.get(torch_private.higher_order_name(node.target) or "")


def _copy_called(owner: GraphModule, node: Node, args: Sequence[Any], place: _Place) -> Sequence[Node]:
    """Copy the region of ``owner`` that ``node`` calls; ``args`` are the call's, in terms of the graph copied to."""
    position = _position(node)
    assert position is not None
    if position == _POSITIONS["wrap_with_autocast"]:
        place = replace(place, autocast=_Autocast(*args[:3]))
    held = node.args[position]
    assert isinstance(held, Node)
    return _copy(getattr(owner, str(held.target)), args[position + 1 :], place)


def _copy(region: GraphModule, inputs: Sequence[Any], place: _Place) -> Sequence[Node]:
    """Copy every operator of ``region`` to ``place``; return its outputs."""
    copied: dict[Node, Any] = {}
    given = iter(inputs)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copied[node] = next(given)
        elif node.op == "get_attr":
            copied[node] = None  # a nested region, copied where it is called
        elif node.op == "output":
            outputs: Sequence[Node] = map_arg(node.args[0], lambda n: copied[n])
            return outputs
        elif _position(node) is not None:
            copied[node] = _copy_called(region, node, [map_arg(arg, lambda n: copied[n]) for arg in node.args], place)
        elif isinstance(node.args[0] if node.args else None, Node) and isinstance(copied[node.args[0]], (tuple, list)):
            copied[node] = copied[node.args[0]][node.args[1]]  # an output of a nested region
        else:
            with place.graph.inserting_before(place.before):
                new = place.graph.node_copy(node, lambda n: copied[n])
                if place.autocast is not None:
                    _cast_operands(new, place.autocast)
            copied[node] = new
    raise AssertionError("a graph ends with its output")


def _cast_operands(node: Node, autocast: _Autocast) -> None:
    """Make the casts that autocast does to the operands of ``node`` operators of their own."""
    if not torch_private.is_operator(node.target):
        return
    operands = list(dict.fromkeys(n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)))

    def call() -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad():
        with autocast.region():
            dtypes, expected = torch_private.casts([n.meta["val"] for n in operands], call)
        for i, dtype in dtypes.items():
            with node.graph.inserting_before(node):
                cast = node.graph.call_function(torch.ops.aten._to_copy.default, (operands[i],), {"dtype": dtype})
            cast.meta = {**node.meta, "val": operands[i].meta["val"].to(dtype)}
            node.replace_input_with(operands[i], cast)
        if dtypes or isinstance(expected, torch.Tensor):
            got = call()
            if isinstance(got, torch.Tensor) and got.dtype != expected.dtype:
                raise CaptureError(
                    f"{node.target} computes {expected.dtype} under autocast by casts within it, which cannot be "
                    f"captured, {node.meta.get('custom')}\nCast its inputs by hand, or leave it outside autocast."
                )
