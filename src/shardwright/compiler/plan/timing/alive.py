"""The most that is alive at once on a device during a step, beside parameters, optimizer states, buffers and inputs.

A step is a line of *acts*, forward and then backward in reverse: each operator, and each step that brings a value to
it. A tensor is alive as long as it is still to be read, and what operators save until their backward; a gradient from
where it is made to the backward of what made the value, and that of a parameter to the end. Each of them adds its bytes
to a stretch of the line, and the largest sum is the peak.

`shardwright.compiler.lower.liveness` counts the same of programs, which may begin collectives early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.decisions import Decisions, Transfer
from shardwright.compiler.plan.pricing.joined import (
    EnteringParameter,
    beside_together,
    entering_alike,
    in_buckets,
    repeated_gather,
    together_bytes,
)
from shardwright.compiler.rules.table import Column, column, row_of
from shardwright.distributed.gradients import BUCKET_BYTES

Storage = tuple[object, ...]
"""The key of a storage: a value where it is made, on its way to a target, or beside an operator."""
Numbers = npt.NDArray[np.int64]

PASSES_GRADIENT: Column[bool] = column(("add", True))
"""Operators whose gradients are those of their result, the same tensor."""

LEAF: Storage = ("leaf",)
"""Where all leaves lie, which are always there."""


@dataclass(frozen=True)
class SavedStorages:
    """What is saved for the backward, with its bytes.

    Args:
        by_operators: of each operator that no block computes again.
        given: to each block that is computed again.
        inside: of each such block, by the operators that save it when they are computed again.
    """

    by_operators: Mapping[str, Mapping[Storage, int]]
    given: Mapping[str, Mapping[Storage, int]]
    inside: Mapping[str, Mapping[str, Mapping[Storage, int]]]


@dataclass
class _Act:
    """An operator or a step of a transfer: what it makes and reads, and the gradients that its backward makes.

    Beside these there are the largest buffers of its collectives.
    """

    of: Node | Transfer
    read: list[Storage]
    made: dict[Storage, int] = field(default_factory=dict)
    gradients: list[tuple[Storage, int]] = field(default_factory=list)
    forward_bytes: int = 0
    backward_bytes: int = 0


class AliveBytes:
    """The line of acts of plans that differ in nothing but what the backward does again.

    Args:
        among: the names of the operators that there are, those of a pipeline stage; by default all.
    """

    def __init__(
        self, plan: Decisions, size_of: Callable[[Value, Layout], int], among: Collection[str] | None = None
    ) -> None:
        self._plan, self._size_of, self._acts = plan, size_of, list[_Act]()
        self._lies = {value.name: LEAF for value in plan.capture.values.values() if value.kind != "result"}
        self._brought: dict[int, Storage] = {}  # where the value of a transfer lies, by its identity
        self._largest = 0
        coming: dict[str, list[tuple[int, Transfer]]] = defaultdict(list)  # by the first operator that needs it
        for number, transfer in enumerate(plan.transfers):
            reads = (name for name, _ in transfer.consumers if among is None or name in among)
            coming[next(reads, "")].append((number, transfer))
        known: dict[Hashable, tuple[int, int]] = {}
        at: list[int] = []  # an even number before each operator, and an odd one at it
        for position, node in enumerate(plan.capture.nodes):
            if among is not None and node.name not in among:
                continue
            for number, transfer in coming[node.name]:
                self._bring(number, transfer, known)
            at += [2 * position] * (len(self._acts) - len(at))
            self._operate(node)
            at.append(2 * position + 1)
        for number, transfer in coming[""] if among is None else ():
            self._bring(number, transfer, known)
        at += [2 * len(plan.capture.nodes)] * (len(self._acts) - len(at))
        self._at = np.array(at, dtype=np.int64)
        self._index()

    def _bring(self, number: int, transfer: Transfer, known: dict[Hashable, tuple[int, int]]) -> None:
        mesh, value = self._plan.mesh, self._plan.capture.values[transfer.value]
        lies = self._lies.get(value.name, ("made", value.name))  # of what another stage has made
        last = max((i for i, step in enumerate(transfer.steps) if step.kind != "enter"), default=-1)
        for i, step in enumerate(transfer.steps):
            act = _Act(transfer, [lies])
            key = value.shape, value.dtype, value.reduced_in, id(step)  # of equal layers it is one object
            if key not in known:
                forward, backward = value.collectives(step, mesh)
                known[key] = self._buffer([forward]), self._buffer([backward])
            act.forward_bytes, act.backward_bytes = known[key][0], known[key][1] if transfer.gradient else 0
            if step.kind != "enter":  # which leaves the value where it is
                if transfer.gradient:
                    act.gradients = [(lies, self._size_of(value, step.before))]
                lies = ("moved", number) if i == last else ("moved", number, i)
                act.made = {lies: self._size_of(value, step.after)}
            self._acts.append(act)
        self._brought[id(transfer)] = lies

    def _operate(self, node: Node) -> None:
        plan, values = self._plan, self._plan.capture.values
        act = _Act(node, [self._brought[id(plan.way[node.name, i])] for i in range(len(node.operands))])
        self._acts.append(act)
        inside = plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh)
        act.forward_bytes, act.backward_bytes = (self._buffer(way) + self._between(node) for way in inside)
        if node.name in plan.kept.views:
            self._lies.update(dict.fromkeys(node.results, act.read[0]))
            return
        for name in node.results:
            self._lies[name] = ("made", name)
            act.made["made", name] = self._size_of(values[name], plan.layout(name))
        for i, name in enumerate(node.operands if plan.graph.needs_gradient(node) else ()):
            if values[name].needs_gradient:
                size = self._size_of(values[name], plan.target(node, i).layout)
                passed = PASSES_GRADIENT.of(node.op) and any(lies != LEAF for lies, _ in act.gradients)
                act.gradients.append((act.read[i], 0 if passed else size))

    def _between(self, node: Node) -> int:
        """Return what an operator makes between those that it consists of, and their gradients: as much as it keeps."""
        if row_of(node.op).between is None:
            return 0
        layouts = {name: self._plan.target(node, i).layout for i, name in enumerate(node.operands)}
        return self._plan.kept.internal_bytes(node, layouts.__getitem__, self._plan.mesh)

    def _buffer(self, collectives: Sequence[Collective | None]) -> int:
        """Return what collectives take beside what they start from and result in."""
        found = [collective for collective in collectives if collective is not None]
        self._largest = max([self._largest, *(collective.bytes for collective in found)])
        return max((collective.bytes for collective in found if collective.kind != "all_reduce"), default=0)

    def _index(self) -> None:
        """Number the storages, and list who makes, reads and differentiates them."""
        acts = [*enumerate(self._acts)]
        self._operators = {act.of.name: number for number, act in acts if isinstance(act.of, Node)}
        self._first = {id(act.of): number for number, act in reversed(acts)}
        made = [(storage, number, size) for number, act in acts for storage, size in act.made.items()]
        self._maker = {storage: number for storage, number, _ in made}
        self._storages = {storage: i for i, (storage, _, _) in enumerate(made)}
        self._makers, self._sizes = np.array([m[1:] for m in made], dtype=np.int64).reshape(-1, 2).T
        read = [(self._storages[of], number) for number, act in acts for of in act.read if of in self._storages]
        self._read, self._readers = np.array(read, dtype=np.int64).reshape(-1, 2).T
        self._operators_reading: dict[Storage, list[str]] = defaultdict(list)
        for _, act in acts:
            if isinstance(act.of, Node):
                for storage in act.read:
                    self._operators_reading[storage].append(act.of.name)
        outputs = (transfer for transfer in self._plan.transfers if any(not name for name, _ in transfer.consumers))
        returned = {self._brought.get(id(transfer), LEAF) for transfer in outputs} & self._storages.keys()
        self._returned = np.array(sorted(self._storages[of] for of in returned), dtype=np.int64)
        leaf = len(made)
        writes = [(self._storages.get(of, leaf), number, size) for number, act in acts for of, size in act.gradients]
        self._written, self._writers, self._gradients = np.array(writes, dtype=np.int64).reshape(-1, 3).T
        self._buffers = np.array([[act.forward_bytes, act.backward_bytes] for act in self._acts], dtype=np.int64).T
        self._buckets = list(self._bucket_bytes())

    def _bucket_bytes(self) -> Iterator[tuple[int, int]]:
        """Yield the act of the first parameter of each bucket, and the bytes of the bucket."""
        plan, entering = self._plan, list[tuple[int, EnteringParameter]]()
        for transfer in plan.transfers:
            value = plan.capture.values[transfer.value]
            enters = value.kind == "parameter" and transfer.steps and transfer.steps[0].kind == "enter"
            if enters and id(transfer) in self._first:
                size = self._size_of(value, transfer.steps[0].after)
                one = EnteringParameter(value.name, size, entering_alike(value, transfer.steps[0]))
                entering.append((self._first[id(transfer)], one))
        for members in in_buckets([one for _, one in entering], BUCKET_BYTES, BUCKET_BYTES):
            yield entering[members[0]][0], sum(entering[i][1].bytes for i in members)

    # Of one plan

    def most(self, plan: Decisions, saved: SavedStorages, joined: Sequence[Sequence[Transfer]]) -> int:
        """Return the most that is alive at once.

        Of the operators that there are: what others save is no part of ``saved``.

        Args:
            plan: one of these decisions.
            saved: what it saves for the backward.
            joined: small parameters that programs gather together.
        """
        blocks = dict(self._blocks(plan)) if plan.blocks else {}
        places = self._places(plan, blocks, joined)
        spans = _spans(blocks, places)
        line = _Line(len(self._acts))
        self._add_values(line, places, saved, spans)
        self._add_made_again(line, places, plan, saved, spans)
        self._add_gradients(line, places)
        alive = line.sums()
        forward, backward = self._buffers_at(plan, blocks, joined)
        return int(max((alive[places] + forward).max(), (alive[line.backward(places)] + backward).max(), 0))

    def _blocks(self, plan: Decisions) -> Iterator[tuple[int, str]]:
        """Yield the acts that are for blocks which are computed again, with the block; "" where it is done outside."""
        for number, act in enumerate(self._acts):
            if isinstance(act.of, Transfer):
                if act.of.consumers[0][0] in plan.block_of:
                    yield number, plan.block_of_transfer(act.of)
            elif act.of.name in plan.block_of:
                yield number, plan.block_of[act.of.name]

    def _places(self, plan: Decisions, blocks: Mapping[int, str], joined: Sequence[Sequence[Transfer]]) -> Numbers:
        """Return the place of each act in the forward.

        What is done for a block outside of it comes before the block begins, and parameters that are gathered together
        where the first of them is needed.
        """
        at, begins = 2 * self._at, dict[str, int]()
        for computed_again in plan.blocks:
            inside = [node.name for node in computed_again.nodes if node.name in self._operators]
            if inside:
                begins[computed_again.name] = at[self._operators[inside[0]]] - 3
        for number, block in blocks.items():
            of = self._acts[number].of
            if not block and isinstance(of, Transfer):
                at[number] = begins[plan.block_of[of.consumers[0][0]]]
        for members in joined:
            numbers = [self._first[id(transfer)] for transfer in members]
            at[numbers] = at[numbers].min()
        places = np.empty_like(at)
        places[np.argsort(at, kind="stable")] = np.arange(len(at))
        return places

    def _add_values(
        self, line: _Line, places: Numbers, saved: SavedStorages, spans: Mapping[str, tuple[int, int]]
    ) -> None:
        """Add what is made in the forward, until nothing reads it or until the backward of the first that saves it."""
        ends = places[self._makers]
        np.maximum.at(ends, self._read, places[self._readers])
        until: dict[Storage, tuple[int, int]] = {}  # the place of the first that saves a storage, and the bytes
        keepers = [(int(places[self._operators[name]]), kept) for name, kept in saved.by_operators.items()]
        keepers += [(spans[block][0], kept) for block, kept in saved.given.items()]
        for place, kept in keepers:
            for storage, size in kept.items():
                until[storage] = min(place, until.get(storage, (place, 0))[0]), size
        known = [(self._storages[storage], place) for storage, (place, _) in until.items() if storage in self._storages]
        numbers, firsts = np.array(known, dtype=np.int64).reshape(-1, 2).T
        ends[numbers] = line.backward(firsts)
        ends[self._returned] = line.last
        line.add(places[self._makers], ends, self._sizes)
        beside = [(place, size) for storage, (place, size) in until.items() if storage not in self._storages]
        firsts, sizes = np.array(beside, dtype=np.int64).reshape(-1, 2).T
        line.add(firsts, line.backward(firsts), sizes)

    def _add_made_again(
        self,
        line: _Line,
        places: Numbers,
        plan: Decisions,
        saved: SavedStorages,
        spans: Mapping[str, tuple[int, int]],
    ) -> None:
        """Add what the backward computes again, a block at once, and what it gathers again."""
        found: list[tuple[int, int, int]] = []  # the places between which it is there, and the bytes
        for block, operators in saved.inside.items():
            firsts: dict[Storage, tuple[int, int]] = {}
            for name, kept in operators.items():
                for storage, size in kept.items():
                    if storage not in saved.given[block]:
                        firsts.setdefault(storage, (int(places[self._operators[name]]), size))
            found += ((spans[block][1], first, size) for first, size in firsts.values())
        repeated = [of for of in plan.transfers if of.value in plan.again and plan.gathers_again(of)]
        ends = {name: spans[block][1] for name, block in plan.block_of.items()} if repeated else {}
        for transfer in repeated:
            storage = self._brought[id(transfer)]
            names = self._operators_reading[storage]
            at = [int(places[self._operators[name]]) for name in names]
            last = max([*at, *(ends.get(name, 0) for name in names)])
            found.append((last, min(at), int(self._sizes[self._storages[storage]])))
            buffer = int(self._buffers[0, self._maker[storage]])
            found += (last, last, buffer), (int(places[self._maker[storage]]),) * 2 + (buffer,)
        together = [(plan.capture.values[of.value], of.steps[0]) for of in repeated]
        together = [of for of in together if of[0].kind == "parameter" and repeated_gather(*of, plan.mesh) is not None]
        if len(together) > 1:  # neighbours are gathered at once, in no more memory than another collective takes
            found.append((line.count - 1, 0, min(self._largest, together_bytes(together, plan.mesh))))
        lasts, first, sizes = np.array(found, dtype=np.int64).reshape(-1, 3).T
        line.add(line.backward(lasts), line.backward(first), sizes)

    def _add_gradients(self, line: _Line, places: Numbers) -> None:
        """Add gradients: of a storage each takes the place of the one before, until the backward of what makes it."""
        at = line.backward(places[self._writers])
        order = np.lexsort((at, self._written))
        storages, at, sizes = self._written[order], at[order], self._gradients[order]
        makers = np.append(line.backward(places[self._makers]), line.last)  # those of leaves stay to the end
        ends = makers[storages]
        leaf = len(self._makers)
        follows = (storages[1:] == storages[:-1]) & (storages[1:] < leaf)
        ends[:-1] = np.where(follows, at[1:], ends[:-1])
        line.add(at, ends, sizes)

    def _buffers_at(
        self, plan: Decisions, blocks: Mapping[int, str], joined: Sequence[Sequence[Transfer]]
    ) -> tuple[Numbers, Numbers]:
        """Return the bytes of buffers beside each act, in the forward and in the backward."""
        forward, backward = self._buffers.copy()
        again = np.array([number for number, block in blocks.items() if block], dtype=np.int64)
        backward[again] = np.maximum(backward[again], forward[again])
        for number, size in self._buckets:
            backward[number] = max(backward[number], size)
        for members in joined:
            values = [plan.capture.values[transfer.value] for transfer in members]
            moved = [value.collectives(of.steps[0], plan.mesh) for of, value in zip(members, values, strict=True)]
            last = max(self._first[id(transfer)] for transfer in members)
            forward[last], backward[last] = (
                sum(beside_together(way, plan.mesh) for way in ways if way) for ways in zip(*moved, strict=True)
            )
            sent = (self._size_of(v, of.steps[0].before) for of, v in zip(members, values, strict=True))
            backward[last] += sum(sent)
        return forward, backward


def _spans(blocks: Mapping[int, str], places: Numbers) -> Mapping[str, tuple[int, int]]:
    """Return the places of the first and the last act of each block."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, block in blocks.items():
        if block:
            found[block].append(int(places[number]))
    return {block: (min(inside), max(inside)) for block, inside in found.items()}


class _Line:
    """Bytes that are alive along the acts of a forward and then of the backward, in reverse."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changes = np.zeros(2 * count + 1, dtype=np.int64)

    @property
    def last(self) -> int:
        """The place of the last act of the backward."""
        return 2 * self.count - 1

    def backward(self, places: Numbers) -> Numbers:
        """Return the places in the backward of acts, by theirs in the forward."""
        return self.last - places

    def add(self, first: Numbers, last: Numbers, sizes: Numbers) -> None:
        """Add bytes to stretches from a first place to a last one, which counts, too."""
        np.add.at(self._changes, first, sizes)
        np.add.at(self._changes, last + 1, -sizes)

    def sums(self) -> Numbers:
        """Return the bytes that are alive at each place."""
        return np.cumsum(self._changes)[:-1]
