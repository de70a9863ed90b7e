"""Losses whose gradient is known before they are: those that a pipeline can do in turns with the backward.

A backward that begins while later microbatches are still to come needs the gradient of the loss for what its own
microbatch has given it. It is known where the loss is linear in that, with factors that the batch alone decides: a mean
is a sum over a count of labels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.plan import Plan

# Of a tensor alone, or beside numbers.
_LINEAR = {
    f"aten.{name}"
    for name in (
        "_to_copy.default", "_unsafe_view.default", "alias.default", "clone.default", "detach.default",
        "div.Scalar", "expand.default", "mean.default", "mean.dim", "mul.Scalar", "neg.default", "permute.default",
        "reshape.default", "select.int", "slice.Tensor", "squeeze.default", "squeeze.dim", "sum.default",
        "sum.dim_IntList", "t.default", "to.dtype", "transpose.int", "unsqueeze.default", "view.default",
    )
}  # fmt: skip
_SUMS = {
    f"aten.{name}"
    for name in ("add.Tensor", "sub.Tensor", "rsub.Scalar", "add.Scalar", "sub.Scalar", "stack.default", "cat.default")
}


def why_not_in_turns(plan: Plan, stage_of: Mapping[str, int]) -> str | None:
    """Return why forwards and backwards of a plan cannot take turns; None where they can.

    Args:
        stage_of: the stage of each operator that depends on the batch and on parameters.
    """
    values = plan.capture.values
    staged = [node for node in plan.capture.nodes if node.name in stage_of]
    halves = [v.name for v in values.values() if v.dtype == torch.float16 and v.needs_gradient]
    if halves and plan.capture.loss:
        return (
            f"{halves[0]} is computed in float16, whose gradients need a scaled loss, and the scale is known when "
            "backward() is called"
        )
    staged_values = {name for node in staged for name in node.results}
    behind: set[str] = set()  # what follows from all microbatches
    for node in staged:
        where = f"{node.op} in {node.scope or 'the loss function'} ({node.source})"
        joins = any(_joins(plan, node, i) for i, name in enumerate(node.operands) if name in staged_values)
        if not joins and behind.isdisjoint(node.operands):
            if plan.stages is not None and plan.stages.microbatches > 1 and not _of_microbatch(plan, node):
                if plan.capture.rows == 1:
                    return "the batch has a single row, which microbatches cannot divide"
                return f"{where} depends on the batch, and not on its rows"
            continue
        behind.update(node.results)
        if not any(values[name].needs_gradient for name in node.results):
            continue
        if problem := _nonlinear(plan, node, staged_values):
            return f"{where} {problem}"
        if stage_of[node.name] != stage_of[_maker(plan, plan.capture.loss)]:
            return f"{where} is in another stage than the loss"
    if plan.capture.loss and plan.capture.loss not in staged_values:
        return "the loss does not depend on both the batch and parameters"
    return None


def _maker(plan: Plan, value: str) -> str:
    return plan.graph.producers[value][0].name


def _joins(plan: Plan, node: Node, index: int) -> bool:
    """Return whether an operand is what all microbatches make together."""
    steps = plan.way[node.name, index].steps
    return any(MICROBATCHES in step.axes and step.kind not in ("slice", "enter") for step in steps)


def _of_microbatch(plan: Plan, node: Node) -> bool:
    return MICROBATCHES in plan.strategies[node.name].used


def _nonlinear(plan: Plan, node: Node, staged: set[str]) -> str | None:
    """Return what is wrong with an operator behind all microbatches that has a gradient."""
    values = plan.capture.values
    if plan.stages is not None and plan.stages.microbatches > 1 and _of_microbatch(plan, node):
        return "reads what several microbatches have made"
    trained = [i for i, name in enumerate(node.operands) if name in staged and values[name].needs_gradient]
    others = [name for i, name in enumerate(node.operands) if i not in trained]
    if any(name in staged for name in others):
        return "has a factor that the model computes"
    if node.op in _SUMS or (node.op in _LINEAR and len(node.operands) == 1):
        return None
    factors = not any(values[name].needs_gradient for name in others) and len(trained) == 1
    if factors and (node.op == "aten.mul.Tensor" or (node.op == "aten.div.Tensor" and trained == [0])):
        return None
    return "is not linear in what the microbatches give it"
