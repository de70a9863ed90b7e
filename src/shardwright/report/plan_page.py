"""A plan on one page: what a step takes and each device holds, equal layers once, and what is dearest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwright.graph.ir import Node
from shardwright.plan.decisions import Decisions, Transfer
from shardwright.plan.explain import certificate, holds, in_bytes, in_tuples, module_of, table
from shardwright.plan.pricing.cost import Seconds, operator_collectives
from shardwright.plan.pricing.hardware import Hardware

MOST_MODULES, MOST_COLLECTIVES = 30, 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass
class _Module:
    """What happens in one module of the model: seconds are those of forward and backward."""

    nodes: list[Node] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)  # what is communicated, so that modules can be told to be alike
    computes_s: float = 0.0
    communicates_s: float = 0.0
    sends: float = 0.0
    holds: int = 0


@dataclass(frozen=True)
class _Dear:
    """One kind of collective: what it does, over which axes, for what."""

    kinds: str
    axes: str
    cause: str


def plan_page(plan: Decisions, hardware: Hardware) -> str:
    """The page, whose seconds are those of ``hardware``; `explain` shows every operator and collective."""
    priced = _Priced(plan, Seconds(hardware))
    computes, communicates = (sum(getattr(m, of) for m in priced.modules.values()) for of in _PARTS)
    lines = [
        f"plan: mode {plan.mode}, search {plan.search}, mesh {plan.named}, {plan.mesh.size} devices",
        f"a step on {hardware.name} takes {_time(computes + communicates)}: {_time(computes)} computing, "
        f"{_time(communicates)} communicating, one after the other",
        f"each device sends {in_bytes(plan.moved_bytes())} per step and holds {holds(plan)}",
        *certificate(plan),
    ]
    parts = ["\n".join(lines), _modules(plan, priced), _collectives(priced), *_without_rule(plan, priced)]
    return "\n\n".join(parts)


_PARTS = ("computes_s", "communicates_s")


class _Priced:
    """A plan whose operators and transfers have a price, by module."""

    def __init__(self, plan: Decisions, seconds: Seconds) -> None:
        self.plan, self.seconds = plan, seconds
        self.modules: dict[str, _Module] = defaultdict(_Module)
        self.computes_s: dict[str, float] = {}  # by operator, without what it communicates inside itself
        self.dear: dict[_Dear, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])  # how often, bytes, seconds
        self.parameters = {value.label for value in plan.capture.of_kind("parameter")}
        for node in plan.capture.nodes:
            self._add_operator(node)
        for transfer in plan.transfers:
            self._add_transfer(transfer)
        for value in plan.capture.of_kind("parameter"):
            self.modules[value.label.rpartition(".")[0]].holds += plan.bytes_of(value)

    def _add_operator(self, node: Node) -> None:
        plan, module, strategy = self.plan, self.modules[node.scope], self.plan.strategies[node.name]
        computes_s = self.seconds.operator(plan.graph, node, strategy, plan.mesh)
        for c in operator_collectives(plan.graph, node, strategy, plan.mesh):
            spent = self.seconds.collective_s(c, plan.mesh)
            computes_s -= spent
            self._add(module, _Dear(c.kind, "·".join(c.axes), node.op), c.sent_bytes(plan.mesh), spent)
        self.computes_s[node.name] = computes_s
        module.nodes.append(node)
        module.computes_s += computes_s

    def _add_transfer(self, transfer: Transfer) -> None:
        plan = self.plan
        found = list(plan.transfer_collectives(transfer))
        if not found:
            return
        value = replace(plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
        spent = self.seconds.transfer(value, transfer.steps, plan.mesh)
        name = module_of(found[0], self.parameters)
        axes = dict.fromkeys(axis for priced in found for axis in priced.collective.axes)
        kinds = dict.fromkeys(f"{priced.collective.kind} {priced.direction}" for priced in found)
        dear = _Dear(
            ", ".join(kinds), "·".join(axes), _template(value.label if value.label in self.parameters else name)
        )
        self._add(self.modules[name], dear, sum(priced.bytes for priced in found), spent)

    def _add(self, module: _Module, dear: _Dear, sent: float, spent: float) -> None:
        module.sends += sent
        module.communicates_s += spent
        module.moves.append(f"{dear.kinds} {dear.axes} {sent:.0f}")
        self.dear[dear][0] += 1
        self.dear[dear][1] += sent
        self.dear[dear][2] += spent


def _modules(plan: Decisions, priced: _Priced) -> str:
    """A row for modules that differ in nothing but their numbers, the dearest rows in the order of the model."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, module in priced.modules.items():
        alike[_template(name), *_decisions(plan, module), *module.moves].append(name)
    rows = []
    for names in alike.values():
        modules = [priced.modules[name] for name in names]
        total = [sum(getattr(m, of) for m in modules) for of in (*_PARTS, "sends", "holds")]
        main = max(modules[0].nodes, key=lambda node: priced.computes_s[node.name], default=None)
        rows.append(
            (
                total[0] + total[1],
                (_joined(names), _strategy(plan, main), *map(_time, total[:2]), *map(in_bytes, total[2:])),
            )
        )
    least = sorted((row[0] for row in rows), reverse=True)[:MOST_MODULES][-1] if rows else 0.0
    shown = [row for spent, row in rows if spent >= least][:MOST_MODULES]
    head = ("module", "what takes longest there: operands -> results", "computes", "communicates", "sends", "holds")
    more = f"\nand {len(rows) - len(shown)} rows that take less" if len(shown) < len(rows) else ""
    return table([head, *shown]) + more


def _decisions(plan: Decisions, module: _Module) -> Iterator[object]:
    for node in module.nodes:
        yield node.op, plan.in_strategy(node), plan.out_strategy(node)


def _strategy(plan: Decisions, node: Node | None) -> str:
    if node is None:
        return "-"
    name = node.op.split(".")[1]
    return f"{name} {in_tuples(plan.in_strategy(node))} -> {in_tuples(plan.out_strategy(node))}"


def _collectives(priced: _Priced) -> str:
    found = sorted(priced.dear.items(), key=lambda item: -item[1][2])
    rows = [
        (d.kinds, d.axes, d.cause or "-", f"{often:.0f}", in_bytes(sent), _time(spent))
        for d, (often, sent, spent) in found[:MOST_COLLECTIVES]
    ]
    more = f"\nand {len(found) - len(rows)} kinds that take less" if len(found) > len(rows) else ""
    head = ("the dearest collectives", "axes", "of", "times", "sent", "takes")
    return table([head, *rows]) + more if rows else "no collectives"


def _without_rule(plan: Decisions, priced: _Priced) -> Iterator[str]:
    spent: dict[str, list[float]] = defaultdict(list)
    for node in plan.graph.unlisted:
        spent[node.op].append(priced.computes_s[node.name])
    if spent:
        each = (f"{op} ({len(times)} times, {_time(sum(times))})" for op, times in spent.items())
        yield f"without a rule, run whole on every device: {', '.join(each)}"


def _template(name: str) -> str:
    return _NUMBER.sub("*", name)


def _joined(names: Sequence[str]) -> str:
    """One name for modules that differ in numbers alone: ``h.0-47.attn``; the model itself is a dash."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([_ranges(sorted(set(of))) for of in numbers])
    return _NUMBER.sub(lambda _: next(ranges), names[0]) or "-"


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
