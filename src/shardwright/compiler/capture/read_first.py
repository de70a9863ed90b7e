"""The parameters that a step reads before all others, as an embedding table.

Nothing is computed before they are needed, nor, in the backward, once their gradients are there: what communicates them
has nothing to hide behind. Where others read them later, as a head that is tied to the table, what communicates them
for those alone has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.reduced import is_cast_or_view


def with_read_first(capture: Capture) -> Capture:
    """Return the capture in which parameters, and casts and views of them, say whether they are `Value.read_first`."""
    first: dict[str, Node] = {}  # who reads a value before all others
    for node in capture.nodes:
        for name in node.operands:
            first.setdefault(name, node)
    makers: dict[str, Node | None] = {value.name: None for value in capture.of_kind("parameter")}
    for node in capture.nodes:
        read = [name for name in dict.fromkeys(node.operands) if name in makers]
        if read and is_cast_or_view(node):
            makers[node.results[0]] = node
        elif read:
            chains = [_with_sources(name, makers) for name in read]
            kept = [chain for chain in chains if _comes_first(chain, node, first, makers, capture)]
            return _noting(capture, [name for chain in kept for name in chain])
    return capture


def _with_sources(name: str, makers: Mapping[str, Node | None]) -> list[str]:
    """Return a value, and what it is a cast or view of, up to the parameter."""
    found = [name]
    while (maker := makers[found[-1]]) is not None:
        found.append(next(operand for operand in maker.operands if operand in makers))
    return found


def _comes_first(
    chain: Sequence[str],
    reader: Node,
    first: Mapping[str, Node],
    makers: Mapping[str, Node | None],
    capture: Capture,
) -> bool:
    """Return whether a reader is the first of a value, and of what it is a cast or view of; none of them leaves."""
    for name in chain:
        if first[name] is not reader or name in capture.returned or name in capture.mutations.values():
            return False
        reader = makers[name] or reader
    return True


def _noting(capture: Capture, names: Sequence[str]) -> Capture:
    found = {name: replace(capture.values[name], read_first=True) for name in names}
    return replace(capture, values={**capture.values, **found})
