"""The modules of a model as a tree in which equal ones stand once, and what several plans do in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.text import joined, template
from shardwright.compiler.plan.timing.costs import Communication
from shardwright.compiler.plan.timing.prices import Prices


@dataclass(frozen=True)
class ShownTensor:
    """An operand or a result as an operator works on it: the axes over which each dim is cut."""

    label: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...]


@dataclass(frozen=True)
class OperatorInPlan:
    """An operator and all its equals under one plan. Seconds and bytes are of all of them together."""

    computes_s: float
    communicates_s: float
    sent_bytes: float
    parts: int  # devices that share the work
    operands: tuple[ShownTensor, ...]
    results: tuple[ShownTensor, ...]
    moved: tuple[Communication, ...]  # for the first of them alone


@dataclass(frozen=True)
class FoldedOperator:
    """An operator that stands for its equals in equal modules, and what each plan does with it."""

    name: str
    op: str
    module: str
    line: str
    times: int
    ways: tuple[OperatorInPlan, ...]


@dataclass(frozen=True)
class FoldedModule:
    """Modules that are equal in all that lies inside; ``operators`` are places in the list of operators."""

    name: str
    count: int
    operators: tuple[int, ...]
    children: tuple[FoldedModule, ...]
    held_bytes: tuple[int, ...]  # of parameters on each device, of all of them together, under each plan


@dataclass
class _Scope:
    """A module as it was called: what is computed in it, and what lies inside."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)  # names of values
    children: dict[str, _Scope] = field(default_factory=dict)
    kind: int = 0  # equal for scopes that are equal in all that lies inside


