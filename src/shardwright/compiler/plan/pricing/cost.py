"""What a search minimises: seconds per step, or bytes moved.

    cost(plan) = sum over operators of operator(node, strategy)
               + sum over transfers of transfer(value, steps)
               + sum over leaves of    leaf(value, layout)

Seconds: an operator takes the longest of its share of flops, its share of bytes and the launch, and of the others what
the hardware does not do at once (`Hardware.at_once`); three times with its backward. A collective takes what the
hardware's curve says for its kind, its bytes, its number of ranks and its link (`Hardware.collective_s`). Nothing
overlaps in such a sum: `plan.prices` takes off what is hidden of the gradients, and `Seconds` has bounds of it that are
sums. A parameter takes the step of the optimizer, which reads its part, the gradient and the states, and writes all of
them but the gradient, as fast as the hardware does for such optimizers (`Hardware.updating`); and what any parameter
takes, more where it is stored in parts. To hold another leaf costs neither seconds nor bytes moved. What any step takes
beside (`Hardware.around_s`) decides nothing, and is added by `plan.prices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch

from shardwright.compiler.capture.facts import bytes_moved, flops
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Link, Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step, enters
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.links import LinkKind, link_along, per_host_along
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.pricing.optimizers import ADAMW, OptimizerStates, updated_times
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.rules.notation import Strategy
from shardwright.distributed.gradients import BUCKET_BYTES

BACKWARD = 2  # a backward costs about two forwards


class Objective(Protocol):
    """A cost that is a sum over operators, transfers and leaves."""

    def __hash__(self) -> int:
        """Equal objectives have equal hashes: what they price is looked up by them."""

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """What running ``node`` under a strategy costs, forward and backward, without its transfers."""

    def floor(self, graph: RuledGraph, node: Node, devices: int) -> float:
        """What running ``node`` costs at least on so many devices, under whichever strategy on whichever mesh."""

    def forward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """What running the forward of ``node`` once more costs, without its transfers."""

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        """What bringing a value to a target costs, forward and backward."""

    def collective(self, collective: Collective, mesh: Mesh, *, shared: bool = False) -> float:
        """What one collective costs; with ``shared`` it is part of a larger one."""

    def leaf(self, value: Value, layout: Layout, mesh: Mesh) -> float:
        """What holding a parameter, buffer, input or constant in a layout costs, and updating it."""


def operator_collectives(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> list[Collective]:
    """The collectives inside an operator, of both directions where it has a backward."""
    forward, backward = graph.collectives_inside(node, strategy, mesh)
    return [*forward, *backward]


def transfer_collectives(value: Value, steps: Sequence[Step], mesh: Mesh) -> list[Collective]:
    """The collectives of a transfer, of both directions where the value has a gradient."""
    found = []
    for step in steps:
        forward, backward = step.collectives(value.shape, value.dtype.itemsize, mesh)
        found += [c for c in (forward, backward if value.needs_gradient else None) if c]
    return found


def reduced_in_buckets(value: Value, steps: Sequence[Step]) -> bool:
    """Whether a transfer does nothing but add up the gradient of a replicated parameter, together with others."""
    return value.kind == "parameter" and enters(steps)


def largest_buffer(value: Value, steps: Sequence[Step], collectives: Iterable[Collective]) -> int:
    """The bytes of the largest buffer that a transfer works on, whose collectives these are.

    Gradients of replicated parameters are reduced in parts no larger than a bucket.
    """
    size = max((collective.bytes for collective in collectives), default=0)
    return min(size, BUCKET_BYTES) if reduced_in_buckets(value, steps) else size


@dataclass(frozen=True)
class Bytes:
    """Bytes that each device sends; each collective counts a byte more, so that among equals the fewest are chosen."""

    per_collective: float = 1.0

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        return self._sum(operator_collectives(graph, node, strategy, mesh), mesh)

    def floor(self, graph: RuledGraph, node: Node, devices: int) -> float:
        return 0.0

    def forward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        return self._sum(list(graph.collectives_inside(node, strategy, mesh)[0]), mesh)

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        return self._sum(transfer_collectives(value, steps, mesh), mesh)

    def leaf(self, value: Value, layout: Layout, mesh: Mesh) -> float:
        return 0.0

    def collective(self, collective: Collective, mesh: Mesh, *, shared: bool = False) -> float:
        return collective.sent_bytes(mesh) + self.per_collective

    def _sum(self, collectives: list[Collective], mesh: Mesh) -> float:
        return sum(self.collective(c, mesh) for c in collectives)


@dataclass(frozen=True)
class Seconds:
    """Seconds per step on given hardware, with the step of an optimizer.

    ``gradients_hidden`` and ``backward_hidden`` are the shares of reducing gradients in buckets, and of computing the
    backward, that count nothing. What goes on at once of the two is never more than either, and so never more than any
    mean of them: with shares that add up to `Hardware.hides_gradients`, a step takes no less than this.
    """

    hardware: Hardware
    optimizer: OptimizerStates = ADAMW
    gradients_hidden: float = 0.0
    backward_hidden: float = 0.0

    def hiding(self, share: float) -> Seconds:
        """The same with all that the hardware hides: this share of it of the gradients, the rest of the backward."""
        hides = self.hardware.hides_gradients
        return replace(self, gradients_hidden=share * hides, backward_hidden=(1 - share) * hides)

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        computing_s = self._once_s(graph, node, _parts(strategy, mesh)) * self._times(graph, node)
        return computing_s + self._sum(operator_collectives(graph, node, strategy, mesh), mesh)

    def floor(self, graph: RuledGraph, node: Node, devices: int) -> float:
        return self._once_s(graph, node, graph.rules[node.name].most_parts(devices)) * self._times(graph, node)

    def _times(self, graph: RuledGraph, node: Node) -> float:
        """How often the forward of ``node`` counts, its backward included."""
        return 1 + BACKWARD * graph.needs_gradient(node) * (1 - self.backward_hidden)

    def backward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """What computing the backward of ``node`` takes, without what it communicates."""
        return BACKWARD * graph.needs_gradient(node) * self._once_s(graph, node, _parts(strategy, mesh))

    def forward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        inside = list(graph.collectives_inside(node, strategy, mesh)[0])
        return self._once_s(graph, node, _parts(strategy, mesh)) + self._sum(inside, mesh)

    def _once_s(self, graph: RuledGraph, node: Node, parts: int) -> float:
        """The forward in so many parts, without what it communicates."""
        work = _work(graph, node)
        work_s = work.flops / self.hardware.flops_in(work.dtype)
        traffic_s = work.bytes / self.hardware.memory_bandwidth
        each_s = work_s / parts, traffic_s / parts, self.hardware.launch_s
        longest_s = max(each_s)
        return longest_s + (1 - self.hardware.at_once) * (sum(each_s) - longest_s)

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        # The gradients of replicated parameters share a few collectives (lower.passes): each pays for its bytes alone.
        return self._sum(transfer_collectives(value, steps, mesh), mesh, shared=reduced_in_buckets(value, steps))

    def leaf(self, value: Value, layout: Layout, mesh: Mesh) -> float:
        if value.kind != "parameter" or not value.needs_gradient:
            return 0.0
        taking = self.hardware.updating(self.optimizer.per_entry)
        moved = local_bytes(value, layout, mesh) * updated_times(self.optimizer.per_entry)
        more_s = self.hardware.split_s if self.in_parts(layout, mesh) else 0.0
        return moved / taking.bandwidth + taking.parameter_s + more_s

    @staticmethod
    def in_parts(layout: Layout, mesh: Mesh) -> bool:
        """Whether devices hold parts of a leaf."""
        return mesh.extent(layout.split_axes) > 1

    def _sum(self, collectives: list[Collective], mesh: Mesh, *, shared: bool = False) -> float:
        return sum(self.collective(c, mesh, shared=shared) for c in collectives)

    def collective(self, collective: Collective, mesh: Mesh, *, shared: bool = False) -> float:
        """Seconds of one collective; with ``shared`` it is part of a larger one and pays for its bytes alone."""
        ranks, where, per_host, given = _road(mesh, collective.axes, self.hardware.ranks_per_host)
        seconds = 0.0
        if where is not None:
            price = self.hardware.shared_s if shared else self.hardware.collective_s
            seconds = price(collective.kind, collective.bytes, ranks, where, per_host)
        for link in given:
            latency_s = 0.0 if shared else link.latency_s
            seconds = max(seconds, latency_s + collective.sent_bytes(mesh) / link.bandwidth)
        if not shared:
            return seconds
        copied_s = 2 * collective.bytes / self.hardware.memory_bandwidth  # a gradient, into its bucket
        return (seconds + copied_s) * (1 - self.gradients_hidden)


@lru_cache(maxsize=1 << 12)  # a search asks a million times
def _road(
    mesh: Mesh, axes: tuple[str, ...], ranks_per_host: int | None
) -> tuple[int, LinkKind | None, int, tuple[Link, ...]]:
    """Along ``axes``: the number of ranks, the hardware's link, the ranks on each host, and the links of the axes.

    The hardware's is None where every axis brings its own; among several links the slowest counts.

    Cached by all that it reads: the mesh with the links of its axes, the axes, and how many ranks a host has.
    """
    along = [axis for axis in mesh.axes if axis.name in axes and axis.size > 1]
    given = tuple(axis.link for axis in along if axis.link is not None)
    where = link_along(mesh, axes, ranks_per_host) if len(given) < len(along) else None
    beside = per_host_along(mesh, axes, ranks_per_host) if ranks_per_host and where == "between" else 1
    return mesh.extent(axes), where, beside, given


def _parts(strategy: Strategy, mesh: Mesh) -> int:
    """Among how many devices an operator is shared."""
    return mesh.extent(axis for axes in strategy.axes for axis in axes)


@dataclass(frozen=True)
class _Work:
    """What the forward of an operator does on the whole tensors: it computes in ``dtype``, and moves ``bytes``."""

    flops: int
    bytes: int
    dtype: torch.dtype


def _work(graph: RuledGraph, node: Node) -> _Work:
    """What the forward of ``node`` does, once for all that are alike."""
    key = "work", graph.alike[node.name]
    if key not in graph.known:
        graph.known[key] = _Work(flops(node, graph.capture), bytes_moved(node, graph.capture), _dtype(graph, node))
    found: _Work = graph.known[key]
    return found


def _dtype(graph: RuledGraph, node: Node) -> torch.dtype:
    """What a node computes in: the dtype of its first floating-point operand."""
    values = graph.capture.values
    dtypes = (values[name].dtype for name in (*node.operands, *node.results))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
