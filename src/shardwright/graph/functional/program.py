"""An exported program -> one that changes nothing in place, whose operators have rules where torch writes them so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from shardwright import torch_private
from shardwright.graph.functional import parts
from shardwright.graph.functional.rewriting import Uncertain, rewrite

aten = torch.ops.aten


def functional(program: ExportedProgram) -> ExportedProgram:
    """The functional program: ``program`` itself, rewritten, or where that is not certain what a second trace gives."""
    _make_copies_even(program.graph)
    try:
        _rewrite(program)
    except Uncertain:
        program.graph_module.recompile()  # of which nodes may have been replaced before
        traced: ExportedProgram = program.run_decompositions(parts.taken_apart())
        return traced
    return program


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


def _make_copies_even(graph: fx.Graph) -> None:
    """Let what is copied into a tensor have its shape and dtype: a second trace takes the one for the other, and would
    compute with a smaller tensor."""
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
    """An operator for ``copy``, which it stands in front of."""
    made = graph.call_function(operator, args, kwargs)
    with torch.no_grad():
        made.meta = {**copy.meta, "val": operator(*(arg.meta["val"] for arg in args), **kwargs)}
    return made


def _rewrite(program: ExportedProgram) -> None:
    graph, signature = program.graph, program.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    if not all(_is_plain(node) for node in placeholders.values()):
        raise Uncertain
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise Uncertain
    for spec in signature.input_specs:
        if spec.kind is InputKind.PARAMETER and program.state_dict[str(spec.target)].requires_grad:
            placeholders[spec.arg.name].meta[parts.TRAINED] = True
    storages = Counter(torch_private.storage_key(node.meta["val"]) for node in placeholders.values() if node.users)
    targets = {
        placeholders[spec.arg.name]: spec.target
        for spec in signature.input_specs
        if spec.kind is InputKind.BUFFER and isinstance(spec.arg, TensorArgument)
    }
    alone = [node for node in targets if storages[torch_private.storage_key(node.meta["val"])] == 1]
    changed = rewrite(graph, alone)
    names = [node.name for node in graph.output_node().args[0]]
    kinds = [(OutputKind.BUFFER_MUTATION, targets[node]) for node in changed]
    kinds += [(spec.kind, spec.target) for spec in signature.output_specs]
    signature.output_specs[:] = [
        OutputSpec(kind, TensorArgument(name), target) for (kind, target), name in zip(kinds, names, strict=True)
    ]


def _is_plain(placeholder: fx.Node) -> bool:
    """Whether a placeholder is a tensor whose sizes are known."""
    val = placeholder.meta.get("val")
    return isinstance(val, torch.Tensor) and all(type(size) is int for size in val.shape)
