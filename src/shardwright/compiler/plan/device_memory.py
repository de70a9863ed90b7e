"""The bytes that a device holds under a plan, by kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import copies
from shardwright.compiler.plan.decisions import Decisions, Transfer
from shardwright.compiler.plan.pricing.cost import largest_inside, reduced_in_buckets
from shardwright.compiler.plan.pricing.joined import SmallGather, in_gathers, small_gather, together_bytes
from shardwright.compiler.plan.pricing.memory import Block, OptimizerStates, local_bytes
from shardwright.compiler.plan.pricing.schedule import UNDER_WAY, most_held, schedule
from shardwright.compiler.plan.timing.alive import AliveBytes, SavedStorages, Storage
from shardwright.distributed.gradients import BUCKET_BYTES


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, by what they are for.

    ``activations`` are saved by autograd for the backward; ``buffers`` include constants; ``communication`` is the
    largest buffer of a collective, or of small parameters that are gathered together; ``recomputed`` is what the
    backward makes again of the block that has most of it. ``transient`` is by how much more is alive at once than all
    these together, as gradients of activations and what the forward does not keep.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    inputs: int
    communication: int
    recomputed: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(size for _, size in self.kinds())

    def kinds(self) -> Iterator[tuple[str, int]]:
        """Each kind with its bytes."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))


def device_memory_of(plan: Decisions, optimizer: OptimizerStates, rank: int = 0) -> DeviceMemory:
    """Return the bytes that ``rank`` holds; none holds more than rank 0."""
    return MemoryModel(plan, rank).held(plan, optimizer)


