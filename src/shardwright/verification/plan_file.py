"""Planning without ranks or devices: from ``FILE.py:build`` to a plan, for any number of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwright.errors import ShardwrightError, UsageError
from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.pricing.hardware import Hardware, read_hardware
from shardwright.plan.pricing.optimizers import states_of
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest, read_memory
from shardwright.plan.searches import Mode, SearchName
from shardwright.report.plan_page import plan_page
from shardwright.verification.build import BuildFunction, Built


@dataclass(frozen=True)
class PlannedFile:
    """A plan, whose prices it has, how it came to be, and the seconds that each stage took."""

    plan: Plan
    hardware: Hardware
    notes: tuple[str, ...]
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return self._with_notes(plan_page(self.plan, self.hardware))

    def full(self) -> str:
        """Every operator and every collective."""
        return self._with_notes(str(self.plan))

    def _with_notes(self, text: str) -> str:
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        return "\n\n".join([text, "\n".join([*self.notes, f"time: {times}"])])


def plan_file(
    target: str,
    *,
    devices: int | None = None,
    mesh: str | None = None,
    mode: Mode = "auto",
    search: SearchName | None = None,
    inputs: Literal["split", "whole"] = "split",
    hardware: str = "cpu",
    load: str | None = None,
    memory: str | None = None,
    optimizer: str = "adamw",
) -> PlannedFile:
    """Plan the model that ``FILE.py:build`` makes, or hold a saved plan against it.

    Args:
        target: ``FILE.py:build``; the model is made on the meta device, or for real where that fails.
        devices: how many; those of the mesh or of the loaded plan where None.
        hardware: whose prices: the name of a shipped profile, or the path of one.
        load: a saved plan, in place of a search.
        memory: how many bytes each device may hold, as "80GiB".
        optimizer: the name of the one that will update the parameters.

    Raises:
        UsageError: where the file, the function or an argument does not fit.
        CaptureError, StrategyError, PlanError: as `sw.parallelize` does.
    """
    known, states = read_hardware(hardware), states_of(optimizer)
    limit = read_memory(memory) if memory is not None else None
    build = BuildFunction.parse(target).load()
    chosen = None if load else _mesh(devices, mesh)
    seconds: dict[str, float] = {}
    built, notes = _timed(seconds, "building", lambda: _build_without_storage(build))
    graph = _timed(
        seconds,
        "capturing",
        lambda: RuledGraph.of(captured_step(built.model, built.loss_fn, built.batches[0], built.pins)),
    )
    if chosen is not None:
        plan = _timed(
            seconds,
            "planning",
            lambda: make_plan(
                graph.capture,
                PlanRequest(chosen, mode, search, inputs, known, memory=limit, optimizer=states),
            ),
        )
    else:
        plan = _timed(seconds, "loading", lambda: Plan.load(load or "", graph))
        _refuse_other_size(plan, load or "", devices, mesh)
    return PlannedFile(plan, known, notes, seconds)


def _timed(seconds: dict[str, float], stage: str, make: Callable[[], Any]) -> Any:
    start_s = time.perf_counter()
    result = make()
    seconds[stage] = time.perf_counter() - start_s
    return result


def _build_without_storage(build: Callable[[], Built]) -> tuple[Built, tuple[str, ...]]:
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


def _refuse_other_size(plan: Plan, path: str, devices: int | None, mesh: str | None) -> None:
    if devices is None and mesh is None:
        return
    wanted = _mesh(devices, mesh)
    if wanted.size != plan.mesh.size:
        raise UsageError(f"{path} is a plan for {plan.mesh.size} devices, not for {wanted.size}; plan again")
