"""The bytes that a device holds under a plan, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from shardwright.graph.ir import Value
from shardwright.mesh.redistribute import copies
from shardwright.plan.decisions import Decisions
from shardwright.plan.pricing.memory import Kept, local_bytes
from shardwright.plan.pricing.optimizers import OptimizerStates
from shardwright.world.gradients import BUCKET_BYTES


@dataclass(frozen=True)
class Held:
    """Bytes of one device, by what they are for.

    ``activations`` are what autograd keeps from the forward for the backward; ``buffers`` those of the model and what
    it closes over; ``communication`` is the largest buffer of a collective.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    inputs: int
    communication: int

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(size for _, size in self.kinds())

    def kinds(self) -> Iterator[tuple[str, int]]:
        """Each kind with its bytes."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))


def held_by(plan: Decisions, optimizer: OptimizerStates, rank: int = 0) -> Held:
    """What ``rank`` holds; none holds more than rank 0."""
    sizes = {
        value.name: local_bytes(value, plan.leaves[value.name], plan.mesh, rank)
        for value in plan.capture.values.values()
        if value.kind != "result"
    }
    trained = [sizes[value.name] for value in plan.capture.of_kind("parameter") if value.needs_gradient]
    of_kind: Counter[str] = Counter()
    for value in plan.capture.values.values():
        of_kind[value.kind] += sizes.get(value.name, 0)
    return Held(
        parameters=of_kind["parameter"],
        gradients=sum(trained),
        optimizer=sum(map(optimizer.bytes_for, trained)),
        activations=sum(saved_memory(plan, rank).values()),
        buffers=of_kind["buffer"] + of_kind["constant"],
        inputs=of_kind["input"],
        communication=_largest_buffer(plan),
    )


Storage = tuple[object, ...]
"""What tells apart where tensors lie: a value where it is made, on its way to a target, or beside an operator."""


def saved_memory(plan: Decisions, rank: int = 0) -> dict[Storage, int]:
    """What is kept for the backward, each storage once; leaves are held all the same, and left out."""
    kept = plan.kept
    read, sizes = _storages(plan, kept, rank)
    found: dict[Storage, int] = {}
    for node in plan.capture.nodes:
        saved = kept.saved[node.name]
        lying = [read[node.name, i] for i in saved.operands or ()]
        lying += [read["", node.results[i]] for i in saved.results or ()]
        found.update({storage: sizes[storage] for storage in lying if storage in sizes})
        layouts = {name: plan.target(node, i).layout for i, name in enumerate(node.operands)}
        layouts |= {name: plan.layout(name) for name in node.results} if saved.beside else {}
        found["beside", node.name] = kept.beside(node, layouts.__getitem__, plan.mesh, rank)
    return found


def _storages(plan: Decisions, kept: Kept, rank: int) -> tuple[dict[tuple[str, object], Storage], dict[Storage, int]]:
    """Where each operand lies, by operator and index, and each value, by "" and its name; and how large that is.

    Where leaves lie has no size. Of what the backward moves again, its source is kept.
    """
    capture = plan.capture
    way = {use: transfer for transfer in plan.transfers for use in transfer.consumers}
    lies: dict[tuple[str, object], Storage] = {}
    sizes: dict[Storage, int] = {}
    for value in capture.values.values():
        lies["", value.name] = ("made", value.name)
    for node in capture.nodes:
        for i, name in enumerate(node.operands):
            transfer = way[node.name, i]
            lies[node.name, i] = lies["", name]
            if copies(transfer.steps) and not plan.gathers_again(transfer):
                lies[node.name, i] = storage = ("moved", name, transfer.target)
                sizes[storage] = local_bytes(capture.values[name], transfer.target.layout, plan.mesh, rank)
        for name in node.results:
            if node.name in kept.views:
                lies["", name] = lies[node.name, 0]
            else:
                sizes["made", name] = local_bytes(capture.values[name], plan.layout(name), plan.mesh, rank)
    return lies, sizes


def _largest_buffer(plan: Decisions) -> int:
    """The bytes of the largest buffer that a collective works on; replicated parameters' gradients are joined."""
    joined: Counter[tuple[object, ...]] = Counter()
    largest = 0
    for transfer in plan.transfers:
        value: Value = plan.capture.values[transfer.value]
        if value.kind == "parameter" and [step.kind for step in transfer.steps] == ["enter"]:
            joined[transfer.steps[0].axes, value.dtype] += plan.bytes_of(value)
        else:
            found = (priced.collective.bytes for priced in plan.transfer_collectives(transfer))
            largest = max(largest, *found, 0)
    for node in plan.capture.nodes:
        inside = plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh)
        largest = max([largest, *(collective.bytes for way in inside for collective in way)])
    return max([largest, *(min(size, BUCKET_BYTES) for size in joined.values())])
