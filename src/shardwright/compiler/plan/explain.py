"""The explanation of one module, operator or parameter of a plan: what it does and costs, and the next best way.

The alternative is searched for among all other strategies of the operator, or layouts of the parameter, while the
operators nearest to it follow freely and the rest of the plan stays as it is. The cost that it adds is therefore never
less than that of a whole new plan.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.graph import target_of
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.search.choices import Space
from shardwright.compiler.plan.search.problem import CostCache, Problem, Solution
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.compiler.plan.spaces import choices_of
from shardwright.compiler.plan.text import in_tuples, joined, short, table, template
from shardwright.compiler.plan.timing.costs import Communication
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.rules.notation import OpRule, Strategy
from shardwright.errors import PlanError, UsageError

FOLLOWERS = 20  # as many operators may follow an alternative
MOST_ROWS = 50  # of operators, before equal ones share a row
MOST_OPERATORS = 6  # of a module are asked for their next best strategy
_KINDS = {
    "free": "",
    "sum": "; each device has a summand of the result",
    "merged": "; the devices exchange inside the operator what they need of each other",
    "frozen": "",
}
# What is done over axes that split a factor along with another one: keys with queries, experts with tokens.
_TOGETHER = {
    "sum": "rows go to the devices of their experts, and results back,",
    "merged": "blocks of them go round",
}


@dataclass(frozen=True)
class Alternative:
    """Another way and what it takes more; less than nothing where the search counted something else than seconds."""

    strategy: Strategy | None  # of an operator
    layout: Layout | None  # of a parameter
    more_s: float


class Explainer:
    """Answers about one plan, whose prices are those of ``hardware``."""

    def __init__(self, plan: Decisions, hardware: Hardware, prices: Prices | None = None) -> None:
        self.plan, self.prices = plan, prices or Prices(plan, hardware)
        self.nodes = {node.name: node for node in plan.capture.nodes}
        self.parameters = {value.label: value for value in plan.capture.of_kind("parameter")}

    def answer(self, name: str) -> str:
        """Explain what the plan does with ``name``, and why.

        Raises:
            UsageError: where nothing has that name; says which names are near.
        """
        if name in self.parameters:
            return "\n\n".join(self._parameter(self.parameters[name]))
        if name in self.modules:
            return "\n\n".join(self._module(name))
        if name in self.nodes:
            return "\n\n".join(self._operator(self.nodes[name]))
        names = [*self.parameters, *self.modules, *self.nodes]
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.3)
        raise UsageError(
            f"the plan has no module, operator or parameter {name!r}; near it: {', '.join(near) or 'nothing'}; "
            "print(plan) shows every operator with its module"
        )

    @cached_property
    def known(self) -> CostCache:
        """The costs that alternatives are found by.

        Cached: the plan and its prices are frozen.
        """
        return CostCache(self.plan.graph, self.prices.bounding, self.plan.mesh)

    @cached_property
    def modules(self) -> dict[str, None]:
        """The names of all modules that have operators or parameters, and of those around them.

        Cached: the plan is frozen.
        """
        scopes = [node.scope for node in self.nodes.values()]
        scopes += [label.rpartition(".")[0] for label in self.parameters]
        parts = [scope.split(".") for scope in dict.fromkeys(scopes) if scope]
        return dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1))

    def reasons(self, node: Node) -> str:
        """Say which constraint binds an operator, and what the next best strategy would cost more."""
        return " ".join(self._why(node))

    # What is asked for

    def _module(self, name: str) -> Iterator[str]:
        nodes = [node for node in self.nodes.values() if _within(node.scope, name)]
        values = [value for label, value in self.parameters.items() if _within(label, name)]
        held = sum(self.plan.bytes_of(value) for value in values)
        moved = [m for m in self.prices.moved if _within(m.module, name)]
        computing = in_time(self._computes(nodes))
        communicating = in_time(_seconds(moved))
        step = f"the {in_time(self.prices.step_s)} of a step on {self.prices.hardware.name}"
        yield (
            f"{name}: a module with {_number(len(nodes), 'operator')}. It computes {computing} and communicates "
            f"{communicating} of {step}, and holds {in_bytes(held)} of parameters on each device"
        )
        if nodes:
            yield self._operators(nodes)
        if values:
            yield self._parameters(values)
        yield _communication(moved)
        if nodes:
            yield "\n".join([*self._why_all(nodes), self._freedom()])

    def _operator(self, node: Node) -> Iterator[str]:
        yield f"{node.name}: the operator {node.op} in {node.scope or 'the loss function'}, {node.source}"
        rule, strategy = self.plan.graph.rules[node.name], self.plan.strategies[node.name]
        slices = f"{in_tuples(self.plan.in_strategy(node))} -> {in_tuples(self.plan.out_strategy(node))}"
        lines = [f"strategy, in slices of operands -> results: {slices}", *self._words(node, strategy)]
        takes = in_time(self.prices.computes_s[node.name])
        shared = f"{self.plan.parts(node)} of {self.plan.sharers.size} devices"
        lines.append(f"It computes {takes}, shared by {shared}. Its rule: {rule}")
        yield "\n".join(lines)
        yield _communication([m for m in self.prices.moved if self._concerns(m, node)])
        yield "\n".join(["why: " + self.reasons(node), self._freedom()])

    def _parameter(self, value: Value) -> Iterator[str]:
        stored, slices, held = self._stored(value)
        where = f"stored {stored}, in slices {slices}; each device holds {held}"
        yield f"{value.label}: a parameter of shape {list(value.shape)}, {where}"
        uses = [(use.node, use.index) for use in self.plan.graph.uses[value.name]]
        lines = [
            f"{node.name} in {node.scope or '-'} needs it as {self.plan.target(node, i).layout}" for node, i in uses
        ]
        yield "\n".join([*lines, _communication([m for m in self.prices.moved if m.value == value.name])])
        yield f"why: {self._why_stored(value)}.\n{self._freedom()}"

    def _why_all(self, nodes: Sequence[Node]) -> Iterator[str]:
        longest = sorted(nodes, key=lambda node: -self._spent(node))[:MOST_OPERATORS]
        whys = [f"{node.name}: {self.reasons(node)}" for node in nodes if node in longest]
        yield "why:" if len(whys) == len(nodes) else f"why, for the {len(whys)} operators that take longest:"
        yield from whys

    def _why_stored(self, value: Value) -> str:
        best = self.next_layout(value)
        if best is None:
            return "no operator that reads it could use it in another layout"
        assert best.layout is not None
        return f"the next best layout, {best.layout}, {_costs(best.more_s)}"

    # Words

    def _operators(self, nodes: Sequence[Node]) -> str:
        """A row for each operator; where they are many, one for all that do the same in equal modules."""
        alike: dict[tuple[str, ...], list[Node]] = defaultdict(list)
        for node in nodes:
            slices = f"{in_tuples(self.plan.in_strategy(node))} -> {in_tuples(self.plan.out_strategy(node))}"
            which = node.name if len(nodes) <= MOST_ROWS else f"{short(node.op)} in {template(node.scope)}"
            cut = ", ".join(self._cuts(node)) or "alike everywhere"
            alike[which, cut, slices, node.source.partition(" in ")[0]].append(node)
        rows = [
            (self._called(which, found), str(len(found)), *rest, in_time(self._computes(found)))
            for (which, *rest), found in alike.items()
        ]
        return table([("operator", "times", "split", "in slices: operands -> results", "line", "computes"), *rows])

    def _parameters(self, values: Sequence[Value]) -> str:
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for value in values:
            alike[template(value.label), str(list(value.shape)), *self._stored(value)].append(value.label)
        rows = [(joined(labels), *rest) for (_, *rest), labels in alike.items()]
        return table([("parameter", "shape", "stored", "in slices", "each held"), *rows])

    def _called(self, which: str, nodes: Sequence[Node]) -> str:
        scopes = list(dict.fromkeys(node.scope for node in nodes))
        return which if which in self.nodes else f"{short(nodes[0].op)} in {joined(scopes)}"

    def _computes(self, nodes: Sequence[Node]) -> float:
        return sum(self.prices.computes_s[node.name] for node in nodes)

    def _cuts(self, node: Node) -> Iterator[str]:
        """The dims over which the work is split, in short: ``dim 1 of the result over tp``."""
        rule, strategy = self.plan.graph.rules[node.name], self.plan.strategies[node.name]
        for factor, taken in zip(rule.factors, strategy.axes, strict=True):
            if axes := _of_ranks(taken):
                yield f"{_places(factor.name, rule, node, self.plan)[-1]} over {'·'.join(axes)}"
        if partial := _of_ranks(strategy.partial):
            yield f"summands over {'·'.join(partial)}"

    def _words(self, node: Node, strategy: Strategy) -> Iterator[str]:
        """A sentence for each axis, or group of axes, of the mesh."""
        rule, mesh = self.plan.graph.rules[node.name], self.plan.mesh
        for at, (factor, taken) in enumerate(zip(rule.factors, strategy.axes, strict=True)):
            where, together = ", ".join(_places(factor.name, rule, node, self.plan)), rule.shared(at, strategy)
            axes = tuple(axis for axis in _of_ranks(taken) if axis not in together)
            if together:
                yield f"Of {where} each device holds its part; {_TOGETHER[factor.kind]} over {'·'.join(together)}."
            if axes:
                parts = f"Over {'·'.join(axes)} the work is cut into {mesh.extent(axes)}"
                yield f"{parts}: {where} (factor {factor.name}){_KINDS[factor.kind]}."
        if partial := _of_ranks(strategy.partial):
            yield f"Over {'·'.join(partial)} each device works on its summand of what is not added up yet."
        idle = [axis for axis in _of_ranks(mesh.names) if axis not in strategy.used]
        if idle:
            yield f"Over {'·'.join(idle)} all devices do the same work."

    def _why(self, node: Node) -> Iterator[str]:
        rule = self.plan.graph.rules[node.name]
        if not rule.listed:
            yield f"It has no rule, so that every device runs it whole; sw.register_rule may give {node.op} one."
            return
        if (pin := self.plan.pin_of(node)) is not None:
            yield f"It is {pin}, which fixes its strategy."
        yield from self._limits(rule, node)
        best = self.next_strategy(node)
        if best is None:
            yield "There is no other strategy that fits what stands around it."
            return
        assert best.strategy is not None
        mesh = self.plan.mesh
        operands = [rule.operand_layout(i, best.strategy).slices(mesh) for i in range(len(node.operands))]
        results = [rule.result_layout(i, best.strategy, mesh).slices(mesh) for i in range(len(node.results))]
        which = "Without the pin the best other strategy" if pin is not None else "The next best strategy"
        yield f"{which}, {in_tuples(operands)} -> {in_tuples(results)}, {_costs(best.more_s)}."

    def _limits(self, rule: OpRule, node: Node) -> Iterator[str]:
        """The dims that its rule forbids to split, where an axis is left for them, and those whose size forbids it."""
        strategy, mesh = self.plan.strategies[node.name], self.plan.mesh
        idle = [axis for axis in mesh.axes if axis.name not in strategy.used]
        frozen = [factor for factor in rule.factors if factor.kind == "frozen" and factor.size > 1]
        if idle and frozen:
            where = ", ".join(_places(factor.name, rule, node, self.plan)[0] for factor in frozen)
            yield f"Its rule forbids to split {where}."
        for i in rule.splittable:
            factor, taken = rule.factors[i], mesh.extent(strategy.axes[i])
            free = idle if strategy.axes[i] else mesh.axes  # what splits others could split this one in their place
            uneven = dict.fromkeys(taken * axis.size for axis in free if factor.size % (taken * axis.size))
            if uneven:
                where = _places(factor.name, rule, node, self.plan)[0]
                yield f"{where[0].upper()}{where[1:]}, of {factor.size}, does not divide into {_or(uneven)}."

    def _freedom(self) -> str:
        if len(self.nodes) <= FOLLOWERS:
            return "(All other operators and parameters may follow an alternative.)"
        return f"(The {FOLLOWERS} operators nearest to it may follow an alternative; all others stay as they are.)"

    # Facts

    def _spent(self, node: Node) -> float:
        inside = self.prices.inside.get(node.name)
        return self.prices.computes_s[node.name] + (inside.seconds if inside else 0.0)

    def _concerns(self, moved: Communication, node: Node) -> bool:
        return moved.value in (*node.operands, *node.results) if moved.value else moved.cause == node.name

    def _stored(self, value: Value) -> tuple[str, str, str]:
        layout = self.plan.leaves[value.name]
        words = "whole" if layout.is_replicated else f"as {layout}"
        return words, in_tuples([layout.slices(self.plan.mesh)]), in_bytes(self.plan.bytes_of(value))

    # Alternatives

    def next_strategy(self, node: Node) -> Alternative | None:
        """The best strategy of ``node`` beside the plan's, None where there is no other."""
        planned = self.plan.strategies[node.name]
        others = tuple(strategy for strategy in self._choices(node) if strategy != planned)
        found = self._best(node, {node.name: others}, None) if others else None
        return Alternative(found[1][node.name], None, found[0]) if found else None

    def next_layout(self, value: Value) -> Alternative | None:
        """The best layout of a parameter beside the plan's, None where there is no other."""
        uses = self.plan.graph.uses[value.name]
        found = self._best(uses[0].node, {}, value) if uses else None
        return Alternative(None, found[2][value.name], found[0]) if found else None

    def _choices(self, node: Node) -> tuple[Strategy, ...]:
        """Return the strategies that the search may choose for an operator without a pin, the plan's own first."""
        rule, planned = self.plan.graph.rules[node.name], self.plan.strategies[node.name]
        if (rule, planned) not in self._chosen:
            found = choices_of(rule, self.plan.mesh, SEARCHES["exact"])
            self._chosen[rule, planned] = tuple(dict.fromkeys([planned, *found]))
        return self._chosen[rule, planned]

    @cached_property
    def _chosen(self) -> dict[tuple[OpRule, Strategy], tuple[Strategy, ...]]:
        """Return what is known of the choices of operators.

        Cached by the rule and the planned strategy, frozen values, which with the plan's mesh are all that it follows
        from.
        """
        return {}

    @cached_property
    def _fixed(self) -> dict[Strategy, tuple[Strategy, ...]]:
        """Return each strategy of the plan as a list of one.

        Cached: the plan is frozen, and equal lists are one object.
        """
        return {strategy: (strategy,) for strategy in self.plan.strategies.values()}

    def _best(
        self, centre: Node, given: Mapping[str, Sequence[Strategy]], other_layout: Value | None
    ) -> tuple[float, Mapping[str, Strategy], Mapping[str, Layout]] | None:
        """The least that the operators around ``centre`` take more, under these strategies of some; and what they do.

        None where nothing fits together.
        """
        free = self._around(centre)
        choices: dict[str, Sequence[Strategy]] = {name: self._choices(self.nodes[name]) for name in free}
        found = self._least(free, given, other_layout, math.inf)  # none of the others follows
        bar = found[0] if found else math.inf
        found = self._least(free, choices | dict(given), other_layout, bar) or found
        if found is None:
            return None
        cost, strategies, leaves = found
        return cost - self._problem(free, {}, None, planned=True).solved()[0], strategies, leaves

    def _least(
        self,
        free: Sequence[str],
        given: Mapping[str, Sequence[Strategy]],
        other_layout: Value | None,
        below: float,
    ) -> Solution | None:
        """Return the cheapest solution; None where none costs less than ``below``."""
        try:
            problem = self._problem(free, given, other_layout)
            found = problem.minimum(below=below)
        except PlanError:
            return None
        return found.cost, *problem.decided(found.picked)

    def _problem(
        self,
        free: Sequence[str],
        given: Mapping[str, Sequence[Strategy]],
        other_layout: Value | None,
        *,
        planned: bool = False,
    ) -> Problem:
        """The choices of the operators ``free``, where all others are as the plan says."""
        plan, graph = self.plan, self.plan.graph
        # In an order that is the same in every process: it decides among choices that cost the same.
        touched = dict.fromkeys(name for at in free for name in (*self.nodes[at].operands, *self.nodes[at].results))
        beside = {use.node.name for name in touched for use in graph.uses[name]}
        beside |= {graph.producers[name][0].name for name in touched if name in graph.producers}
        strategies: dict[str, Sequence[Strategy]] = {
            name: given.get(name, self._fixed[plan.strategies[name]]) for name in beside | set(free)
        }
        leaves: dict[str, Sequence[Layout]] = {
            name: (plan.leaves[name],) for name in plan.capture.values if name in touched and name in plan.leaves
        }
        if not planned:
            leaves |= self._stored_freely(leaves, strategies, set(free), other_layout)
        space = Space(graph, plan.mesh, strategies, leaves, plan.outputs)
        return Problem(space, self.known, set(strategies), priced=set(free), values=touched.keys())

    def _stored_freely(
        self,
        leaves: Mapping[str, Sequence[Layout]],
        strategies: Mapping[str, Sequence[Strategy]],
        free: set[str],
        other_layout: Value | None,
    ) -> dict[str, Sequence[Layout]]:
        """The layouts of the parameters that no operator but the free ones read."""
        values, uses = self.plan.capture.values, self.plan.graph.uses
        found: dict[str, Sequence[Layout]] = {}
        for name, layouts in leaves.items():
            readers = {use.node.name for use in uses[name]}
            if values[name].kind == "parameter" and readers <= free:
                found[name] = self._layouts(values[name], strategies, layouts)
            if other_layout is not None and name == other_layout.name:
                options = self._layouts(values[name], strategies, layouts)
                found[name] = tuple(layout for layout in options if layout != layouts[0])
        return found

    def _layouts(
        self, value: Value, strategies: Mapping[str, Sequence[Strategy]], planned: Sequence[Layout]
    ) -> tuple[Layout, ...]:
        demanded = [
            target_of(self.plan.graph, use.node, use.index, strategy, self.plan.mesh).layout.whole()
            for use in self.plan.graph.uses[value.name]
            for strategy in strategies[use.node.name]
        ]
        return tuple(dict.fromkeys([*planned, Layout.replicated(len(value.shape)), *demanded]))

    def _around(self, centre: Node) -> tuple[str, ...]:
        """The operators nearest to ``centre`` on the ways of values, itself first."""
        graph = self.plan.graph
        found, pending = {centre.name: None}, deque([centre])
        while pending and len(found) < FOLLOWERS:
            node = pending.popleft()
            near = [graph.producers[name][0] for name in node.operands if name in graph.producers]
            near += [use.node for name in node.results for use in graph.uses[name]]
            for neighbour in near:
                if neighbour.name not in found and neighbour.pin is None and len(found) < FOLLOWERS:
                    found[neighbour.name] = None
                    pending.append(neighbour)
        return tuple(found)