class Tree:
    """The tree of one graph under several plans."""

    def __init__(self, plans: Sequence[Plan], prices: Sequence[Prices]) -> None:
        self._plans, self._prices = plans, prices
        self._capture = plans[0].capture
        self._moved = [_by_operator(plan, price) for plan, price in zip(plans, prices, strict=True)]
        self._kinds: dict[object, int] = {}
        self.operators: list[FoldedOperator] = []
        self.places: dict[str, int] = {}
        """The name of each operator -> the place of the one that stands for it."""
        root = self._scopes()
        self._tell_kinds(root)
        self.root = self._folded([root], "model")

    def _scopes(self) -> _Scope:
        root = _Scope("")
        for node in self._capture.nodes:
            self._scope(self._stage(root, node.results, node.name), node.scope).nodes.append(node)
        for value in self._capture.of_kind("parameter"):
            module = value.label.rpartition(".")[0]
            self._scope(self._stage(root, [value.name]), module).parameters.append(value.name)
        return root

    def _stage(self, root: _Scope, values: Sequence[str], operator: str = "") -> _Scope:
        """Return what stands for the pipeline stage, of the first plan, of an operator or of all that needs values.

        Modules have their names in it. It is the root where the plan has no stages.
        """
        plan = self._plans[0]
        if plan.stages is None:
            return root
        own = plan.stages.of.get(operator)
        stages = frozenset[int]().union(*(plan.needed_in[name] for name in values)) if own is None else {own}
        name = f"stage {min(stages)}" if len(stages) == 1 else "in several stages"
        return root.children.setdefault(name, _Scope(""))

    @staticmethod
    def _scope(root: _Scope, path: str) -> _Scope:
        scope = root
        for part in path.split(".") if path else ():
            name = f"{scope.name}.{part}" if scope.name else part
            scope = scope.children.setdefault(part, _Scope(name))
        return scope

    def _tell_kinds(self, scope: _Scope) -> None:
        for child in scope.children.values():
            self._tell_kinds(child)
        facts = (
            tuple(self._facts(node) for node in scope.nodes),
            tuple(self._held(name) for name in scope.parameters),
            tuple((template(part), child.kind) for part, child in scope.children.items()),
        )
        scope.kind = self._kinds.setdefault(facts, len(self._kinds))

    def _facts(self, node: Node) -> object:
        """Return what must be alike for two operators to share a row."""
        decided = tuple(
            (plan.in_strategy(node), plan.out_strategy(node), tuple(_fact(moved) for moved in found.get(node.name, ())))
            for plan, found in zip(self._plans, self._moved, strict=True)
        )
        shapes = tuple(self._capture.values[name].shape for name in node.results)
        return node.op, node.source, shapes, decided

    def _held(self, name: str) -> tuple[int, ...]:
        return tuple(plan.bytes_of(self._capture.values[name]) for plan in self._plans)

    def _folded(self, equals: Sequence[_Scope], shown: str) -> FoldedModule:
        """One row for scopes that are equal."""
        first = equals[0]
        module = joined([scope.name for scope in equals])
        operators = tuple(
            self._operator(nodes, module) for nodes in zip(*(scope.nodes for scope in equals), strict=True)
        )
        groups: dict[tuple[str, int], list[str]] = defaultdict(list)
        for part, child in first.children.items():
            groups[template(part), child.kind].append(part)
        children = []
        for (name, kind), parts in groups.items():
            inside = [
                child
                for scope in equals
                for part, child in scope.children.items()
                if (template(part), child.kind) == (name, kind)
            ]
            children.append(self._folded(inside, joined(parts)))
        held = [self._held(name) for scope in equals for name in scope.parameters]
        summed = tuple(map(sum, zip(*held, strict=True))) if held else (0,) * len(self._plans)
        return FoldedModule(shown, len(equals), operators, tuple(children), summed)

    def _operator(self, nodes: Sequence[Node], module: str) -> int:
        first, place = nodes[0], len(self.operators)
        self.places |= dict.fromkeys((node.name for node in nodes), place)
        ways = tuple(self._way(i, nodes) for i in range(len(self._plans)))
        line = first.source.partition(" in ")[0]
        self.operators.append(FoldedOperator(first.name, first.op, module, line, len(nodes), ways))
        return place

    def _way(self, i: int, nodes: Sequence[Node]) -> OperatorInPlan:
        plan, computes_s, found = self._plans[i], self._prices[i].computes_s, self._moved[i]
        first = nodes[0]
        rule, strategy = plan.graph.rules[first.name], plan.strategies[first.name]
        operands = [rule.operand_layout(at, strategy) for at in range(len(first.operands))]
        results = [rule.result_layout(at, strategy, plan.mesh) for at in range(len(first.results))]
        moved = [each for node in nodes for each in found.get(node.name, ())]
        return OperatorInPlan(
            sum(computes_s[node.name] for node in nodes),
            sum(each.seconds for each in moved),
            sum(each.bytes for each in moved),
            plan.parts(first),
            self._tensors(plan, first.operands, operands),
            self._tensors(plan, first.results, results),
            tuple(found.get(first.name, ())),
        )

    def _tensors(self, plan: Plan, names: Sequence[str], layouts: Sequence[Layout]) -> tuple[ShownTensor, ...]:
        """Return the tensors as operators work on them; with pipeline stages those of a microbatch."""
        found = []
        for name, layout in zip(names, layouts, strict=True):
            value, cut = self._capture.values[name], layout.without(MICROBATCHES)
            times = [plan.mesh.extent({*dim.axes} & {MICROBATCHES}) for dim in layout.dims]
            shape = tuple(-(-size // many) for size, many in zip(value.shape, times, strict=True))
            found.append(ShownTensor(value.label, shape, tuple(dim.axes for dim in cut.dims), cut.partial))
        return tuple(found)


def _by_operator(plan: Plan, prices: Prices) -> Mapping[str, Sequence[Communication]]:
    """Return the communication of each operator: inside it, of its results, and of leaves that it reads first."""
    found: dict[str, list[Communication]] = defaultdict(list)
    for name, moved in prices.inside.items():
        found[name].append(moved)
    for transfer in plan.transfers:
        communicated = prices.transferred(transfer)
        if communicated is not None:
            maker = plan.graph.producers.get(transfer.value)
            found[maker[0].name if maker else transfer.consumers[0][0]].append(communicated)
    return found


def _fact(moved: Communication) -> object:
    return moved.kinds, moved.axes, round(moved.bytes)
