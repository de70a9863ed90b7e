"""Measures a machine for the planner: what collectives take on every link, and how fast a device computes.

A collective is timed as programs run it, through a `Communicator`, after a barrier, on the slowest rank. Where
groups are smaller than the world all groups communicate at once, as they do along an axis of a mesh. Sizes and kinds
take turns in an order that is drawn anew in each round, so that a slow minute of the machine falls on all of them; the
median over the rounds counts. Devices are measured while all ranks compute.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.cluster.bench.profile_fit import fit
from shardwright.cluster.bench.roofline import copy_rate, processor
from shardwright.cluster.bench.stopwatch import refill, synchronize, took_s
from shardwright.errors import UsageError
from shardwright.mesh.collectives import Axes, Communicator
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.processes import communicator_over
from shardwright.mesh.redistribute import CollectiveKind
from shardwright.plan.pricing.hardware import Hardware, LinkCost, LinkKind
from shardwright.world.agreement import from_all_ranks
from shardwright.world.world import World

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# 64 bytes, then two sizes between each power of two and the next, from 645 bytes to 85 MB: whoever compares at powers
# of two compares at sizes that were not fitted. And one on each side of 32 MiB, from where on glibc maps every block
# anew, so that a result costs its page faults.
SIZES = tuple(sorted({
    64, 30 * 2**20, 2**25 + 2**16, *(round(2 ** (third / 3)) for third in range(28, 80) if third % 3)
}))  # fmt: skip
ROUNDS = 20
WARMUP_ROUNDS = 2
# Over slow links a round would take minutes: beyond a size that takes longer, the last bandwidth is taken to hold.
LONGEST_S = 0.25
# Small collectives vary most, by whatever else wants a core for an instant, and cost least.
_TIMES = ((2**20, 11), (2**26, 3))
_FLOAT = 4


@dataclass(frozen=True)
class MeasuredCollective:
    """The median seconds of a kind of collective at every size, in groups of ``ranks``, ``per_host`` on each host."""

    where: LinkKind
    kind: CollectiveKind
    ranks: int
    points: tuple[tuple[int, float], ...]
    per_host: int


@dataclass(frozen=True)
class _Groups:
    """Groups that cover the world: those along ``axes`` of the communicator's mesh."""

    where: LinkKind
    ranks: int
    comm: Communicator
    axes: Axes
    per_host: int


@dataclass(frozen=True)
class _Cell:
    """One thing to time: ``run`` does it once."""

    groups: _Groups
    kind: CollectiveKind
    size: int
    run: Callable[[], object]


