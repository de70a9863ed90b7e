"""Planning without ranks or devices: from ``FILE.py:build`` to a plan, for any number of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.capture.tracing.gpu_autocast import NOTE, autocast_without_gpu
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware, read_hardware
from shardwright.compiler.plan.pricing.memory import states_of
from shardwright.compiler.plan.pricing.reserve import AUTO, reserve_of
from shardwright.compiler.plan.request import PlanRequest, read_memory, read_patterns
from shardwright.compiler.plan.searches import MindSporeMode, Mode, SearchName, mode_called
from shardwright.compiler.report.plans.comparison import comparison, in_numbers, with_known_plans
from shardwright.compiler.report.plans.html import PlanDocument, document_of
from shardwright.compiler.report.plans.summary import plan_summary
from shardwright.compiler.report.plans.text_page import plan_page
from shardwright.distributed.backends.table import usual_backend
from shardwright.distributed.precision import Precision, within
from shardwright.errors import ShardwrightError, UsageError
from shardwright.runtime.verification.build import BuildFunction, BuiltModel

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedFile:
    """A plan, what was asked for, how it came to be, and the seconds that each stage took."""

    plan: Plan
    request: PlanRequest
    notes: tuple[str, ...]
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return self._with_notes(plan_page(self.plan, self.request.hardware))

    def full(self) -> str:
        """Every operator and every collective."""
        return self._with_notes(str(self.plan))

    def with_comparison(self) -> str:
        """The page, and the plans that people know by name beside this one."""
        table = comparison(self._known_plans, self.request.hardware)
        return self._with_notes(f"{plan_page(self.plan, self.request.hardware)}\n\n{table}")

    def explained(self, name: str) -> str:
        """Return what the plan does with a module, an operator or a parameter, and why; as `Plan.explain`."""
        return self.plan.explain(name, self.request.hardware)

    def document(self, *, compared: bool = False) -> dict[str, Any]:
        """The page as JSON has it; docs/planning.md lists the keys."""
        found = asdict(plan_summary(self.plan, self.request.hardware))
        if compared:
            found["known_plans"] = in_numbers(self._known_plans, self.request.hardware)
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
        return document_of(title, plans, self.request.hardware)

    @cached_property
    def _known_plans(self) -> Mapping[str, Plan | str]:
        return with_known_plans(self.plan, self.request)

    def _with_notes(self, text: str) -> str:
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        return "\n\n".join([text, "\n".join([*self.notes, f"time: {times}"])])


def plan_file(
    target: str,
    *,
    devices: int | None = None,
    hosts: int | None = None,
    mesh: str | None = None,
    mode: Mode | MindSporeMode = "auto",
    search: SearchName | None = None,
    inputs: Literal["split", "whole"] = "split",
    hardware: str = "cpu",
    load: str | None = None,
    memory: str | None = None,
    optimizer: str = "adamw",
    recompute: Sequence[str] = (),
    precision: Precision | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlannedFile:
    """Plan the model that ``FILE.py:build`` makes, or hold a saved plan against it.

    Args:
        target: ``FILE.py:build``; the model is made on the meta device, or for real where that fails.
        devices: how many; those of the mesh or of the loaded plan where None.
        hosts: on how many the devices stand, neighbours side by side; as ``hardware`` says where None.
        hardware: whose prices: the name of a shipped profile, or the path of one.
        load: a saved plan, in place of a search.
        memory: how many bytes each device may hold, as "80GiB"; "auto" is what a `Reserve` leaves of it.
        optimizer: the name of the one that will update the parameters.
        recompute: patterns of the paths of modules that the backward is to compute again.
        precision: what a step computes in, by autocast; by default as the loss function itself says.
        progress: called with the name of each stage as it begins.

    Raises:
        UsageError: where the file, the function or an argument does not fit.
        CaptureError, StrategyError, PlanError: as `sw.parallelize` does.
    """
    states, limit = states_of(optimizer), None if memory in (None, AUTO) else read_memory(memory)
    build = BuildFunction.parse(target).load()
    chosen = None if load else _mesh(devices, mesh)
    # Read before what takes long; which profile "cpu" is, only the number of devices says.
    prices = hardware if hardware == "cpu" else read_hardware(hardware)
    kept_free = None
    if chosen is not None:
        known = _on_hosts(prices, hosts, chosen.size)
        if memory == AUTO:
            kept_free = reserve_of(known)
            limit = kept_free.limit_bytes
    stages = _Stages(progress)
    graph, notes = _captured(build, precision, prices, stages)
    if chosen is not None:
        patterns = read_patterns(recompute)
        request = PlanRequest(
            chosen, mode_called(mode), search, inputs, known, memory=limit, optimizer=states, recompute=patterns
        )
        plan = stages.timed("planning", lambda: make_plan(graph.capture, request))
    else:
        plan = stages.timed("loading", lambda: Plan.load(load or "", graph))
        _refuse_other_size(plan, load or "", devices, mesh)
        known = _on_hosts(prices, hosts, plan.mesh.size)
        request = PlanRequest(plan.named, inputs=inputs, hardware=known, optimizer=plan.optimizer)
    if kept_free is not None:
        notes = (*notes, f"memory: {kept_free}")
    return PlannedFile(plan, request, notes, stages.seconds)


def _captured(
    build: Callable[[], BuiltModel], precision: Precision | None, prices: Hardware | str, stages: _Stages
) -> tuple[RuledGraph, tuple[str, ...]]:
    """Return the graph of a step on the device that the prices are of, and what is to be said of how it came to be."""
    device, on_gpus = None, isinstance(prices, Hardware) and prices.device_type == "cuda"
    if on_gpus and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    with autocast_without_gpu() if on_gpus and device is None else nullcontext(lambda: False) as autocast:
        built, notes = stages.timed("building", lambda: _build_without_storage(build))
        loss_fn = within(precision, device or torch.device("cuda" if on_gpus else "cpu"), built.loss_fn)
        graph = stages.timed(
            "capturing",
            lambda: RuledGraph.of(captured_step(built.model, loss_fn, built.batches[0], built.pins, device=device)),
        )
        return graph, (*notes, *([NOTE] if autocast() else []))


class _Stages:
    """Times the stages, and says which one begins."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def timed(self, stage: str, make: Callable[[], T]) -> T:
        if self._progress is not None:
            self._progress(stage)
        start_s = time.perf_counter()
        result = make()
        self.seconds[stage] = time.perf_counter() - start_s
        return result


