"""Holds a rule against its operator: run on simulated ranks and reassembled, it must equal the whole.

`check` cuts the operands as the rule says, runs the local operator of every rank, forward and backward, puts results
and gradients together as the rule says, and compares them with the operator on whole tensors.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.capture import operators
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.call import Call, Name
from shardwright.compiler.lower.local import localise
from shardwright.compiler.lower.operators import draws, kernels
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.lower.site import Site
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.rules import row as row_module
from shardwright.compiler.rules.notation import Operand, OpRule, Strategy
from shardwright.compiler.rules.row import Operator
from shardwright.compiler.rules.table import internal_collectives, row_of, rule_of

KEY = 0x5EED
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Invocation:
    """An operator with whole tensors in its arguments."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _replaced(arg: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(arg, (tuple, list)):
        return tuple(_replaced(a, change) for a in arg)
    return change(arg)


def bound(invocation: Invocation) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """The arguments with `Operand` in place of tensors, and the tensors."""
    tensors: list[Tensor] = []

    def change(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        tensors.append(arg)
        return Operand(len(tensors) - 1)

    args = _replaced(invocation.args, change)
    return args, {name: _replaced(arg, change) for name, arg in invocation.kwargs.items()}, tensors


def evaluate(call: Call, tensors: Sequence[Tensor], comm: Any) -> list[Tensor]:
    """The results of a local operator, as a program has them."""
    room, *path = call.function.split(".")
    function: Any = {"torch": torch, "kernels": kernels, "draws": draws, "ops": operators}[room]
    for name in path:  # some are no names for Python, as "from"
        function = getattr(function, name)
    given = call.mapped(lambda arg: Name(f"x{arg.index}") if isinstance(arg, Operand) else arg)
    operands = {f"x{index}": tensor for index, tensor in enumerate(tensors)}
    around = {"comm": comm, "key": lambda number: KEY + number, "guard": Guard(), "device": torch.device("cpu")}
    names = {"torch": torch, "function": function} | around
    output = eval(replace(given, function="function").source, names, operands)
    if isinstance(output, Tensor):
        return [output]
    return [tensor for tensor in output if isinstance(tensor, Tensor)]


def site_of(
    invocation: Invocation, rule: OpRule, strategy: Strategy, mesh: Mesh, rank: int, results: Sequence[Tensor]
) -> Site:
    """The invocation as the node of a graph."""
    args, kwargs, tensors = bound(invocation)
    operands, made = [f"x{i}" for i in range(len(tensors))], [f"y{i}" for i in range(len(results))]
    values = {
        name: Value(name, "result", name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in zip([*operands, *made], [*tensors, *results], strict=True)
    }
    node = Node("node", invocation.op, args, tuple(kwargs.items()), tuple(operands), tuple(made), "", "")
    return Site(node, rule, strategy, mesh, rank, values, number=7)


def whole(invocation: Invocation) -> list[Tensor]:
    """The results on one device, random numbers drawn by position."""
    args, kwargs, tensors = bound(invocation)
    made = without_gradients(invocation)
    rule = rule_of(invocation.op, args, kwargs, shapes_of(tensors), shapes_of(made))
    call = localise(site_of(invocation, rule, rule.replicated(), Mesh(()), 0, made))
    if call.function.startswith(("kernels.", "draws.")):
        return evaluate(call, tensors, None)
    return plain(args, kwargs, invocation.op, tensors)


def plain(args: tuple[Any, ...], kwargs: Mapping[str, Any], op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    function = f"ops.{op.split('.')[1]}" if operators.is_ours(op) else f"torch.ops.{op}"
    return evaluate(Call(function, args, tuple(kwargs.items())), tensors, None)


def without_gradients(invocation: Invocation) -> list[Tensor]:
    """Results as torch makes them, random numbers drawn anyhow: of the shapes and dtypes that any have."""
    args, kwargs, tensors = bound(invocation)
    with torch.no_grad():
        return plain(args, kwargs, invocation.op, tensors)


def shapes_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def operator_of(invocation: Invocation, results: Sequence[Tensor]) -> Operator:
    """The invocation as the table of operators sees it."""
    args, kwargs, tensors = bound(invocation)
    return Operator(invocation.op, args, kwargs, tuple(shapes_of(tensors)), tuple(shapes_of(results)))


def rule_for(invocation: Invocation) -> OpRule:
    """The rule bound to the shapes of an invocation."""
    args, kwargs, tensors = bound(invocation)
    return rule_of(invocation.op, args, kwargs, shapes_of(tensors), shapes_of(without_gradients(invocation)))


def check(invocation: Invocation, mesh: Mesh, strategy: Strategy, rule: OpRule | None = None) -> None:
    """Fail where the operator on local parts is not the whole operator, forward or backward.

    ``rule`` is the one of the table where it is left out. Random numbers must be equal to the last bit.
    """
    row = row_of(invocation.op)
    drawn = row.draws and row.flops is row_module.one_per_element and not strategy.partial
    tolerance = 0.0 if drawn else TOLERANCE
    _, _, tensors = bound(invocation)
    rule = rule or rule_for(invocation)
    wanted = whole(invocation)
    leaves = [i for i, t in enumerate(tensors) if t.requires_grad]
    outputs = [j for j, t in enumerate(wanted) if t.requires_grad]
    cotangents = [torch.randn_like(wanted[j]) for j in outputs]
    _check_connected(invocation.op, tensors, wanted)
    gradients = _gradients([wanted[j] for j in outputs], [tensors[i] for i in leaves], cotangents)
    layouts = [rule.operand_layout(i, strategy) for i in range(len(tensors))]
    addends = [_addends(tensor.detach(), layout.partial, mesh) for tensor, layout in zip(tensors, layouts, strict=True)]
    result_layouts = [rule.result_layout(j, strategy, mesh) for j in range(len(wanted))]

    def run(comm: Any, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        locals_ = [
            addend[rank][layout.local_slice(t.shape, mesh, rank)].clone().requires_grad_(t.requires_grad)
            for addend, layout, t in zip(addends, layouts, tensors, strict=True)
        ]
        call = localise(site_of(invocation, rule, strategy, mesh, rank, wanted))
        results = evaluate(call, locals_, comm)
        local_cotangents = [
            c[result_layouts[j].local_slice(c.shape, mesh, rank)] for j, c in zip(outputs, cotangents, strict=True)
        ]
        found = _gradients([results[j] for j in outputs], [locals_[i] for i in leaves], local_cotangents)
        return [result.detach() for result in results], found

    itemsize = tensors[0].dtype.itemsize if tensors else 1
    forward, backward = internal_collectives(operator_of(invocation, wanted), rule, strategy, mesh, itemsize)
    if forward:

        def run_counted(comm: Any) -> tuple[list[Tensor], list[Tensor]]:
            found = run(comm, comm.rank)
            if comm.rank == 0:  # whose parts are the largest: the bytes of a collective are counted there
                planned = [*forward, *(backward if outputs else ())]
                if row.between is None:
                    assert comm.collectives == planned
                else:  # how many rows an expert gets depends on numbers
                    assert [(c.kind, c.axes) for c in comm.collectives] == [(c.kind, c.axes) for c in planned]
            return found

        ranks = simulate(mesh, run_counted)
    else:
        ranks = [run(None, rank) for rank in range(mesh.size)]

    for j, (result, layout) in enumerate(zip(wanted, result_layouts, strict=True)):
        _compare(f"result {j}", [results[j] for results, _ in ranks], layout, result.detach(), mesh, tolerance)
    for at, i in enumerate(leaves):
        layout = Layout(layouts[i].dims, rule.operand_gradient_partial(i, strategy, mesh))
        _compare(f"gradient of operand {i}", [found[at] for _, found in ranks], layout, gradients[at], mesh, tolerance)


def _check_connected(op: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """The results that have a gradient are those that the graph takes to have one, and so has every operand.

    An operator on an empty part goes by the graph, and its rank is to come to the same collectives.
    """
    row = row_of(op)
    first = len(results) if row.differentiable is None else row.differentiable
    flows = any(x.requires_grad for x in operands)
    taken = [flows and j < first and (y.is_floating_point() or y.is_complex()) for j, y in enumerate(results)]
    assert [y.requires_grad for y in results] == taken, f"the row of {op} says other results are differentiable"
    for number, operand in enumerate(operands):
        if operand.requires_grad and any(taken):
            made = [y for y in results if y.requires_grad]
            ones = [torch.ones_like(y) for y in made]
            found = torch.autograd.grad(made, operand, ones, retain_graph=True, allow_unused=True)
            assert found[0] is not None, f"{op} has no gradient of operand {number}"


def _gradients(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    if not outputs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def _addends(tensor: Tensor, partial: Sequence[str], mesh: Mesh) -> list[Tensor]:
    """For every rank a tensor, which sum to ``tensor`` over the axes ``partial``."""
    found: dict[tuple[int, ...], Tensor] = {}
    rest = tensor.clone()
    places = list(itertools.product(*(range(mesh.sizes[axis]) for axis in partial)))
    for place in places[1:]:
        found[place] = (torch.randn(tensor.shape) * 3).to(tensor.dtype)
        rest = rest - found[place]
    found[places[0]] = rest
    return [found[tuple(mesh.coordinates(rank)[axis] for axis in partial)] for rank in range(mesh.size)]


def _compare(what: str, parts: list[Tensor], layout: Layout, wanted: Tensor, mesh: Mesh, tolerance: float) -> None:
    """The parts of all ranks, put together as ``layout`` says, equal ``wanted``."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in mesh.names if axis not in layout.partial), []).append(rank)
    covered = torch.zeros(wanted.shape, dtype=torch.bool)
    scale = wanted.abs().max().item() if wanted.numel() and wanted.dtype != torch.bool else 1
    for ranks in groups.values():
        place = layout.local_slice(wanted.shape, mesh, ranks[0])
        expected = wanted[place]
        for rank in ranks:
            assert parts[rank].shape == expected.shape, f"{what}: {tuple(parts[rank].shape)} on rank {rank}"
            assert parts[rank].dtype == expected.dtype, f"{what}: {parts[rank].dtype} on rank {rank}"
        total = parts[ranks[0]]
        for rank in ranks[1:]:
            total = total + parts[rank]
        torch.testing.assert_close(
            total, expected, rtol=0, atol=tolerance * max(scale, 1), equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
        covered[place] = True
    assert covered.all(), f"{what}: the parts do not cover the whole"
