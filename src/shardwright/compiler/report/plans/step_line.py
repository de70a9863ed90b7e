"""What one device does in a step, one after the other: the forward, then the backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.plan.decided.decisions import Transfer
from shardwright.compiler.plan.decided.prices import Prices
from shardwright.compiler.plan.plan import Plan

Lane = Literal["computes", "communicates"]


class Event(NamedTuple):
    """Computing or communicating for one operator, in one direction."""

    backward: bool
    lane: Lane
    operator: str  # its name, "" where none is concerned
    seconds: float


def events_of(plan: Plan, prices: Prices) -> list[Event]:
    """All that computes or communicates, in order, as if nothing were hidden; what the optimizer does follows it."""
    both = list(_both_ways(plan, prices))
    forward = [Event(False, lane, name, seconds) for lane, name, seconds, _ in both if seconds > 0]
    backward = [Event(True, lane, name, seconds) for lane, name, _, seconds in reversed(both) if seconds > 0]
    return [*forward, *backward]


def _both_ways(plan: Plan, prices: Prices) -> Iterator[tuple[Lane, str, float, float]]:
    """What is done in the order of the forward, with its seconds there and in the backward."""
    coming = _coming(plan)
    for node in plan.capture.nodes:
        for transfer in coming[node.name]:
            yield "communicates", node.name, *_transferred(plan, prices, transfer)
        computing_s, inside_s = _forward_s(plan, prices, node)
        moved = prices.inside.get(node.name)
        yield "computes", node.name, computing_s, prices.computes_s[node.name] - computing_s
        yield "communicates", node.name, inside_s, (moved.seconds if moved else 0.0) - inside_s
    for transfer in coming[""]:
        yield "communicates", "", *_transferred(plan, prices, transfer)


def _coming(plan: Plan) -> dict[str, list[Transfer]]:
    """What is brought to its place before each operator, the first that needs it there; "" stands for the outputs."""
    found: dict[str, list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        if transfer.steps:
            found[transfer.consumers[0][0]].append(transfer)
    return found


def _forward_s(plan: Plan, prices: Prices, node: Node) -> tuple[float, float]:
    """What a node computes in the forward, and what it communicates inside."""
    strategy = plan.strategies[node.name]
    found = plan.graph.collectives_inside(node, strategy, plan.mesh)[0]
    inside_s = sum(prices.objective.collective(collective, plan.mesh) for collective in found)
    return prices.objective.forward(plan.graph, node, strategy, plan.mesh) - inside_s, inside_s


def _transferred(plan: Plan, prices: Prices, transfer: Transfer) -> tuple[float, float]:
    """Seconds of the forward and of the backward."""
    moved = prices.transferred(transfer)
    if moved is None:
        return 0.0, 0.0
    found = [each.collective for each in plan.transfer_collectives(transfer) if each.direction == "forward"]
    forward_s = sum(prices.objective.collective(collective, plan.mesh) for collective in found)
    return forward_s, moved.seconds - forward_s
