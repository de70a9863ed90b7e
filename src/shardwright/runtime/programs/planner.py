"""From a model and a batch to its plan: rank 0 captures and plans, the other ranks receive the plan."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common.trees import tree_flatten, tree_unflatten
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture, Filled
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import PIPELINE
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import Hardware, for_device
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.backends.table import backend_moving
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.distributed.world import World
from shardwright.errors import CaptureError, PlanError, ShardwrightError
from shardwright.launch.progress_notes import waiting_for
from shardwright.runtime.graphs.captures import Captures
from shardwright.runtime.graphs.equal import same_step
from shardwright.runtime.programs.inputs import Rows, global_shapes, shapes_of
from shardwright.runtime.programs.plan_cache import remembered
from shardwright.runtime.programs.splitting import Stored, stored_before


@dataclass(frozen=True)
class Planner:
    """A model with how it is captured and planned. All ranks ask for a plan together; rank 0's fields decide it."""

    captures: Captures
    request: PlanRequest

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.captures.module

    @property
    def loss_fn(self) -> LossFunction:
        """The loss function, called with the model and a batch."""
        return self.captures.loss_fn

    def first_plan(
        self, batch: Any, rows: Rows, decided: Plan | str | None = None, filled: frozenset[Filled] = frozenset()
    ) -> Plan:
        """The plan of a training step on the global batch of which ``batch`` is this rank's part.

        Args:
            decided: a plan, or the path of a saved one, in place of a search.
            filled: what the batch is known to hold.
        """
        stored = stored_before(self.module)

        def make(filled: frozenset[Filled] = filled) -> Plan:
            capture = self._capture("training", batch, rows, filled)
            if decided is None:
                with waiting_for("planning"):
                    return remembered(RuledGraph.of(capture), self._within(stored, capture))
            try:
                given = Plan.load(decided, RuledGraph.of(capture)) if isinstance(decided, str) else decided
                stored.refuse(given)
                return given if isinstance(decided, str) else given.for_capture(capture)
            except PlanError:
                if not capture.filled:  # else it may be one for any batch
                    raise
            return make(frozenset())

        def made() -> Plan:
            try:
                return make()
            except (ShardwrightError, OSError, MemoryError):
                raise
            except Exception as error:
                raise _internal(error) from error

        return from_rank_zero(ranks_by_collectives("making the plan"), made)

    def _within(self, stored: Stored, capture: Capture) -> PlanRequest:
        """Return the request for parameters of which some are stored already."""
        if not stored.layouts:
            return self.request
        layouts = {v.name: stored.layouts[v.label] for v in capture.of_kind("parameter") if v.label in stored.layouts}
        staged = stored.mesh is not None and PIPELINE in stored.mesh.names
        mesh = stored.mesh if staged and stored.mesh else self.request.mesh
        return replace(self.request, mesh=mesh, storage=layouts, axes=stored.mesh, search_stages=False)

    def later_plan(
        self,
        first: Plan,
        storage: Mapping[str, Layout],
        kind: StepKind,
        batch: Any,
        rows: Rows,
        known: Sequence[Plan] = (),
        filled: frozenset[Filled] = frozenset(),
    ) -> Plan:
        """The plan of another step of the same model, whose parameters are stored as the first plan says.

        Args:
            storage: the layouts of the parameters by their names in the model.
            known: plans of such steps, the same on all ranks. Where one is of the very graph that is captured now, it
                is what is returned.
            filled: what the batch is known to hold.
        """

        def make() -> Plan | int:  # the number of a plan that all ranks have, which need not be sent
            capture = self._captured_later(kind, batch, rows, filled)
            for number, plan in enumerate(known):
                if same_step(plan.capture, capture):
                    return number
            if (unchanged := _unchanged(first, capture, kind)) is not None:
                return unchanged
            try:
                with waiting_for("planning"):
                    return make_plan(capture, self._alongside(first, storage, capture))
            except OverBudget as error:
                unlike = _unlike_first(capture, first.capture)
                evaluated = "; to evaluate alone, call it under torch.no_grad()" if kind == "fine-tuning" else ""
                raise OverBudget(f"a batch with {shapes_of(capture)} came{unlike}: {error}{evaluated}") from None

        made = from_rank_zero(ranks_by_collectives("making the plan"), make)
        return known[made] if isinstance(made, int) else made

    def _alongside(self, first: Plan, storage: Mapping[str, Layout], capture: Capture) -> PlanRequest:
        """Return the request on the mesh and in the mode of the first plan, which may have been given."""
        inputs = self.request.inputs
        if capture.loss == "" and isinstance(inputs, Mapping):  # the batches of predictions may lack some
            labels = {value.label for value in capture.of_kind("input")}
            inputs = {label: slices for label, slices in inputs.items() if label in labels}
        return replace(
            self.request,
            inputs=inputs,
            mesh=first.named,
            mode=first.mode,  # type: ignore[arg-type]  # a plan's mode is one of the modes
            search=None if first.search == "none" else first.search,  # type: ignore[arg-type]  # nor is its search another
            storage={v.name: storage[v.label] for v in capture.of_kind("parameter") if v.label in storage},
            axes=first.mesh,
            microbatches=None if first.stages is None else first.stages.microbatches,
            search_stages=False,
            memory=first.memory or self.request.memory,
        )

    def _captured_later(self, kind: StepKind, batch: Any, rows: Rows, filled: frozenset[Filled]) -> Capture:
        try:
            return self._capture(kind, batch, rows, filled)
        except CaptureError as error:
            if kind != "predict" or self.captures.predict_fn is not None:
                raise
            raise CaptureError(
                f"{error}\nTo predict otherwise than the loss function does, such as without labels, pass "
                "sw.parallelize(..., predict_fn=function), which is called as function(model, batch)."
            ) from error

    def _capture(self, kind: StepKind, batch: Any, rows: Rows, filled: frozenset[Filled]) -> Capture:
        """The graph for the whole of the batch of which this rank has a part."""
        leaves, spec = tree_flatten(batch)
        shapes = iter(global_shapes([leaf for _, leaf in leaves if isinstance(leaf, Tensor)], rows))
        whole = [
            torch.empty(next(shapes), dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
            for _, leaf in leaves
        ]
        with waiting_for(f"capturing {type(self.module).__name__}"):
            return self.captures.of(kind, tree_unflatten(whole, spec), filled)


def _unlike_first(capture: Capture, first: Capture) -> str:
    """Say that a step is called within another autocast than the first one, where it is."""
    now, then = capture.key.autocast, first.key.autocast
    if now == then:
        return ""
    under, planned = (f"autocast {dtype}" if dtype else "no autocast" for dtype in (now, then))
    return f", under {under}, while the model was planned under {planned}"


def _internal(error: Exception) -> CaptureError:
    """Return what is said of an error that nothing of the model explains: it is as one that cannot be captured."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{'/'.join(Path(last.filename).parts[-3:])}:{last.lineno}"
    return CaptureError(
        f"capturing or planning the model fails with {type(error).__name__}: {error}, at {where}\n"
        "This is a fault of Shardwright or of torch: please report it with the program. With mode='data' a model that "
        "cannot be captured runs by torch's DistributedDataParallel, where its loss is a mean over samples."
    )


def hardware_of(world: World, asked: Hardware | None = None) -> Hardware:
    """Return the hardware that prices plans: the one asked for, or the shipped profile, on these hosts."""
    told = None if world.rank == 0 else str  # what other ranks believe decides nothing, and they need not warn
    known = asked or for_device(world.device.type, told, world.backend)
    backend = backend_moving(world.device.type, world.backend).name
    return replace(known, backend=backend).on_hosts(world.hosts)


def _unchanged(first: Plan, capture: Capture, kind: StepKind) -> Plan | None:
    """The decisions of the first plan for another batch; None where they are impossible or hold more than they may."""
    try:
        plan = first.for_capture(capture)
    except PlanError:
        return None
    return None if plan.memory and kind in ("training", "fine-tuning") and plan.held.total > plan.memory else plan
