"""The captured graph with the rule of every operator, and the layouts that operators demand and produce."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from shardwright.common.stages import in_stage
from shardwright.compiler.capture.facts import operator_of
from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.mesh.cached_hash import kept_hash
from shardwright.compiler.mesh.layout import Layout
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
    @in_stage("rules")
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
        """A cache of what follows from the graph alone.

        Cached by keys that begin with a word or a function of those who write them. Rules and meshes are in keys by
        their identity: the graph holds the rules, and a mesh is held beside what is known of it.
        """
        return {}

    def once(self, make: Callable[[RuledGraph], T]) -> T:
        """Return what ``make`` gives for the graph, made once."""
        if make not in self.known:
            self.known[make] = make(self)
        found: T = self.known[make]
        return found

    def needs_gradient(self, node: Node) -> bool:
        """Return whether a node has a backward."""
        return any(self.capture.values[name].needs_gradient for name in node.results)

    def collectives_inside(self, node: Node, strategy: Strategy, mesh: Mesh) -> Directions:
        """Return the collectives inside a node under a strategy: forward and, where it has one, backward."""
        if not self.rules[node.name].merged_axes(strategy, mesh):
            return (), ()
        values = [self.capture.values[name] for name in node.operands]
        itemsize = values[0].dtype.itemsize if values else 1
        operator = operator_of(node, self.capture)
        forward, backward = internal_collectives(operator, self.rules[node.name], strategy, mesh, itemsize)
        return forward, backward if self.needs_gradient(node) else ()

    @cached_property
    def uses(self) -> Mapping[str, tuple[Use, ...]]:
        """Value name -> the operands that read it, in order of execution."""
        found: dict[str, list[Use]] = {name: [] for name in self.capture.values}
        for node in self.capture.nodes:
            for index, name in enumerate(node.operands):
                found[name].append(Use(node, index))
        return {name: tuple(uses) for name, uses in found.items()}

    def read_first_by(self, value: str, readers: Container[str]) -> bool:
        """Return whether one of these operators, by their names, is the first of all to read a parameter, this one.

        What brings the parameter, or a cast or view of it, to it has nothing to hide behind (`Value.read_first`).
        """
        return self.capture.values[value].read_first and self.uses[value][0].node.name in readers

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
        """Return what the costs of an operator follow from: what it is, its tensors, and which of these are one.

        So does beside what it computes (`before_last_gather`). Its rule follows from the same, so that operators that
        are alike share one.
        """
        values = [self.capture.values[name] for name in node.operands + node.results]
        names = list(dict.fromkeys(node.operands))  # an operand that is read twice counts once
        repeated = tuple(names.index(name) for name in node.operands)
        facts = tuple((value.shape, value.dtype, value.needs_gradient) for value in values)
        return node.call, repeated, facts, node.name in self.before_last_gather

    @cached_property
    def before_last_gather(self) -> frozenset[str]:
        """The names of the operators before the last that reads a parameter: there all parameters were gathered.

        Cached: the capture is frozen.
        """
        nodes, values = self.capture.nodes, self.capture.values
        readers = [at for at, node in enumerate(nodes) if any(values[name].of_parameter for name in node.operands)]
        return frozenset(node.name for node in nodes[: max(readers, default=0)])

    @cached_property
    def unlisted(self) -> tuple[Node, ...]:
        """The operators without a rule, which every rank runs whole."""
        return tuple(node for node in self.capture.nodes if not self.rules[node.name].listed)


@kept_hash
@dataclass(frozen=True)
class Target:
    """A layout that a consumer needs a value in, and the axes over which the gradient that it returns is partial."""

    layout: Layout
    gradient_partial: tuple[str, ...] = ()


def target_of(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Target:
    """Return what operand ``index`` of ``node`` must be under a strategy, units normalised; once for equal layers."""
    return targets_of(graph, node, index, (strategy,), mesh)[0]


def targets_of(
    graph: RuledGraph, node: Node, index: int, strategies: Sequence[Strategy], mesh: Mesh
) -> tuple[Target, ...]:
    """Return the result for each of several strategies."""
    rule, value = graph.rules[node.name], graph.capture.values[node.operands[index]]
    known = _known(graph, mesh, ("target", id(rule), index, value.shape, value.needs_gradient))
    found: list[Target] = []
    for strategy in strategies:
        target = known.get(strategy)
        if target is None:
            layout = rule.operand_layout(index, strategy).normalised(value.shape, mesh)
            partial = rule.operand_gradient_partial(index, strategy, mesh) if value.needs_gradient else ()
            target = known[strategy] = the_one(graph, Target(layout, partial), mesh)
        found.append(target)
    return tuple(found)


def made_by(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Layout:
    """Return the layout of result ``index`` of ``node`` under a strategy, units normalised; once for equal layers."""
    return each_made_by(graph, node, index, (strategy,), mesh)[0]


def each_made_by(
    graph: RuledGraph, node: Node, index: int, strategies: Sequence[Strategy], mesh: Mesh
) -> tuple[Layout, ...]:
    """Return the result for each of several strategies."""
    rule, shape = graph.rules[node.name], graph.capture.values[node.results[index]].shape
    known = _known(graph, mesh, ("layout", id(rule), index, shape))
    found: list[Layout] = []
    for strategy in strategies:
        layout = known.get(strategy)
        if layout is None:
            layout = known[strategy] = rule.result_layout(index, strategy, mesh).normalised(shape, mesh)
        found.append(layout)
    return tuple(found)


def the_one(graph: RuledGraph, target: Target, mesh: Mesh) -> Target:
    """Of equal targets the one that is the same object."""
    found: Target = _known(graph, mesh, "targets").setdefault(target, target)
    return found


def _known(graph: RuledGraph, mesh: Mesh, of: Hashable) -> dict[Hashable, Any]:
    """Return what is known of a graph on a mesh, which is held so that no other object gets its identity."""
    key = "on a mesh", id(mesh), of
    if key not in graph.known:
        graph.known[key] = mesh, {}
    found: dict[Hashable, Any] = graph.known[key][1]
    return found
