"""Measures a machine for the planner: what collectives take on every link, and how fast a device computes.

A collective is timed as programs run it, through a `Communicator`, after a barrier, on the slowest rank. Where
groups are smaller than the world all groups communicate at once, as they do along an axis of a mesh. Sizes and kinds
take turns in an order that is drawn anew in each round, so that a slow minute of the machine falls on all of them; the
median over the rounds counts. Devices are measured while all ranks compute.

A program computes before each collective, and ranks that share cores then come to it one after the other; and it
communicates by functions of autograd. What both add to the smallest size is added to all (`under_load`).

Beside operators and collectives a step takes what optimizers, parameters and calls take (`overheads`).

How often each is timed follows from a budget of seconds and a first look. On slow links the largest sizes are left out,
as the last segment of a curve goes on beyond the largest size that was timed.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import torch
from torch import Tensor

from shardwright.cluster.bench.device import measure_device, memory_of, timed_s
from shardwright.cluster.bench.overheads import ProductLoad, gradients_hidden, measure_overheads
from shardwright.cluster.bench.profile_fit import fit
from shardwright.cluster.bench.roofline import processor
from shardwright.cluster.bench.stopwatch import refill
from shardwright.compiler.mesh.collectives import Axes, Communicator, all_gather, all_reduce, all_to_all
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.mesh.redistribute import CollectiveKind
from shardwright.compiler.plan.pricing.hardware import Hardware, profile_of, shipped
from shardwright.compiler.plan.pricing.links import LinkCost, LinkKind
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.world import World
from shardwright.errors import UsageError

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# 64 bytes, then two sizes between each power of two and the next, from 645 bytes to 85 MB: whoever compares at powers
# of two compares at sizes that were not fitted. And one on each side of 32 MiB, from where on glibc maps every block
# anew, so that a result costs its page faults.
SIZES = tuple(sorted({
    64, 30 * 2**20, 2**25 + 2**16, *(round(2 ** (third / 3)) for third in range(28, 80) if third % 3)
}))  # fmt: skip
ROUNDS, FEWEST_ROUNDS = 20, 3
LINKS_S = 80.0  # for all links together
# Over slow links a round would take minutes: beyond a size that takes longer, or such a part of what its collective may
# take, the last bandwidth is taken to hold.
LONGEST_S, LONGEST_PART = 0.25, 1 / 40
# A size is timed as often in succession as fits in so long: small collectives vary most, by whatever else wants a core
# for an instant, and cost least.
_VISIT_S, _MOST_TIMES, _LOOKS = 0.03, 11, 2
_FLOAT = 4


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
    """One size of a collective: ``run`` does it once. ``visits`` has what each call took here, by visit."""

    size: int
    run: Callable[[], object]
    times: int = 1  # in succession
    visits: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """One kind of collective in one kind of groups: its sizes, rising, and in how many rounds they are timed."""

    groups: _Groups
    kind: CollectiveKind
    cells: tuple[_Cell, ...]
    rounds: int

    def takes_part(self, turn: int, turns: int) -> bool:
        """Return whether its sizes are timed in this turn: in ``rounds`` of them, evenly between the others."""
        return turn * self.rounds // turns != (turn - 1) * self.rounds // turns


def measure_hardware(
    world: World, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, links_s: float = LINKS_S
) -> Hardware:
    """Return the profile of the hosts that the world runs on; every rank calls this and gets the same.

    Each collective is timed ``rounds`` times at each of ``sizes``, as far as ``links_s`` seconds are enough for all.
    """
    speeds = measure_device(world.device)
    hidden = gradients_hidden(world)
    links = tuple(measure_links(world, sizes, rounds, within_s=links_s))
    around = measure_overheads(world, speeds)
    memory_bytes, outside_bytes = memory_of(world.device)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else processor()
    hosts, known = len(set(world.hosts)), profile_of(device)
    return Hardware(
        name=f"{world.device.type}, {world.backend}, {world.size} ranks",
        device=device,
        hides_gradients=hidden,
        backend=world.backend,
        **vars(speeds),
        **vars(around),
        memory_bytes=memory_bytes,
        outside_bytes=outside_bytes,
        peak_flops=shipped(known).peak_flops if known else (),
        links=links,
        ranks_per_host=None if hosts == 1 else world.local_size,
        sources=tuple(_sources(world, hosts, links, max(sizes))),
    )


def _sources(world: World, hosts: int, links: Sequence[LinkCost], most_bytes: int) -> Iterator[str]:
    yield (
        f"measured {date.today().isoformat()} by shardwright bench --save-profile: {world.size} ranks on {hosts} "
        f"host{'s' * (hosts > 1)}, {world.backend}, torch {torch.__version__}, {torch.get_num_threads()} threads a rank"
    )
    least = {where: min(m.points[-1][0] for m in links if m.where == where) for where in {m.where for m in links}}
    for where, timed_bytes in sorted(least.items()):
        if timed_bytes < most_bytes:
            yield f"{where} hosts some collectives were timed up to {timed_bytes} bytes; beyond they go on as a line"


def measure_links(
    world: World,
    sizes: Sequence[int],
    rounds: int = ROUNDS,
    kinds: Sequence[CollectiveKind] = KINDS,
    *,
    ranks: int | None = None,
    within_s: float = math.inf,
) -> list[LinkCost]:
    """Return the seconds at ``sizes``, bytes of the whole buffer, for every kind of collective and of group.

    In a round a size is timed once, or several times in succession where it is small, of which the median counts.
    Sizes and rounds are fewer where all would take longer than ``within_s``; there are `FEWEST_ROUNDS` at least.
    ``ranks``, where given, leaves out groups of another size.
    """
    all_groups = [groups for groups in _all_groups(world) if ranks in (None, groups.ranks)]
    buffer = torch.zeros(max(sizes) // _FLOAT + world.size, device=world.device)
    row_s = within_s / (len(all_groups) * len(kinds))
    rows = [
        _row(groups, kind, [_cell(groups, kind, size, buffer) for size in sorted(sizes)], rounds, row_s, world.device)
        for groups in all_groups
        for kind in kinds
    ]
    _visit(rows, buffer)
    everyone = from_all_ranks([[cell.visits for cell in row.cells] for row in rows])
    work = ProductLoad.of(world.device)
    amid = [work.seconds_between(_in_a_program(row.groups, row.kind, world.device)) for row in rows]
    for groups in all_groups:
        groups.comm.close()
    medians = [
        [_typical([theirs[at][i] for theirs in everyone]) for i in range(len(row.cells))] for at, row in enumerate(rows)
    ]
    least = {(id(row.groups), row.kind): of[0] for row, of in zip(rows, medians, strict=True)}
    found = []
    for row, of, taken in zip(rows, medians, amid, strict=True):
        alone = [least.get((id(row.groups), kind), of[0]) for kind in _BOTH_WAYS.get(row.kind, (row.kind,))]
        more_s = max(0.0, (taken - sum(alone)) / len(alone))
        points = tuple((cell.size, s + more_s) for cell, s in zip(row.cells, of, strict=True))
        groups = row.groups
        found.append(LinkCost(groups.where, row.kind, groups.ranks, fit(points), points, groups.per_host))
    return found


def _visit(rows: Sequence[_Row], buffer: Tensor) -> None:
    """Time all sizes of all rows, each as often as its row says, in an order that is the same on every rank."""
    drawn = random.Random(0)
    turns = max(row.rounds for row in rows)
    for turn in range(turns):
        cells = [cell for row in rows if row.takes_part(turn, turns) for cell in row.cells]
        drawn.shuffle(cells)
        for cell in cells:
            refill(buffer)
            cell.visits.append([timed_s(cell.run, buffer.device) for _ in range(cell.times)])


def _row(
    groups: _Groups, kind: CollectiveKind, cells: Sequence[_Cell], rounds: int, within_s: float, device: torch.device
) -> _Row:
    """Return the sizes, which rise, up to the first that takes too long, in the rounds that there is time for."""
    kept: list[_Cell] = []
    spent_s = round_s = 0.0
    for cell in cells:
        took_s = _looked_at(cell, device)
        times = max(1, min(_MOST_TIMES, int(_VISIT_S / took_s)))
        kept.append(replace(cell, times=times))
        spent_s, round_s = spent_s + _LOOKS * took_s, round_s + times * took_s
        if took_s > min(LONGEST_S, within_s * LONGEST_PART) and len(kept) > 1:  # a curve needs two
            break
    if spent_s + round_s * rounds > within_s:
        rounds = min(rounds, max(FEWEST_ROUNDS, int((within_s - spent_s) / round_s)))
    return _Row(groups, kind, tuple(kept), rounds)


def _looked_at(cell: _Cell, device: torch.device) -> float:
    calls = []
    for _ in range(_LOOKS):  # the least: others may want the cores for an instant
        start_s = time.perf_counter()
        timed_s(cell.run, device)
        calls.append(time.perf_counter() - start_s)
    return float(min(max(call) for call in zip(*from_all_ranks(calls), strict=True)))


def _typical(visits_of_ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the median over the visits of the median of a visit, in each of whose calls the slowest rank counts."""
    samples = [
        statistics.median(max(call) for call in zip(*calls_of_ranks, strict=True))
        for calls_of_ranks in zip(*visits_of_ranks, strict=True)
    ]
    return float(statistics.median(samples))


