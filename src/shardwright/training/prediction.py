"""How many bytes go from host to host when programs run so and so often: what a plan predicts of the network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.lower.program import LocalProgram
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective, CollectiveKind
from shardwright.run.execute import Pass

Flows = Mapping[tuple[str, str], float]
"""(from host, to host) -> bytes; from a host to itself are the bytes between its own ranks."""


@dataclass(frozen=True)
class Way:
    """How a collective travels: around a ring, or from every member to every other.

    In both each member sends `Collective.sent_bytes`, in as many ``messages(members, bytes)`` with a header each.
    """

    route: Literal["ring", "pairs"]
    messages: Callable[[int, int], float] = lambda members, buffer_bytes: 0


def _gloo_segments(members: int, buffer_bytes: int) -> float:
    """Messages of an all-reduce: each of twice as many segments as members, none below an element, goes round twice."""
    return 2 * (members - 1) / members * min(2 * members, max(buffer_bytes // 4, 1))


# The ways of each backend. gloo's were measured on the loopback of an empty network namespace with 2, 3 and 4 ranks
# and buffers from 4 bytes to 8 MB: a header of 72 bytes goes with every message, and another 72 bytes come back to say
# that it may be sent. A reduce-scatter is an all-to-all and a local sum (`mesh.processes`).
_RING, _PAIRS = Way("ring"), Way("pairs")
_WAYS: dict[str, dict[CollectiveKind, Way]] = {
    "gloo": {
        "all_reduce": Way("ring", _gloo_segments),
        "all_gather": Way("ring", lambda members, buffer_bytes: 2 * (members - 1)),
        "reduce_scatter": Way("pairs", lambda members, buffer_bytes: members - 1),
        "all_to_all": Way("pairs", lambda members, buffer_bytes: members - 1),
    },
    # NCCL may choose trees, which cross hosts with as few as half of a ring's bytes for an all-reduce.
    "nccl": {"all_reduce": _RING, "all_gather": _RING, "reduce_scatter": _RING, "all_to_all": _PAIRS},
}
_HEADER_BYTES = {"gloo": 144}


def collectives_of(program: LocalProgram, runs: Mapping[Pass, int]) -> Counter[Collective]:
    """Every collective that the program ran, with its count. A bucket is one all-reduce of all its gradients."""
    forwards, backwards = runs.get("forward", 0), runs.get("reduced", 0) + runs.get("deferred", 0)
    found: Counter[Collective] = Counter()
    for instruction in program.instructions:
        collectives = instruction.collectives(program.mesh)
        if instruction.kind == "bucket":
            joined = [collective for _, _, collective in collectives]
            if joined:
                whole = Collective("all_reduce", joined[0].axes, sum(c.bytes for c in joined))
                found[whole] += runs.get("reduced", 0)
            continue
        for _, direction, collective in collectives:
            found[collective] += backwards + (forwards if direction == "forward" else 0)
    return +found


def flows_between(collectives: Mapping[Collective, int], mesh: Mesh, hosts: Sequence[str], backend: str) -> Flows:
    """The bytes from host to host, for ranks on ``hosts`` (rank 0's first), the backend's own headers included.

    >>> reduced = {Collective("all_reduce", ("dp",), 1000): 3}
    >>> flows = flows_between(reduced, Mesh.of(dp=4), ["a", "a", "b", "b"], "nccl")
    >>> flows["a", "b"], flows["a", "a"]
    (4500.0, 4500.0)
    """
    ways = _WAYS.get(backend, _WAYS["nccl"])
    sent: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)  # what each member sends, in bytes
    for collective, count in collectives.items():
        way = ways[collective.kind]
        axes = mesh.ordered(collective.axes)
        headers = way.messages(mesh.extent(axes), collective.bytes) * _HEADER_BYTES.get(backend, 0)
        sent[way.route, axes] += count * (collective.sent_bytes(mesh) + headers)
    flows: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (route, axes), each in sent.items():
        for members in _groups(mesh, axes):
            for sender, receiver in _edges(route, members):
                flows[hosts[sender], hosts[receiver]] += each if route == "ring" else each / (len(members) - 1)
    return flows


def _groups(mesh: Mesh, axes: Iterable[str]) -> list[list[int]]:
    """The ranks, in groups of those that differ on these axes only; groups of one have nothing to say."""
    along = set(axes)
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        groups[tuple(at for axis, at in mesh.coordinates(rank).items() if axis not in along)].append(rank)
    return [members for members in groups.values() if len(members) > 1]


def _edges(route: str, members: Sequence[int]) -> Iterator[tuple[int, int]]:
    if route == "ring":
        yield from zip(members, [*members[1:], members[0]], strict=True)
    else:
        yield from ((a, b) for a in members for b in members if a != b)
