"""From a plan to the local program of one rank.

Every node becomes the same operator on local parts (`local.localise`), and every transfer of the plan the
redistributions that it consists of, placed directly before their first consumer. Then the passes of `passes` run, and
`check` holds the result against the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.common.signatures import returns_list, tensors_returned
from shardwright.compiler.capture.casts import widens_back
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.call import COMM, Call, Name
from shardwright.compiler.lower.check import check
from shardwright.compiler.lower.early import begin_early
from shardwright.compiler.lower.local import localise
from shardwright.compiler.lower.passes import (
    join_buckets,
    join_gathers,
    join_running_statistics,
    note_regathered,
)
from shardwright.compiler.lower.pipeline.stages import in_stages, microbatches_of
from shardwright.compiler.lower.program import Instruction, LocalProgram, variables
from shardwright.compiler.lower.site import Site
from shardwright.compiler.mesh.redistribute import Step
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.table import row_of
from shardwright.distributed.gradients import BUCKET_BYTES


def lower(
    plan: Plan,
    rank: int,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = False,
) -> LocalProgram:
    """Return the program of ``rank`` under a plan.

    Args:
        bucket_bytes: the most bytes of gradients that are reduced together.
        first_bucket_bytes: the most of those that are reduced first.
        overlap: whether collectives of sharded parameters run beside computing, too.

    Raises:
        LoweringError: where the result is not what the plan says (a defect, to be reported).
    """
    if plan.stages is not None:
        return in_stages([_unjoined(plan, of) for of in microbatches_of(plan, rank)], plan, rank)
    program = _unjoined(plan, rank)
    program = join_buckets(program, bucket_bytes, first_bucket_bytes)
    program = join_running_statistics(join_gathers(program))
    if overlap:
        program = begin_early(program, plan)
    check(program, plan)
    return note_regathered(program, plan)


def _unjoined(plan: Plan, rank: int) -> LocalProgram:
    program = _Lowering(plan, rank).run()
    check(program, plan)
    return program


class _Lowering:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.instructions: list[Instruction] = []
        self.variables: dict[tuple[str, int], str] = {}  # (node name, operand index) -> variable to read
        self.outputs: dict[str, str] = {}
        self._firsts = {block.name: block.nodes[0].name for block in plan.blocks}
        self.pending: dict[str, list[Transfer]] = {}  # first consuming node ("" for outputs) -> transfers
        # A recomputed block is one stretch of the program: what is done for it outside of it comes before it begins.
        for transfer in sorted(plan.transfers, key=lambda each: bool(plan.block_of_transfer(each))):
            self.pending.setdefault(self._place(transfer), []).append(transfer)
        self.counts: dict[str, int] = {}
        self.readers: dict[str, Iterator[str]] = {}  # of shared casts: a variable for each of them
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
        variable = self._read(transfer.value) if transfer.steps else transfer.value
        value = replace(self.plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
        regathers, block = self.plan.gathers_again(transfer), self.plan.block_of_transfer(transfer)
        for step in transfer.steps:
            made, reads = self._fresh(transfer.value), [variable]
            source = self._cast_of(value) if step is transfer.steps[0] and step.sums_gradient else None
            call = step_call(step, Name(variable), value, source)
            reads += [source] if source is not None else []
            if regathers and step is transfer.steps[-1]:
                steps = [(Name(each.function), each.arguments(value.shape)) for each in transfer.steps]
                call = Call("resharded", (call, Name(value.name), value.label, COMM, steps))
                reads = list(dict.fromkeys((*reads, value.name)))
            self.instructions.append(
                Instruction(
                    "redistribution",
                    (made,),
                    tuple(reads),
                    call,
                    moves=((value, step),),
                    regathers=regathers,
                    block=block,
                    recommunicates=bool(block),
                )
            )
            variable = made
        for node, index in transfer.consumers:
            if node:
                self.variables[node, index] = variable if transfer.steps else self._read(variable)
            else:
                self.outputs[transfer.value] = variable

    def _read(self, value: str) -> str:
        """Return the variable by which the next reader of a value reads it."""
        return next(self.readers[value]) if value in self.readers else value

    def _share(self, node: Node) -> None:
        """Give each reader of a cast that several share a variable of its own; see `capture.casts`."""
        values, name = self.plan.capture.values, node.results[0]
        if not widens_back(values[name], values[node.operands[0]]):
            return
        moved = [transfer for transfer in self.plan.transfers if transfer.value == name]
        outputs = [self._fresh(name) for transfer in moved for _ in ([None] if transfer.steps else transfer.consumers)]
        if len(outputs) < 2:
            return
        reads = (name, self.variables[node.name, 0])
        call = Call("kernels.readers_of", (*variables(reads), len(outputs)))
        block = self.plan.block_of.get(node.name, "")
        self.instructions.append(Instruction("shared", tuple(outputs), reads, call, unpacks=True, block=block))
        self.readers[name] = iter(outputs)

    def _cast_of(self, value: Value) -> str | None:
        """Return the variable of which a value is a cast, where its gradient is summed in a wider dtype."""
        if not value.needs_gradient or value.kind == "parameter" or value.reduced_in in (None, value.dtype):
            return None
        maker, _ = self.plan.graph.producers[value.name]
        return self.variables[maker.name, 0] if row_of(maker.op).casts else None

    def _fresh(self, value: str) -> str:
        self.counts[value] = self.counts.get(value, 0) + 1
        return f"{value}_v{self.counts[value]}"

    def _operator(self, node: Node, number: int) -> None:
        plan = self.plan
        rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
        values = plan.capture.values
        site = Site(node, rule, strategy, plan.mesh, self.rank, values, number, self.splits_parameters)
        reads = tuple(self.variables[node.name, i] for i in range(len(node.operands)))
        operands = variables(reads)
        call = localise(site).mapped(lambda arg: operands[arg.index] if isinstance(arg, Operand) else arg)
        self.instructions.append(
            Instruction(
                "operator",
                node.results,
                reads,
                _unpacked(call, node),
                unpacks=returns_list(node.op) and call.function != "kernels.nothing",
                node=node,
                internal=plan.graph.collectives_inside(node, strategy, plan.mesh),
                block=plan.block_of.get(node.name, ""),
                recommunicates=node.name in plan.computed_again,
            )
        )
        if node.results and values[node.results[0]].shared:
            self._share(node)


def step_call(step: Step, part: Name, value: Value, source: str | None = None) -> Call:
    """Return the call that performs a step of a redistribution on a part of a value.

    Args:
        source: the variable of which the part is a cast, which is to be given the gradient.
    """
    arguments = step.arguments(value.shape)
    if step.sums_gradient and value.needs_gradient and value.reduced_in not in (None, value.dtype):
        arguments["reduced_in"] = value.reduced_in
        arguments |= {"source": Name(source)} if source is not None else {}
    return Call(step.function, (part, COMM), tuple(arguments.items()))


def _unpacked(call: Call, node: Node) -> Call:
    """A call that gives the results of ``node``, with nothing in place of tensors."""
    leaves_out = call.function == f"torch.ops.{node.op}" and tensors_returned(node.op) not in (None, len(node.results))
    return Call("ops.tensors_of", (call,)) if leaves_out else call
