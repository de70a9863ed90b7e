"""Which gradients of replicated parameters are reduced together: what programs do, and what plans are priced by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_ALONE = 4  # a gradient of more than a bucket's bytes divided by this is reduced alone, where it lies


@dataclass(frozen=True)
class Entering:
    """A parameter that enters split work, whose gradient is added up over ranks.

    Those that can share a collective have the same ``alike``: the axes and the dtype.
    """

    parameter: str
    bytes: int
    alike: Hashable


def travels_alone(size_bytes: int, limit_bytes: int) -> bool:
    """Whether a gradient is reduced where it lies, since to join it with others costs a copy."""
    return size_bytes * _ALONE > limit_bytes


def in_buckets(entering: Sequence[Entering], limit_bytes: int, first_bytes: int) -> list[list[int]]:
    """What is reduced together, by its rising numbers; the buckets in the order in which they begin.

    ``entering`` is in the order of the program. The backward comes to it from its end, and so do buckets begin, each
    when its first member is there. The one that is filled first has ``first_bytes`` at most.
    """
    groups: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}  # the bytes that still fit
    for number in reversed(range(len(entering))):
        one = entering[number]
        if travels_alone(one.bytes, limit_bytes):
            groups.append([number])
            continue
        # A parameter that enters twice, as to two layouts that differ in units alone, has no two places in a bucket.
        twice = any(entering[member].parameter == one.parameter for member in filling.get(one.alike, ()))
        if one.alike not in filling or twice or one.bytes > room[one.alike]:
            room[one.alike] = limit_bytes if one.alike in filling else min(first_bytes, limit_bytes)
            filling[one.alike] = []
            groups.append(filling[one.alike])
        filling[one.alike].insert(0, number)
        room[one.alike] -= one.bytes
    return sorted(groups, key=lambda members: -members[0])
