"""The parameters that a step reads before all others, as an embedding table.

Nothing is computed before they are needed, nor, in the backward, once their gradients are there: what communicates them
has nothing to hide behind.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.reduced import is_cast_or_view


def with_read_first(capture: Capture) -> Capture:
    """Return the capture in which parameters, and casts and views of them, say whether they are `Value.read_first`."""
    readers: dict[str, list[Node]] = {name: [] for name in capture.values}
    for node in capture.nodes:
        for name in dict.fromkeys(node.operands):
            readers[name].append(node)
    source = {value.name: "" for value in capture.of_kind("parameter")}  # of what it is a cast or view, "" of nothing
    for node in capture.nodes:
        read = [name for name in dict.fromkeys(node.operands) if name in source]
        if read and is_cast_or_view(node):
            source[node.results[0]] = read[0]
        elif read:
            return _noting(capture, [name for name in read if _alone(name, readers, source, capture)], source)
    return capture


def _alone(name: str, readers: dict[str, list[Node]], source: dict[str, str], capture: Capture) -> bool:
    """Return whether a value, and each that it is a cast or view of, has one reader and stays in the step."""
    while name:
        if len(readers[name]) > 1 or name in capture.returned or name in capture.mutations.values():
            return False
        name = source[name]
    return True


def _noting(capture: Capture, names: list[str], source: dict[str, str]) -> Capture:
    values = dict(capture.values)
    for found in names:
        name = found
        while name:
            values[name] = replace(values[name], read_first=True)
            name = source[name]
    return replace(capture, values=values)