class MemoryModel:
    """The memory of a rank under the decisions of a plan, whichever blocks are recomputed.

    Most of it does not depend on these, and is worked out once for all plans that differ in nothing else.
    """

    def __init__(self, plan: Decisions, rank: int = 0) -> None:
        self._rank, values = rank, plan.capture.values.values()
        size_of = _sizing(plan.mesh, rank)
        leaves = {v.name: size_of(v, plan.leaves[v.name]) for v in values if v.kind != "result"}
        self._leaves: Counter[str] = Counter()
        for name, size in leaves.items():
            self._leaves[plan.capture.values[name].kind] += size
        self._trained = [leaves[value.name] for value in plan.capture.of_kind("parameter") if value.needs_gradient]
        self._largest_buffer = _largest_buffer(plan)
        self._small_gathers = list(_small_gathers(plan))
        self._moved = dict(_moved(plan))
        self._sizes = dict(_sizes(plan, self._moved, size_of, rank))
        self._alive, self._size_of = AliveBytes(plan, size_of), size_of
        # Cached by the operators of a stage: plans that differ in blocks and `again` have the same acts.
        self._alive_of: dict[frozenset[str], AliveBytes] = {}
        # Cached by what is gathered again: of plans that differ in blocks and `again` alone nothing else moves storage.
        self._last: tuple[frozenset[tuple[str, int]], _Storages] | None = None

    def held(self, plan: Decisions, optimizer: OptimizerStates) -> DeviceMemory:
        """Return the bytes that are held under a plan of these decisions; of stages, by the one that holds most."""
        if plan.stages is not None:
            every = (self.of_stage(plan, optimizer, group) for group in range(plan.stages.count))
            return max(every, key=lambda held: held.total)
        return self._held(plan, optimizer)

    def _held(self, plan: Decisions, optimizer: OptimizerStates) -> DeviceMemory:
        lying, together = self._lying(plan), self._together(plan)
        found = DeviceMemory(
            parameters=self._leaves["parameter"],
            gradients=sum(self._trained),
            optimizer=sum(map(optimizer.bytes_for, self._trained)),
            activations=sum(_saved(plan, lying).values()),
            buffers=self._leaves["buffer"] + self._leaves["constant"],
            inputs=self._leaves["input"],
            communication=max(self._largest_buffer, _together_bytes(together, plan.mesh)),
            recomputed=max(_remade(plan, lying).values(), default=0),
        )
        joined = [[transfer for transfer, _ in members] for members in together if len(members) > 1]
        most = self._alive.most(plan, _saved_storages(plan, lying), joined)
        always = found.parameters + found.optimizer + found.buffers + found.inputs
        return replace(found, transient=max(0, always + most - found.total))

    def of_stage(self, plan: Decisions, optimizer: OptimizerStates, group: int) -> DeviceMemory:
        """Return the bytes that a rank holds of a group with pipeline stages, and of the microbatches it has begun.

        Parameters and gradients are those that it stores, and those that are sent to it, whole. What stages exchange
        before the forward and behind the backward, in three buffers, is there while nothing is saved, and so are the
        gradients again in which those of other ranks are added up. Messages that were asked for, and have not come,
        are there beside what is saved.
        """
        assert plan.stages is not None
        stages, lying = plan.stages, self._lying(plan)
        values, ranks = plan.capture.values, plan.mesh.size // stages.microbatches
        rank = group * ranks + self._rank % ranks
        of = _stages_of_operators(plan)
        names = {name for name, at in of.items() if group in map(stages.group, at)}
        table = schedule(stages.schedule, stages.count, stages.microbatches, stages.total)
        once, saved, beside = dict[Storage, int](), 0, list[int]()
        for stage, held in most_held(table[group]).items():
            of_stage = frozenset(name for name in names if stage in of[name])
            each = 0
            for storage, size in _saved(plan, lying, of_stage).items():
                if _is_of_parameter(storage, plan):
                    once[storage] = size  # gathered or cast before the first microbatch
                else:
                    each += size
            saved += held * each
            beside.append(self._most_of_stage(plan, lying, of_stage) - each)
        shared = sum(once.values())
        # Of what is gathered the gradients of all microbatches are added up before they are scattered.
        whole_gradients = sum(size * _gradient_itemsizes(storage, plan) for storage, size in once.items())
        stored = {
            v.name: local_bytes(v, plan.stored[v.name], plan.devices, rank)
            for v in values.values()
            if v.kind != "result"
        }
        trained = [value for value in plan.capture.of_kind("parameter") if value.needs_gradient]
        read = [
            v
            for v in plan.capture.of_kind("parameter")
            if v.name in plan.moved_between_stages and group in plan.read_by_stages[v.name]
        ]
        whole = {value.name: local_bytes(value, plan.leaves[value.name], plan.mesh, self._rank) for value in read}
        own = sum(stored[value.name] for value in trained if value.name not in plan.moved_between_stages)
        of_kind = Counter[str]()
        for name, size in stored.items():
            of_kind[values[name].kind] += size
        blocks = _blocks_among(plan, names)
        recomputed = [size for name, size in _remade(plan, lying).items() if name in blocks]
        found = DeviceMemory(
            parameters=of_kind["parameter"] + sum(whole.values()),
            gradients=sum(stored[v.name] + whole.get(v.name, 0) for v in trained) + whole_gradients,
            optimizer=sum(optimizer.bytes_for(stored[value.name]) for value in trained),
            activations=saved + shared,
            buffers=of_kind["buffer"] + of_kind["constant"],
            inputs=of_kind["input"],
            communication=max(self._largest_buffer + _asked_for(plan, group), 3 * sum(whole.values()) + own - saved),
            recomputed=max(recomputed, default=0),
        )
        counted = shared + found.gradients + found.communication + found.recomputed
        return replace(found, transient=max(0, max(beside, default=0) - counted))

    def _most_of_stage(self, plan: Decisions, lying: _Storages, names: frozenset[str]) -> int:
        """Return the most that is alive at once of one microbatch that goes through these operators and back."""
        if names not in self._alive_of:
            self._alive_of[names] = AliveBytes(plan, self._size_of, names)
        return self._alive_of[names].most(plan, _saved_storages(plan, lying, names), ())

    def saved_by(self, plan: Decisions) -> dict[str, tuple[int, int]]:
        """Return the bytes that each operator saves for the backward, and none before it; of blocks, their first one.

        The first number is of what all microbatches of a pipeline share, the second of what each saves. Of a block that
        is recomputed they are those that it is given.
        """
        lying, seen, found = self._lying(plan), set[Storage](), dict[str, tuple[int, int]]()
        first = {block.nodes[0].name: block for block in plan.blocks}
        for node in plan.capture.nodes:
            of = lying.given_to(first[node.name], plan) if node.name in first else {}
            of = of if node.name in plan.block_of else lying.kept_by[node.name]
            new = [(_is_of_parameter(storage, plan), size) for storage, size in of.items() if storage not in seen]
            found[node.name] = sum(size for once, size in new if once), sum(size for once, size in new if not once)
            seen.update(of)
        return found

    def _together(self, plan: Decisions) -> list[list[tuple[Transfer, Value]]]:
        """Return the small parameters that programs gather together, and how, by the collective."""
        found = [one for one in self._small_gathers if _gathers_once(one[0], plan)]
        groups = in_gathers([gathered for _, _, gathered in found])
        return [[found[i][:2] for i in members] for members in groups]

    def remade(self, plan: Decisions) -> dict[str, int]:
        """Return the bytes that the backward makes again of each block, by its name, besides the block's inputs."""
        return _remade(plan, self._lying(plan))

    def _lying(self, plan: Decisions) -> _Storages:
        """Return the storages, which depend on the blocks only by what is gathered again for them."""
        again = (use for use in self._moved if plan.again and plan.gathers_again(plan.way[use]))
        gathered = frozenset(again)
        if self._last is None or self._last[0] != gathered:
            moved = {use: storage for use, storage in self._moved.items() if use not in gathered}
            self._last = gathered, _Storages(plan, moved, self._sizes, self._rank)
        return self._last[1]


