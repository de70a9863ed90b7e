"""Planning without ranks or devices: from ``FILE.py:build`` to a plan, for any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shardwright.common.stages import StageRow, recorded
from shardwright.compiler.mesh.mesh import SEARCHED_STAGES, UNNAMED, Mesh
from shardwright.compiler.plan.pipeline.explained import explained
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.pricing.memory import states_of
from shardwright.compiler.plan.pricing.reserve import AUTO
from shardwright.compiler.plan.request import PlanRequest, read_memory, read_patterns
from shardwright.compiler.plan.searches import MindSporeMode, Mode, SearchName, mode_called
from shardwright.compiler.report.plans.answers import NOT_ASKED
from shardwright.compiler.report.plans.comparison import comparison, in_numbers, with_known_plans
from shardwright.compiler.report.plans.html import PlanDocument, document_of
from shardwright.compiler.report.plans.staged_page import staged_page
from shardwright.compiler.report.plans.summary import plan_summary
from shardwright.compiler.report.plans.text_page import plan_page
from shardwright.distributed.precision import Precision
from shardwright.errors import UsageError
from shardwright.runtime.verification.advice import Advised, Change, best_batch, fewest_devices, in_words, what_if
from shardwright.runtime.verification.build import BuildFunction
from shardwright.runtime.verification.file_planner import FilePlanner, PlanningOptions


@dataclass(frozen=True)
class PlannedFile:
    """A plan, what was asked for, how it came to be, and the seconds that each stage took."""

    plan: Plan
    request: PlanRequest
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    advised: Advised | None = None
    changes: tuple[Change, ...] | None = None  # None where nobody asked
    stages: tuple[StageRow, ...] | None = None

    def __str__(self) -> str:
        return self._with_notes(self._page)

    def full(self) -> str:
        """Every operator and every collective."""
        return self._with_notes(str(self.plan))

    def with_comparison(self) -> str:
        """The page, and the plans that people know by name beside this one."""
        table = comparison(self._known_plans, self.request.hardware)
        return self._with_notes(f"{self._page}\n\n{table}")

    def explained(self, name: str) -> str:
        """Return what the plan does with a module, an operator or a parameter, and why; as `Plan.explain`."""
        return explained(self.plan, name, self.request.hardware)

    def document(self, *, compared: bool = False) -> dict[str, Any]:
        """The page as JSON has it; docs/planning.md lists the keys."""
        found = asdict(plan_summary(self.plan, self.request.hardware))
        if compared:
            found["known_plans"] = in_numbers(self._known_plans, self.request.hardware)
        if self.advised is not None:
            found["tried"] = [asdict(one) for one in self.advised.tried]
        if self.changes is not None:
            found["what_if"] = [asdict(change) for change in self.changes]
        if self.stages is not None:
            found["profile"] = [asdict(row) for row in self.stages]
        return found | {"notes": list(self.notes), "seconds": dict(self.seconds)}

    def difference(self, path: str) -> str:
        """Return the differences to the plan of a file, by its name.

        Raises:
            PlanError: where it is no plan of this model.
        """
        return f"beside {path}, the other:\n{self.plan.diff(Plan.load(path, self.plan.graph))}"

    def page(self, title: str, *, compared: bool = False, beside: str | None = None) -> PlanDocument:
        """Return the page for a browser, with the known plans and the plan of a file where they are wanted.

        Raises:
            PlanError: where ``beside`` is no plan of this model.
        """
        plans = {"this plan": self.plan}
        if beside is not None:
            plans[Path(beside).name] = Plan.load(beside, self.plan.graph)
        if compared:
            plans |= {name: plan for name, plan in self._known_plans.items() if isinstance(plan, Plan)}
        return document_of(title, plans, self.request.hardware, self._what_if)

    @property
    def _page(self) -> str:
        if self.plan.stages is not None:
            page = staged_page(self.plan, self.request.hardware, self._what_if)
        else:
            page = plan_page(self.plan, self.request.hardware, self._what_if)
        return page if self.advised is None else f"{self.advised}\n\n{page}"

    @property
    def _what_if(self) -> str:
        return NOT_ASKED if self.changes is None else in_words(self.changes, self.plan)

    @cached_property
    def _known_plans(self) -> Mapping[str, Plan | str]:
        return with_known_plans(self.plan, self.request)

    def _with_notes(self, text: str) -> str:
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        return "\n\n".join([text, "\n".join([*self.notes, f"time: {times}"])])


def plan_file(
    target: str,
    *,
    devices: int | str | None = None,
    hosts: int | None = None,
    mesh: str | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    batch: int | str | None = None,
    mode: Mode | MindSporeMode = "auto",
    search: SearchName | None = None,
    inputs: Literal["split", "whole"] = "split",
    hardware: str = "cpu",
    load: str | None = None,
    memory: str | None = None,
    optimizer: str = "adamw",
    recompute: Sequence[str] = (),
    precision: Precision | None = None,
    what_if: bool = False,
    profile: bool = False,
    progress: Callable[[str], None] | None = None,
) -> PlannedFile:
    """Plan the model that ``FILE.py:build`` makes, or hold a saved plan against it.

    Args:
        target: ``FILE.py:build``; the model is made on the meta device, or for real where that fails.
        devices: how many; those of the mesh or of the loaded plan where None; "min": the fewest on which a plan fits.
        hosts: on how many the devices stand, neighbours side by side; as ``hardware`` says where None.
        microbatches: into how many parts the batch is cut, where the mesh has stages; a few for each stage where None.
        schedule: the order in which they go through the stages, as `sw.parallelize` takes it.
        batch: how many rows the global batch has; as many as build() gives where None; "search": those of the batch
            that gives the most samples per second.
        hardware: whose prices: the name of a shipped profile, or the path of one.
        load: a saved plan, in place of a search.
        memory: how many bytes each device may hold, as "80GiB"; "auto" is what a `Reserve` leaves of it.
        optimizer: the name of the one that will update the parameters.
        recompute: patterns of the paths of modules that the backward is to compute again.
        precision: what a step computes in, by autocast; by default as the loss function itself says.
        what_if: whether it is planned on one more host and with twice the memory, too.
        profile: whether the seconds of each stage of planning are recorded.
        progress: called with the name of each stage as it begins.

    Raises:
        UsageError: where the file, the function or an argument does not fit.
        CaptureError, StrategyError, PlanError: as `sw.parallelize` does.
    """
    wanted = _Wanted.read(devices, hosts, mesh, batch, memory, load, what_if)
    states = states_of(optimizer)
    limit = None if memory is None else AUTO if memory == AUTO else read_memory(memory)
    options = PlanningOptions(
        # Read before what takes long; which profile "cpu" is, only the number of devices says.
        "cpu" if hardware == "cpu" else read_hardware(hardware),
        mode_called(mode),
        search,
        inputs,
        limit,
        states,
        read_patterns(recompute),
        precision,
        microbatches,
        schedule,
        mesh == SEARCHED_STAGES,
    )
    planner = FilePlanner(BuildFunction.parse(target), options, progress)
    with recorded() if profile else nullcontext() as record:
        found = _loaded(planner, load, wanted) if load is not None else _planned(planner, wanted)
    return found if record is None else replace(found, stages=record.rows())


@dataclass(frozen=True)
class _Wanted:
    """The devices and the batch that somebody asks for, by number or by what they are to be best at."""

    devices: int | Literal["min"] | None
    hosts: int | None
    mesh: str | None
    rows: int | Literal["search"] | None
    what_if: bool

    @staticmethod
    def read(
        devices: int | str | None,
        hosts: int | None,
        mesh: str | None,
        batch: int | str | None,
        memory: str | None,
        load: str | None,
        what_if: bool,
    ) -> _Wanted:
        """Return what is asked for.

        Raises:
            UsageError: where a word is no number, or options do not go together.
        """
        wanted = _Wanted(_number("devices", devices, "min"), hosts, mesh, _number("batch", batch, "search"), what_if)
        asked = {"--devices min": wanted.devices == "min", "--batch search": wanted.rows == "search"}
        tries = [option for option, given in asked.items() if given]
        if load is not None and (again := [*tries, *["--what-if"] * what_if]):
            raise UsageError(f"{again[0]} makes plans, and --load shows one that is made: leave out one of them")
        if len(tries) > 1:
            raise UsageError("--devices min and --batch search each look for something: type a number for one of them")
        if tries and memory is None:
            raise UsageError(f"{tries[0]} looks for what fits: type how much a device may hold, as --memory 80GiB")
        if asked["--devices min"] and (mesh is not None or hosts is not None):
            given = "--mesh" if mesh is not None else "--hosts"
            raise UsageError(f"--devices min tries devices by the hosts of the hardware profile: leave out {given}")
        return wanted

    @property
    def numbered(self) -> int | None:
        """Return the rows that are given as a number."""
        return None if self.rows == "search" else self.rows


def _number(option: str, given: int | str | None, word: Literal["min", "search"]) -> Any:
    """Return a number from 1 on, or the word."""
    if given is None or given == word:
        return given
    if not str(given).isdecimal() or int(given) < 1:
        what = {"devices": "number of devices", "batch": "number of rows of a batch"}[option]
        raise UsageError(f"--{option} {given} is no {what}; type a whole number from 1 on, or {word}")
    return int(given)


def _planned(planner: FilePlanner, wanted: _Wanted) -> PlannedFile:
    advised = None
    if wanted.devices == "min":
        advised = fewest_devices(planner, wanted.numbered)
        plan, request = advised.plan, advised.request
    else:
        request = planner.options.request(_mesh(wanted.devices, wanted.mesh), wanted.hosts)
        if wanted.rows == "search":
            advised = best_batch(planner, request)
            plan = advised.plan
        else:
            plan = planner.plan(planner.graph(wanted.rows), request)
    changes = what_if(planner, plan, request, wanted.hosts) if wanted.what_if else None
    return PlannedFile(plan, request, tuple(planner.notes), planner.seconds, advised, changes)


def _loaded(planner: FilePlanner, path: str, wanted: _Wanted) -> PlannedFile:
    graph, options = planner.graph(wanted.numbered), planner.options
    plan = planner.timed("loading", lambda: Plan.load(path, graph))
    if (wanted.devices, wanted.mesh) != (None, None):
        _refuse_other_size(plan, path, _mesh(wanted.devices, wanted.mesh))
    known = options.on_hosts(wanted.hosts, plan.devices.size)
    request = PlanRequest(plan.named, inputs=options.inputs, hardware=known, optimizer=plan.optimizer)
    return PlannedFile(plan, request, tuple(planner.notes), planner.seconds)


def _mesh(devices: int | Literal["min"] | None, mesh: str | None) -> Mesh:
    if devices is None and mesh is None:
        raise UsageError("for how many devices? type --devices 8 or --mesh dp=2,tp=4")
    if devices is None and mesh == SEARCHED_STAGES:
        raise UsageError(f"--mesh {mesh} divides devices: type how many there are, as --devices 8")
    named = mesh is not None and mesh != SEARCHED_STAGES
    chosen = Mesh.parse(mesh or "") if named else Mesh.of(**{UNNAMED: int(devices or 1)})
    if devices not in (None, chosen.size):
        raise UsageError(f"--mesh {mesh} has {chosen.size} devices, --devices says {devices}; leave one of them out")
    return chosen


def _refuse_other_size(plan: Plan, path: str, wanted: Mesh) -> None:
    if wanted.size != plan.devices.size:
        raise UsageError(f"{path} is a plan for {plan.devices.size} devices, not for {wanted.size}; plan again")
