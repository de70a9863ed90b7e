"""The operators that make the values of a graph, where a rewriting may leave them out."""

from __future__ import annotations

from collections import Counter

from shardwright.compiler.capture.ir import Capture, Node


class Makers:
    """The operators of a graph by what they make, and how often each value is read."""

    def __init__(self, capture: Capture) -> None:
        self._makers = {result: node for node in capture.nodes for result in node.results}
        self._reads = Counter(name for node in capture.nodes for name in node.operands)
        self._reads.update([capture.loss, *capture.aux, *capture.mutations.values()])

    def of(self, name: str) -> Node | None:
        """Return the operator that makes a value, None where there is none."""
        return self._makers.get(name)

    def for_one_reader(self, name: str) -> Node | None:
        """Return the operator that makes a value which is read once, None where it is pinned or there is none."""
        maker = self._makers.get(name)
        return maker if self._reads[name] == 1 and maker is not None and maker.pin is None else None
