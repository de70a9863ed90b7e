"""Advice that is checked: each batch, number of devices or memory that is tried is a plan that has been made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.common.words import in_bytes, in_thousands, in_time
from shardwright.compiler.mesh.mesh import PIPELINE, UNNAMED, Mesh
from shardwright.compiler.plan.make import fixed_bytes
from shardwright.compiler.plan.pipeline.prices import prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.text import table
from shardwright.compiler.plan.timing.throughput import Throughput
from shardwright.errors import CaptureError, PlanError
from shardwright.runtime.verification.file_planner import FilePlanner

MOST_DEVICES = 1 << 14
MOST_STEPS = 12  # of batches that double, or are halved
LEAST_GAIN = 5e-4
WORTH = 1.01  # a batch that brings less than this times the samples per second of the one before is the last one
FALLS = 0.97  # of the least that a device holds, by twice as many devices; else no number of them is enough


@dataclass(frozen=True)
class Tried:
    """What was tried, and what its plan comes to; ``error`` says why there is none."""

    devices: int
    rows: int
    memory: int | None
    step_s: float | None = None
    rows_s: float | None = None
    tokens_s: float | None = None  # 0 where the batch has no tokens
    utilisation: float | None = None
    held_bytes: int | None = None
    error: str | None = None

    @staticmethod
    def of(plan: Plan, hardware: Hardware) -> Tried:
        """Return what a plan comes to at the prices of ``hardware``."""
        step_s = prices_of(plan, hardware).step_s
        done = Throughput.of(plan, hardware, step_s)
        speeds = done.rows_s, done.tokens_s, done.utilisation
        return Tried(plan.devices.size, done.rows, plan.memory, step_s, *speeds, plan.held.total)

    @property
    def per_s(self) -> float:
        """Return tokens per second, samples where there are no tokens; 0 without a plan."""
        return self.tokens_s or self.rows_s or 0.0


@dataclass(frozen=True)
class Advised:
    """The plan that is advised, and all that was tried before it."""

    plan: Plan
    request: PlanRequest
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        """Return a table of what was tried, in rising order."""
        rows = sorted(self.tried, key=lambda one: (one.devices, one.rows))
        best = Tried.of(self.plan, self.request.hardware)
        unit = "tokens/s" if best.tokens_s else "samples/s"
        cells = [_cells(one, advised=(one.devices, one.rows) == (best.devices, best.rows)) for one in rows]
        return table([("devices", "batch", "a step takes", unit, "a device", "MFU", "each device holds"), *cells])


def _cells(one: Tried, *, advised: bool) -> tuple[str, ...]:
    where = str(one.devices), f"{one.rows:,}"
    if one.step_s is None:
        return (*where, "-", "-", "-", "-", one.error or "-")
    speeds = in_thousands(one.per_s), in_thousands(one.per_s / one.devices), f"{one.utilisation or 0.0:.1%}"
    held = in_bytes(one.held_bytes or 0)
    return (*where, in_time(one.step_s), *speeds, f"{held}  <- this plan" if advised else held)


class _Trials:
    """The plans that were tried, of which the best is held, by a number that is largest for it."""

    def __init__(self, planner: FilePlanner, good: Callable[[Tried], float]) -> None:
        self._planner, self._good = planner, good
        self._best: tuple[float, Plan, PlanRequest] | None = None
        self.tried: list[Tried] = []
        self.errors: list[PlanError | CaptureError] = []

    def fits(self, graph: Callable[[], RuledGraph], request: PlanRequest, rows: int) -> Tried | None:
        """Try a plan; return what it comes to, None where there is none."""
        try:
            plan = self._planner.plan(graph(), request)
        except (PlanError, CaptureError) as error:
            self.errors.append(error)
            self.tried.append(Tried(request.mesh.size, rows, request.memory, error=_why(error)))
            return None
        found = Tried.of(plan, request.hardware)
        self.tried.append(found)
        if self._best is None or self._good(found) > self._best[0]:
            self._best = self._good(found), plan, request
        return found

    def advised(self) -> Advised:
        """Return the best plan as the advice.

        Raises:
            PlanError: where there is none, the last one that was raised.
        """
        if self._best is None:
            raise self.errors[-1]
        return Advised(*self._best[1:], tuple(self.tried))


def _why(error: Exception) -> str:
    if isinstance(error, OverBudget) and error.least_bytes:
        return f"does not fit: at least {in_bytes(error.least_bytes)}"
    return str(error).splitlines()[0][:120]


def best_batch(planner: FilePlanner, request: PlanRequest) -> Advised:
    """Return the plan of the global batch that gives the most samples per second and fits.

    Tried are the batch of ``build()``, or half of it and so on until one fits; from there twice as many rows and so on
    while that brings more, or else half as many, which recompute less; and then what lies between the best and its
    neighbours, where it divides over the devices as the batch of ``build()`` does.

    Raises:
        UsageError: where the batch has no rows that could be more.
        PlanError: where nothing fits.
    """
    trials, first = _Trials(planner, lambda one: one.per_s), planner.rows

    def per_s(rows: int) -> float:
        known = [one for one in trials.tried if one.rows == rows]
        found = known[0] if known else trials.fits(lambda: planner.graph(rows), request, rows)
        return found.per_s if found else 0.0

    rows = first
    while not per_s(rows) and rows % 2 == 0:
        rows //= 2
    if not per_s(rows):
        return trials.advised()
    larger = _climbed(rows, lambda of: 2 * of, per_s) if rows == first else rows
    rows = larger if larger > rows else _climbed(rows, lambda of: of // 2 if of % 2 == 0 else 0, per_s)
    for between in (rows * 3 // 4, rows * 3 // 2):
        if between and between % math.gcd(first, request.mesh.size) == 0:
            per_s(between)
    return trials.advised()


def _climbed(rows: int, following: Callable[[int], int], per_s: Callable[[int], float]) -> int:
    """Return the last of the batches that follow each other of which each brings more than the one before."""
    for _ in range(MOST_STEPS):
        after = following(rows)
        brings = per_s(after) / per_s(rows) if after else 0.0
        rows = after if brings > 1 else rows
        if brings < WORTH:
            break
    return rows


def fewest_devices(planner: FilePlanner, rows: int | None) -> Advised:
    """Return the plan on the fewest devices on which one fits: a power of two within a host, or whole hosts.

    Tried are powers of two, then of hosts, until a plan fits, from the first one on whose devices the parameters would
    fit; and then the numbers of hosts between that one and the one before, by bisection: what fits on some hosts is
    taken to fit on more.

    Raises:
        PlanError: where no number is enough.
    """
    trials, graph = _Trials(planner, lambda one: -one.devices), planner.graph(rows)
    limit = planner.options.request(_devices(1)).memory or math.inf
    least = math.ceil(sum(fixed_bytes(graph.capture, planner.options.optimizer)) / limit)
    host = planner.options.on_hosts(None, 1).ranks_per_host or MOST_DEVICES

    def fits(devices: int) -> bool:
        return trials.fits(lambda: graph, planner.options.request(_devices(devices)), graph.capture.rows) is not None

    powers = sorted({devices for devices in _doubling(1) if devices < host} | set(_doubling(host)))
    enough = _first_enough([devices for devices in powers if devices >= least], fits, trials)
    below = max((devices for devices in powers if devices < enough), default=0)
    between = [devices for devices in range(host, enough, host) if devices > below and devices >= least]
    low, high = -1, len(between)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(between[middle]) else (middle, high)
    return trials.advised()


def _devices(number: int) -> Mesh:
    return Mesh.of(**{UNNAMED: number})


def _doubling(first: int) -> Iterator[int]:
    while first <= MOST_DEVICES:
        yield first
        first *= 2


def _first_enough(numbers: Sequence[int], fits: Callable[[int], bool], trials: _Trials) -> int:
    for devices in numbers:
        if fits(devices):
            return devices
        if not _falls(trials.errors):
            break
    tried = "".join(f"\n  {one.devices} devices: {one.error}" for one in trials.tried)
    raise PlanError(
        f"no plan was found that fits, however many devices there are{':' if tried else ''}{tried}\n"
        "type a larger --memory, a smaller --batch, or --recompute for the modules that keep most"
    )


def _falls(errors: Sequence[Exception]) -> bool:
    """Return whether more devices may make it fit: of the last two numbers the larger one made it smaller."""
    least = [error.least_bytes for error in errors if isinstance(error, OverBudget)]
    return len(least) == len(errors) and (len(least) < 2 or least[-1] < FALLS * least[-2])


@dataclass(frozen=True)
class Change:
    """What another machine would bring: "one more host" or "twice the memory"."""

    name: str
    tried: Tried
    gain: float  # of tokens or samples per second, as a share of what there is

    def __str__(self) -> str:
        if self.tried.error is not None:
            return f"{self.name}: {self.tried.error}"
        if self.gain < LEAST_GAIN:
            return f"{self.name}: nothing that was found is faster"
        unit = "tokens/s" if self.tried.tokens_s else "samples/s"
        return f"{self.name}: {in_thousands(self.tried.per_s)} {unit}, {self.gain:.1%} more"


def what_if(planner: FilePlanner, plan: Plan, request: PlanRequest, hosts: int | None) -> tuple[Change, ...]:
    """Return what one more host, and twice the memory, would change, by plans for these."""
    now = Tried.of(plan, request.hardware)

    def change(name: str, graph: Callable[[], RuledGraph], request: PlanRequest, rows: int) -> Change:
        trials = _Trials(planner, lambda one: one.per_s)
        trials.fits(graph, request, rows)
        [found] = trials.tried
        return Change(name, found, found.per_s / now.per_s - 1 if now.per_s else 0.0)

    mesh, more_hosts = _one_more_host(request, hosts)
    rows = _scaled(plan.capture.rows, mesh.size, plan.devices.size) or plan.capture.rows
    name = f"one more host ({mesh.size} devices, {rows:,} samples)"
    larger = replace(planner.options.request(mesh, more_hosts), memory=request.memory)
    found = [change(name, lambda: plan.graph if rows == plan.capture.rows else planner.graph(rows), larger, rows)]
    if request.memory is not None:
        twice = replace(request, memory=2 * request.memory)
        found.append(change("twice the memory", lambda: plan.graph, twice, plan.capture.rows))
    return tuple(found)


def _scaled(number: int, by: int, of: int) -> int:
    """Return a number at the ratio of two others; 0 where that is not whole."""
    return number * by // of if number * by % of == 0 else 0


def _one_more_host(request: PlanRequest, hosts: int | None) -> tuple[Mesh, int | None]:
    """Return the mesh with one more host, and on how many hosts it stands.

    The first axis grows where that is whole, but for that of pipeline stages where there is another one.
    """
    devices, per_host = request.mesh.size, request.hardware.ranks_per_host
    if hosts is None and per_host is not None and devices > per_host:
        more, on = devices + per_host, None
    else:
        more, on = devices + devices // (hosts or 1), (hosts or 1) + 1
    axes = list(request.mesh.axes or _devices(1).axes)
    grows = 1 if axes[0].name == PIPELINE and len(axes) > 1 else 0
    if size := _scaled(axes[grows].size, more, devices):
        axes[grows] = replace(axes[grows], size=size)
        return Mesh(tuple(axes)), on
    return _devices(more), on


def in_words(changes: Sequence[Change], plan: Plan) -> str:
    """Return what was found, on one line."""
    limits = [] if plan.memory else ["twice the memory: nothing, since no limit of it was given"]
    return "; ".join([*map(str, changes), *limits])
