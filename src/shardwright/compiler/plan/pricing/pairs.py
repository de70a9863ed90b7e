"""The cost of bringing a value from each of many layouts to each of many targets, all pairs at once.

On three axes an operator has a hundred strategies, and a value ten thousand ways to one that reads it. Each pair is a
number, made of which axes cut each dim that changes: numpy finds the different ones, `way_of` says what each of these
communicates, and a collective is priced once for all ways that have one of as many bytes. Dims that stay as they are
divide the bytes of all that moves.

A pair with uneven parts, or whose axes stand in another order than the mesh's, is priced by its steps instead.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import (
    SUMS,
    Collective,
    CollectiveKind,
    Step,
    copies,
    enters,
    moves_alone,
    possible,
    redistribute,
)
from shardwright.compiler.mesh.ways import Axes, Change, Part, Way, way_of
from shardwright.compiler.plan.pricing.cost import (
    Beside,
    Objective,
    forward_beside,
    largest_buffer,
    overlaps,
    transfer_collectives,
)
from shardwright.compiler.plan.pricing.graph import Target
from shardwright.distributed.gradients import BUCKET_BYTES

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Costs = npt.NDArray[np.float64]

# In the place of the number of a way: no steps lead from the layout to the target; the steps of this pair are asked.
IMPOSSIBLE, BY_STEPS = -1, -2
# A way is told by so many bits: on more axes, each pair is asked.
MOST_AXES, BITS = 6, 62
# As many parts of a way are priced together; the first of all is none.
PARTS = 16


@dataclass(frozen=True)
class MoveFlags:
    """For each layout and target whether a move is possible, copies, sums nothing, or only sums a gradient."""

    possible: Flags
    copies: Flags
    alone: Flags
    enters: Flags


class Ways:
    """The ways on one mesh, by number, and what each communicates."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.count = len(mesh.axes)
        fast = self.count <= MOST_AXES and all(axis.size > 1 for axis in mesh.axes)
        among = range(1 << self.count) if fast else range(0)
        self._of_mask = [tuple(i for i in range(self.count) if mask >> i & 1) for mask in among]
        self.named = [tuple(mesh.names[i] for i in axes) for axes in self._of_mask]
        self._masks = {names: mask for mask, names in enumerate(self.named)}
        self.extents = [mesh.extent(names) for names in self.named]
        self._sizes = [axis.size for axis in mesh.axes]
        self._numbers: dict[int, int] = {IMPOSSIBLE: IMPOSSIBLE, BY_STEPS: BY_STEPS}
        self._parts: dict[tuple[CollectiveKind, int, int], int] = {}
        self.kinds: list[tuple[CollectiveKind, int, int]] = [("all_reduce", 0, 1)]  # of no axes
        # By the number of the way: its parts, forward and backward, and what a `Way` says.
        self.forward = np.zeros((1024, PARTS), dtype=np.int32)
        self.backward = np.zeros((1024, PARTS), dtype=np.int32)
        self.flags = np.zeros((1024, 3), dtype=bool)
        self.early = np.zeros((1024, 2), dtype=np.int32)

    def moves(self, shape: tuple[int, ...], layouts: Sequence[Layout], targets: Sequence[Target]) -> MoveFlags:
        """Return what each way does to a value of this shape."""
        numbers, _ = self.look_up(shape, layouts, targets)
        flags = self.flags[np.maximum(numbers, 0)]
        for i, j in np.argwhere(numbers == BY_STEPS).tolist():
            steps = self.steps(shape, layouts[i], targets[j])
            flags[i, j] = copies(steps), moves_alone(steps), enters(steps)
        return MoveFlags(numbers != IMPOSSIBLE, flags[:, :, 0], flags[:, :, 1], flags[:, :, 2])

    def entered(
        self, shape: tuple[int, ...], layouts: Sequence[Layout], targets: Sequence[Target]
    ) -> Mapping[tuple[str, ...], Flags]:
        """Return by the axes over which a gradient is summed first, none among them, which ways do so."""
        found: dict[tuple[str, ...], Flags] = {}
        for i, layout in enumerate(layouts):
            for j, target in enumerate(targets):
                if possible(layout, target.layout):
                    steps = self.steps(shape, layout, target) if target.gradient_partial else ()
                    axes = steps[0].axes if steps and steps[0].kind == "enter" else ()
                    found.setdefault(axes, np.zeros((len(layouts), len(targets)), dtype=bool))[i, j] = True
        return found

    def look_up(
        self, shape: tuple[int, ...], layouts: Sequence[Layout], targets: Sequence[Target]
    ) -> tuple[Numbers, Numbers]:
        """Return the number of each way, and the axes of the dims that stay as they are; what others share."""
        return _looked_up(self, shape, tuple(layouts), tuple(targets))

    def numbered(
        self, shape: tuple[int, ...], layouts: Sequence[Layout], targets: Sequence[Target]
    ) -> tuple[Numbers, Numbers]:
        """Work out what `look_up` returns."""
        bits = 2 * self.count
        source, even_source = self._encoded(shape, layouts)
        to, even_to = self._encoded(shape, [target.layout for target in targets])
        of_gradients = [self._masks.get(target.gradient_partial) for target in targets]
        even_to &= np.array([mask is not None for mask in of_gradients], dtype=bool)
        gradient = np.array([mask or 0 for mask in of_gradients], dtype=np.int64)
        code = np.zeros((len(layouts), len(targets)), dtype=np.int64)
        staying = np.zeros_like(code)
        for dim in range(len(shape)):
            a, b = source[:, dim, None], to[None, :, dim]
            changed = a != b
            code = np.where(changed, (code << bits) | (a << self.count) | b, code)
            staying |= np.where(changed, 0, a)
        partial, left = source[:, -1, None], to[None, :, -1]
        code = (code << self.count | partial) << bits | left << self.count | gradient
        code[(left & ~partial) != 0] = IMPOSSIBLE
        self._ask_singly(code, layouts, targets, even_source[:, None] & even_to[None, :])
        found, which = _different(code)
        codes = found.tolist()
        for code in codes:
            if code not in self._numbers:
                self._add(code)
        numbers = np.array([self._numbers[code] for code in codes], dtype=np.int64)
        return numbers[which], staying

    def _ask_singly(self, code: Numbers, layouts: Sequence[Layout], targets: Sequence[Target], even: Flags) -> None:
        """Mark the pairs whose codes say nothing."""
        for i, j in np.argwhere(~even).tolist():
            code[i, j] = BY_STEPS if possible(layouts[i], targets[j].layout) else IMPOSSIBLE

    def _encoded(self, shape: tuple[int, ...], layouts: Sequence[Layout]) -> tuple[Numbers, Flags]:
        """The axes that cut each dim and those of partial sums, and of which layouts they say everything."""
        fits = self._masks and 2 * self.count * min(len(shape), 2 * self.count) + 3 * self.count <= BITS
        rows = [self._row(shape, layout) if fits else None for layout in layouts]
        nothing = [0] * (len(shape) + 1)
        codes = np.array([nothing if row is None else row for row in rows], dtype=np.int64)
        return codes.reshape(len(layouts), len(shape) + 1), np.array([row is not None for row in rows], dtype=bool)

    def _row(self, shape: tuple[int, ...], layout: Layout) -> list[int] | None:
        found = []
        for size, dim in zip(shape, layout.dims, strict=True):
            mask = self._masks.get(dim.axes)
            if mask is None or dim.unit > 1 or not size or size % self.extents[mask]:
                return None
            found.append(mask)
        partial = self._masks.get(layout.partial)
        return None if partial is None else [*found, partial]

    def _decoded(self, code: int) -> tuple[Way, list[int]]:
        """The way of a code, and the axes of the mesh by their numbers in it."""
        mask = (1 << self.count) - 1
        sums = [code >> 2 * self.count & mask, code >> self.count & mask, code & mask]
        code >>= 3 * self.count
        dims = []
        while code:
            dims.append((code >> self.count & mask, code & mask))
            code >>= 2 * self.count
        number: dict[int, int] = {}

        def renamed(of: int) -> Axes:
            return tuple(number.setdefault(axis, len(number)) for axis in self._of_mask[of])

        changed = tuple((renamed(before), renamed(after)) for before, after in reversed(dims))
        change = Change(changed, *(tuple(sorted(renamed(of))) for of in sums))
        return way_of(change, tuple(self._sizes[axis] for axis in number)), list(number)

    def _add(self, code: int) -> None:
        """Give the way of a code the next number."""
        self._numbers[code] = number = len(self._numbers) - 2
        way, axes = self._decoded(code)
        if number == len(self.flags):
            self.forward = np.concatenate([self.forward, np.zeros_like(self.forward)])
            self.backward = np.concatenate([self.backward, np.zeros_like(self.backward)])
            self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)])
            self.early = np.concatenate([self.early, np.zeros_like(self.early)])
        for rows, parts in ((self.forward, way.forward), (self.backward, way.backward)):
            rows[number, : len(parts)] = [self._part(part, axes) for part in parts]
        self.flags[number] = way.copies, way.alone, way.enters
        self.early[number] = way.early

    def _part(self, part: Part, axes: Sequence[int]) -> int:
        kind, along, divisor = part
        key = kind, sum(1 << axes[i] for i in along), divisor
        if key not in self._parts:
            self._parts[key] = len(self.kinds)
            self.kinds.append(key)
        return self._parts[key]

    def steps(self, shape: tuple[int, ...], layout: Layout, target: Target) -> tuple[Step, ...]:
        return redistribute(layout, target.layout, target.gradient_partial, shape, self.mesh)


