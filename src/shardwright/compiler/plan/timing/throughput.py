"""What a step gets done: samples and tokens, and the floating-point operations of its products.

The flops are those of the model, forward and backward: every product counts two operations for each multiplication and
addition, its backward counts two forwards (`cost.BACKWARD`), and causal attention half of the scores. What the backward
recomputes counts nothing, so that a plan that recomputes less for the same time has the larger utilisation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.cost import BACKWARD, work_of
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.rules.table import row_of


@dataclass(frozen=True)
class Throughput:
    """What all devices together get done: in a step, ``_s`` per second.

    ``tokens`` are 0 where the batch has none. ``utilisation`` (MFU) is the share that the flops of the model are of
    what all devices could do in a step at ``peak_flops`` per second each (`Hardware.peak_in`).
    """

    rows: int
    tokens: int
    rows_s: float
    tokens_s: float
    model_flops: int
    peak_flops: float
    utilisation: float

    @staticmethod
    def of(plan: Decisions, hardware: Hardware, step_s: float) -> Throughput:
        """Return what is done under a plan, a step of which takes so long."""
        rows, tokens = plan.capture.rows, tokens_of(plan.capture)
        flops, peak = model_flops(plan.graph), hardware.peak_in(main_dtype(plan.graph))
        could_do = step_s * plan.devices.size * peak
        return Throughput(rows, tokens, rows / step_s, tokens / step_s, flops, peak, flops / could_do)


def model_flops(graph: RuledGraph) -> int:
    """Return the floating-point operations of the products of a step, forward and backward."""
    return sum(
        work_of(graph, node).flops * (1 + BACKWARD * graph.needs_gradient(node))
        for node in graph.capture.nodes
        if row_of(node.op).multiplies
    )


def main_dtype(graph: RuledGraph) -> torch.dtype:
    """Return the dtype in which most is multiplied, by the work of the operators."""
    done: Counter[torch.dtype] = Counter()
    for node in graph.capture.nodes:
        work = work_of(graph, node)
        done[work.dtype] += work.flops or work.bytes
    [(dtype, _)] = done.most_common(1) or [(torch.float32, 0)]
    return dtype


def tokens_of(capture: Capture) -> int:
    """Return the tokens of a batch: the entries of the largest input of indices of two dims or more.

    Those are indices that are looked up in a parameter, as they are or through casts and views; 0 where there are none.
    """
    found, sources = 0, {name: node for node in capture.nodes for name in node.results}
    for node in capture.nodes:
        if row_of(node.op).looks_up and capture.values[node.operands[0]].of_parameter:
            name = node.operands[1]
            while (source := sources.get(name)) is not None and len(source.operands) == 1:
                name = source.operands[0]
            value = capture.values[name]
            if value.kind == "input" and len(value.shape) > 1:
                found = max(found, torch.Size(value.shape).numel())
    return found
