"""The seconds of each operator and each transfer of a plan on given hardware, as if one came after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.decisions import Decisions, Transfer
from shardwright.compiler.plan.pricing.cost import Seconds, early_steps, once_more, overlaps, reduced_in_buckets
from shardwright.compiler.plan.pricing.hardware import Hardware


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
    forward_s: float = 0.0  # of the seconds, those of the forward
    again_s: float = 0.0  # and those of what the backward repeats of it
    value: str | None = None  # the value that a transfer brings to its target
    in_buckets: bool = False  # gradients of replicated parameters, which are reduced beside the backward
    early_forward_s: float = 0.0  # of the forward, what programs begin before it is needed
    early_gradient_s: float = 0.0  # of the gradient, what they wait for later
    overlaps: bool = False  # whether a search counts both as what may go on beside computing

    @property
    def gradient_s(self) -> float:
        """Return the seconds that the gradient takes."""
        return max(0.0, self.seconds - self.forward_s - self.again_s)


class Costs:
    """The seconds and bytes of the operators and transfers of a plan on ``hardware``."""

    def __init__(self, plan: Decisions, hardware: Hardware) -> None:
        self.plan, self.hardware, self.objective = plan, hardware, Seconds(hardware, plan.optimizer)

    @cached_property
    def inside(self) -> Mapping[str, Communication]:
        """The communication inside operators, by the name of the operator.

        Cached, as all of this class: the plan and the hardware are frozen.
        """
        found = {node.name: self._inside(node) for node in self.plan.capture.nodes}
        return {name: moved for name, moved in found.items() if moved is not None}

    def forward_s(self, node: Node) -> float:
        """Return the seconds that an operator computes in the forward."""
        return self.objective.computing(self.plan.graph, node, self.plan.strategies[node.name], self.plan.mesh)

    def backward_s(self, node: Node) -> float:
        """Return the seconds that an operator computes in the backward, without what is recomputed."""
        return self.objective.backward(self.plan.graph, node, self.plan.strategies[node.name], self.plan.mesh)

    @cached_property
    def computes_s(self) -> Mapping[str, float]:
        """Seconds that each operator computes, forward and backward, without its communication, by its name."""
        again = self.plan.computed_again
        return {
            node.name: self.forward_s(node) * (1 + (node.name in again)) + self.backward_s(node)
            for node in self.plan.capture.nodes
        }

    @cached_property
    def transfers(self) -> Sequence[Communication]:
        """The communication of the redistributions, in order of execution."""
        return [moved for _, moved in self.moving]

    @cached_property
    def moving(self) -> Sequence[tuple[Transfer, Communication]]:
        """The redistributions that communicate, in order of execution."""
        found = ((transfer, self.transferred(transfer)) for transfer in self.plan.transfers)
        return [(transfer, moved) for transfer, moved in found if moved is not None]

    def transferred(self, transfer: Transfer) -> Communication | None:
        """Return the communication of one redistribution; None where it moves nothing."""
        plan = self.plan
        found = list(plan.transfer_collectives(transfer))
        if not found:
            return None
        value = plan.brought(transfer)
        forward_s = self.objective.transfer(once_more(value), transfer.steps, plan.mesh)
        again_s = plan.repeats(transfer) * forward_s
        shared = reduced_in_buckets(value, transfer.steps)
        early = transfer.steps[: early_steps(transfer.steps)]
        early = early if shared or (value.begins_early and self.hardware.prefetches) else ()
        early_forward_s = self.objective.transfer(once_more(value), early, plan.mesh)
        return Communication(
            tuple(dict.fromkeys(f"{priced.collective.kind} {priced.direction}" for priced in found)),
            _axes([priced.collective for priced in found]),
            value.label,
            found[0].module,
            len(found),
            sum(priced.bytes for priced in found),
            self.objective.transfer(value, transfer.steps, plan.mesh) + again_s,
            forward_s,
            again_s,
            transfer.value,
            in_buckets=shared and value.kind == "parameter",
            early_forward_s=early_forward_s,
            early_gradient_s=self.objective.transfer(value, early, plan.mesh) - early_forward_s,
            overlaps=overlaps(value, shared=shared) and bool(early),
        )

    @property
    def moved(self) -> Sequence[Communication]:
        """Everything that is communicated."""
        return [*self.inside.values(), *self.transfers]

    def _inside(self, node: Node) -> Communication | None:
        plan, strategy = self.plan, self.plan.strategies[node.name]
        forward, backward = plan.graph.collectives_inside(node, strategy, plan.mesh)
        again = forward if node.name in plan.computed_again else ()
        found = [*forward, *backward, *again]
        if not found:
            return None
        inside_s = self.objective.inside(plan.graph, node, strategy, plan.mesh)
        forward_s, again_s = inside_s.forward, inside_s.forward if again else 0.0
        seconds = sum(inside_s) + again_s
        sent = sum(c.sent_bytes(plan.mesh) for c in found)
        kinds = tuple(dict.fromkeys(c.kind for c in found))
        return Communication(kinds, _axes(found), node.name, node.scope, len(found), sent, seconds, forward_s, again_s)


def _axes(collectives: Sequence[Collective]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for collective in collectives for axis in collective.axes))
