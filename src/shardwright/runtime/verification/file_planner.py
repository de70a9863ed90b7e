"""The planner of a file: the model of ``FILE.py:build``, made once, and its plans for any devices, batch and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from shardwright.common import stages, trees
from shardwright.compiler.capture.capture import flatten_batch
from shardwright.compiler.capture.ir import Filled
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.capture.tracing.gpu_autocast import NOTE, autocast_without_gpu
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware, read_hardware
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates
from shardwright.compiler.plan.pricing.reserve import AUTO, Reserve, reserve_of
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import Mode, SearchName
from shardwright.distributed.backends.table import usual_backend
from shardwright.distributed.precision import Precision, within
from shardwright.errors import ShardwrightError, UsageError
from shardwright.runtime.graphs.filled import filled_of
from shardwright.runtime.verification.build import BuildFunction, BuiltModel
from shardwright.runtime.verification.filled_tensors import FilledTensors

T = TypeVar("T")


@dataclass(frozen=True)
class PlanningOptions:
    """What a file is planned with, whatever the devices and the batch.

    ``memory`` is how many bytes each device may hold; "auto" is what a `Reserve` leaves of it. ``hardware`` is "cpu"
    where only the number of devices says which profile that is.
    """

    hardware: Hardware | Literal["cpu"]
    mode: Mode = "auto"
    search: SearchName | None = None
    inputs: Literal["split", "whole"] = "split"
    memory: int | Literal["auto"] | None = None
    optimizer: OptimizerStates = ADAMW
    recompute: tuple[str, ...] = ()
    precision: Precision | None = None
    microbatches: int | None = None
    schedule: str | None = None
    search_stages: bool = False

    def on_hosts(self, hosts: int | None, devices: int) -> Hardware:
        """Return the prices of so many devices on so many hosts, or on as many as the profile says.

        Raises:
            UsageError: where each host cannot have as many.
        """
        known = read_hardware(self.hardware, usual_backend("cpu", shared=hosts in (None, 1)).name)
        if hosts is None:
            return known
        if hosts < 1 or devices % hosts:
            raise UsageError(
                f"--hosts {hosts} for {devices} devices: each has as many; type a number that divides {devices}"
            )
        return known.on_hosts([str(device * hosts // devices) for device in range(devices)])

    def reserve(self, hardware: Hardware) -> Reserve | None:
        """Return what ``memory="auto"`` keeps free of a device; None where the memory is a number, or not limited."""
        return reserve_of(hardware) if self.memory == AUTO else None

    def request(self, mesh: Mesh, hosts: int | None = None) -> PlanRequest:
        """Return the request for a plan on a mesh."""
        hardware = self.on_hosts(hosts, mesh.size)
        reserve = self.reserve(hardware)
        limit = reserve.limit_bytes if reserve else self.memory if isinstance(self.memory, int) else None
        return PlanRequest(
            mesh,
            self.mode,
            self.search,
            self.inputs,
            hardware,
            memory=limit,
            optimizer=self.optimizer,
            recompute=self.recompute,
            microbatches=self.microbatches,
            schedule=self.schedule,
            search_stages=self.search_stages,
        )


@dataclass
class FilePlanner:
    """Builds a model once, and captures and plans its step, as often as somebody asks.

    Args:
        progress: called with the name of each stage as it begins.
    """

    function: BuildFunction
    options: PlanningOptions
    progress: Callable[[str], None] | None = None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _filled: FilledTensors = field(default_factory=FilledTensors)

    def timed(self, stage: str, make: Callable[[], T], detail: str = "") -> T:
        """Return what ``make`` returns; its seconds are added to those of the stage."""
        if self.progress is not None:
            self.progress(f"{stage}{detail}")
        start_s = time.perf_counter()
        with stages.stage(stage):
            result = make()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start_s
        return result

    def graph(self, rows: int | None = None) -> RuledGraph:
        """Return the graph of a step on the batch of ``build()``, or on one of so many rows.

        Raises:
            UsageError: where the batch has no rows that could be more.
            CaptureError: as `captured_step` does.
        """
        with self._autocast() as autocast:
            built = self._built
            loss_fn = within(self.options.precision, torch.device(self._device or self._device_type), built.loss_fn)
            batch = built.batches[0] if rows is None else with_rows(built.batches[0], rows)
            graph = self.timed(
                "capturing",
                lambda: RuledGraph.of(
                    captured_step(
                        built.model, loss_fn, batch, built.pins, device=self._device, filled=self._filled_of(built)
                    )
                ),
                "" if rows is None else f" a batch of {rows} rows",
            )
            self._note(*[NOTE] * autocast())
        return graph

    @property
    def rows(self) -> int:
        """Return the rows of the batch of ``build()``.

        Raises:
            UsageError: where it has none.
        """
        with self._autocast():
            return count_rows(self._built.batches[0])

    def plan(self, graph: RuledGraph, request: PlanRequest) -> Plan:
        """Return the plan of a graph. Raises as `make_plan` does."""
        if reserve := self.options.reserve(request.hardware):
            self._note(f"memory: {reserve}")
        detail = f" {request.mesh.size} devices, {graph.capture.rows} rows"
        return self.timed("planning", lambda: make_plan(graph.capture, request), detail)

    def _note(self, *notes: str) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    @cached_property
    def _built(self) -> BuiltModel:
        """The model, on torch's meta device where it can be made there.

        Cached: the file is loaded once.
        """
        return self.timed("building", self._build_without_storage)

    def _build_without_storage(self) -> BuiltModel:
        """A model that is too large for this machine can be planned, as long as its making reads no values."""
        build = self.function.load()
        try:
            with torch.device("meta"), self._filled:
                return build()
        except ShardwrightError as error:
            reason = str(error).splitlines()[0]
        self._note(f"built with storage, since it cannot be built on the meta device: {reason}")
        return build()

    def _filled_of(self, built: BuiltModel) -> frozenset[Filled]:
        """Return which tensors of the batch have one number in every entry, as a run of it finds."""
        tensors = flatten_batch(built.batches[0])
        return self._filled.among(tensors) | filled_of(tensors)

    @property
    def _device_type(self) -> str:
        return "cpu" if isinstance(self.options.hardware, str) else self.options.hardware.device_type

    @property
    def _device(self) -> torch.device | None:
        """The GPU on which a step for GPUs is captured; None where there is none."""
        on_gpus = self._device_type == "cuda" and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpus else None

    def _autocast(self) -> Any:
        without = self._device_type == "cuda" and self._device is None
        return autocast_without_gpu() if without else nullcontext(lambda: False)


def count_rows(batch: Any) -> int:
    """Return the rows of a batch: the first dim of the first tensor that has one.

    Raises:
        UsageError: where it has no such tensor.
    """
    shapes = [leaf.shape for _, leaf in trees.tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    if found := next((shape[0] for shape in shapes if shape), 0):
        return int(found)
    raise UsageError(
        f"--batch needs a batch whose rows are the first dim of its tensors; the one of build() is a "
        f"{type(batch).__name__} with tensors of the shapes {[list(shape) for shape in shapes] or 'none'}: return "
        "a batch of so many rows from build() instead"
    )


def with_rows(batch: Any, rows: int) -> Any:
    """Return a batch of so many rows: those that there are, again where they are too few.

    All tensors have them whose first dim is as large as that of the first one.

    Raises:
        UsageError: where the batch has no rows.
    """
    there = count_rows(batch)

    def scaled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != there:
            return leaf
        return leaf.detach()[torch.arange(rows, device=leaf.device) % there]

    return batch if rows == there else trees.tree_map(scaled, batch)
