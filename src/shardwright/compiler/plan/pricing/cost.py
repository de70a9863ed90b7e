"""The cost that a search minimises: seconds per step (`Seconds`) or bytes sent (`Bytes`).

Seconds: an operator takes the longest of its share of flops, its share of bytes and the launch, and of the others the
part that the hardware does not overlap (`Hardware.at_once`); three times that with its backward. Fused attention
multiplies at a speed of its own (`Hardware.attention`), and its backward makes the scores again. A collective takes
what the hardware's curve says for its kind, its bytes, its number of ranks and its link (`Hardware.collective_s`).
Nothing overlaps in such a sum but what goes on inside of an operator, round by round (`Seconds.inside`): `plan.timing`
subtracts the communication that is hidden, and `Seconds.hiding` gives bounds of it that are sums. A parameter takes the
optimizer's update, which reads its shard, the gradient and the states, and writes all of them but the gradient
(`Hardware.updating`), and a little more where it is sharded. Other leaves cost nothing. What any step takes besides
(`Hardware.around_s`) decides nothing, and is added by `plan.timing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, get_args

import torch

from shardwright.compiler.capture.facts import bytes_moved, flops, operator_of
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Link, Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step, enters
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.links import LinkKind, link_along, per_host_along
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates, local_bytes, updated_times
from shardwright.compiler.rules import row
from shardwright.compiler.rules.notation import Strategy
from shardwright.compiler.rules.table import row_of
from shardwright.distributed.gradients import BUCKET_BYTES

BACKWARD = 2  # a backward costs about two forwards
IN_FLIGHT = 2  # bytes of gradients in reduce-scatters at a time: so many times those of a layer's parameters
# Of fused attention: the forward has two products, the backward five, of which the first makes the scores once more.
BACKWARD_OF_ATTENTION = 2.5
# Of scores in blocks: two products, a mask, the greatest, the exponentials and their sum, a quotient, dropout.
PASSES_OVER_SCORES = 12
ComputingPart = Literal["flops", "traffic", "launch"]
COMPUTING_PARTS: tuple[ComputingPart, ...] = get_args(ComputingPart)

Beside = Literal["forward", "backward", "either"]
"""The computing beside which communication may go on; "either" where a cost does not tell which of both."""


class Objective(Protocol):
    """A cost that is a sum over operators, transfers and leaves."""

    def __hash__(self) -> int:
        """Equal objectives have equal hashes: what they price is looked up by them."""

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """Return the cost of ``node`` under a strategy, forward and backward, without its transfers."""

    def floor(self, graph: RuledGraph, node: Node, devices: int) -> float:
        """Return a lower bound of the cost of ``node`` on so many devices, under any strategy on any mesh."""

    def forward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """Return the cost of running the forward of ``node`` once more, without its transfers."""

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        """Return the cost of bringing a value to a target, forward and backward."""

    def collective(
        self, collective: Collective, mesh: Mesh, *, shared: bool = False, beside: Beside | None = None
    ) -> float:
        """Return the cost of one collective.

        Args:
            shared: whether it is part of a larger one.
            beside: of a value that `overlaps`, beside what computing the collective may go on.
        """

    def leaf(self, value: Value, layout: Layout, mesh: Mesh) -> float:
        """Return the cost of holding a leaf in a layout, and of updating it."""


def largest_inside(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> int:
    """Return the most bytes of buffers of the collectives inside an operator at once.

    Of blocks that are shifted the forward has the one that is here and the one that comes; the backward has three of
    their gradients, too. Rows that a ring exchanges are there as they go and as they come.
    """
    forward, backward = graph.collectives_inside(node, strategy, mesh)
    rings = any(c.kind == "shift" for c in forward)

    def at_once(c: Collective, shifted: int) -> int:
        return c.bytes * (shifted if c.kind == "shift" else 2 if rings else 1)

    return max((at_once(c, shifted) for of, shifted in ((forward, 2), (backward, 5)) for c in of), default=0)


def operator_collectives(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> list[Collective]:
    """The collectives inside an operator, of both directions where it has a backward."""
    forward, backward = graph.collectives_inside(node, strategy, mesh)
    return [*forward, *backward]


def transfer_collectives(value: Value, steps: Sequence[Step], mesh: Mesh) -> list[Collective]:
    """The collectives of a transfer, of both directions where the value has a gradient."""
    found = []
    for step in steps:
        forward, backward = value.collectives(step, mesh)
        found += [c for c in (forward, backward if value.needs_gradient else None) if c]
    return found


def reduced_in_buckets(value: Value, steps: Sequence[Step]) -> bool:
    """Return whether a transfer does nothing but reduce the gradient of a replicated parameter, with others.

    A search takes that of its casts and views for it, which plans sum where the parameter is read.
    """
    return value.of_parameter and enters(steps)


def overlaps(value: Value, *, shared: bool) -> bool:
    """Return whether the communication of a value, and of its gradient, may go on beside computing.

    Views of parameters are gathered where they are read; with ``shared`` a gradient is reduced with others.
    """
    return not value.read_first and (value.of_parameter if shared else value.begins_early)


def early_steps(steps: Sequence[Step]) -> int:
    """Return how many steps of what `overlaps` do: up to the first all-gather, unless other steps come before it.

    The gradient's sum over replicas stands before that. What comes behind it follows at once, forward and backward.
    """
    first = 1 if enters(steps[:1]) else 0
    return first + 1 if steps[first : first + 1] and steps[first].kind == "all_gather" else first


def forward_beside(value: Value) -> Beside:
    """Return beside what a value that `overlaps` is brought to a target: what has no gradient may be brought again."""
    return "forward" if value.needs_gradient else "either"


def once_more(value: Value) -> Value:
    """Return what counts of a value that the backward brings to a target once more: it has computed before that."""
    return replace(value, needs_gradient=False, read_first=False)


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

    def collective(
        self, collective: Collective, mesh: Mesh, *, shared: bool = False, beside: Beside | None = None
    ) -> float:
        return collective.sent_bytes(mesh) + self.per_collective

    def _sum(self, collectives: list[Collective], mesh: Mesh) -> float:
        return sum(self.collective(c, mesh) for c in collectives)


class PerDirection(NamedTuple):
    """A number of the forward of a step, and one of its backward."""

    forward: float
    backward: float


NEITHER = PerDirection(0.0, 0.0)


@dataclass(frozen=True)
class Seconds:
    """Seconds per step on given hardware, with the step of an optimizer.

    Of the forward of a step, P seconds are communication that may go on beside computing, and C seconds the computing
    beside which it may (`RuledGraph.before_last_gather`); so are P' and C' of its backward. Where the hardware
    prefetches, P and P' are the communication of parameters and their gradients that programs begin early, and wait for
    late (`early_steps`); elsewhere P is nothing, and P' the reduction of gradients in buckets. C' has what is
    recomputed.
    Both go on at once for at most min(P, C) + min(P', C') seconds, and the hardware hides a share of that time
    (`Hardware.hides_gradients`, here h). So whatever the order in which a program does what it does, a step takes

        all that it computes and communicates - hidden
            >=  all that - h * (min(P, C) + min(P', C'))
            >=  all that - h * (w * P + (1 - w) * C + v * P' + (1 - v) * C')  for w and v from 0 to 1,

    and the last of these is a sum over operators, transfers and leaves, which a search minimises:
    ``overlapping_hidden`` are h * w and h * v, and ``computing_hidden`` h * (1 - w) and h * (1 - v), the shares of P
    and P', and of C and C', that count nothing. The least of it over all plans is a bound of what the step of any plan
    takes. `plan.timing` says what it takes.

    P and P' are without what is `read_first`. That is gathered before the first operator that reads a parameter, and
    its gradient is reduced after the backward of that one, so that it goes on beside nothing but what stands before
    that operator, for at most the K seconds which that takes (`before_first`). What brings it to later readers alone
    is among P and P' (`RuledGraph.read_first_by`). All else goes on beside the rest of C
    and C', or beside these K seconds too: a step takes no less than the sum above, less h * K.
    """

    hardware: Hardware
    optimizer: OptimizerStates = ADAMW
    overlapping_hidden: PerDirection = NEITHER
    computing_hidden: PerDirection = NEITHER

    def hiding(self, weights: PerDirection) -> Seconds:
        """Return the prices that are a bound: with these weights of what overlaps, the rest of what it is beside."""
        hides = self.hardware.hides_gradients
        overlapping = PerDirection(*(hides * weight for weight in weights))
        computing = PerDirection(*(hides * (1 - weight) for weight in weights))
        return replace(self, overlapping_hidden=overlapping, computing_hidden=computing)

    def before_first(self, graph: RuledGraph) -> float:
        """Return the most seconds that is computed before what is read first, forward and backward; 0 of nothing."""
        nodes = graph.capture.nodes
        readers = [
            at for at, node in enumerate(nodes) if any(graph.read_first_by(name, {node.name}) for name in node.operands)
        ]
        before = nodes[: max(readers, default=0)]
        return sum(self._forward_s(work_of(graph, node), 1) * (1 + backward_times(graph, node)) for node in before)

    def operator(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        computing_s = self.computing(graph, node, strategy, mesh) * self._times(graph, node)
        return computing_s + sum(self.inside(graph, node, strategy, mesh))

    def inside(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> PerDirection:
        """Return the seconds of the communication inside ``node``, forward and backward, without what is hidden there.

        A block is shifted beside the computing of all rounds but the last.
        """
        ways = graph.collectives_inside(node, strategy, mesh)
        if ways == ((), ()):
            return NEITHER
        forward_s = self.computing(graph, node, strategy, mesh)
        computing_s = forward_s, forward_s * backward_times(graph, node)
        return PerDirection(*(self._exposed_s(*way, mesh) for way in zip(ways, computing_s, strict=True)))

    def _exposed_s(self, collectives: Sequence[Collective], computing_s: float, mesh: Mesh) -> float:
        seconds = self._sum(collectives, mesh)
        shifts = [collective for collective in collectives if collective.kind == "shift"]
        if not shifts or not self.hardware.prefetches:
            return seconds
        rounds = mesh.extent(shifts[0].axes)
        together_s = min(self._sum(shifts, mesh), computing_s * (rounds - 1) / rounds)
        return seconds - self.hardware.hides_gradients * together_s

    def computing(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """Return the seconds that the forward of ``node`` computes on the busiest rank, all of them."""
        return self._forward_s(_work(graph, node, strategy, mesh), _parts(graph, node, strategy, mesh))

    def floor(self, graph: RuledGraph, node: Node, devices: int) -> float:
        forward_s = self._forward_s(work_of(graph, node), graph.rules[node.name].most_parts(devices))
        return forward_s * self._times(graph, node)

    def _times(self, graph: RuledGraph, node: Node) -> float:
        """Return how often the forward of ``node`` counts, its backward included."""
        hidden = self.computing_hidden
        forward = 1 - hidden.forward * (node.name in graph.before_last_gather)
        return forward + backward_times(graph, node) * (1 - hidden.backward)

    def backward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        """Return the seconds of the backward of ``node``, without its communication."""
        return backward_times(graph, node) * self.computing(graph, node, strategy, mesh)

    def forward(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
        computing_s = self.computing(graph, node, strategy, mesh)  # what is repeated is a part of the backward
        inside_s = self.inside(graph, node, strategy, mesh).forward
        return computing_s * (1 - self.computing_hidden.backward) + inside_s

    def longest_part(self, graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> ComputingPart:
        """Return what takes longest of computing ``node``."""
        each_s = self._roofline_s(_work(graph, node, strategy, mesh), _parts(graph, node, strategy, mesh))
        return COMPUTING_PARTS[each_s.index(max(each_s))]

    def _roofline_s(self, work: OperatorWork, parts: float) -> tuple[float, float, float]:
        """Return the seconds of each of `COMPUTING_PARTS`."""
        work_s = work.flops / (self.hardware.flops_in(work.dtype) * (self.hardware.attention if work.attention else 1))
        traffic_s = work.bytes / self.hardware.memory_bandwidth
        return work_s / parts, traffic_s / parts, self.hardware.launch_s

    def _forward_s(self, work: OperatorWork, parts: float) -> float:
        each_s = self._roofline_s(work, parts)
        longest_s = max(each_s)
        return longest_s + (1 - self.hardware.at_once) * (sum(each_s) - longest_s)

    def transfer(self, value: Value, steps: Sequence[Step], mesh: Mesh) -> float:
        # The gradients of replicated parameters share a few collectives (lower.passes): each pays for its bytes alone.
        shared = reduced_in_buckets(value, steps)
        early = early_steps(steps) if overlaps(value, shared=shared) else 0
        seconds = 0.0
        for at, step in enumerate(steps):
            there, back = value.collectives(step, mesh)
            if there:
                beside = forward_beside(value) if at < early else None
                seconds += self.collective(there, mesh, shared=shared, beside=beside)
            if back and value.needs_gradient:
                seconds += self.collective(back, mesh, shared=shared, beside="backward" if at < early else None)
        return seconds

    def leaf(self, value: Value, layout: Layout, mesh: Mesh) -> float:
        if value.kind != "parameter" or not value.needs_gradient:
            return 0.0
        taking = self.hardware.updating(self.optimizer.per_entry)
        moved = local_bytes(value, layout, mesh) * updated_times(self.optimizer.per_entry)
        more_s = self.hardware.split_s if self.in_parts(layout, mesh) else 0.0
        return moved / taking.bandwidth + taking.parameter_s + more_s

    @staticmethod
    def in_parts(layout: Layout, mesh: Mesh) -> bool:
        """Return whether a leaf is sharded."""
        return mesh.extent(layout.split_axes) > 1

    def _sum(
        self, collectives: Iterable[Collective], mesh: Mesh, *, shared: bool = False, beside: Beside | None = None
    ) -> float:
        return sum(self.collective(c, mesh, shared=shared, beside=beside) for c in collectives)

    def collective(
        self, collective: Collective, mesh: Mesh, *, shared: bool = False, beside: Beside | None = None
    ) -> float:
        """Seconds of one collective; with ``shared`` it is part of a larger one and pays for its bytes alone."""
        ranks, where, per_host, given = _links(mesh, collective.axes, self.hardware.ranks_per_host)
        seconds = 0.0
        if where is not None:
            price = self.hardware.shared_s if shared else self.hardware.collective_s
            seconds = price(collective.kind, collective.bytes, ranks, where, per_host)
        for link in given:
            latency_s = 0.0 if shared else link.latency_s
            seconds = max(seconds, latency_s + collective.sent_bytes(mesh) / link.bandwidth)
        if shared:
            seconds += 2 * collective.bytes / self.hardware.memory_bandwidth  # a gradient, copied into its bucket
        if beside is None or not (shared or self.hardware.prefetches):
            return seconds
        hidden = self.overlapping_hidden
        return seconds * (1 - (max(hidden) if beside == "either" else getattr(hidden, beside)))


@lru_cache(maxsize=1 << 12)  # a search asks a million times
def _links(
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


def _parts(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
    """Return into how many parts the work of ``node`` is split that are as large as the largest."""
    parts = mesh.extent({axis for axes in strategy.axes for axis in axes})
    busiest = row_of(node.op).busiest
    if busiest is None or parts == 1:
        return parts
    return parts / busiest(operator_of(node, graph.capture), graph.rules[node.name].cuts(strategy), mesh)


@dataclass(frozen=True)
class OperatorWork:
    """The work of an operator's forward on whole tensors: it computes in ``dtype``, and moves ``bytes``.

    ``attention`` says whether it is fused attention.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    attention: bool