def _all_groups(world: World) -> list[_Groups]:
    """Return the groups to measure: in a host of 2, 4, 8, ... and all ranks, between hosts one of each and all."""
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
    """Return a collective whose whole buffer has ``size`` bytes, up to a part of a float for each rank."""
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
    return _Cell(size, calls[kind])


# What a step communicates, forward and backward, that is timed for a kind; where not given, that kind alone.
_BOTH_WAYS: dict[CollectiveKind, tuple[CollectiveKind, ...]] = {
    "reduce_scatter": ("all_gather", "reduce_scatter"),
    "all_to_all": ("all_to_all", "all_to_all"),
}


def _in_a_program(groups: _Groups, kind: CollectiveKind, device: torch.device) -> Callable[[], object]:
    """Return a small step of a redistribution with its backward, as programs make it."""
    comm, axes, ranks = groups.comm, groups.axes, groups.ranks
    part, whole = torch.zeros(1, ranks, device=device), torch.zeros(ranks, ranks, device=device)
    steps: dict[CollectiveKind, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: all_reduce(x, comm, axes=axes),
        "all_gather": lambda x: all_gather(x, comm, dim=0, axes=axes, size=ranks, adjoint="slice"),
        "reduce_scatter": lambda x: all_gather(x, comm, dim=0, axes=axes, size=ranks, adjoint="reduce_scatter"),
        "all_to_all": lambda x: all_to_all(x, comm, dim=0, to_dim=1, axes=axes, size=ranks, to_size=ranks),
    }
    given = part.requires_grad_()
    gradient = {"all_reduce": part, "all_to_all": whole[:, :1]}.get(kind, whole).detach()
    return lambda: torch.autograd.grad(steps[kind](given), given, gradient)


