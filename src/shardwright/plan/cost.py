"""What a search minimises: seconds per step, or bytes moved.

    cost(plan) = sum over operators of operator(node, strategy) + sum over transfers of transfer(value, steps)

Seconds: an operator takes the larger of its share of flops and of bytes, at least the launch floor, three times with
its backward; a collective takes its link's latency and its bytes over the bandwidth. Overlap is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.graph.facts import bytes_moved, flops
from shardwright.graph.ir import Node, Value
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective, Step
from shardwright.plan.hardware import Hardware
from shardwright.plan.ruled import RuledGraph
from shardwright.rules.notation import Strategy
from shardwright.rules.table import internal_collectives

BACKWARD = 2  # a backward costs about two forwards


class Objective(Protocol):
    """A cost that is a sum over operators and transfers."""

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """What running ``node`` under a strategy costs, forward and backward, without its transfers."""

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        """What bringing a value to a target costs, forward and backward."""


def operator_collectives(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> list[Collective]:
    """The collectives inside an operator, of both directions where it has a backward."""
    values = graph.capture.values
    shapes = [values[name].shape for name in node.operands]
    itemsize = values[node.operands[0]].dtype.itemsize if node.operands else 1
    forward, backward = internal_collectives(node.op, graph.rules[node.name], strategy, mesh, shapes, itemsize)
    return [*forward, *(backward if needs_gradient(graph, node) else ())]


def transfer_collectives(value: Value, steps: Sequence[Step], mesh: Mesh) -> list[Collective]:
    """The collectives of a transfer, of both directions where the value has a gradient."""
    found = []
    for step in steps:
        forward, backward = step.collectives(value.shape, value.dtype.itemsize, mesh)
        found += [c for c in (forward, backward if value.needs_gradient else None) if c]
    return found


def needs_gradient(graph: RuledGraph, node: Node) -> bool:
    return any(graph.capture.values[name].needs_gradient for name in node.results)


@dataclass(frozen=True)
class Bytes:
    """Bytes that each device sends; each collective counts a byte more, so that among equals the fewest are chosen."""

    per_collective: float = 1.0

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        return self._sum(operator_collectives(graph, node, strategy, mesh), mesh)

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        return self._sum(transfer_collectives(value, steps, mesh), mesh)

    def _sum(self, collectives: list[Collective], mesh: Mesh) -> float:
        return sum(c.sent_bytes(mesh) + self.per_collective for c in collectives)


@dataclass(frozen=True)
class Seconds:
    """Seconds per step on given hardware."""

    hardware: Hardware

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        parts = mesh.extent(axis for axes in strategy.axes for axis in axes)
        work_s = flops(node, graph.capture) / self.hardware.flops
        traffic_s = bytes_moved(node, graph.capture) / self.hardware.memory_bandwidth
        once_s = max(work_s / parts, traffic_s / parts, self.hardware.launch_s)
        times = 1 + BACKWARD * needs_gradient(graph, node)
        return once_s * times + self._sum(operator_collectives(graph, node, strategy, mesh), mesh)

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        # The gradients of replicated parameters share a few collectives (lower.passes): each pays for its bytes alone.
        joined = value.kind == "parameter" and [step.kind for step in steps] == ["enter"]
        return self._sum(transfer_collectives(value, steps, mesh), mesh, latency=not joined)

    def _sum(self, collectives: list[Collective], mesh: Mesh, *, latency: bool = True) -> float:
        return sum(self._collective_s(c, mesh, latency) for c in collectives)

    def _collective_s(self, collective: Collective, mesh: Mesh, latency: bool) -> float:
        links = [axis.link or self.hardware.link for axis in mesh.axes if axis.name in collective.axes]
        latency_s = max(link.latency_s for link in links) if latency else 0.0
        return latency_s + collective.sent_bytes(mesh) / min(link.bandwidth for link in links)