class _Storages:
    """The storage of each operand and each value; the bytes that operators save there, and that blocks are given.

    Where leaves lie has no size. Of what the backward moves again, its source is kept.
    """

    def __init__(
        self, plan: Decisions, moved: Mapping[tuple[str, int], Storage], sizes: Mapping[Storage, int], rank: int
    ) -> None:
        self._sizes, self._rank = sizes, rank
        self._made: dict[str, Storage] = {name: ("made", name) for name in plan.capture.values}
        self._read: dict[tuple[str, int], Storage] = {}
        for node in plan.capture.nodes:
            for i, name in enumerate(node.operands):
                self._read[node.name, i] = moved.get((node.name, i)) or self._made[name]
            if node.name in plan.kept.views:
                self._made.update(dict.fromkeys(node.results, self._read[node.name, 0]))
        self.kept_by = {node.name: self._kept_by(node, plan) for node in plan.capture.nodes}
        """The storages that each operator saves for its backward, with their bytes."""
        # Cached by the block: which others are computed again does not change what this one is given.
        self._given: dict[str, dict[Storage, int]] = {}

    def _kept_by(self, node: Node, plan: Decisions) -> dict[Storage, int]:
        saved = plan.kept.saved[node.name]
        lying = [self._read[node.name, i] for i in saved.operands or ()]
        lying += [self._made[node.results[i]] for i in saved.results or ()]
        found = {storage: self._sizes[storage] for storage in lying if storage in self._sizes}
        if saved.internal:
            found["internal", node.name] = self._sizes["internal", node.name]
        return found

    def given_to(self, block: Block, plan: Decisions) -> dict[Storage, int]:
        """Return the inputs of a block, from which it is recomputed, and buffers before they change.

        Of the blocks that are computed again it depends on this one alone.
        """
        if block.name not in self._given:
            self._given[block.name] = self._given_to(block, plan)
        return self._given[block.name]

    def _given_to(self, block: Block, plan: Decisions) -> dict[Storage, int]:
        made = {name for node in block.nodes for name in node.results}
        found: dict[Storage, int] = {}
        reads = [(node, i, name) for node in block.nodes for i, name in enumerate(node.operands) if name not in made]
        for node, i, name in reads:
            inside = plan.block_of_transfer(plan.way[node.name, i]) == block.name
            storage = self._made[name] if inside else self._read[node.name, i]
            if storage in self._sizes:
                found[storage] = self._sizes[storage]
            elif name in plan.capture.mutations:
                value = plan.capture.values[name]
                found["before", block.name, name] = local_bytes(value, plan.leaves[name], plan.mesh, self._rank)
        return found


def _remade(plan: Decisions, lying: _Storages) -> dict[str, int]:
    """Return the bytes that the backward makes again of each block, by its name, besides the block's inputs."""
    made = {}
    for block in plan.blocks:
        inside: dict[Storage, int] = {}
        for node in block.nodes:
            inside |= lying.kept_by[node.name]
        given = lying.given_to(block, plan)
        made[block.name] = sum(size for storage, size in inside.items() if storage not in given)
    return made


