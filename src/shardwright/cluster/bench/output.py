"""Prints benchmark rows exactly as nccl-tests 2.19 does, so that parsers of its output can read ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.cluster.bench.options import BenchOptions


@dataclass(frozen=True)
class Half:
    """One half of a row: microseconds of a call, the mean over ranks; GB/s (10^9); the wrong elements of all ranks.

    ``wrong`` is None where nothing was checked.
    """

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class BenchRow:
    """A size in bytes with its count of elements, measured out of place and in place; ``root`` is -1 where unused."""

    size: int
    count: int
    dtype: str
    reduction: str
    root: int
    out_of_place: Half
    in_place: Half

    @property
    def halves(self) -> tuple[Half, Half]:
        return self.out_of_place, self.in_place

    @property
    def best_busbw(self) -> float:
        return max(half.busbw for half in self.halves)


@dataclass(frozen=True)
class RankDevice:
    """A rank as the list of devices shows it; ``bus`` is the PCI domain, bus and device."""

    rank: int
    pid: int
    host: str
    number: int
    bus: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Roofline:
    """The bus bandwidth in GB/s that the best row can have, and why; ``limit`` is None where nobody knows one."""

    limit: float | None
    reason: str


@dataclass(frozen=True)
class Test:
    """The rows of one collective. nccl-tests calls a half with wrong elements "out of bounds"."""

    __test__ = False  # for pytest, which collects classes of this name

    program: str
    rows: tuple[BenchRow, ...]
    roofline: Roofline

    @property
    def out_of_bounds(self) -> int:
        return sum(bool(half.wrong) for row in self.rows for half in row.halves)

    @property
    def average_busbw(self) -> float:
        bandwidths = [half.busbw for row in self.rows for half in row.halves]
        return sum(bandwidths) / len(bandwidths) if bandwidths else 0.0

    @property
    def best_busbw(self) -> float:
        return max((row.best_busbw for row in self.rows), default=0.0)


def number(value: float, width: int) -> str:
    """Return a number in ``width`` characters with as many decimals as fit, two at most, else with an exponent.

    >>> [number(v, 7) for v in (0.5, 1234.5, 12345.6, 123456.7, 12345678.0)]
    ['   0.50', '1234.50', '12345.6', ' 123457', '1.2e+07']
    """
    digits = 0
    while value >= 10**digits:
        digits += 1
    for decimals, most in ((2, width - 2), (1, width - 1), (0, width + 1)):
        if digits < most:
            return f"{value:{width}.{decimals}f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def opening(first_line: str, program: str, options: BenchOptions, devices: Sequence[RankDevice]) -> list[str]:
    """Return the lines before the rows; nccl-tests repeats its flags there."""
    step = f"{options.factor}(factor)" if options.factor > 1 else f"{options.step_bytes}(bytes)"
    lines = [
        f"# {first_line}",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus 1 minBytes {options.min_bytes} maxBytes {options.max_bytes} step: {step} "
        f"warmup iters: {options.warmup} iters: {options.iters} agg iters: 1 "
        f"validation: {options.check} graph: 0 unalign: 0",
        "#",
        "# Using devices",
    ]
    for device in devices:
        domain, bus, slot = device.bus
        lines.append(
            f"#  Rank {device.rank:2d} Group  0 Pid {device.pid:6d} on {device.host:>10} device {device.number:2d} "
            f"[{domain:04x}:{bus:02x}:{slot:02x}] {device.name}"
        )
    blank = ("",) * 5
    left, half = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", "  {:>7}  {:>6}  {:>6}  {:>6}"
    return [
        *lines,
        "#",
        left.format(*blank) + "           out-of-place                       in-place          ",
        left.format("size", "count", "type", "redop", "root")
        + half.format("time", "algbw", "busbw", "#wrong") * 2
        + " ",
        left.format("(B)", "(elements)", "", "", "") + half.format("(us)", "(GB/s)", "(GB/s)", "") * 2 + " ",
    ]


def row_line(row: BenchRow) -> str:
    """Return one row."""
    text = f"{row.size:12d}  {row.count:12d}  {row.dtype:>8}  {row.reduction:>6}  {row.root:6d}"
    for half in row.halves:
        wrong = "   N/A" if half.wrong is None else f"{float(half.wrong):6g}"
        text += f"  {number(half.time_us, 7)}  {number(half.algbw, 6)}  {number(half.busbw, 6)}  {wrong}"
    return text


def closing(test: Test) -> list[str]:
    """Return the lines after the rows; the last line is ours."""
    bad = test.out_of_bounds
    return [
        f"# {'Out of bounds values':<20} : {bad} {'FAILED' if bad else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {test.average_busbw:g} ",
        "#",
        f"# Collective test concluded: {test.program}",
        f"# {'Roofline':<20} : best {test.best_busbw:.3g} {_share(test)}; {test.roofline.reason}",
        "#",
    ]


def _share(test: Test) -> str:
    limit = test.roofline.limit
    return "GB/s" if limit is None else f"of {limit:.3g} GB/s ({test.best_busbw / limit:.0%})"


def to_json(
    first_line: str, backend: str, options: BenchOptions, devices: Sequence[RankDevice], tests: Sequence[Test]
) -> Any:
    """Return all that the tables say, with the keys of nccl-tests' JSON for each test."""
    step = {"step_factor": options.factor} if options.factor > 1 else {"step_bytes": options.step_bytes}
    return {
        "version": 2,
        "program": first_line,
        "backend": backend,
        "ranks": len(devices),
        "config": {
            "nthreads": 1, "ngpus": 1, "minimum_bytes": options.min_bytes, "maximum_bytes": options.max_bytes, **step,
            "warmup_iters": options.warmup, "iterations": options.iters, "validation": options.check,
        },
        "devices": [asdict(device) for device in devices],
        "tests": [
            {
                "name": test.program,
                "results": [_row_json(row) for row in test.rows],
                "out_of_bounds": {"count": test.out_of_bounds, "okay": test.out_of_bounds == 0},
                "average_bus_bandwidth": {"bandwidth": test.average_busbw},
                "roofline": asdict(test.roofline),
            }
            for test in tests
        ],
    }  # fmt: skip


def _row_json(row: BenchRow) -> Any:
    def values(half: Half) -> Any:
        return {"time": half.time_us, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": half.wrong}

    return {
        "size": row.size, "count": row.count, "type": row.dtype, "redop": row.reduction, "root": row.root,
        "out_of_place": values(row.out_of_place), "in_place": values(row.in_place),
    }  # fmt: skip
