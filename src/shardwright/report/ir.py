"""Dumps of a plan and of a rank's program, for people and for diff.

rank_N/step_parallel_begin.ir    the whole graph, every operator with its strategy, scope and source line
rank_N/execute.ir                what rank N runs: local shapes, collectives, the ranks that take part, adjoints
rank_N/program.py                the same as the Python that is executed
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwright.graph.ir import Node, Value
from shardwright.lower.program import Instruction, LocalProgram
from shardwright.mesh.layout import Layout
from shardwright.mesh.redistribute import Collective, Step
from shardwright.plan.plan import Plan


def save_graphs(directory: str | Path, plan: Plan, program: LocalProgram, level: int = 2) -> Path:
    """Write the dumps of one rank under ``directory``/rank_N and return that folder.

    Level 1 writes the graph with its strategies, level 2 the local program as well.
    """
    folder = Path(directory) / f"rank_{program.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step_parallel_begin.ir").write_text(strategies_text(plan))
    if level > 1:
        (folder / "execute.ir").write_text(execute_text(plan, program))
        (folder / "program.py").write_text(program.source)
    return folder


def strategies_text(plan: Plan) -> str:
    """The graph, one line per operator, with `in_strategy` and `out_strategy` in slices per dim."""
    captured = plan.capture
    numbers = {name: i for i, name in enumerate(captured.values)}
    lines = [f"# {plan.mode}, search {plan.search}, mesh {plan.named}, {plan.mesh.size} devices"]
    for value in captured.values.values():
        if value.kind != "result":
            slices = plan.leaves[value.name].slices(plan.mesh)
            lines.append(f"%{numbers[value.name]}({value.label}) = {value.kind} {_fact(value)} {{strategy: {slices}}}")
    lines += [_operator_line(plan, node, numbers) for node in captured.nodes]
    aux = ", ".join(_reference(name, numbers) for name in captured.aux)
    lines.append(f"return loss: {_reference(captured.loss, numbers)}, aux: {aux}")
    return "\n".join(lines) + "\n"


def _operator_line(plan: Plan, node: Node, numbers: dict[str, int]) -> str:
    results = ", ".join(f"%{numbers[name]}({name})" for name in node.results)
    operands = ", ".join(f"%{numbers[name]}" for name in node.operands)
    marks = [f"{{instance name: {node.name}}}", f"{{in_strategy: {plan.in_strategy(node)}}}"]
    marks.append(f"{{out_strategy: {plan.out_strategy(node)}}}")
    partial = plan.layout(node.results[0]).partial
    if partial:
        marks.append(f"{{partial over: {', '.join(partial)}}}")
    if node.pin is not None:
        marks.append("{pinned}")
    if not plan.graph.rules[node.name].listed:
        marks.append("{no rule: replicated}")
    scope = f"Default/{node.scope.replace('.', '/')}" if node.scope else "Default"
    return f"{results} = {_short(node.op)}({operands}) {' '.join(marks)}  # scope: ({scope}) {node.source}"


def execute_text(plan: Plan, program: LocalProgram) -> str:
    """What a rank runs, one line per instruction, local shapes on the left."""
    at = program.mesh.coordinates(program.rank)
    lines = [f"# rank {program.rank} of {program.mesh.size}, mesh {program.mesh}, at {at}"]
    for instruction in program.instructions:
        lines += _instruction_lines(plan, program, instruction)
    return "\n".join(lines) + "\n"


def _instruction_lines(plan: Plan, program: LocalProgram, instruction: Instruction) -> Iterator[str]:
    if instruction.kind == "operator":
        assert instruction.node is not None
        values = plan.capture.values
        results = ", ".join(
            f"%{name}: {_local(values[name], plan.layout(name), program)}" for name in instruction.node.results
        )
        yield f"{results} = {instruction.text}  # {instruction.node.scope}"
        for direction, collectives in zip(("forward", "backward"), instruction.internal, strict=True):
            for collective in collectives:
                yield f"    # inside, {direction}: {_collective(collective, program)}"
    elif instruction.kind == "redistribution":
        [(value, step)] = instruction.steps()
        [name], [read] = instruction.outputs, instruction.reads
        yield f"%{name}: {_local(value, step.after, program)} = {step.kind}(%{read})  # {step.before} -> {step.after}"
        yield from _collective_lines(value, step, program)
    else:
        outputs, reads = (", ".join(f"%{name}" for name in names) for names in (instruction.outputs, instruction.reads))
        yield f"{outputs} = bucket({reads})"
        for value, step in instruction.bucket:
            yield from _collective_lines(value, step, program)


def _collective_lines(value: Value, step: Step, program: LocalProgram) -> Iterator[str]:
    forward, backward = step.collectives(value.shape, value.dtype.itemsize, program.mesh)
    ranks = program.mesh.group(program.rank, step.axes)
    if forward:
        yield f"    # forward: {_collective(forward, program)}"
    if step.kind == "reduce_scatter":
        yield f"    #   equivalent: all_reduce over ranks {ranks}, then slice of dim {step.dim}"
    if value.needs_gradient:
        yield f"    # adjoint: {_collective(backward, program) if backward else step.adjoint}"


def _collective(collective: Collective, program: LocalProgram) -> str:
    ranks = program.mesh.group(program.rank, collective.axes)
    return f"{collective.kind} over ranks {ranks}, {collective.bytes} bytes"


def _local(value: Value, layout: Layout, program: LocalProgram) -> str:
    shape = layout.local_shape(value.shape, program.mesh, program.rank)
    return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"


def _fact(value: Value) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _reference(name: str, numbers: dict[str, int]) -> str:
    return f"%{numbers[name]}" if name else "none"


def _short(op: str) -> str:
    """``aten.matmul.default`` -> ``matmul``."""
    return op.split(".")[1]