class Pairs:
    """The cost of the ways on one mesh, at the prices of one objective."""

    def __init__(self, objective: Objective, ways: Ways) -> None:
        self._objective, self._mesh, self.ways = objective, ways.mesh, ways
        # Cached by all that `Objective.collective` and `Objective.transfer` are given; the mesh and the objective are
        # those of this object.
        self._prices: dict[Hashable, float] = {}
        self._singly: dict[Hashable, float] = {}

    def costs(self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target]) -> Costs:
        """Return the cost of each way; infinite where there is none."""
        numbers, staying = self.ways.look_up(value.shape, layouts, targets)
        costs = np.full(numbers.shape, math.inf)
        asked = numbers >= 0
        different, which = _different(numbers[asked] << self.ways.count | staying[asked])
        costs[asked] = self._priced(different >> self.ways.count, different & (1 << self.ways.count) - 1, value)[which]
        for i, j in np.argwhere(numbers == BY_STEPS).tolist():
            costs[i, j] = self._alone(value, layouts[i], targets[j])
        return costs

    def buffers(self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target]) -> Costs:
        """The bytes of the largest buffer of a collective on each way; 0 where there is none."""
        numbers, staying = self.ways.look_up(value.shape, layouts, targets)
        found = np.zeros(numbers.shape)
        asked = numbers >= 0
        sizes = np.array([value.bytes // extent for extent in self.ways.extents], dtype=np.int64)
        found[asked] = self._largest(numbers[asked], value, sizes[staying[asked]])
        for i, j in np.argwhere(numbers == BY_STEPS).tolist():
            steps = self.ways.steps(value.shape, layouts[i], targets[j])
            found[i, j] = largest_buffer(value, steps, transfer_collectives(value, steps, self._mesh))
        return found

    def _largest(self, ways: Numbers, value: Value, sizes: Numbers) -> Costs:
        divisors = np.array([divisor if axes else math.inf for _, axes, divisor in self.ways.kinds])
        divided = divisors[self.ways.forward[ways]].min(axis=1)
        if value.needs_gradient:
            larger = value.reduced_itemsize / value.dtype.itemsize
            backward = np.where(self._summing, divisors / larger, divisors)
            divided = np.minimum(divided, backward[self.ways.backward[ways]].min(axis=1))
        found = sizes // divided
        if value.of_parameter:
            enters = self.ways.flags[ways, 2]
            found[enters] = np.minimum(found[enters], BUCKET_BYTES)
        return np.asarray(found)

    # Prices

    def _priced(self, ways: Numbers, staying: Numbers, value: Value) -> Costs:
        """Return the cost of ways for a value, by the axes of the dims that each leaves as they are."""
        overlap = overlaps(value, shared=False)
        beside = forward_beside(value) if overlap else None
        early = self.ways.early[ways]
        costs = self._both(self.ways.forward[ways], early[:, 0], staying, value.bytes, beside=beside)
        if value.needs_gradient:
            size, summed = value.bytes, value.bytes // value.dtype.itemsize * value.reduced_itemsize
            beside = "backward" if overlap else None
            costs += self._both(self.ways.backward[ways], early[:, 1], staying, size, summed, beside=beside)
            enters = self.ways.flags[ways, 2] & value.of_parameter
            if enters.any():  # such gradients share a few collectives
                backward = self.ways.backward[ways[enters]]
                beside = "backward" if overlaps(value, shared=True) else None
                costs[enters] = self._sums(backward, staying[enters], size, summed, shared=True, beside=beside)
        return costs

    @property
    def _summing(self) -> Flags:
        """Return which kinds of parts are sums."""
        return np.array([kind in SUMS for kind, _, _ in self.ways.kinds])

    def _both(
        self,
        parts: npt.NDArray[np.int32],
        early: npt.NDArray[np.int32],
        staying: Numbers,
        size: int,
        summed: int | None = None,
        *,
        beside: Beside | None = None,
    ) -> Costs:
        """Return the cost of the parts of each way, of which the first ``early`` may go on beside computing."""
        if beside is None:
            return self._sums(parts, staying, size, summed)
        is_early = np.arange(parts.shape[1]) < early[:, None]
        costs = self._sums(np.where(is_early, parts, 0), staying, size, summed, beside=beside)
        late = np.where(is_early, 0, parts)
        return costs + self._sums(late, staying, size, summed) if late.any() else costs

    def _sums(
        self,
        parts: npt.NDArray[np.int32],
        staying: Numbers,
        size: int,
        summed: int | None = None,
        *,
        shared: bool = False,
        beside: Beside | None = None,
    ) -> Costs:
        """Return the cost of the parts of each way together, by the axes of the dims that stay as they are.

        Args:
            size: the bytes of the whole value, and ``summed`` where it is a gradient that is summed, if others.
        """
        kinds = len(self.ways.kinds)
        priced = staying[:, None] * kinds + parts
        prices = np.zeros(len(self.ways.extents) * kinds)
        for at in _present(priced):
            mask, part = divmod(at, kinds)
            moved = summed if summed is not None and self.ways.kinds[part][0] in SUMS else size
            prices[at] = self._price(part, moved // self.ways.extents[mask], shared, beside) if part else 0.0
        return np.asarray(prices[priced].sum(axis=1))

    def _price(self, part: int, size: int, shared: bool, beside: Beside | None) -> float:
        kind, mask, divisor = self.ways.kinds[part]
        key = kind, mask, size // divisor, shared, beside
        if key not in self._prices:
            collective = Collective(kind, self.ways.named[mask], size // divisor)
            found = self._objective.collective(collective, self._mesh, shared=shared, beside=beside)
            self._prices[key] = found
        return self._prices[key]

    def _alone(self, value: Value, layout: Layout, target: Target) -> float:
        alike = value.needs_gradient, value.of_parameter, value.reduced_in, value.read_first, value.viewed
        key = value.shape, value.dtype, *alike, layout, target
        if key not in self._singly:
            steps = self.ways.steps(value.shape, layout, target)
            self._singly[key] = self._objective.transfer(value, steps, self._mesh)
        return self._singly[key]


def _present(numbers: npt.NDArray[np.signedinteger[Any]]) -> list[int]:
    """Return which numbers from 0 on there are, few of which are possible."""
    found: list[int] = np.flatnonzero(np.bincount(numbers.ravel())).tolist()
    return found


def _different(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """The different ones of all numbers, and which of them each is: what `numpy.unique` takes longer for."""
    ordered = np.sort(numbers, axis=None)
    found = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]]
    return found, np.searchsorted(found, numbers)


@lru_cache(maxsize=128)  # tables of costs, of bytes and of buffers ask for the same ways, one after the other
def _looked_up(
    ways: Ways, shape: tuple[int, ...], layouts: tuple[Layout, ...], targets: tuple[Target, ...]
) -> tuple[Numbers, Numbers]:
    """Look ways up once.

    Cached by frozen values and the ways themselves, whose numbers stay when others get some; nobody writes to it.
    """
    found = ways.numbered(shape, layouts, targets)
    for numbers in found:
        numbers.setflags(write=False)
    return found


@lru_cache(maxsize=16)
def ways_on(mesh: Mesh) -> Ways:
    """The ways on a mesh, which the prices of all objectives share.

    Cached by a frozen value, of which all is made.
    """
    return Ways(mesh)


@lru_cache(maxsize=8)
def pairs_on(objective: Objective, mesh: Mesh) -> Pairs:
    """The ways on a mesh at the prices of an objective, which searches share.

    Cached by frozen values, all of which it is made of: equal objectives have equal prices.
    """
    return Pairs(objective, ways_on(mesh))
