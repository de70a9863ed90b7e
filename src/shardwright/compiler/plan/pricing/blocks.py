"""Blocks of a graph: what the backward can compute again as a whole, in place of keeping what lies inside.

A block is a module whose operators run one after the other. What it is made from is kept, and with it the backward
computes the block once more, up to the last operator that keeps anything: what follows it in the module is no part of
the block, as nothing of it is needed. What the block makes for others is made by the forward alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.plan.pricing.memory import Kept
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.rules.row import Saved
from shardwright.errors import UsageError


@dataclass(frozen=True)
class Block:
    """A module and its operators up to the last that keeps anything, in order of execution."""

    name: str
    nodes: tuple[Node, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the operators."""
        return frozenset(node.name for node in self.nodes)

    def computed_again(self, kept: Kept) -> tuple[Node, ...]:
        """The operators whose work is done twice: not the last one where it keeps nothing but what it is given."""
        last = kept.saved[self.nodes[-1].name]
        return self.nodes if last.results or last.beside else self.nodes[:-1]


class Blocks:
    """The blocks of a graph, by the path of the module."""

    def __init__(self, graph: RuledGraph) -> None:
        self._graph, self._kept = graph, graph.once(Kept)
        self._known: dict[str, Block | None] = {}

    def named(self, name: str) -> Block | None:
        """The block of a module; None where there is none, or nothing of it is kept."""
        if name not in self._known:
            self._known[name] = self._made(name)
        return self._known[name]

    def _made(self, name: str) -> Block | None:
        nodes = self._graph.capture.nodes
        keeps = [at for at in self._spans.get(name, range(0)) if self._kept.saved[nodes[at].name] != Saved()]
        return Block(name, nodes[self._spans[name].start : keeps[-1] + 1]) if keeps else None

    def repeated(self) -> tuple[Block, ...]:
        """The layers of the model: blocks that stand beside equal ones, and keep what they made themselves.

        Of those that lie in one another the outermost.
        """
        alike: dict[Hashable, list[str]] = defaultdict(list)
        nodes, rules = self._graph.capture.nodes, self._graph.rules
        for name, span in self._spans.items():
            operators = tuple(id(rules[node.name]) for node in nodes[span.start : span.stop])
            alike[name.rpartition(".")[0], operators].append(name)
        found = (self.named(name) for names in alike.values() if len(names) > 1 for name in names)
        return _outermost([block for block in found if block is not None and self._saves(block)])

    def matching(self, patterns: Sequence[str], *, demanded: bool) -> tuple[Block, ...]:
        """The blocks of the modules whose paths match one of these patterns, of those in one another the outermost.

        Raises:
            UsageError: with ``demanded``, where a pattern matches no module that runs at once.
        """
        found: list[Block] = []
        for pattern in patterns:
            names = [name for name in self._spans if fnmatchcase(name, pattern)]
            if demanded and not names:
                shown = ", ".join(list(self._spans)[:8]) or "none"
                raise UsageError(
                    f"recompute names {pattern!r}, which no module matches that is run at once; there are {shown}"
                )
            found += [block for block in map(self.named, names) if block is not None]
        return _outermost(list(dict.fromkeys(found)))

    def _saves(self, block: Block) -> bool:
        """Whether the operators of the block keep more that they have made themselves than the block is given."""
        values, kept = self._graph.capture.values, set()
        for node in block.nodes:
            saved = self._kept.saved[node.name]
            kept |= {node.operands[i] for i in saved.operands or ()} | {node.results[i] for i in saved.results or ()}
        made = {name for node in block.nodes for name in node.results}
        given = {name for node in block.nodes for name in node.operands} - made
        given_bytes = sum(values[name].bytes for name in given if values[name].kind == "result")
        return sum(values[name].bytes for name in kept & made) > given_bytes

    @cached_property
    def _spans(self) -> Mapping[str, range]:
        """The positions of the operators of each module that is run at once, in order of execution.

        Cached: the graph is frozen.
        """
        at: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self._graph.capture.nodes):
            parts = node.scope.split(".") if node.scope else []
            for depth in range(1, len(parts) + 1):
                at[".".join(parts[:depth])].append(position)
        return {
            name: range(positions[0], positions[-1] + 1)
            for name, positions in at.items()
            if positions[-1] - positions[0] == len(positions) - 1
        }


def moved_inside(value: Value, before_bytes: int, after_bytes: int) -> bool:
    """Whether a block that is given a value and moves it keeps it as it is given, and moves it again.

    So it does where that takes less memory: what is gathered for the block. Leaves are held all the same.
    """
    return value.kind != "result" or after_bytes > before_bytes


def _outermost(blocks: Sequence[Block]) -> tuple[Block, ...]:
    names = {block.name for block in blocks}

    def inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:depth]) in names for depth in range(1, len(parts)))

    return tuple(block for block in blocks if not inside(block.name))
