"""`shardwright bench`: collectives timed and checked, in the manner of nccl-tests.

A rank times a loop of calls after a barrier; a row shows the mean over ranks. The check runs afterwards on fresh data:
every rank counts the elements that differ from what must arrive, and the row shows the sum over ranks.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shardwright import __version__
from shardwright.cluster.bench.data import DTYPES
from shardwright.cluster.bench.operations import OPERATIONS, Buffers, Case, Operation
from shardwright.cluster.bench.options import BenchOptions
from shardwright.cluster.bench.output import (
    BenchRow,
    Half,
    RankDevice,
    Roofline,
    Test,
    closing,
    opening,
    row_line,
    to_json,
)
from shardwright.cluster.bench.roofline import between, copy_s, fastest_link, processor, within
from shardwright.cluster.bench.stopwatch import mean_s, synchronize
from shardwright.distributed.agreement import agree, from_all_ranks
from shardwright.distributed.world import World


def run_bench(world: World, options: BenchOptions, show: Callable[[str], None]) -> tuple[Test, ...]:
    """Measure every collective of ``options``; rank 0 hands each line, or the JSON, to ``show``.

    Every rank calls this, and gets the same result.

    Raises:
        UsageError: where the options do not fit the world or the memory of a host.
    """
    agree("shardwright bench", {"the benchmark": options}, _problem(world, options))
    bench = _Bench(world, options)
    say = show if world.rank == 0 and not options.json else lambda line: None
    tests = []
    for name in options.collectives:
        for line in opening(bench.first_line, OPERATIONS[name].program, options, bench.devices):
            say(line)
        test = bench.test(OPERATIONS[name], say)
        for line in closing(test):
            say(line)
        tests.append(test)
    if options.json and world.rank == 0:
        show(json.dumps(to_json(bench.first_line, world.backend, options, bench.devices, tests), indent=1))
    return tuple(tests)


def _problem(world: World, options: BenchOptions) -> str | None:
    if options.root >= world.size:
        return f"-r {options.root} is no rank of this world, whose ranks are 0 to {world.size - 1}"
    if options.collectives and world.device.type == "cpu":
        needed = 3 * options.max_bytes * world.local_size
        if needed > (free := _free_bytes()):
            return (
                f"-e {options.max_bytes} needs about {needed / 2**30:.1f} GiB for {world.local_size} ranks on "
                f"{world.host}, which has {free / 2**30:.1f} GiB free; type a smaller -e"
            )
    return None


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Bench:
    def __init__(self, world: World, options: BenchOptions) -> None:
        self.world = world
        self.options = options
        self.first_line = f"shardwright bench {__version__}, torch {torch.__version__}, {world.backend}"
        self.devices = from_all_ranks(_this_device(world))
        links = from_all_ranks(fastest_link(world.backend))
        self.between = between(links) if len(set(world.hosts)) > 1 else None

    def test(self, operation: Operation, say: Callable[[str], None]) -> Test:
        rows, bounds = [], []
        for size in self.options.sizes():
            rows.append(self._row(operation, size))
            bounds.append(self.between or self._copied(rows[-1].size))
            say(row_line(rows[-1]))
        best = max(range(len(rows)), key=lambda row: rows[row].best_busbw)
        return Test(operation.program, tuple(rows), bounds[best])

    def _copied(self, size: int) -> Roofline:
        if size == 0:
            return Roofline(None, "nothing was moved")
        options, device = self.options, self.world.device
        mine_s = copy_s(size, device, options.warmup, options.iters)
        return within(size, from_all_ranks(mine_s))

    def _row(self, operation: Operation, size_bytes: int) -> BenchRow:
        options, world = self.options, self.world
        dtype = DTYPES[options.dtype]
        count = operation.count(size_bytes, dtype.itemsize, world.size)
        case = Case(count, dtype, world.device, world.rank, world.size, options.reduction, options.root)
        size = operation.bytes(count, dtype.itemsize, world.size)
        out, inside = (self._half(operation, case, size, in_place) for in_place in (False, True))
        return BenchRow(
            size, count, options.dtype, operation.shown_reduction or options.reduction,
            options.root if operation.rooted else -1, out, inside,
        )  # fmt: skip

    def _half(self, operation: Operation, case: Case, size: int, in_place: bool) -> Half:
        buffers = operation.buffers(case, in_place)
        operation.fill(case, buffers)
        call = partial(operation.call, case, buffers)
        mine_s = mean_s(call, case.device, self.options.warmup, self.options.iters)
        times, wrong = zip(*from_all_ranks((mine_s, self._wrong(operation, case, buffers))), strict=True)
        seconds = sum(times) / len(times)
        algbw = size / seconds / 1e9
        total = sum(wrong) if self.options.check else None
        return Half(seconds * 1e6, algbw, algbw * operation.factor(case.ranks), total)

    def _wrong(self, operation: Operation, case: Case, buffers: Buffers) -> int:
        """Return the wrong elements on this rank after one call on fresh data, the most of ``check`` calls."""
        most = 0
        for _ in range(self.options.check):
            buffers.received.zero_()
            operation.fill(case, buffers)
            operation.call(case, buffers)
            synchronize(case.device)
            most = max(most, operation.wrong(case, buffers))
        return most


def _this_device(world: World) -> RankDevice:
    bus: tuple[int, ...] = (0, 0, 0)
    number, name = world.local_rank, processor()
    if world.device.type == "cuda":
        facts = torch.cuda.get_device_properties(world.device)
        # torch's stubs do not know them
        bus = tuple(getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
        number, name = world.device.index, facts.name
    return RankDevice(world.rank, os.getpid(), socket.gethostname(), number, bus, name)


def passed(tests: tuple[Test, ...]) -> bool:
    """Return whether no element of any row was wrong."""
    return not any(test.out_of_bounds for test in tests)
