"""What autograd keeps of a graph between its forward and its backward, and in whose memory it lies.

The table of operators says what each of them keeps (`rules.row.Saved`). A value that several keep is held once. The
result of a view lies in the memory of its operand, unless it is a reshape of what lies there in another order: that is
found out on torch's meta device, by the whole shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardwright.compiler.capture.evaluate import call
from shardwright.compiler.capture.facts import operator_of, saved
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Step, copies, moves_alone
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.rules.operator import Operator
from shardwright.compiler.rules.row import Saved
from shardwright.compiler.rules.table import Column, column, row_of

_META = torch.device("meta")


def _dropping(op: Operator) -> Saved | None:
    """Attention whose dropout is drawn by position keeps what it is made of, and makes its scores again."""
    return Saved(operands=tuple(range(len(op.operands)))) if op["dropout_p"] else None


def _queries_outside(op: Operator, result: Tensor) -> Tensor:
    """The kernels of attention write a query's heads beside each other; ours, which drops, head by head."""
    return (
        result if op["dropout_p"] or result.ndim < 4 else torch.empty_like(result.transpose(-3, -2)).transpose(-3, -2)
    )


# Columns of the table of operators: what the form on local parts keeps where it is another, and in which order the
# dims of a result lie in memory where that is not their own.
KEPT_LOCALLY: Column[Callable[[Operator], Saved | None]] = column(("scaled_dot_product_attention", _dropping))
ORDERS: Column[Callable[[Operator, Tensor], Tensor]] = column(("scaled_dot_product_attention", _queries_outside))


def local_bytes(value: Value, layout: Layout, mesh: Mesh, rank: int = 0) -> int:
    """The bytes of a rank's part of a value; no rank has more than rank 0."""
    return torch.Size(layout.local_shape(value.shape, mesh, rank)).numel() * value.dtype.itemsize


def repeatable(value: Value, steps: Sequence[Step]) -> bool:
    """Whether the backward can move a value again in place of keeping it: parameters, and what has a gradient.

    Other values, as targets of a loss, are small, and operators on local parts may keep them in another form.
    """
    return copies(steps) and moves_alone(steps) and (value.kind == "parameter" or value.needs_gradient)


class Kept:
    """What the operators of a graph keep for its backward: of each graph there is one, by `RuledGraph.once`."""

    def __init__(self, graph: RuledGraph) -> None:
        self.graph = graph
        self.saved = {node.name: self._saved(node) for node in graph.capture.nodes}

    def _saved(self, node: Node) -> Saved:
        kept = saved(node, self.graph.capture)
        locally = KEPT_LOCALLY.of(node.op)
        if kept == Saved() or locally is None:
            return kept
        return locally(operator_of(node, self.graph.capture)) or kept

    def times(self, node: Node, index: int) -> int:
        """How many operators keep an operand, or what is viewed of it where it lies."""
        found = int(index in (self.saved[node.name].operands or ()))
        if index == 0 and node.name in self.views:
            found += sum(self.times(use.node, use.index) for name in node.results for use in self.graph.uses[name])
        return found

    def beside(self, node: Node, layout_of: Callable[[str], Layout], mesh: Mesh, rank: int = 0) -> int:
        """The bytes of what an operator makes inside itself and keeps, by the layouts of its operands and results."""
        total = 0.0
        for part in self.saved[node.name].beside:
            name = (node.operands if part.like == "operand" else node.results)[part.index]
            value = self.graph.capture.values[name]
            size = local_bytes(value, layout_of(name), mesh, rank) / value.dtype.itemsize
            total += size * part.times * (part.itemsize or value.dtype.itemsize)
        return int(total)

    @cached_property
    def views(self) -> frozenset[str]:
        """The names of the operators whose results lie in the memory of their first operand.

        Cached: the graph is frozen.
        """
        return frozenset(_views(self.graph))


def _views(graph: RuledGraph) -> Iterator[str]:
    capture = graph.capture
    laid: dict[str, Tensor] = {}  # values on the meta device, as they lie in memory
    # Results, and whether they lie in the operand's memory. Cached by the call and the form of its operands: a view
    # depends on nothing else, wherever in memory it begins.
    known: dict[Hashable, tuple[list[Tensor], bool]] = {}

    def of(name: str) -> Tensor:
        value = capture.values[name]
        return laid.setdefault(name, torch.empty(value.shape, dtype=value.dtype, device=_META))

    for node in capture.nodes:
        if (order := ORDERS.of(node.op)) is not None:
            [name] = node.results
            laid[name] = order(operator_of(node, capture), of(name))
        elif row_of(node.op).view and node.operands:
            operands = [of(name) for name in node.operands]
            key = node.call, tuple((x.shape, x.stride(), x.dtype) for x in operands)
            if key not in known:
                made = call(node, operands, _META)
                known[key] = made, all(x.untyped_storage() is operands[0].untyped_storage() for x in made)
            made, inside = known[key]
            laid.update(zip(node.results, made, strict=True))
            if inside:
                yield node.name
