"""The cost of a plan on given hardware, operator by operator and transfer by transfer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.decisions import Decisions, Transfer
from shardwright.compiler.plan.pricing.cost import (
    EnteringParameter,
    Objective,
    Seconds,
    entering_alike,
    in_buckets,
    operator_collectives,
    reduced_in_buckets,
)
from shardwright.compiler.plan.pricing.hardware import Hardware

ROUNDING = 1e-9


@dataclass(frozen=True)
class Communication:
    """The communication at one place of a plan, both directions together: inside an operator, or of a transfer."""

    kinds: tuple[str, ...]  # "all_reduce forward", each once
    axes: tuple[str, ...]
    cause: str  # the label of the value, or the name of the operator
    module: str  # for which it is: its parameter's, or where the value is made
    collectives: int
    bytes: float  # sent by each device
    seconds: float
    value: str | None = None  # the value that a transfer brings to its target
    in_buckets: bool = False  # gradients of replicated parameters, which are reduced beside the backward


class Prices:
    """The seconds and bytes of a plan on ``hardware``."""

    def __init__(self, plan: Decisions, hardware: Hardware) -> None:
        self.plan, self.hardware, self.objective = plan, hardware, Seconds(hardware, plan.optimizer)

    @cached_property
    def inside(self) -> Mapping[str, Communication]:
        """The communication inside operators, by the name of the operator.

        Cached, as all of this class: the plan and the hardware are frozen.
        """
        found = {node.name: self._inside(node) for node in self.plan.capture.nodes}
        return {name: moved for name, moved in found.items() if moved is not None}

    @cached_property
    def computes_s(self) -> Mapping[str, float]:
        """Seconds that each operator computes, forward and backward, without its communication, by its name."""
        plan = self.plan
        spent = {
            node.name: self.objective.operator(plan.graph, node, plan.strategies[node.name], plan.mesh)
            for node in plan.capture.nodes
        }
        for node in plan.capture.nodes:
            if node.name in plan.computed_again:
                strategy = plan.strategies[node.name]
                spent[node.name] += self.objective.forward(plan.graph, node, strategy, plan.mesh)
        return {
            name: all_s - (self.inside[name].seconds if name in self.inside else 0) for name, all_s in spent.items()
        }

    @cached_property
    def transfers(self) -> Sequence[Communication]:
        """The communication of the redistributions, in order of execution."""
        return [moved for _, moved in self._moving]

    @cached_property
    def _moving(self) -> Sequence[tuple[Transfer, Communication]]:
        found = ((transfer, self.transferred(transfer)) for transfer in self.plan.transfers)
        return [(transfer, moved) for transfer, moved in found if moved is not None]

    def transferred(self, transfer: Transfer) -> Communication | None:
        """Return the communication of one redistribution; None where it moves nothing."""
        plan = self.plan
        found = list(plan.transfer_collectives(transfer))
        if not found:
            return None
        value = replace(plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
        spent = self.objective.transfer(value, transfer.steps, plan.mesh)
        if times := plan.repeats(transfer):
            spent += times * self.objective.transfer(replace(value, needs_gradient=False), transfer.steps, plan.mesh)
        kinds = tuple(dict.fromkeys(f"{priced.collective.kind} {priced.direction}" for priced in found))
        in_buckets = value.kind == "parameter" and reduced_in_buckets(value, transfer.steps)
        axes = _axes([priced.collective for priced in found])
        sent = sum(priced.bytes for priced in found)
        return Communication(
            kinds, axes, value.label, found[0].module, len(found), sent, spent, transfer.value, in_buckets
        )

    @property
    def moved(self) -> Sequence[Communication]:
        """Everything that is communicated."""
        return [*self.inside.values(), *self.transfers]

    @property
    def computing_s(self) -> float:
        """Seconds of a step that are computation."""
        return sum(self.computes_s.values())

    @property
    def communicating_s(self) -> float:
        """Seconds of a step that are communication."""
        return sum(moved.seconds for moved in self.moved)

    @cached_property
    def updating_s(self) -> float:
        """Seconds of a step that are the optimizer's, and those of storing parameters in parts.

        Where one is stored so, all are DTensors, which no sum over parameters can say.
        """
        plan = self.plan
        trained = [value for value in plan.capture.of_kind("parameter") if value.needs_gradient]
        whole = [value for value in trained if not self.objective.in_parts(plan.leaves[value.name], plan.mesh)]
        more_s = self.hardware.split_s * len(whole) if len(whole) < len(trained) else 0.0
        return sum(self.objective.leaf(value, plan.leaves[value.name], plan.mesh) for value in trained) + more_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.computing_s + self.communicating_s + self.updating_s + self.hardware.around_s - self.hidden_s

    @cached_property
    def hidden_s(self) -> float:
        """Seconds that a step is shorter since gradients are reduced and the backward computes at once.

        That is what the hardware hides of the time in which both go on, which is no longer than either of the two. A
        bucket begins when the backward has come to the first parameter of it, and when those before it are done.
        """
        if not self.hardware.hides_gradients:
            return 0.0
        done_s = 0.0
        for bucket in self._buckets():
            reached_s = self._reached_s[bucket[0][0].consumers[0][0]]
            done_s = max(done_s, reached_s) + sum(moved.seconds for _, moved in bucket)
        together_s = self.reducing_s - max(0.0, done_s - self.backward_s)
        return self.hardware.hides_gradients * together_s if together_s > ROUNDING * self.reducing_s else 0.0

    @property
    def reducing_s(self) -> float:
        """Seconds in which gradients are reduced in buckets, all of them."""
        return sum(moved.seconds for moved in self.transfers if moved.in_buckets)

    @property
    def backward_s(self) -> float:
        """Seconds of a step in which the backward computes."""
        return max(self._reached_s.values(), default=0.0)

    @cached_property
    def _reached_s(self) -> Mapping[str, float]:
        """Seconds until the backward is through with each operator, by the operator's name."""
        plan, passed_s, found = self.plan, 0.0, {}
        for node in reversed(plan.capture.nodes):
            passed_s += self.objective.backward(plan.graph, node, plan.strategies[node.name], plan.mesh)
            found[node.name] = passed_s
        return found

    def _buckets(self) -> list[list[tuple[Transfer, Communication]]]:
        """The gradients that are reduced in buckets, as programs join them, in the order in which they begin."""
        plan, hardware = self.plan, self.hardware
        found = [(transfer, moved) for transfer, moved in self._moving if moved.in_buckets]
        entering = []
        for transfer, _ in found:
            value = plan.capture.values[transfer.value]
            alike = entering_alike(value, transfer.steps[0])
            entering.append(EnteringParameter(value.name, plan.bytes_of(value), alike))
        groups = in_buckets(entering, hardware.buckets.bytes, hardware.buckets.first_bytes)
        return [[found[i] for i in members] for members in groups]

    def _inside(self, node: Node) -> Communication | None:
        plan, strategy = self.plan, self.plan.strategies[node.name]
        found = operator_collectives(plan.graph, node, strategy, plan.mesh)
        if node.name in plan.computed_again:
            found += plan.graph.collectives_inside(node, strategy, plan.mesh)[0]
        if not found:
            return None
        spent = sum(self.objective.collective(c, plan.mesh) for c in found)
        sent = sum(c.sent_bytes(plan.mesh) for c in found)
        kinds = tuple(dict.fromkeys(c.kind for c in found))
        return Communication(kinds, _axes(found), node.name, node.scope, len(found), sent, spent)


