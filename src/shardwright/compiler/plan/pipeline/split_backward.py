"""The operators whose backward is two actions: gradients that the stage before waits for, and those of weights."""

from __future__ import annotations

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.schedule import SPLIT
from shardwright.compiler.rules.table import row_of

SHARE = 0.5
"""Of the backward of a product, what the gradient of its weight takes: it is one of two products."""


def with_split_backward(plan: Decisions) -> frozenset[str]:
    """Return the operators of which a schedule does the gradients of weights in actions of their own.

    They are products of torch's, of one result, with what depends on parameters alone, but for those of layers that
    are recomputed, which are there again only while the backward is in them.
    """
    stages = plan.stages
    if stages is None or stages.schedule not in SPLIT:
        return frozenset()
    staged = {name for node in plan.capture.nodes if node.name in stages.of for name in node.results}

    def has_weights(node: Node) -> bool:
        values = [plan.capture.values[name] for name in node.operands]
        return any(value.needs_gradient and value.name not in staged for value in values)

    return frozenset(
        node.name
        for node in plan.capture.nodes
        if node.name in stages.of
        and node.op.startswith("aten.")
        and row_of(node.op).multiplies
        and len(node.results) == 1
        and node.name not in plan.block_of
        and has_weights(node)
    )