def work_of(graph: RuledGraph, node: Node) -> OperatorWork:
    """Return the work of the forward of ``node``, computed once for all that are alike."""
    key = "work", graph.alike[node.name]
    if key not in graph.known:
        moved, attention = bytes_moved(node, graph.capture), row_of(node.op).flops is row.attention
        graph.known[key] = OperatorWork(flops(node, graph.capture), moved, _dtype(graph, node), attention)
    found: OperatorWork = graph.known[key]
    return found


def _work(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> OperatorWork:
    """Return the work of ``node`` under a strategy: scores that are made in blocks are products, written and read."""
    usual, in_blocks = work_of(graph, node), row_of(node.op).in_blocks
    if in_blocks is None or not graph.rules[node.name].merged_axes(strategy, mesh):
        return usual
    count, dtype = in_blocks(operator_of(node, graph.capture)), torch.promote_types(usual.dtype, torch.float32)
    moved = usual.bytes + PASSES_OVER_SCORES * count * dtype.itemsize
    return OperatorWork(usual.flops, moved, dtype, attention=False) if count else usual


def backward_times(graph: RuledGraph, node: Node) -> float:
    """Return how many forwards the backward of ``node`` costs, 0 where it has none."""
    if not graph.needs_gradient(node):
        return 0.0
    return BACKWARD_OF_ATTENTION if work_of(graph, node).attention else BACKWARD


def _dtype(graph: RuledGraph, node: Node) -> torch.dtype:
    """Return the dtype that a node computes in: that of its first floating-point operand."""
    values = graph.capture.values
    dtypes = (values[name].dtype for name in (*node.operands, *node.results))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
