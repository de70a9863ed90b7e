"""From a plan to the local program of one rank.

Every node becomes the same operator on local parts (`local.localise`), and every transfer of the plan the
redistributions that it consists of, placed directly before their first consumer. Then the passes of `passes` run, and
`check` holds the result against the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.common.torch_private import returns_list, tensors_returned
from shardwright.compiler.capture.ir import Node
from shardwright.compiler.capture.tracing.literals import literal
from shardwright.compiler.lower.check import check
from shardwright.compiler.lower.local import localise
from shardwright.compiler.lower.order import note_gathered
from shardwright.compiler.lower.passes import (
    ask_first,
    join_buckets,
    join_gathers,
    join_running_statistics,
    join_sums,
    sum_first,
)
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.lower.site import Axes, Call, Literal, RandomKey, Site
from shardwright.compiler.mesh.redistribute import FUNCTION_NAMES, Shape, Step
from shardwright.compiler.plan.decided.decisions import Transfer
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.rules.notation import Operand
from shardwright.distributed.gradients import BUCKET_BYTES
from shardwright.errors import LoweringError


def lower(
    plan: Plan, rank: int, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = BUCKET_BYTES
) -> LocalProgram:
    """The program of ``rank`` under a plan; as many bytes of gradients are reduced together, at first as many.

    Raises:
        LoweringError: where the result is not what the plan says (a defect, to be reported).
    """
    lowering = _Lowering(plan, rank)
    program = lowering.run()
    check(program, plan)
    program = join_buckets(ask_first(program), bucket_bytes, first_bucket_bytes)
    program = join_running_statistics(join_gathers(join_sums(sum_first(program, plan))))
    check(program, plan)
    return note_gathered(program, plan)


class _Lowering:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.instructions: list[Instruction] = []
        self.variables: dict[tuple[str, int], str] = {}  # (node name, operand index) -> variable to read
        self.outputs: dict[str, str] = {}
        self._firsts = {block.name: block.nodes[0].name for block in plan.blocks}
        self.pending: dict[str, list[Transfer]] = {}  # first consuming node ("" for outputs) -> transfers
        for transfer in plan.transfers:
            self.pending.setdefault(self._place(transfer), []).append(transfer)
        self.counts: dict[str, int] = {}
        stored = (plan.leaves[value.name] for value in plan.capture.of_kind("parameter"))
        self.splits_parameters = any(layout.split_axes for layout in stored)

    def run(self) -> LocalProgram:
        capture = self.plan.capture
        for number, node in enumerate(capture.nodes):
            for transfer in self.pending.get(node.name, ()):
                self._transfer(transfer)
            self._operator(node, number)
        for transfer in self.pending.get("", ()):
            self._transfer(transfer)
        return LocalProgram(
            rank=self.rank,
            mesh=self.plan.mesh,
            instructions=tuple(self.instructions),
            parameters=tuple(v.name for v in capture.of_kind("parameter")),
            buffers=tuple(v.name for v in capture.of_kind("buffer")),
            inputs=tuple(v.name for v in capture.of_kind("input")),
            constants=tuple(v.name for v in capture.of_kind("constant")),
            outputs=self.outputs,
            loss=capture.loss,
            aux=capture.aux,
            mutations=capture.mutations,
        )

    def _place(self, transfer: Transfer) -> str:
        """Before which operator a transfer is done: the first that needs it, or the first of its block."""
        first = transfer.consumers[0][0]
        block = self.plan.block_of.get(first, "")
        return self._firsts[block] if block and not self.plan.block_of_transfer(transfer) else first

    def _transfer(self, transfer: Transfer) -> None:
        variable = transfer.value
        value = replace(self.plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
        again, block = self.plan.gathers_again(transfer), self.plan.block_of_transfer(transfer)
        for step in transfer.steps:
            fresh = self._fresh(transfer.value)
            text = step.call(variable, value.shape)
            reads: tuple[str, ...] = (variable,)
            if again and step is transfer.steps[-1]:
                text = f"again({text}, {value.name}, {value.label!r}, comm, {_repeated(transfer.steps, value.shape)})"
                reads = tuple(dict.fromkeys((variable, value.name)))
            self.instructions.append(
                Instruction(
                    "redistribution",
                    (fresh,),
                    reads,
                    text,
                    value=value,
                    step=step,
                    again=again,
                    block=block,
                    repeated=bool(block),
                )
            )
            variable = fresh
        for node, index in transfer.consumers:
            if node:
                self.variables[node, index] = variable
            else:
                self.outputs[transfer.value] = variable

    def _fresh(self, value: str) -> str:
        self.counts[value] = self.counts.get(value, 0) + 1
        return f"{value}_v{self.counts[value]}"

    def _operator(self, node: Node, number: int) -> None:
        plan = self.plan
        rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
        values = plan.capture.values
        site = Site(node, rule, strategy, plan.mesh, self.rank, values, number, self.splits_parameters)
        reads = tuple(self.variables[node.name, i] for i in range(len(node.operands)))
        call = localise(site)
        self.instructions.append(
            Instruction(
                "operator",
                node.results,
                reads,
                _unpacked(call, node, reads),
                node=node,
                internal=plan.graph.collectives_inside(node, strategy, plan.mesh),
                block=plan.block_of.get(node.name, ""),
                repeated=node.name in plan.computed_again,
            )
        )


def _repeated(steps: Sequence[Step], shape: Shape) -> str:
    """Steps as Python source: the functions that perform them, with their arguments."""
    texts = (f"({FUNCTION_NAMES.get(step.kind, step.kind)}, {step.arguments(shape)!r})" for step in steps)
    return f"[{', '.join(texts)}]"


def _unpacked(call: Call, node: Node, reads: tuple[str, ...]) -> str:
    """A call as Python source that gives the results of ``node``: no list of one, and nothing in place of tensors."""
    text = render(call, reads)
    if call.function == "kernels.nothing":
        return text
    if len(node.results) == 1 and returns_list(node.op):
        return text + "[0]"
    leaves_out = call.function == f"torch.ops.{node.op}" and tensors_returned(node.op) not in (None, len(node.results))
    return f"ops.tensors_of({text})" if leaves_out else text


def render(call: Call, reads: tuple[str, ...]) -> str:
    """A call as Python source; ``reads`` are the variables that its operands stand for."""
    args = [_source(arg, reads) for arg in call.args]
    args += [f"{name}={_source(arg, reads, name)}" for name, arg in call.kwargs]
    known = call.function.startswith("torch.ops.aten.")  # "aten" is a name of the program's
    return f"{call.function.removeprefix('torch.ops.') if known else call.function}({', '.join(args)})"


def _source(arg: Any, reads: tuple[str, ...], name: str = "") -> str:
    if name == "device" and arg is not None:
        return "device"
    for kind, write in _WRITERS.items():
        if isinstance(arg, kind):
            return write(arg, reads)
    raise LoweringError(f"an argument of type {type(arg).__name__} ({arg!r}) cannot be written into a program")


def _sequence(arg: Any, reads: tuple[str, ...]) -> str:
    return "[" + ", ".join(_source(a, reads) for a in arg) + "]"


# How each kind of argument is written; the first match counts.
_WRITERS: Mapping[type, Callable[[Any, tuple[str, ...]], str]] = {
    Operand: lambda arg, reads: reads[arg.index],
    Literal: lambda arg, reads: arg.text,
    RandomKey: lambda arg, reads: f"key({arg.number})",
    Axes: lambda arg, reads: f"comm, {arg.names!r}",
    torch.dtype: lambda arg, reads: str(arg),
    torch.device: lambda arg, reads: "device",
    torch.layout: lambda arg, reads: str(arg),
    torch.memory_format: lambda arg, reads: str(arg),
    bool: lambda arg, reads: str(arg),
    int: lambda arg, reads: str(int(arg)),
    float: lambda arg, reads: str(literal(arg)),
    complex: lambda arg, reads: str(literal(arg)),
    str: lambda arg, reads: repr(arg),
    type(None): lambda arg, reads: "None",
    list: _sequence,
    tuple: _sequence,
}
