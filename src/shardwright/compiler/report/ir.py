"""Dumps of a plan and of a rank's program, for people and for diff.

rank_N/step_parallel_begin.ir    the whole graph, every operator with its strategy, scope and source line
rank_N/execute.ir                what rank N runs: local shapes, collectives, the ranks that take part, adjoints
rank_N/program.py                the same as the Python that is executed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.rules.notation import Operand
from shardwright.launch.options.save_graphs import SaveGraphs


def save_graphs(where: SaveGraphs, plan: Plan, program: LocalProgram, number: int = 1) -> Path:
    """Write the dumps of one rank under rank_N and return their folder.

    Level 1 writes the graph with its strategies, level 2 the local program as well. A model has one program for every
    shape of the batch, and others for evaluation: those after the first are written to rank_N/program_``number``.
    """
    folder = Path(where.directory) / f"rank_{program.rank}"
    if number > 1:
        folder /= f"program_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step_parallel_begin.ir").write_text(strategies_text(plan, program.rank))
    if where.level > 1:
        (folder / "execute.ir").write_text(execute_text(plan, program))
        (folder / "program.py").write_text(program.source)
    return folder


def strategies_text(plan: Plan, rank: int = 0) -> str:
    """The graph, one line per operator, with `in_strategy` and `out_strategy` in slices per dim.

    It is the same on every rank but for the ranks with which ``rank`` shares partial sums.
    """
    captured = plan.capture
    numbers = {name: i for i, name in enumerate(captured.values)}
    lines = [f"# {plan.mode}, search {plan.search}, mesh {plan.shown_mesh}, {plan.devices.size} devices"]
    for value in captured.values.values():
        if value.kind != "result":
            slices = plan.leaves[value.name].slices(plan.mesh)
            lines.append(f"%{numbers[value.name]}({value.label}) = {value.kind} {_fact(value)} {{strategy: {slices}}}")
    lines += [_operator_line(plan, node, numbers, rank) for node in captured.nodes]
    returned = [("loss", captured.loss), *(("aux", name) for name in captured.aux)]
    returned += [(captured.values[buffer].label, new) for buffer, new in captured.mutations.items()]
    lines.append("return " + ", ".join(f"{what}: %{numbers[name]}" for what, name in returned if name))
    return "\n".join(lines) + "\n"


def _operator_line(plan: Plan, node: Node, numbers: dict[str, int], rank: int) -> str:
    results = ", ".join(f"%{numbers[name]}({name})" for name in node.results)
    operands = [f"%{numbers[name]}" for name in node.operands]
    arguments = [_argument(arg, operands) for arg in node.args]
    arguments += [f"{name}={_argument(arg, operands)}" for name, arg in node.kwargs]
    marks = [f"{{instance name: {node.name}}}", f"{{in_strategy: {plan.in_strategy(node)}}}"]
    marks.append(f"{{out_strategy: {plan.out_strategy(node)}}}")
    marks.append(f"{{out: {', '.join(_fact(plan.capture.values[name]) for name in node.results)}}}")
    partial = plan.layout(node.results[0]).partial if node.results else ()
    if partial:
        marks.append(f"{{partial over ranks: {plan.devices.group(rank, set(partial) & {*plan.devices.names})}}}")
    if plan.pin_of(node) is not None:
        marks.append("{pinned}")
    if not plan.graph.rules[node.name].listed:
        marks.append("{no rule: replicated}")
    return f"{results} = {_short(node.op)}({', '.join(arguments)}) {' '.join(marks)}  # {_place(node)}"


def execute_text(plan: Plan, program: LocalProgram) -> str:
    """Return the program of a rank, one line per instruction with local shapes, each followed by its communication.

    An adjoint is what the backward does in place of the line above it; operators have autograd's.
    """
    at = " ".join(f"{axis}={place}" for axis, place in program.mesh.coordinates(program.rank).items())
    lines = [f"# rank {program.rank} of {program.mesh.size}, at {at or 'the only place'} of the mesh {program.mesh}"]
    for value in plan.capture.values.values():
        if value.kind != "result":
            layout = plan.stored[value.name]
            local = _local(value, layout, program)
            lines.append(f"%{value.name}: {local} = {value.kind} {value.label}  # {list(value.shape)} as {layout}")
    for instruction in program.instructions:
        lines += _instruction_lines(plan, program, instruction)
    lines.append("return " + ", ".join(f"%{variable}" for variable in program.outputs.values()))
    for direction in ("forward", "backward"):
        sent = sum(c.sent_bytes(program.mesh) for _, way, c in program.collectives() if way == direction)
        lines.append(f"# {direction}: each rank sends {sent:.0f} bytes")
    return "\n".join(lines) + "\n"


def _instruction_lines(plan: Plan, program: LocalProgram, instruction: Instruction) -> Iterator[str]:
    if plan.stages is not None and instruction.kind != "redistribution":  # of a microbatch, or between stages
        yield instruction.line + (f"  # {_place(instruction.node)}" if instruction.node is not None else "")
    elif instruction.kind == "operator":
        assert instruction.node is not None
        values = plan.capture.values
        results = ", ".join(
            f"%{name}: {_local(values[name], plan.layout(name), program)}" for name in instruction.node.results
        )
        call = instruction.call.renamed(lambda name: f"%{name}" if name in instruction.reads else name)
        yield f"{results} = {call.source}  # {_place(instruction.node)}"
        for direction, collectives in zip(("forward", "backward"), instruction.internal, strict=True):
            for collective in collectives:
                yield f"    # inside, {direction}: {_collective(collective, program)}"
    elif instruction.kind == "redistribution":
        [(value, step)] = instruction.moves
        [name], read = instruction.outputs, instruction.reads[0]
        yield f"%{name}: {_local(value, step.after, program)} = {step.kind}(%{read})  # {step.before} -> {step.after}"
        yield from _collective_lines(value, step, program)
        if instruction.regathers:
            yield "    # resharded after the forward: the backward gathers it anew"
    elif instruction.kind == "later":
        awaited = ", ".join(f"%{name}" for name in instruction.reads)
        yield f"# the last of the backward: wait for the gradients of {awaited}"
    elif instruction.kind == "begin":
        yield f"%{instruction.outputs[0]} = begin(%{', %'.join(instruction.reads)})  # an all-gather, waited for below"
    elif instruction.kind == "late":
        awaited = ", ".join(f"%{name}" for name in instruction.reads)
        yield f"# in the backward: wait for the gradients of {awaited}, which an all-gather below scatters"
    elif instruction.kind == "in place":
        yield f"{instruction.call.source}  # in one collective, what is said inside of operators above"
    elif instruction.kind == "shared":
        readers = ", ".join(f"%{name}" for name in instruction.outputs)
        yield f"{readers} = %{instruction.reads[0]}  # one for each reader, whose gradient is cast back on its own"
    elif instruction.kind == "joined":
        for output, read, (value, step) in zip(instruction.outputs, instruction.reads, instruction.moves, strict=True):
            local = _local(value, step.after, program)
            yield f"%{output}: {local} = {step.kind}(%{read})  # {step.before} -> {step.after}"
            yield from _collective_lines(value, step, program)
        yield f"    # these {len(instruction.moves)} run as one collective"
        if instruction.regathers:
            yield "    # resharded after the forward: the backward gathers it anew"
    else:
        for output, (value, step) in zip(instruction.outputs, instruction.moves, strict=True):
            yield f"%{output}: {_local(value, step.after, program)} = enter(%{value.name})  # {step.after}"
            yield from _collective_lines(value, step, program)
        if len(instruction.moves) > 1:
            yield f"    # one bucket: these {len(instruction.moves)} adjoints run as one all_reduce"


def _collective_lines(value: Value, step: Step, program: LocalProgram) -> Iterator[str]:
    forward, backward = value.collectives(step, program.mesh)
    if forward:
        yield f"    # forward: {_collective(forward, program)}"
    if forward and step.kind == "reduce_scatter":
        whole = dataclasses.replace(forward, kind="all_reduce")
        yield f"    #   equivalent to {_collective(whole, program)}, and a slice of dim {step.dim}"
    if value.needs_gradient:
        yield f"    # adjoint: {_collective(backward, program) if backward else step.adjoint}"


def _collective(collective: Collective, program: LocalProgram) -> str:
    ranks = program.mesh.group(program.rank, collective.axes)
    sent = collective.sent_bytes(program.mesh)
    return f"{collective.kind} over ranks {ranks} of {collective.bytes} bytes, each sends {sent:.0f}"


def _argument(arg: Any, operands: list[str]) -> str:
    if isinstance(arg, Operand):
        return operands[arg.index]
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_argument(a, operands) for a in arg)}]"
    return str(arg)


def _local(value: Value, layout: Layout, program: LocalProgram) -> str:
    return _tensor(value.dtype, layout.local_shape(value.shape, program.mesh, program.rank))


def _fact(value: Value) -> str:
    return _tensor(value.dtype, value.shape)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _place(node: Node) -> str:
    scope = f"Default/{node.scope.replace('.', '/')}" if node.scope else "Default"
    return f"scope: ({scope}) {node.source}"


def _short(op: str) -> str:
    return op.split(".")[1]
