"""The time of a step under a plan on given hardware: what is hidden of its communication, and what repeats cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.cost import Objective, PerDirection, Seconds, once_more
from shardwright.compiler.plan.timing.acts import StepActs
from shardwright.compiler.plan.timing.costs import Costs
from shardwright.compiler.plan.timing.time_line import TimeLine, time_line


class Prices(Costs):
    """The seconds and bytes of a plan on ``hardware``."""

    @property
    def computing_s(self) -> float:
        """Seconds of a step that are computation."""
        return sum(self.computes_s[node.name] for node in self.nodes)

    @property
    def nodes(self) -> Sequence[Node]:
        """The operators that take part in the sums: all."""
        return self.plan.capture.nodes

    @property
    def waiting_s(self) -> float:
        """Seconds in which there is nothing to do: of pipeline stages alone."""
        return 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return self.plan.moved_bytes()

    @property
    def communicating_s(self) -> float:
        """Seconds of a step that are communication."""
        return sum(moved.seconds for moved in self.moved)

    @cached_property
    def updating_s(self) -> float:
        """Seconds of a step that are the optimizer's, and those of storing parameters in parts.

        Where one is stored so, all are DTensors, which no sum over parameters can say.

        Cached, as all of this class: the plan and the hardware are frozen.
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

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which computing waits for communication, or is slower because of it."""
        return self.communicating_s - self.hidden_s

    @property
    def hidden_s(self) -> float:
        """Seconds that a step is shorter since it computes and communicates at once.

        That is what the hardware hides of the time in which both go on.
        """
        return self.hardware.hides_gradients * self.time_line.together_s

    @cached_property
    def time_line(self) -> TimeLine:
        """When a device computes and communicates what, forward and backward."""
        return time_line(StepActs(self).all(), self.hardware.hides_gradients)

    @property
    def bounding(self) -> Seconds:
        """The prices whose sum is nearest to what a step takes of those that are a bound of it."""
        pairs = zip(self.overlapping_s, self.beside_s, strict=True)
        return self.objective.hiding(PerDirection(*(float(overlapping <= beside) for overlapping, beside in pairs)))

    @property
    def overlapping_s(self) -> PerDirection:
        """P and P' of `Seconds`: seconds of the communication that may go on beside computing."""
        forward = backward = 0.0
        for transfer, moved in self.moving:
            again_s = self.plan.repeats(transfer) * moved.early_forward_s
            if moved.overlaps:
                forward += moved.early_forward_s
                backward += moved.early_gradient_s
            backward += again_s
        return PerDirection(forward, backward)

    @property
    def beside_s(self) -> PerDirection:
        """C and C' of `Seconds`: seconds of the computing beside which communication may go on."""
        graph, nodes = self.plan.graph, self.plan.capture.nodes
        forward = sum(self.forward_s(node) for node in nodes if node.name in graph.before_last_gather)
        return PerDirection(forward, self.computing_s - sum(map(self.forward_s, nodes)))


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
            value = once_more(plan.capture.values[transfer.value])
            moved = value.shape, value.dtype, value.of_parameter, value.viewed, id(transfer.steps)
            if moved not in known:
                known[moved] = objective.transfer(value, transfer.steps, mesh)
            costs[block] += known[moved]
    return costs


def gathered_again(plan: Decisions, objective: Objective) -> float:
    """Return the cost of the values that the backward gathers again, in the unit of an objective."""
    values, total = plan.capture.values, 0.0
    for transfer in plan.transfers if plan.again else ():
        if transfer.value in plan.again and (times := plan.gathers_again(transfer)):
            value = once_more(values[transfer.value])
            total += times * objective.transfer(value, transfer.steps, plan.mesh)
    return total
