"""The bytes that a device holds under a plan, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from shardwright.graph.ir import Node, Value
from shardwright.mesh.redistribute import copies
from shardwright.plan.decisions import Decisions
from shardwright.plan.pricing.blocks import Block
from shardwright.plan.pricing.cost import reduced_in_buckets
from shardwright.plan.pricing.memory import Kept, local_bytes
from shardwright.plan.pricing.optimizers import OptimizerStates
from shardwright.world.gradients import BUCKET_BYTES


@dataclass(frozen=True)
class Held:
    """Bytes of one device, by what they are for.

    ``activations`` are what autograd keeps from the forward for the backward; ``buffers`` those of the model and what
    it closes over; ``communication`` is the largest buffer of a collective, and ``recomputed`` what the backward makes
    again of the block that has most of it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    inputs: int
    communication: int
    recomputed: int = 0

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
    memory = _Memory(plan, rank)
    return Held(
        parameters=of_kind["parameter"],
        gradients=sum(trained),
        optimizer=sum(map(optimizer.bytes_for, trained)),
        activations=sum(memory.saved.values()),
        buffers=of_kind["buffer"] + of_kind["constant"],
        inputs=of_kind["input"],
        communication=_largest_buffer(plan),
        recomputed=max(memory.remade().values(), default=0),
    )


Storage = tuple[object, ...]
"""What tells apart where tensors lie: a value where it is made, on its way to a target, or beside an operator."""


def saved_memory(plan: Decisions, rank: int = 0) -> dict[Storage, int]:
    """What is kept for the backward, each storage once; leaves are held all the same, and left out.

    Of a block that the backward computes again it is what the block is given.
    """
    return _Memory(plan, rank).saved


def remade_memory(plan: Decisions, rank: int = 0) -> dict[str, int]:
    """What the backward makes again and then holds of each block, by its name, beside what the block is given."""
    return _Memory(plan, rank).remade()


class _Memory:
    """What the operators of a plan keep on a rank."""

    def __init__(self, plan: Decisions, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._read, self._sizes = _storages(plan, plan.kept, rank)

    @cached_property
    def saved(self) -> dict[Storage, int]:
        plan = self._plan
        found: dict[Storage, int] = {}
        for node in plan.capture.nodes:
            if node.name not in plan.block_of:
                found |= self._kept_by(node)
        for block in plan.blocks:
            found |= self._given_to(block)
        return found

    def remade(self) -> dict[str, int]:
        made = {}
        for block in self._plan.blocks:
            inside: dict[Storage, int] = {}
            for node in block.nodes:
                inside |= self._kept_by(node)
            given = self._given_to(block)
            made[block.name] = sum(size for storage, size in inside.items() if storage not in given)
        return made

    def _kept_by(self, node: Node) -> dict[Storage, int]:
        """What an operator keeps for its backward."""
        plan, saved = self._plan, self._plan.kept.saved[node.name]
        lying = [self._read[node.name, i] for i in saved.operands or ()]
        lying += [self._read["", node.results[i]] for i in saved.results or ()]
        layouts = {name: plan.target(node, i).layout for i, name in enumerate(node.operands)} if saved.beside else {}
        layouts |= {name: plan.layout(name) for name in node.results} if saved.beside else {}
        beside = plan.kept.beside(node, layouts.__getitem__, plan.mesh, self._rank)
        return {storage: self._sizes[storage] for storage in lying if storage in self._sizes} | {
            ("beside", node.name): beside
        }

    def _given_to(self, block: Block) -> dict[Storage, int]:
        """What a block is computed again from: what it reads and does not make, and buffers before they change."""
        plan = self._plan
        made = {name for node in block.nodes for name in node.results}
        found: dict[Storage, int] = {}
        reads = [(node, i, name) for node in block.nodes for i, name in enumerate(node.operands)]
        for node, i, name in reads:
            inside = plan.block_of_transfer(plan.way[node.name, i]) == block.name
            storage = self._read["", name] if inside else self._read[node.name, i]
            if name in made:
                continue
            if storage in self._sizes:
                found[storage] = self._sizes[storage]
            elif name in plan.capture.mutations:
                value = plan.capture.values[name]
                found["before", block.name, name] = local_bytes(value, plan.leaves[name], plan.mesh, self._rank)
        return found


def _storages(plan: Decisions, kept: Kept, rank: int) -> tuple[dict[tuple[str, object], Storage], dict[Storage, int]]:
    """Where each operand lies, by operator and index, and each value, by "" and its name; and how large that is.

    Where leaves lie has no size. Of what the backward moves again, its source is kept.
    """
    capture = plan.capture
    lies: dict[tuple[str, object], Storage] = {}
    sizes: dict[Storage, int] = {}
    for value in capture.values.values():
        lies["", value.name] = ("made", value.name)
    for node in capture.nodes:
        for i, name in enumerate(node.operands):
            transfer = plan.way[node.name, i]
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
        if reduced_in_buckets(value, transfer.steps):
            joined[transfer.steps[0].axes, value.dtype] += plan.bytes_of(value)
        else:
            found = (priced.collective.bytes for priced in plan.transfer_collectives(transfer))
            largest = max(largest, *found, 0)
    for node in plan.capture.nodes:
        inside = plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh)
        largest = max([largest, *(collective.bytes for way in inside for collective in way)])
    return max([largest, *(min(size, BUCKET_BYTES) for size in joined.values())])