def _build_without_storage(build: Callable[[], BuiltModel]) -> tuple[BuiltModel, tuple[str, ...]]:
    """A model that is too large for this machine can be planned, as long as its making reads no values."""
    try:
        with torch.device("meta"):
            return build(), ()
    except ShardwrightError as error:
        reason = str(error).splitlines()[0]
    return build(), (f"built with storage, since it cannot be built on the meta device: {reason}",)


def _mesh(devices: int | None, mesh: str | None) -> Mesh:
    if devices is None and mesh is None:
        raise UsageError("for how many devices? type --devices 8 or --mesh dp=2,tp=4")
    if devices is not None and devices < 1:
        raise UsageError(f"--devices {devices} is no number of devices; type a whole number from 1 on")
    chosen = Mesh.parse(mesh) if mesh is not None else Mesh.of(ranks=devices or 1)
    if devices not in (None, chosen.size):
        raise UsageError(f"--mesh {mesh} has {chosen.size} devices, --devices says {devices}; leave one of them out")
    return chosen


def _on_hosts(prices: Hardware | str, hosts: int | None, devices: int) -> Hardware:
    known = read_hardware(prices, usual_backend("cpu", shared=hosts != devices).name)
    if hosts is None:
        return known
    if hosts < 1 or devices % hosts:
        raise UsageError(
            f"--hosts {hosts} for {devices} devices: each has as many; type a number that divides {devices}"
        )
    return known.on_hosts([str(device * hosts // devices) for device in range(devices)])


def _refuse_other_size(plan: Plan, path: str, devices: int | None, mesh: str | None) -> None:
    if devices is None and mesh is None:
        return
    wanted = _mesh(devices, mesh)
    if wanted.size != plan.mesh.size:
        raise UsageError(f"{path} is a plan for {plan.mesh.size} devices, not for {wanted.size}; plan again")
