"""An exported program -> one whose operators return new tensors and change nothing in place.

Torch does this, by a second trace: `ExportedProgram.run_decompositions` traces the whole program; where nothing is
changed in place, torch's tracer traces each distinct call alone (`each_call`). Composite operators that have a row in
the table of rules stay whole, all others are decomposed as torch itself computes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from shardwright.common import signatures, torch_private
from shardwright.compiler.capture.functional.each_call import each_call
from shardwright.compiler.rules.table import key_of

aten = torch.ops.aten


def functional(program: ExportedProgram, is_without_gradient: Callable[[fx.Node], bool]) -> ExportedProgram:
    """Return ``program`` without changes in place, its composite operators decomposed where they have no rule.

    Args:
        is_without_gradient: whether gradients are off where an operator is called.
    """
    _match_copies(program.graph)
    _separate_buffers(program)
    if torch.is_grad_enabled():
        _pass_operands_on(program, is_without_gradient)
        _detach_views(program.graph, is_without_gradient)
    _forget_disabled(program.graph)
    _forget_detaching(program)
    preserved = _preserved()
    made = each_call(program, preserved)
    return torch_private.run_decompositions(program, preserved) if made is None else made


def join_names(program: ExportedProgram) -> None:
    """Let a buffer that is registered under several names, as that of a module in two places, be read by the first."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[Any, fx.Node] = {}
    for name in program.graph_signature.inputs_to_buffers:
        node = placeholders[name]
        val = node.meta["val"]
        known = first.setdefault((torch_private.storage_key(val), val.shape, val.stride(), val.storage_offset()), node)
        if known is not node:
            node.replace_all_uses_with(known)


def is_decomposed(operator: Any) -> bool:
    """Return whether `functional` puts other operators in the place of ``operator``."""
    stays = operator in torch_private.preservable_operators() and _is_preserved(operator)
    return torch_private.is_composite(operator) and not stays


def decomposed(call: fx.Node) -> fx.Graph:
    """Return the operators that torch computes the composite operator of ``call`` by.

    The placeholders of the graph are the tensors of the call, each once, in order; it returns what the operator does.
    Its operators may be composite themselves, and may change tensors in place.
    """
    mode = torch_private.fake_mode()
    inputs = call.all_input_nodes

    def run(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        args, kwargs = map_arg((call.args, call.kwargs), lambda node: given[node])
        return call.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch_private.empty_like_on(tensor, tensor.device, mode)

    graph = torch_private.traced(run, *(empty(node.meta["val"]) for node in inputs), above_autograd=True).graph
    for part in graph.nodes:
        if signatures.is_operator(part.target):
            part.args = signatures.without_defaults(part.target, part.args)
    return graph


def _is_preserved(operator: Any) -> bool:
    return key_of(str(operator)) is not None or _checks_itself(operator)


def _preserved() -> tuple[Any, ...]:
    """Return the composite operators that stay whole."""
    return tuple(filter(_is_preserved, torch_private.preservable_operators()))


def _separate_buffers(program: ExportedProgram) -> None:
    """Give each buffer memory of its own: torch traces no change of an input that shares memory with another one.

    Where the change of one would be seen in the other, the step is refused: by `refuse_hidden_changes` before, or by
    `refuse_shared_memory` behind this.
    """
    seen = {torch_private.storage_key(tensor) for tensor in program.parameters()}
    for name in program.graph_signature.inputs_to_buffers.values():
        tensors = program.state_dict if name in program.state_dict else program.constants
        tensor = tensors[name]
        if torch_private.storage_key(tensor) in seen:
            tensors[name] = torch_private.empty_like_on(tensor, tensor.device, torch_private.mode_of(tensor))
        seen.add(torch_private.storage_key(tensor))


def _forget_disabled(graph: fx.Graph) -> None:
    """Remove dynamo's notes on inputs, which have no use here.

    A tensor of constants that is made inside activation checkpointing has other notes in the second trace, and torch
    asserts that they are equal.
    """
    for node in graph.find_nodes(op="placeholder"):
        noted = node.meta.get("custom") or {}
        node.meta["custom"] = {key: value for key, value in noted.items() if not key.startswith("_torchdynamo_disable")}


def _forget_detaching(program: ExportedProgram) -> None:
    """Remove ``detach_`` of tensors without gradient, as the exporter has it behind each constant: it does nothing."""
    for node in program.graph.find_nodes(op="call_function", target=aten.detach_.default):
        if not node.args[0].meta["val"].requires_grad:
            _replace(program, node, node.args[0])


def _pass_operands_on(program: ExportedProgram, is_without_gradient: Callable[[fx.Node], bool]) -> None:
    """Remove the operators that return an operand itself, as ``x.float()`` of what is float32, where gradients are off.

    The operand that they return keeps its gradient, and from there on the first trace reads their result in its place.
    """
    for node in list(program.graph.nodes):
        composite = signatures.is_operator(node.target) and torch_private.is_composite(node.target)
        if composite and is_without_gradient(node) and not signatures.changes_operands(node.target):
            returned = _operands_returned(node)
            for user in list(node.users) if isinstance(returned, list) else ():
                if user.target is operator.getitem and (operand := returned[user.args[1]]) is not None:
                    _replace(program, user, operand)
            if isinstance(returned, fx.Node):
                _replace(program, node, returned)


def _operands_returned(node: fx.Node) -> Any:
    """Return the operand that a composite operator returns as it is, None where it returns another tensor.

    Of an operator that returns several tensors, return a list of these.
    """
    vals = {operand: operand.meta["val"] for operand in node.all_input_nodes}
    args, kwargs = map_arg((node.args, node.kwargs), vals.__getitem__)
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]

    def operand(tensor: Any) -> fx.Node | None:
        return next((of for of, val in vals.items() if val is tensor and isinstance(val, torch.Tensor)), None)

    return [operand(each) for each in result] if isinstance(result, (tuple, list)) else operand(result)