def _beside(hardware: Hardware) -> Iterator[str]:
    for known in hardware.updates:
        yield (
            f"an optimizer with {known.per_entry} states of an entry: {known.bandwidth / 1e9:.2f} GB/s of what it "
            f"has to read and write once, {known.parameter_s * 1e6:.1f} us for a parameter at least"
        )
    yield (
        f"a parameter that is stored in parts: {hardware.split_s * 1e6:.1f} us more; a step beside operators, "
        f"collectives and parameters: {hardware.around_s * 1e6:.1f} us"
    )


def report(hardware: Hardware) -> str:
    """Return the profile as tables: the device, the segments of every link, and their distance from measurements."""
    products = ", ".join(f"{name} {flops / 1e9:,.1f}" for name, flops in hardware.flops)
    lines = [
        f"profile: {hardware.name} ({hardware.device})",
        *hardware.sources,
        f"matrix products: {products} GFLOP/s, fused attention {hardware.attention:.0%} of that; memory: "
        f"{hardware.memory_bandwidth / 1e9:.2f} GB/s read and written; an "
        f"operator takes {hardware.launch_s * 1e6:.2f} us at least; {hardware.at_once:.0%} of what an operator does "
        f"goes on at once, and {hardware.hides_gradients:.0%} of reducing gradients behind the backward",
        *_beside(hardware),
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
