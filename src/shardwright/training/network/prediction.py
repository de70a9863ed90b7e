"""Predicts how many bytes go from host to host in a number of runs of a plan's programs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.distributed.backends.table import Backend
from shardwright.runtime.programs.execute import Pass

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
            alike: defaultdict[tuple[str, str], list[Collective]] = defaultdict(list)
            for _, direction, collective in collectives:
                alike[direction, collective.kind].append(collective)
            for (direction, _), members in alike.items():
                times = backwards + (forwards if direction == "forward" else 0)
                counts[replace(members[0], bytes=sum(c.bytes for c in members))] += times
            continue
        for _, direction, collective in collectives:
            counts[collective] += backwards + (forwards if direction == "forward" else 0)
    return +counts


def flows_between(collectives: Mapping[Collective, int], mesh: Mesh, hosts: Sequence[str], backend: Backend) -> Flows:
    """The bytes from host to host, for ranks on ``hosts`` (rank 0's first), the backend's own headers included.

    >>> from shardwright.distributed.backends.table import NCCL
    >>> reduced = {Collective("all_reduce", ("dp",), 1000): 3}
    >>> flows = flows_between(reduced, Mesh.of(dp=4), ["a", "a", "b", "b"], NCCL)
    >>> flows["a", "b"], flows["a", "a"]
    (4500.0, 4500.0)
    """
    sent: Counter[tuple[Collective, tuple[int, ...]]] = Counter()
    for collective, count in collectives.items():
        for members in mesh.groups(collective.axes):
            if len(members) > 1:  # a group of one has nothing to say
                sent[collective, members] += count
    flows: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (collective, members), count in sent.items():
        for pair, each in _flows_of(collective, mesh, [hosts[rank] for rank in members], backend):
            flows[pair] += count * each
    return flows


def flows_from_rank_zero(broadcast_bytes: int, hosts: Sequence[str]) -> Flows:
    """Return what ranks on ``hosts`` pass on until all have so many bytes of rank 0.

    In each round those who have them pass them on to as many others, as gloo does: each to who is as far behind it as
    there are who have them.

    >>> dict(flows_from_rank_zero(100, ["a", "a", "b", "b"]))
    {('a', 'a'): 100, ('a', 'b'): 200}
    """
    flows: Counter[tuple[str, str]] = Counter()
    for number, host in enumerate(hosts[1:], start=1):
        had_before = 1 << number.bit_length() - 1
        flows[hosts[number - had_before], host] += broadcast_bytes
    return flows


def _flows_of(
    collective: Collective, mesh: Mesh, places: Sequence[str], backend: Backend
) -> Iterator[tuple[tuple[str, str], float]]:
    """Return what one collective sends among members that are on these hosts."""
    members, way = len(places), backend.ways[collective.kind]
    each = collective.sent_bytes(mesh) + way.messages(members, collective.bytes) * backend.header_bytes
    for sender, receiver in _edges(way.route, places):
        yield (sender, receiver), each if way.route == "ring" else each / (members - 1)


def _edges(route: str, places: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(places, [*places[1:], places[0]], strict=True) if route == "ring" else permutations(places, 2)