def _replace(program: ExportedProgram, node: fx.Node, operand: fx.Node) -> None:
    program.graph_signature.replace_all_uses(node.name, operand.name)
    node.replace_all_uses_with(operand)
    program.graph.erase_node(node)


def _detach_views(graph: fx.Graph, is_without_gradient: Callable[[fx.Node], bool]) -> None:
    """Detach the operands of views that are made where gradients are off.

    Where a tensor was changed, the second trace makes its views anew at each of their uses, which gradients reach.
    """
    for node in list(graph.nodes):
        if signatures.is_operator(node.target) and is_without_gradient(node):
            for at in signatures.shared_operands(node.target):
                operand = node.args[at] if at < len(node.args) else None
                if isinstance(operand, fx.Node) and not signatures.changes_operands(node.target):
                    with graph.inserting_before(node):
                        node.replace_input_with(operand, _added(graph, node, aten.detach.default, (operand,), {}))


def _match_copies(graph: fx.Graph) -> None:
    """Give the source of each ``copy_`` the shape and dtype of its target.

    The second trace takes the source for the target, and would compute with a smaller tensor.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, source = node.args[0], node.args[1]
        with graph.inserting_before(node):
            if source.meta["val"].dtype != into.meta["val"].dtype:
                cast = {"dtype": into.meta["val"].dtype}
                source = _added(graph, node, aten._to_copy.default, (source,), cast)
            if source.meta["val"].shape != into.meta["val"].shape:
                source = _added(graph, node, aten.expand_as.default, (source, into), {})
        node.args = (into, source, *node.args[2:])


def _added(graph: fx.Graph, copy: fx.Node, operator: Any, args: tuple[fx.Node, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Insert an operator in front of ``copy``, with the annotations of that."""
    made = graph.call_function(operator, args, kwargs)
    with torch.no_grad():
        made.meta = {**copy.meta, "val": operator(*(arg.meta["val"] for arg in args), **kwargs)}
    return made


def _checks_itself(operator: Any) -> bool:
    """Return whether an operator is one of linear algebra that checks its results.

    Where it is decomposed, an exported graph would carry this check as a token.
    """
    namespace, name, _ = str(operator).split(".")
    unchecked = {"norm", "vecdot", "matmul", "multi_dot", "matrix_norm", "det", "slogdet", "vander"}
    return namespace == "aten" and (
        name in ("inverse", "pinverse") or (name.startswith("linalg_") and name[7:] not in unchecked)
    )
