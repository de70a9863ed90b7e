"""Tensors that lie in the same memory though no schema says so: what is changed by one name and read by another.

A composite operator that has a rule stays whole in a graph, and may give its operand itself or a view of it, as
``einsum("ij->ji", x)`` and ``dropout(x, 0.5, False)`` do. Graphs take its result for a new tensor, so that a change in
place of one of the two would be lost for the other.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from shardwright import torch_private
from shardwright.errors import CaptureError
from shardwright.graph.functional import parts
from shardwright.rules.table import row_of


def refuse_hidden_changes(graph: fx.Graph) -> None:
    """Raises `CaptureError` where a tensor is changed in place and then read by a name of which that is not known."""
    nodes = list(graph.nodes)
    groups = _known_groups(nodes)
    storages: dict[object, list[fx.Node]] = {}
    for node in nodes:
        if (key := _storage(node)) is not None:
            storages.setdefault(key, []).append(node)
    last_reads = {operand: at for at, node in enumerate(nodes) for operand in node.all_input_nodes}
    for at, node in enumerate(nodes):
        changed = _changed_by(node)
        for other in storages.get(None if changed is None else _storage(changed), ()):
            lives_on = other.op == "placeholder" or last_reads.get(other, -1) > at
            if changed is not None and groups[other] is not groups[changed] and lives_on:
                hiding = changed if changed.op == "call_function" else other
                raise CaptureError(
                    f"{node.target} changes a tensor in place of which {other.name} is another name, since "
                    f"{hiding.target} gave its operand itself or a view of it; write .clone() behind that, or compute "
                    "a new tensor in place of the change"
                )


def _storage(node: fx.Node) -> object:
    """The memory of the tensor that a node gives; None of what is none, and of tensors inside of vmap."""
    value = node.meta.get("val")
    try:
        return torch_private.storage_key(value) if isinstance(value, Tensor) else None
    except NotImplementedError:
        return None


def _changed_by(node: fx.Node) -> fx.Node | None:
    """The tensor whose values an operator changes in place."""
    is_operator = node.op == "call_function" and torch_private.is_operator(node.target)
    if not is_operator or not torch_private.changes_operands(node.target) or not node.args:
        return None
    if row_of(str(node.target)).identity == "always":
        return None
    changed = node.args[0]
    return changed if isinstance(changed, fx.Node) else None


def _known_groups(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The nodes whose tensors are known to share memory, of each node those with itself."""
    groups: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        groups[node] = {node}
        for other in _known_to_share(node):
            together = groups[node] | groups[other]
            groups.update(dict.fromkeys(together, together))
    return groups


def _known_to_share(node: fx.Node) -> list[fx.Node]:
    """The operands in whose memory results of a node may lie, by what schemas say and parts show."""
    if node.op != "call_function" or node.target is operator.getitem or not torch_private.is_operator(node.target):
        return list(node.all_input_nodes)
    shared = torch_private.shared_operands(node.target)
    if shared or torch_private.changes_operands(node.target) or parts.is_taken_apart(node.target):
        return list(node.all_input_nodes)
    return []