def _saved_storages(plan: Decisions, lying: _Storages, among: Collection[str] | None = None) -> SavedStorages:
    """Return what is saved for the backward, by who saves it; ``among`` some operators."""
    names = [node.name for node in plan.capture.nodes if among is None or node.name in among]
    by_operators = {name: lying.kept_by[name] for name in names if name not in plan.block_of}
    inside = defaultdict[str, dict[str, Mapping[Storage, int]]](dict)
    for name in names:
        if name in plan.block_of:
            inside[plan.block_of[name]][name] = lying.kept_by[name]
    given = {block.name: lying.given_to(block, plan) for block in plan.blocks if block.name in inside}
    return SavedStorages(by_operators, given, inside)


def _saved(plan: Decisions, lying: _Storages, among: Collection[str] | None = None) -> dict[Storage, int]:
    """Return the storages that are saved for the backward, each once, without leaves; ``among`` some operators.

    Of a block that the backward computes again it is what the block is given.
    """
    found: dict[Storage, int] = {}
    for node in plan.capture.nodes:
        if node.name not in plan.block_of and (among is None or node.name in among):
            found.update(lying.kept_by[node.name])
    blocks = None if among is None else _blocks_among(plan, among)
    for block in plan.blocks:
        if blocks is None or block.name in blocks:
            found.update(lying.given_to(block, plan))
    return found


def _is_of_parameter(storage: Storage, plan: Decisions) -> bool:
    """Return whether a storage holds a parameter, gathered or cast, which the microbatches of a pipeline share."""
    kind, of, *_ = storage
    if kind == "moved":
        assert isinstance(of, int)
        of = plan.transfers[of].value
    return kind in ("moved", "made") and plan.capture.values[str(of)].of_parameter