def measure_hardware(world: World, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Hardware:
    """The profile of the hosts that the world runs on; every rank calls this and gets the same.

    Raises:
        UsageError: in a world of one rank, or where hosts have different numbers of ranks.
    """
    links = tuple(
        LinkCost(link.where, link.kind, link.ranks, fit(link.points), link.points, link.per_host)
        for link in measure_links(world, sizes, rounds)
    )
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else processor()
    hosts = len(set(world.hosts))
    source = (
        f"measured {date.today().isoformat()} by shardwright bench --save-profile: {world.size} ranks on {hosts} "
        f"host{'s' * (hosts > 1)}, {world.backend}, torch {torch.__version__}, {torch.get_num_threads()} threads a rank"
    )
    return Hardware(
        name=f"{world.device.type}, {world.backend}, {world.size} ranks",
        device=device,
        flops=_on_slowest(_flops(world.device)),
        memory_bandwidth=dict(_on_slowest((("copy", 2 * _copied(world)),)))["copy"],
        launch_s=1 / dict(_on_slowest((("launch", 1 / _launch_s(world.device)),)))["launch"],
        links=links,
        ranks_per_host=None if hosts == 1 else world.local_size,
        sources=(source,),
    )


def measure_links(
    world: World,
    sizes: Sequence[int],
    rounds: int = ROUNDS,
    kinds: Sequence[CollectiveKind] = KINDS,
    *,
    ranks: int | None = None,
) -> list[MeasuredCollective]:
    """The medians at ``sizes``, bytes of the whole buffer, for every kind of collective and of group.

    Sizes beyond one that takes longer than `LONGEST_S` are left out. In each round a size is timed once, or several
    times in succession where it is small, of which the median counts.
    ``ranks``, where given, leaves out groups of another size.
    """
    all_groups = [groups for groups in _all_groups(world) if ranks in (None, groups.ranks)]
    buffer = torch.zeros(max(sizes) // _FLOAT + world.size, device=world.device)
    rising = sorted(sizes)
    cells = [_cell(groups, kind, size, buffer) for groups in all_groups for kind in kinds for size in rising]
    cells = _soon_over(cells, world.device)
    visits: list[list[list[float]]] = [[] for _ in cells]
    order = list(range(len(cells)))
    drawn = random.Random(0)  # the same order on every rank
    for turn in range(WARMUP_ROUNDS + rounds):
        drawn.shuffle(order)
        for index in order:
            cell = cells[index]
            refill(buffer)
            calls = [_timed(cell.run, world.device) for _ in range(_times(cell.size))]
            if turn >= WARMUP_ROUNDS:
                visits[index].append(calls)
    everyone = from_all_ranks(visits)
    for groups in all_groups:
        groups.comm.close()
    medians = [_typical([theirs[index] for theirs in everyone]) for index in range(len(cells))]
    links = []
    for groups in all_groups:
        for kind in kinds:
            mine = zip(cells, medians, strict=True)
            points = tuple((cell.size, s) for cell, s in mine if cell.groups is groups and cell.kind == kind)
            links.append(MeasuredCollective(groups.where, kind, groups.ranks, points, groups.per_host))
    return links


def _soon_over(cells: Sequence[_Cell], device: torch.device) -> list[_Cell]:
    """Of each groups and kind, whose sizes rise, those up to the first that takes longer than `LONGEST_S`, with it."""
    kept: list[_Cell] = []
    over: set[tuple[int, CollectiveKind]] = set()
    for cell in cells:
        row = id(cell.groups), cell.kind
        if row not in over:
            kept.append(cell)
            calls = from_all_ranks([_timed(cell.run, device) for _ in range(2)])
            if min(map(max, zip(*calls, strict=True))) > LONGEST_S:  # an instant in which others want the cores
                over.add(row)
    return kept


def _times(size: int) -> int:
    return next((times for below, times in _TIMES if size < below), 1)


def _typical(visits_of_ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """The median over the visits of the median of a visit, in each of whose calls the slowest rank counts."""
    samples = [
        statistics.median(max(call) for call in zip(*calls_of_ranks, strict=True))
        for calls_of_ranks in zip(*visits_of_ranks, strict=True)
    ]
    return float(statistics.median(samples))


def _all_groups(world: World) -> list[_Groups]:
    """The groups to measure: inside a host of 2, 4, 8, ... and all of its ranks, between hosts one of each and all."""
    hosts, local = len(set(world.hosts)), world.local_size
    blocks = [world.hosts[i * local : (i + 1) * local] for i in range(hosts)]
    if world.size == 1:
        raise UsageError("a profile needs 2 ranks or more to measure links between them; type -n 2")
    if hosts * local != world.size or any(len(set(block)) > 1 for block in blocks):
        raise UsageError(f"a profile needs as many ranks on every host, side by side; got {', '.join(world.hosts)}")
    all_groups = []
    for ranks in range(2, local + 1):
        if local % ranks == 0 and (ranks == local or ranks & (ranks - 1) == 0):
            all_groups.append(_groups("inside", Mesh.of(rest=world.size // ranks, group=ranks), ("group",)))
    if hosts > 1:
        all_groups.append(_groups("between", Mesh.of(hosts=hosts, local=local), ("hosts",)))
        if local > 1:
            all_groups.append(_groups("between", Mesh.of(hosts=hosts, local=local), ("hosts", "local"), local))
    return all_groups


def _groups(where: LinkKind, mesh: Mesh, axes: Axes, per_host: int = 1) -> _Groups:
    comm = communicator_over(mesh)
    comm.prepare([axes])
    return _Groups(where, mesh.extent(axes), comm, axes, per_host)


def _cell(groups: _Groups, kind: CollectiveKind, size: int, buffer: Tensor) -> _Cell:
    """A collective whose whole buffer has ``size`` bytes, up to a part of a float for each rank."""
    comm, axes = groups.comm, groups.axes
    part = max(1, round(size / _FLOAT / groups.ranks))
    whole = buffer[: part * groups.ranks]
    rows = whole.view(groups.ranks, part)
    parts = list(rows.unbind())
    calls: dict[CollectiveKind, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(whole, axes),
        "all_gather": lambda: comm.all_gather(parts[0], axes),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, axes),
        "all_to_all": lambda: comm.all_to_all(parts, axes),
    }
    return _Cell(groups, kind, size, calls[kind])


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``run()`` on this rank, from a moment that all ranks have reached."""
    synchronize(device)
    dist.barrier()
    return took_s(run, device)


def _on_slowest(mine: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The least of all ranks of every figure, of which more is better."""
    everyone = from_all_ranks(mine)
    return tuple((name, min(dict(theirs)[name] for theirs in everyone)) for name, _ in mine)


def _copied(world: World) -> float:
    return copy_rate(world.device, dist.barrier)


def _flops(device: torch.device) -> list[tuple[str, float]]:
    """Operations per second in a square matrix product that fills the device, by dtype."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 1024
    dtypes = [torch.float32, torch.float64, torch.bfloat16] + [torch.float16] * on_gpu
    by_dtype = []
    for dtype in dtypes:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))  # equal numbers draw less power
        out = torch.empty_like(a)
        product = partial(torch.mm, a, b, out=out)
        times = [_timed(product, device) for _ in range(8)]
        by_dtype.append((str(dtype).removeprefix("torch."), 2 * n**3 / statistics.median(times[3:])))
    return by_dtype


def _launch_s(device: torch.device) -> float:
    """Seconds of an operator that has next to nothing to do, one after the other."""
    x = torch.ones(1, device=device)
    calls = 1000

    def run() -> None:
        for _ in range(calls):
            torch.relu(x)

    return statistics.median(_timed(run, device) for _ in range(5)) / calls


def report(hardware: Hardware) -> str:
    """The profile as tables: the device, the segments of every link, and how far they are from what was measured."""
    products = ", ".join(f"{name} {flops / 1e9:,.1f}" for name, flops in hardware.flops)
    lines = [
        f"profile: {hardware.name} ({hardware.device})",
        *hardware.sources,
        f"matrix products: {products} GFLOP/s; memory: {hardware.memory_bandwidth / 1e9:.2f} GB/s read and written; an "
        f"operator takes {hardware.launch_s * 1e6:.2f} us at least",
    ]
    for link in hardware.links:
        where = "inside a host" if link.where == "inside" else "between hosts"
        lines += ["", f"{link.collective} {where}, groups of {link.ranks}:"]
        lines.append(f"  {'from (B)':>12}  {'latency (us)':>12}  {'GB/s':>8}")
        for segment in link.curve.segments:
            bandwidth = f"{segment.bandwidth / 1e9:8.3f}" if segment.bandwidth < 1e14 else "       -"
            lines.append(f"  {segment.from_bytes:12d}  {segment.latency_s * 1e6:12.1f}  {bandwidth}")
        if link.points:
            lines.append(f"  {'size (B)':>12}  {'measured (us)':>13}  {'curve (us)':>10}  residual")
        for (size, seconds), residual in zip(link.points, link.residuals(), strict=True):
            curve_us = link.curve.seconds(size) * 1e6
            lines.append(f"  {size:12d}  {seconds * 1e6:13.1f}  {curve_us:10.1f}  {residual:+7.1%}")
    return "\n".join(lines)
