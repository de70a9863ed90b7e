"""The cost of an operator on whole tensors: floating-point operations and bytes of its forward."""

from __future__ import annotations

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.rules.row import Operator, Saved
from shardwright.compiler.rules.table import row_of


def operator_of(node: Node, capture: Capture) -> Operator:
    """A node as the table of operators sees it."""
    operands = tuple(capture.values[name].shape for name in node.operands)
    results = tuple(capture.values[name].shape for name in node.results)
    return Operator(node.op, node.args, dict(node.kwargs), operands, results)


def flops(node: Node, capture: Capture) -> int:
    """Floating-point operations of the forward: two per multiplication and addition, one per element elsewhere."""
    row = row_of(node.op)
    return 0 if row.view else row.flops(operator_of(node, capture))


def bytes_moved(node: Node, capture: Capture) -> int:
    """Return the bytes that the forward reads and writes: nothing of a view, by default all operands and results."""
    row = row_of(node.op)
    if row.view:
        return 0
    sizes = {name: capture.values[name].bytes for name in (*node.operands, *node.results)}
    if row.between is not None:
        itemsize = capture.values[node.operands[0]].dtype.itemsize
        return sum(sizes.values()) + row.between(operator_of(node, capture)) * itemsize
    if row.traffic is None:
        return sum(sizes.values())
    operands, results = ([sizes[name] for name in names] for names in (node.operands, node.results))
    return row.traffic(operands, results, capture.values[node.operands[0]].dtype.itemsize)


def saved(node: Node, capture: Capture) -> Saved:
    """Return what a node keeps for its backward; nothing where none of its results has a gradient."""
    if not any(capture.values[name].needs_gradient for name in node.results):
        return Saved()
    gradients = [capture.values[name].needs_gradient for name in node.operands]
    return row_of(node.op).saved(operator_of(node, capture)).where(gradients)
