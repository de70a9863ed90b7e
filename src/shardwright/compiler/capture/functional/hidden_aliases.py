"""Tensors that lie in the same memory though no schema says so: what is changed by one name and read by another.

A composite operator that has a rule stays whole in a graph, and may give its operand itself or a view of it, as
``einsum("ij->ji", x)`` does. Graphs take its result for a new tensor, so that a change in place of one of the two would
be lost for the other.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardwright.common import signatures, torch_private
from shardwright.compiler.capture.functional.decompositions import is_decomposed
from shardwright.compiler.rules.table import Column, column, row_of
from shardwright.errors import CaptureError

# The operands that operators change which say so by an argument, and where that stands.
_CHANGED_IF: Column[tuple[int, tuple[int, ...]]] = column(("batch_norm", (5, (3, 4))))

_ANYWHERE = 4096  # where a storage begins in the arrays that say where tensors lie in it
_MAY_OVERLAP = {"expand", "expand_as", "broadcast_to", "unfold", "as_strided"}  # views with elements in several places
_MOST_WORK: Any = 100_000  # candidates that are looked at for a byte that two tensors have in common


def refuse_hidden_changes(graph: fx.Graph, source_of: Callable[[fx.Node], str]) -> None:
    """Raises `CaptureError` where a tensor is changed in place and then read by a name of which that is not known.

    Args:
        source_of: where the user calls an operator.
    """
    nodes = list(graph.nodes)
    changes = [(at, changed) for at, node in enumerate(nodes) for changed in changed_by(node)]
    if not changes:
        return
    _refuse_one_memory(nodes, changes, source_of)
    groups, storages = _known_groups(nodes), _by_storage(nodes)
    places = {node: at for at, node in enumerate(nodes)}
    last_reads = {operand: at for at, node in enumerate(nodes) for operand in node.all_input_nodes}
    for at, changed in changes:
        for other in storages.get(_storage(changed), ()):
            lives_on = (other.op == "placeholder" and other.users) or last_reads.get(other, -1) > at
            was_there = places[other] < at  # what is made later is made of the new values
            if groups[other] is not groups[changed] and was_there and lives_on:
                hiding = max(_made_by(changed, groups), _made_by(other, groups), key=nodes.index)
                raise _error(nodes[at], hiding, source_of)
        _refuse_unordered(nodes[at], changed, source_of)


def _refuse_unordered(node: fx.Node, changed: fx.Node, source_of: Callable[[fx.Node], str]) -> None:
    """Refuse an operator whose result depends on the order in which it writes elements, or into what it writes."""
    if (why := _unwritable(changed)) is not None:
        raise CaptureError(f"{node.target} changes {why[0]}, at {source_of(node)}\n{why[1]}")
    if _reads_what_it_writes(node):
        raise CaptureError(
            f"{node.target} changes a tensor in place and reads others of its elements meanwhile, at "
            f"{source_of(node)}\nWrite .clone() behind what it reads: what that is would depend on the order in which "
            "elements are changed."
        )


def _refuse_one_memory(
    nodes: Sequence[fx.Node], changes: Sequence[tuple[int, fx.Node]], source_of: Callable[[fx.Node], str]
) -> None:
    """Refuse an operator that changes several tensors where one sees the change of another.

    A graph has a result for each of them, made of what they all were before.
    """
    counts = Counter(nodes[at] for at, _ in changes)
    for node, count in counts.items():
        if count > 1 and _sees_changes(node):
            raise CaptureError(
                f"{node.target} changes {count} tensors, and one of them is changed or read as another one is, at "
                f"{source_of(node)}\nChange them one after the other."
            )


def _sees_changes(node: fx.Node) -> bool:
    """Return whether an operator changes or reads in one place of its lists what it changes in another."""
    lying: defaultdict[object, list[tuple[int, Tensor, bool]]] = defaultdict(list)
    operands = [(place, of, True) for place, of in enumerate(changed_by(node))]
    for place, of, changes in [*operands, *((place, of, False) for place, of in _read_by(node))]:
        if (key := _storage(of)) is not None:
            lying[key].append((place, of.meta["val"], changes))
    pairs = (pair for together in lying.values() for pair in combinations(together, 2))
    return any(  # where a tensor lies is asked of these alone: sizes that are open are decided by that
        (changes or other_changes) and place != other_place and overlap(one, other)
        for (place, one, changes), (other_place, other, other_changes) in pairs
    )


def _unwritable(changed: fx.Node) -> tuple[str, str] | None:
    """Return why a tensor that is changed has no place to write in what it looks into, and what to write; else None."""
    views = _views_above(changed)
    if len(views) > 1 and any(view.target is torch.ops.aten.as_strided.default for view in views):
        instead = "Index the tensor, x[rows, columns] = values, or write .clone() in front of what is changed."
        return "a view that as_strided has made of another view, or another one of that", instead
    value = changed.meta.get("val")
    may_overlap = any(str(view.target).split(".")[1] in _MAY_OVERLAP for view in views)
    if may_overlap and isinstance(value, Tensor) and _overlaps_itself(value):
        instead = "Write .clone() in front of the change, or change the tensor that it looks into."
        return "a view that has one element in several places, as those of unfold and expand", instead
    return None


def _views_above(node: fx.Node) -> list[fx.Node]:
    """Return the views that lead to what a tensor looks into, as far as schemas tell, itself first."""
    found: list[fx.Node] = []
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
            continue
        shared = signatures.shared_operands(node.target) if signatures.is_operator(node.target) else ()
        above = [of for at in sorted(shared) if at < len(node.args) for of in _nodes(node.args[at])]
        if not above:
            break
        found += [] if signatures.changes_operands(node.target) else [node]
        node = above[0]
    return found


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether some elements of a tensor lie in one place; where that is hard to find, that they do."""
    reach = 0  # of all dims with smaller strides, in elements
    for stride, size in sorted(
        (int(stride), int(size)) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        if size > 1 and stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _reads_what_it_writes(node: fx.Node) -> bool:
    """Return whether an operator of single tensors reads elements that it changes elsewhere."""
    read = [of for place, of in _read_by(node) if place < 0 and isinstance(of.meta.get("val"), Tensor)]
    for changed in changed_by(node) if read else ():
        for other in (of for of in read if _storage(of) is not None and _storage(of) == _storage(changed)):
            one, two = changed.meta["val"], other.meta["val"]
            if changed is other or _same_place(one, two):
                if not _reads_in_place(node.target):
                    return True
            elif (two.ndim or _is_pointwise(node.target)) and overlap(one, two):
                return True
    return False


def _reads_in_place(target: Any) -> bool:
    """Return whether an operator reads each element of an operand before it writes there, and none behind that."""
    return _is_pointwise(target) or target is torch.ops.aten.copy_.default


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags


def changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors whose values an operator changes in place."""
    for at, name in _changed_at(node):
        yield from _nodes(node.args[at] if at < len(node.args) else node.kwargs.get(name))


def _read_by(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The other tensors that an operator takes, with their places in lists; -1 is of no list, and read for all."""
    positions, names = {at for at, _ in _changed_at(node)}, {name for _, name in _changed_at(node)}
    given = [arg for at, arg in enumerate(node.args) if at not in positions]
    for arg in [*given, *(arg for name, arg in node.kwargs.items() if name not in names)]:
        in_list = isinstance(arg, (list, tuple))
        yield from ((place if in_list else -1, of) for place, of in enumerate(_nodes(arg)))


def _changed_at(node: fx.Node) -> Sequence[tuple[int, str]]:
    """Position and name of each operand that an operator changes in place."""
    if node.op != "call_function" or not signatures.is_operator(node.target):
        return ()
    hidden = _CHANGED_IF.of(str(node.target))
    if hidden is not None:
        flag, positions = hidden
        return [(at, "") for at in positions] if node.args[flag] else ()
    return signatures.written_operands(node.target) if row_of(str(node.target)).identity != "always" else ()


def _made_by(node: fx.Node, groups: Mapping[fx.Node, set[fx.Node]]) -> fx.Node:
    """The node that made the tensor of which ``node`` is a view, as far as that is known."""
    known = [operand for operand in node.all_input_nodes if operand in groups[node]]
    return _made_by(known[0], groups) if known else node


def _error(node: fx.Node, hiding: fx.Node, source_of: Callable[[fx.Node], str]) -> CaptureError:
    why = (
        f"{hiding.target} gave its operand itself or a view of it, at {source_of(hiding)}; write .clone() behind that, "
        "or compute a new tensor in place of the change."
    )
    if hiding.op == "placeholder":
        why = "It, or the module that has it, is registered twice in the model; keep it under one name alone."
    return CaptureError(f"{node.target} changes a tensor in place that has another name, at {source_of(node)}\n{why}")


def _by_storage(nodes: Sequence[fx.Node]) -> Mapping[object, Sequence[fx.Node]]:
    found = defaultdict(list)
    for node in nodes:
        if (key := _storage(node)) is not None:
            found[key].append(node)
    return found


def _storage(node: fx.Node) -> object:
    """The memory of the tensor that a node gives; None of what is none, and of tensors inside of vmap."""
    value = node.meta.get("val")
    try:
        return torch_private.storage_key(value) if isinstance(value, Tensor) else None
    except NotImplementedError:
        return None


def _nodes(args: Any) -> list[fx.Node]:
    given = args if isinstance(args, (list, tuple)) else [args]
    return [arg for arg in given if isinstance(arg, fx.Node)]


def _known_groups(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, set[fx.Node]]:
    """The nodes whose tensors are known to share memory, of each node those with itself."""
    groups: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        groups[node] = {node}
        for other in _known_to_share(node) if node.op == "call_function" else []:
            together = groups[node] | groups[other]
            groups.update(dict.fromkeys(together, together))
    return groups


def _known_to_share(node: fx.Node) -> list[fx.Node]:
    """The operands in whose memory results of a node may lie, by what schemas say and decompositions show."""
    if node.target is operator.getitem or not signatures.is_operator(node.target):
        return list(node.all_input_nodes)
    if is_decomposed(node.target):
        return list(node.all_input_nodes)
    shared = signatures.shared_operands(node.target)
    named = list(node.kwargs.values()) if shared else []  # as out=
    return _nodes(named) + [of for at in shared if at < len(node.args) for of in _nodes(node.args[at])]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common; where that is hard to find, that they have."""
    try:
        return bool(np.shares_memory(_laid_out(one), _laid_out(other), max_work=_MOST_WORK))
    except np.exceptions.TooHardError:
        return True


def _laid_out(tensor: Tensor) -> Any:
    """Return an array that says where a tensor lies in its storage, and is never read."""
    step, begin = tensor.itemsize, int(tensor.storage_offset())
    described = {
        "shape": tuple(map(int, tensor.shape)),
        "strides": tuple(int(stride) * step for stride in tensor.stride()),
        "typestr": f"|V{step}",
        "data": (_ANYWHERE + begin * step, True),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Return whether each element of one tensor lies where that of the other one does."""
    if one.dtype != other.dtype or one.ndim != other.ndim or one.storage_offset() != other.storage_offset():
        return False
    return one.shape == other.shape and one.stride() == other.stride()