def _of_ranks(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which ranks differ: not that of microbatches, which each of them works through."""
    return tuple(axis for axis in axes if axis != MICROBATCHES)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _places(factor: str, rule: OpRule, node: Node, plan: Decisions) -> list[str]:
    """Return the dims of a factor, operands first: ``dim 1 of up.weight``, ``dim 2 of the result``."""
    found = []
    for name, dims in zip(node.operands, rule.operands, strict=True):
        found += [f"dim {at} of {plan.capture.values[name].label}" for at, dim in enumerate(dims) if factor in dim]
    for i, dims in enumerate(rule.results):
        which = "the result" if len(rule.results) == 1 else f"result {i}"
        found += [f"dim {at} of {which}" for at, dim in enumerate(dims) if factor in dim]
    return found or [f"factor {factor}"]


def _communication(moved: Sequence[Communication]) -> str:
    """A row for what is communicated alike for values of equal layers, the longest first."""
    alike: dict[tuple[str, str, str], list[Communication]] = defaultdict(list)
    for m in moved:
        alike[", ".join(m.kinds), "·".join(m.axes), template(m.cause)].append(m)
    rows = [
        (*key[:2], joined([m.cause for m in found]), in_bytes(sum(m.bytes for m in found)), in_time(_seconds(found)))
        for key, found in sorted(alike.items(), key=lambda item: -_seconds(item[1]))
    ]
    return table([("collectives", "axes", "of", "sent", "takes"), *rows]) if rows else "no collectives"


def _seconds(moved: Sequence[Communication]) -> float:
    return sum(m.seconds for m in moved)


def _or(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _costs(more_s: float) -> str:
    if abs(more_s) < 1e-12:
        return "costs as much"
    return f"would cost {in_time(more_s)} more" if more_s > 0 else f"would cost {in_time(-more_s)} less"
