"""Which collectives of parameters, and of their gradients, programs join into one.

Programs join the gradients of replicated parameters into buckets, and the all-gathers of small sharded parameters into
one. What the backward gathers again is joined in no more memory than another collective of the plan takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.plan.pricing.memory import local_bytes

# To copy a parameter of so much into a memory with others, and out of it, takes less than a collective of its own.
SMALL_WHOLE_BYTES = 32 * 1024
GATHERED_BYTES = 2**20  # by all gathers that are joined
# The same of one that the backward gathers again: three collectives are saved for each, and all is copied for it.
REPEATED_WHOLE_BYTES = 2**20
_ALONE = 4  # a gradient of more than a bucket's bytes divided by this is reduced alone, as soon as it is there


@dataclass(frozen=True)
class EnteringParameter:
    """A parameter that enters split work, whose gradient is added up over ranks.

    Those that can share a collective have the same ``alike``: the axes and the dtype.
    """

    parameter: str
    bytes: int
    alike: Hashable


def entering_alike(value: Value, step: Step) -> Hashable:
    """Return what the gradients have in common that share a bucket: the axes, the dtype, and that of the sum."""
    return step.axes, value.dtype, value.reduced_in


def in_buckets(entering: Sequence[EnteringParameter], limit_bytes: int, first_bytes: int) -> list[list[int]]:
    """Return the buckets, as rising numbers of what enters, in the order in which they begin.

    ``entering`` is in the order of the program. The backward comes to it from its end, and so do buckets begin, each
    when its first member is there. The one that is filled first has ``first_bytes`` at most. The last ones are ever
    smaller, since nothing is left to compute beside the very last: each has at most half of what is still to come, or
    ``first_bytes``.
    """
    groups: list[list[int]] = []
    coming = Counter[Hashable]()  # the bytes that are still to be joined
    for one in entering:
        coming[one.alike] += one.bytes if one.bytes * _ALONE <= limit_bytes else 0
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}  # the bytes that still fit
    for number in reversed(range(len(entering))):
        one = entering[number]
        if one.bytes * _ALONE > limit_bytes:
            groups.append([number])
            continue
        # A parameter that enters twice, as to two layouts that differ in units alone, has no two places in a bucket.
        twice = any(entering[member].parameter == one.parameter for member in filling.get(one.alike, ()))
        if one.alike not in filling or twice or one.bytes > room[one.alike]:
            most_bytes = max(first_bytes, coming[one.alike] // 2) if one.alike in filling else first_bytes
            room[one.alike] = min(most_bytes, limit_bytes)
            filling[one.alike] = []
            groups.append(filling[one.alike])
        filling[one.alike].insert(0, number)
        room[one.alike] -= one.bytes
        coming[one.alike] -= one.bytes
    return sorted(groups, key=lambda members: -members[0])


@dataclass(frozen=True)
class SmallGather:
    """A small parameter, stored split, that is gathered where it is used; ``bytes`` are those of what comes of it.

    Those that can share a collective have the same ``alike``.
    """

    bytes: int
    alike: Hashable


def small_gather(value: Value, step: Step, mesh: Mesh) -> SmallGather | None:
    """The gather of a parameter as it is stored, where it is one that may be joined with others."""
    if step.kind != "all_gather" or mesh.extent(step.axes) == 1:
        return None
    size = local_bytes(value, step.after, mesh)
    if size > SMALL_WHOLE_BYTES:
        return None
    return SmallGather(size, _gathered_alike(value, step))


def _gathered_alike(value: Value, step: Step) -> Hashable:
    return step.axes, value.dtype, step.adjoint, value.needs_gradient, value.reduced_in


def in_gathers(gathers: Sequence[SmallGather]) -> list[list[int]]:
    """Return the all-gathers that are joined, as rising numbers in the order of the program; some are alone."""
    groups: dict[Hashable, list[list[int]]] = {}
    room: dict[Hashable, int] = {}  # the bytes that still fit
    for number, one in enumerate(gathers):
        if one.alike not in room or one.bytes > room[one.alike]:
            groups.setdefault(one.alike, []).append([])
            room[one.alike] = GATHERED_BYTES
        groups[one.alike][-1].append(number)
        room[one.alike] -= one.bytes
    return [members for alike in groups.values() for members in alike]


def repeated_gather(value: Value, step: Step, mesh: Mesh) -> Hashable | None:
    """Of the gather of a parameter that the backward does again: what all that may be joined with it have alike."""
    if step.kind != "all_gather" or local_bytes(value, step.after, mesh) > REPEATED_WHOLE_BYTES:
        return None
    return _gathered_alike(value, step) if mesh.extent(step.axes) > 1 else None


def in_repeated_gathers(
    gathers: Sequence[tuple[Hashable, tuple[Value, Step]]], mesh: Mesh, limit_bytes: int
) -> list[list[int]]:
    """Return the all-gathers of the backward that are joined, as rising numbers in the order of the program.

    Those are neighbours, which forward and backward need one after the other. None of another kind stands between
    them, so that only one joined collective's results exist at a time.

    Args:
        gathers: of what kind each is, as `repeated_gather` says, and what it moves.
        limit_bytes: of memory that those of one collective may take.
    """
    groups: list[list[int]] = []
    for number, (alike, _) in enumerate(gathers):
        last = groups[-1] if groups and gathers[groups[-1][-1]][0] == alike else []
        moved = [gathers[member][1] for member in (*last, number)]
        if last and together_bytes(moved, mesh) <= limit_bytes:
            last.append(number)
        else:
            groups.append([number])
    return groups


def beside_together(collective: Collective, mesh: Mesh) -> int:
    """Return the most bytes that joining a collective with others takes, besides its inputs and results.

    The backend shm takes none where parts are even and of the first dim.

    To gather: this rank's part behind those of others, and what all ranks have sent. To scatter sums: this rank's whole
    behind others, and what all ranks have sent for its part.
    """
    own = collective.bytes // mesh.extent(collective.axes) if collective.kind == "all_gather" else collective.bytes
    return own + collective.bytes


def together_bytes(moved: Sequence[tuple[Value, Step]], mesh: Mesh) -> int:
    """Return the most bytes that parameters take which are gathered together.

    These are all parameters, or the gradients of all, which wait for the last of them, and what it takes to move them.
    """
    forward = backward = 0
    for value, step in moved:
        there, back = value.collectives(step, mesh)
        forward += beside_together(there, mesh) if there else 0
        backward += beside_together(back, mesh) if back and value.needs_gradient else 0
    return sum(local_bytes(value, step.after, mesh) for value, step in moved) + max(forward, backward)
