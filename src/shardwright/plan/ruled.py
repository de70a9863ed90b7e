"""The captured graph with the rule of every operator: what every search reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.graph.ir import Capture, Node
from shardwright.rules.notation import OpRule
from shardwright.rules.table import rule_of


@dataclass(frozen=True)
class Use:
    """One place where a value is read: operand ``index`` of ``node``."""

    node: Node
    index: int


@dataclass(frozen=True)
class RuledGraph:
    """A capture and, by node name, its rules bound to its shapes."""

    capture: Capture
    rules: Mapping[str, OpRule]

    @staticmethod
    def of(capture: Capture) -> RuledGraph:
        """Look up the rule of every operator."""
        rules = {}
        for node in capture.nodes:
            operands = [capture.values[name].shape for name in node.operands]
            results = [capture.values[name].shape for name in node.results]
            rules[node.name] = rule_of(node.op, node.args, dict(node.kwargs), operands, results)
        return RuledGraph(capture, rules)

    @cached_property
    def uses(self) -> Mapping[str, tuple[Use, ...]]:
        """Value name -> the operands that read it, in order of execution."""
        found: dict[str, list[Use]] = {name: [] for name in self.capture.values}
        for node in self.capture.nodes:
            for index, name in enumerate(node.operands):
                found[name].append(Use(node, index))
        return {name: tuple(uses) for name, uses in found.items()}

    @cached_property
    def producers(self) -> Mapping[str, tuple[Node, int]]:
        """Name of a result -> its node and the position among the node's results."""
        return {name: (node, i) for node in self.capture.nodes for i, name in enumerate(node.results)}

    @cached_property
    def unlisted(self) -> tuple[Node, ...]:
        """The operators without a rule, which every rank runs whole."""
        return tuple(node for node in self.capture.nodes if not self.rules[node.name].listed)