def repeated_costs(plan: Decisions, objective: Objective) -> dict[str, float]:
    """Return the cost of recomputing each block in the backward, by its name, in the unit of an objective."""
    graph, mesh = plan.graph, plan.mesh
    costs = dict.fromkeys((block.name for block in plan.blocks), 0.0)
    known: dict[Hashable, float] = {}  # equal layers cost the same, and equal steps of them are one object
    for node in plan.capture.nodes:
        if node.name in plan.computed_again:
            alike = graph.alike[node.name], plan.strategies[node.name]
            if alike not in known:
                known[alike] = objective.forward(graph, node, plan.strategies[node.name], mesh)
            costs[plan.block_of[node.name]] += known[alike]
    for transfer in plan.transfers:
        if block := plan.block_of_transfer(transfer):
            value = replace(plan.capture.values[transfer.value], needs_gradient=False)
            moved = value.shape, value.dtype, value.kind, id(transfer.steps)
            if moved not in known:
                known[moved] = objective.transfer(value, transfer.steps, mesh)
            costs[block] += known[moved]
    return costs


def gathered_again(plan: Decisions, objective: Objective) -> float:
    """Return the cost of the values that the backward gathers again, in the unit of an objective."""
    values, total = plan.capture.values, 0.0
    for transfer in plan.transfers if plan.again else ():
        if transfer.value in plan.again and (times := plan.gathers_again(transfer)):
            value = replace(values[transfer.value], needs_gradient=False)
            total += times * objective.transfer(value, transfer.steps, plan.mesh)
    return total


def _axes(collectives: Sequence[Collective]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for collective in collectives for axis in collective.axes))
