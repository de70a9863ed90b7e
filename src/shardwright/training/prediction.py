"""How many bytes go from host to host when programs run so and so often: what a plan predicts of the network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwright.backends.table import Backend
from shardwright.lower.program import LocalProgram
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective
from shardwright.run.programs.execute import Pass

Flows = Mapping[tuple[str, str], float]
"""(from host, to host) -> bytes; from a host to itself are the bytes between its own ranks."""


def collectives_of(program: LocalProgram, runs: Mapping[Pass, int]) -> Counter[Collective]:
    """Every collective that the program ran, with its count. A bucket is one all-reduce of all its gradients."""
    forwards, backwards = runs.get("forward", 0), runs.get("reduced", 0) + runs.get("deferred", 0)
    counts: Counter[Collective] = Counter()
    for instruction in program.instructions:
        collectives = instruction.collectives(program.mesh)
        if instruction.kind == "bucket":
            joined = [collective for _, _, collective in collectives]
            if joined:
                whole = Collective("all_reduce", joined[0].axes, sum(c.bytes for c in joined))
                counts[whole] += runs.get("reduced", 0)
            continue
        if instruction.kind == "joined":
            joined = [collective for _, _, collective in collectives]
            one_dtype = len({value.dtype for value, _ in instruction.bucket}) == 1
            size, axes = sum(c.bytes for c in joined), joined[0].axes
            whole = (
                Collective("all_reduce", axes, size)
                if one_dtype
                else Collective("all_gather", axes, size * program.mesh.extent(axes))
            )
            counts[whole] += backwards + forwards
            continue
        for _, direction, collective in collectives:
            counts[collective] += backwards + (forwards if direction == "forward" else 0)
    return +counts


def flows_between(collectives: Mapping[Collective, int], mesh: Mesh, hosts: Sequence[str], backend: Backend) -> Flows:
    """The bytes from host to host, for ranks on ``hosts`` (rank 0's first), the backend's own headers included.

    >>> from shardwright.backends.table import NCCL
    >>> reduced = {Collective("all_reduce", ("dp",), 1000): 3}
    >>> flows = flows_between(reduced, Mesh.of(dp=4), ["a", "a", "b", "b"], NCCL)
    >>> flows["a", "b"], flows["a", "a"]
    (4500.0, 4500.0)
    """
    sent: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)  # what each member sends, in bytes
    for collective, count in collectives.items():
        way = backend.ways[collective.kind]
        axes = mesh.ordered(collective.axes)
        headers = way.messages(mesh.extent(axes), collective.bytes) * backend.header_bytes
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