def _gradient_itemsizes(storage: Storage, plan: Decisions) -> int:
    """Return how many times as large as what a storage holds its gradient is; 0 where it has none."""
    kind, of, *_ = storage
    if kind != "moved":
        return 0  # the gradient of a cast is cast back
    assert isinstance(of, int)
    value = plan.capture.values[plan.transfers[of].value]
    return plan.transfers[of].gradient * -(-value.reduced_itemsize // value.dtype.itemsize)


def _stages_of_operators(plan: Decisions) -> dict[str, Collection[int]]:
    """Return the stages that do each operator: of one without a stage of its own those of its block, or else all."""
    assert plan.stages is not None
    every, of_block = range(plan.stages.total), dict[str, set[int]]()
    for name, block in plan.block_of.items():
        if name in plan.stages.of:
            of_block.setdefault(block, set()).add(plan.stages.of[name])
    return {
        node.name: [plan.stages.of[node.name]]
        if node.name in plan.stages.of
        else of_block.get(plan.block_of.get(node.name, ""), every)
        for node in plan.capture.nodes
    }


def crossing_bytes(plan: Decisions) -> list[int]:
    """Return for each stage the bytes that it, or one before, makes of a microbatch for later ones; 0 for the last."""
    assert plan.stages is not None
    return bytes_behind(plan, plan.stages.of, plan.stages.total)


def bytes_behind(plan: Decisions, of: Mapping[str, int], count: int) -> list[int]:
    """Return the same for ``count`` stages, of which ``of`` names that of each operator."""
    changes = [0] * count
    for node in plan.capture.nodes:
        for name in node.results if node.name in of else ():
            last = max((of.get(use.node.name, 0) for use in plan.graph.uses[name]), default=0)
            if last > of[node.name]:
                size = local_bytes(plan.capture.values[name], plan.layout(name), plan.mesh)
                changes[of[node.name]] += size
                changes[last] -= size
    return [*accumulate(changes)]


def _asked_for(plan: Decisions, group: int) -> int:
    """Return the bytes of messages that a group with stages has asked for, and is not waiting for, at most."""
    assert plan.stages is not None
    if plan.hardware is None or not plan.hardware.receives_early:
        return 0
    own = [stage for stage in range(plan.stages.total) if plan.stages.group(stage) == group]
    crossing = crossing_bytes(plan)  # nothing from the last stage
    ahead, back = (max(crossing[stage - before] for stage in own) for before in (1, 0))
    return UNDER_WAY * (ahead + back)


def _blocks_among(plan: Decisions, among: Collection[str]) -> set[str]:
    """Return the blocks of which some operators are among these."""
    return {block for name, block in plan.block_of.items() if name in among}


def _moved(plan: Decisions) -> Iterator[tuple[tuple[str, int], Storage]]:
    """Yield the storage of each operand that is moved first, by operator and index."""
    for at, transfer in enumerate(plan.transfers):
        if copies(transfer.steps):
            yield from ((use, ("moved", at)) for use in transfer.consumers if use[0])


def _sizing(mesh: Mesh, rank: int) -> Callable[[Value, Layout], int]:
    """Return a function for the bytes of a rank's part of a value, computed once for all that are alike."""
    known: dict[Hashable, int] = {}

    def size_of(value: Value, layout: Layout) -> int:
        key = value.shape, value.dtype, id(layout)
        if key not in known:
            known[key] = local_bytes(value, layout, mesh, rank)
        return known[key]

    return size_of


def _sizes(
    plan: Decisions, moved: Mapping[tuple[str, int], Storage], size_of: Callable[[Value, Layout], int], rank: int
) -> Iterator[tuple[Storage, int]]:
    """Yield the bytes of each storage: of each value where it is made, and where it is moved, and within operators."""
    for node in plan.capture.nodes:
        if node.name not in plan.kept.views:
            for name in node.results:
                yield ("made", name), size_of(plan.capture.values[name], plan.layout(name))
        if plan.kept.saved[node.name].internal:
            layouts = {name: plan.target(node, i).layout for i, name in enumerate(node.operands)}
            layouts |= {name: plan.layout(name) for name in node.results}
            yield ("internal", node.name), plan.kept.internal_bytes(node, layouts.__getitem__, plan.mesh, rank)
    for (name, index), storage in moved.items():
        transfer = plan.way[name, index]
        yield storage, size_of(plan.capture.values[transfer.value], transfer.target.layout)


def _small_gathers(plan: Decisions) -> Iterator[tuple[Transfer, Value, SmallGather]]:
    """The transfers, and of what, that begin with a gather which may be joined with others."""
    for transfer in plan.transfers:
        value = plan.capture.values[transfer.value]
        if value.kind == "parameter" and transfer.steps:
            value = replace(value, needs_gradient=transfer.gradient)
            if (gathered := small_gather(value, transfer.steps[0], plan.mesh)) is not None:
                yield transfer, value, gathered


def _together_bytes(together: Sequence[Sequence[tuple[Transfer, Value]]], mesh: Mesh) -> int:
    """Return the most that is there of small parameters which programs gather together."""
    moved = ([(value, transfer.steps[0]) for transfer, value in members] for members in together)
    return max((together_bytes(of, mesh) for of in moved), default=0)


def _gathers_once(transfer: Transfer, plan: Decisions) -> bool:
    """Return whether the backward does not repeat the first step."""
    return not plan.block_of_transfer(transfer) and not (len(transfer.steps) == 1 and plan.gathers_again(transfer))


def _largest_buffer(plan: Decisions) -> int:
    """The bytes of the largest buffer that a collective works on; replicated parameters' gradients are joined."""
    joined: Counter[tuple[object, ...]] = Counter()
    largest = 0
    seen: set[Hashable] = set()
    for transfer in plan.transfers:
        value: Value = plan.capture.values[transfer.value]
        # Those of equal layers are one object.
        alike = value.shape, value.dtype, value.reduced_in, transfer.gradient, id(transfer.steps)
        if value.kind == "parameter" and reduced_in_buckets(value, transfer.steps):
            joined[transfer.steps[0].axes, value.dtype, value.reduced_in] += plan.bytes_of(value)
        elif transfer.steps and alike not in seen:
            seen.add(alike)
            found = (priced.collective.bytes for priced in plan.transfer_collectives(transfer))
            largest = max(largest, *found, 0)
    inside_of = {(plan.graph.alike[node.name], plan.strategies[node.name]): node for node in plan.capture.nodes}
    inside = [largest_inside(plan.graph, node, strategy, plan.mesh) for (_, strategy), node in inside_of.items()]
    return max([largest, *inside, *(min(size, BUCKET_BYTES) for size in joined.values())])
