"""The captured graph with the rule of every operator: what every search reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import OpRule, Strategy
from shardwright.compiler.rules.row import Directions
from shardwright.compiler.rules.table import internal_collectives, rule_of

T = TypeVar("T")


@dataclass(frozen=True)
class Use:
    """One place where a value is read: operand ``index`` of ``node``."""

    node: Node
    index: int


@dataclass(frozen=True)
class RuledGraph:
    """A capture and, by node name, its rules bound to its shapes; operators that are alike share one."""

    capture: Capture
    rules: Mapping[str, OpRule]

    @staticmethod
    def of(capture: Capture) -> RuledGraph:
        """Look up the rule of every operator."""
        rules: dict[str, OpRule] = {}
        alike: dict[Hashable, OpRule] = {}  # Cached by all that `rule_of` is given
        for node in capture.nodes:
            operands = tuple(capture.values[name].shape for name in node.operands)
            results = tuple(capture.values[name].shape for name in node.results)
            key = node.call, operands, results
            if key not in alike:
                alike[key] = rule_of(node.op, node.args, dict(node.kwargs), operands, results)
            rules[node.name] = alike[key]
        return RuledGraph(capture, rules)

    def __getstate__(self) -> dict[str, Any]:
        """All but ``known``, whose keys are identities that other processes give to something else."""
        return {name: of for name, of in self.__dict__.items() if name != "known"}

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """What others have worked out of the graph alone, for all who ask again.

        Cached by keys that begin with a word or a function of those who write them. Rules and meshes are in keys by
        their identity: the graph holds the rules, and a mesh is held beside what is known of it.
        """
        return {}

    def once(self, make: Callable[[RuledGraph], T]) -> T:
        """What ``make`` gives of the graph, made when it is first asked for."""
        if make not in self.known:
            self.known[make] = make(self)
        found: T = self.known[make]
        return found

    def needs_gradient(self, node: Node) -> bool:
        """Whether a node has a backward."""
        return any(self.capture.values[name].needs_gradient for name in node.results)

    def collectives_inside(self, node: Node, strategy: Strategy, mesh: Mesh) -> Directions:
        """What a node communicates inside itself under a strategy: forward and, where it has one, backward."""
        if not self.rules[node.name].merged_axes(strategy, mesh):
            return (), ()
        values = [self.capture.values[name] for name in node.operands]
        itemsize = values[0].dtype.itemsize if values else 1
        shapes = [value.shape for value in values]
        forward, backward = internal_collectives(node.op, self.rules[node.name], strategy, mesh, shapes, itemsize)
        return forward, backward if self.needs_gradient(node) else ()

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
    def alike(self) -> Mapping[str, int]:
        """By the name of an operator a number that it shares with those which cost the same under any strategy."""
        numbers: dict[Hashable, int] = {}
        return {node.name: numbers.setdefault(self._facts(node), len(numbers)) for node in self.capture.nodes}

    def _facts(self, node: Node) -> Hashable:
        """What the costs of an operator follow from: what it is, its tensors, and which of these are one.

        Its rule follows from the same, so that operators that are alike share one.
        """
        values = [self.capture.values[name] for name in node.operands + node.results]
        names = list(dict.fromkeys(node.operands))  # an operand that is read twice counts once
        repeated = tuple(names.index(name) for name in node.operands)
        facts = tuple((value.shape, value.dtype, value.needs_gradient) for value in values)
        return node.call, repeated, facts

    @cached_property
    def unlisted(self) -> tuple[Node, ...]:
        """The operators without a rule, which every rank runs whole."""
        return tuple(node for node in self.capture.nodes if not self.rules[node.name].listed)
