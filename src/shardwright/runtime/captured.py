"""The parallel model that runs captured programs: `Parallel`, its state, and its training and evaluation steps.

One program is made for every shape of the global batch and every mode (training, evaluation, prediction, autocast).
The first decides how parameters are stored; the plans of later shapes take the storage as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.compiler.capture.capture import StepKind, flatten_batch
from shardwright.compiler.capture.ir import Capture, Filled
from shardwright.compiler.mesh.changed import refuse_lost_changes
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.compiler.mesh.mesh import PIPELINE
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.plan.plan import Plan
from shardwright.data.loading.batch import Batch
from shardwright.distributed.agreement import from_all_ranks, from_rank_zero
from shardwright.distributed.lockstep import Lockstep, Turns
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.distributed.world import World
from shardwright.errors import UsageError
from shardwright.launch.options.save_graphs import SaveGraphs
from shardwright.launch.progress_notes import waiting_for
from shardwright.runtime.checks.check import Checks, StepCheck
from shardwright.runtime.checks.lost_changes import LostChanges
from shardwright.runtime.checks.replicas import Replicas, summed_axes
from shardwright.runtime.checks.same_batch import SameBatch
from shardwright.runtime.checks.same_calls import SameCalls
from shardwright.runtime.compiled.compiler import Compiler
from shardwright.runtime.freed_memory import keep_freed_memory
from shardwright.runtime.graphs.filled import agreed, filled_of
from shardwright.runtime.graphs.unchanged import Structure
from shardwright.runtime.model import ParallelModel, Replay
from shardwright.runtime.placing.initialising import Init
from shardwright.runtime.placing.placing import place
from shardwright.runtime.programs.batches import tensors_of
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, ModelState, Outputs, layouts_by_name
from shardwright.runtime.programs.failures import with_text
from shardwright.runtime.programs.inputs import (
    BatchKind,
    Rows,
    SizeExchange,
    count_rows,
    global_shapes,
    look_at,
    rows_of,
)
from shardwright.runtime.programs.planner import Planner
from shardwright.runtime.programs.programs import PreparedProgram, Programs, Step
from shardwright.runtime.programs.splitting import is_split


@dataclass(frozen=True)
class Options:
    """The options of `parallelize` for running."""

    batch: BatchKind | None
    gradients: Literal["mean", "sum"]
    save_graphs: SaveGraphs | None
    init: Init | None = None
    compile: bool = False
    checks: Checks = "usual"


class Parallel(ParallelModel):
    """A model that was captured, which runs by the programs of its plans.

    Of an auxiliary output each rank gets the rows of the batch that it was given, or with ``batch="global"`` those that
    it computed; what has no such rows comes whole.
    """

    plan: Plan

    def __init__(
        self,
        planner: Planner,
        sample_batch: Any,
        options: Options,
        world: World,
        plan: Plan | str | None = None,
    ) -> None:
        model = planner.module
        self.options, self.world = options, world
        self._reduction = GradientReduction()
        self._closed = False
        self._between_steps = True
        self._unchecked: Execution | None = None
        seed: int = from_rank_zero(ranks_by_collectives("drawing the seed"), torch.initial_seed)
        rows = rows_of(sample_batch, flatten_batch(sample_batch), options.batch, world.size)
        filled = frozenset.intersection(*from_all_ranks(filled_of(flatten_batch(sample_batch))))
        self.plan = planner.first_plan(sample_batch, rows, plan, filled)
        lockstep = Lockstep() if self.plan.mode == "single" else Lockstep.of_all_ranks()
        self._turns = Turns(always=options.checks == "full")
        self._same_batch, self._sizes = SameBatch(lockstep, world.device, self._turns), SizeExchange(lockstep)
        self._communicator = communicator_over(self.plan.devices, lockstep)
        if world.device.type == "cpu":
            keep_freed_memory()
        with waiting_for(f"placing the parameters of {type(model).__name__}"):
            place(model, layouts_by_name(self.plan), self.plan.devices, world.device, options.init, seed)
        self._state = ModelState(model, self.plan, seed, world.device)
        self._split = is_split(model)
        self._reduction.ask_for(model)
        super().__init__(model, lockstep)
        self._programs = Programs(
            planner,
            self.plan,
            self._state.storage,
            self._communicator,
            self._reduction,
            world,
            options.save_graphs,
            lockstep,
            Compiler(says=world.rank == 0) if options.compile else None,
        )
        self._programs.add_first(sample_batch, rows)
        self._replicas = Replicas(
            model,
            _used_buffers(self.plan.capture),
            lockstep,
            world.device,
            self._turns,
            axes=[axis.name for axis in self.plan.devices.axes if axis.size > 1],
            summed=partial(summed_axes, self.plan.capture, self._programs.executions()[0].program),  # of training
            together=self.plan.mode != "single",
            failed=self._failed_in_step,
        )
        together = self.plan.mode != "single"
        self._stage = self.plan.devices.coordinates(world.rank).get(PIPELINE, 0) if together else 0
        self._same_calls = SameCalls(lockstep, self._pulse, self._turns, together=together)
        self._checks: list[StepCheck] = [Structure(model), *([LostChanges()] if self._split else [])]
        """Before anything is known of a step. In the calls of ``_turns``, ``_same_batch`` compares whole batches that
        all ranks pass, and once all have come to one program ``_same_calls`` and ``_replicas`` compare. After a step
        the program raises what the model raises."""
        if self._pulse.steps.has_reader:
            from shardwright.compiler.report.plans.expected import expected  # loaded where somebody reads it

            self._pulse.steps.tell({"plan": expected(self.plan, planner.request.hardware)})

    # Running

    def __call__(self, batch: Any) -> Any:
        """Return the loss of the global batch, or ``(loss, aux)``; in training mode it is one more step."""
        with self._lockstep:
            training, pulse = self.module.training, self._pulse
            if training and self._between_steps:  # all batches of an accumulation are one step
                pulse.begin_step()
            else:
                pulse.beat()
            self._between_steps = not training or not self._reduction.deferring
            kind: StepKind = "training" if training else "fine-tuning" if torch.is_grad_enabled() else "evaluation"
            prepared, rows, inputs = self._ready(kind, batch)
            loss, aux, _ = self._run(kind, prepared, inputs)
            assert loss is not None
            self._rows = rows
            if training:
                pulse.steps.computed(rows.total, partial(PendingNumbers, loss.detach()))
            if kind != "evaluation" and self.options.gradients == "sum":
                loss = _scaled_gradient(loss, self.world.size)
            if self._split and loss.requires_grad:
                loss = _scaled_gradient(loss, 1)
            if prepared.capture.aux_spec is None:
                return loss
            return loss, prepared.outputs(aux, rows, self._communicator, whole=False, loss=loss)

    def _step_and_samples(self, batch: Any) -> tuple[Any, int]:
        return self(batch), self._rows.total

    def _predicted(self, batch: Any, gather: bool) -> Any:
        prepared, rows, inputs = self._ready("predict", batch)
        _, aux, _ = self._run("predict", prepared, inputs)
        return prepared.outputs(aux, rows, self._communicator, whole=gather)

    def _ready(self, kind: StepKind, batch: Any) -> tuple[PreparedProgram, Rows, list[Tensor]]:
        """Check, and return the program for a batch, which rows this rank was given, and its part of the inputs."""
        if self._unchecked is not None:
            self._raise_failed()
        if self._failure or self._closed:
            self._refuse_failed()
            self._refuse_closed()
        for check in self._checks:
            check.before()
        self._turns.next()
        self._pulse.set_stage(self._stage)

        look, device = look_at(batch), self.world.device
        found = look.tensors if look else tensors_of(batch)
        tensors = [x if x.device == device else x.to(device, non_blocking=True) for x in found]
        key = self._programs.keys.of(kind, batch, look)
        from_loader = isinstance(batch, Batch)
        if from_loader or self.options.batch != "local" or self.world.size == 1:
            if self._turns.due_or_after and self.options.batch == "global" and not from_loader:
                self._same_batch.before(found)
            rows = rows_of(batch, found, self.options.batch, self.world.size)
        else:
            rows = self._rows_of_all_ranks(found, key)
        if not rows.total and any(tensor.ndim for tensor in tensors):
            raise UsageError("the batch is empty; expected at least one sample")

        step_key = key, global_shapes(tensors, rows)
        conditions = self._programs.conditions.get(step_key)
        if conditions is not None and not conditions:
            filled = frozenset[Filled]()
        else:
            filled = filled_of(found, conditions)
            if conditions and (from_loader or self.options.batch == "local"):  # whose parts may be filled unlike
                filled = agreed(filled, conditions, self._lockstep)
        prepared = self._programs.of(Step(kind, batch, rows, step_key, filled))
        return prepared, rows, prepared.inputs(tensors, rows, self._communicator)

    def _rows_of_all_ranks(self, tensors: Sequence[Tensor], key: str) -> Rows:
        """Return which rows of the global batch this rank was given, whose sizes all ranks exchange."""
        count = count_rows(tensors)
        alike = self._same_batch.beside_rows(tensors, count) if self._turns.due_or_after else []
        try:
            sizes = self._sizes.of_all_ranks(tensors, count, key, alike)
        except Exception as error:  # others may still wait for the sizes of this rank
            self._note_failure(error)
            raise
        return self._sizes.rows(sizes, tensors, alike)

    def _run(self, kind: StepKind, prepared: PreparedProgram, inputs: Sequence[Tensor]) -> Outputs:
        """Run a program on this rank's part of a batch, and keep the buffers that it makes.

        What the model itself raises for values of its tensors is raised at once on a CPU, and on a GPU, which is not
        waited for, at the next step.
        """
        if self._turns.due_or_after:
            self._same_calls.before()
        if self._turns.due_or_after or self._replicas.due:
            self._replicas.before()
        state, capture, device = self._state, prepared.capture, self.world.device.type
        try:
            arguments = state.arguments(capture, prepared.function, inputs, kind, self._reduction)
            with torch.autocast(device, enabled=False):  # whose casts are operators of the graph
                outputs = prepared.execution(arguments)
        except Exception as error:
            if prepared.unlike:
                with_text(error, prepared.unlike)
            self._failed_in_step(error)
            raise
        self._unchecked = prepared.execution if capture.checks else None
        if device == "cpu" and self._unchecked is not None:
            self._raise_failed()
        if outputs[2]:
            state.store_buffers(capture, outputs[2])
        if kind in ("training", "fine-tuning"):  # evaluations change nothing for the training
            state.step += 1
        elif prepared.execution.program.draws:
            state.evaluations += 1
        return outputs

    def _raise_failed(self) -> None:
        before, self._unchecked = self._unchecked, None
        if before is not None:
            before.raise_failed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._reduction.forget()

    def accumulate(self) -> AbstractContextManager[None]:
        return self._reduction.deferred()

    def samples(self, batch: Any) -> int:
        if isinstance(batch, Batch):
            return batch.global_size
        tensors = flatten_batch(batch)
        if self.options.batch == "local" and self.world.size > 1:
            return self._summed(count_rows(tensors))
        return rows_of(batch, tensors, self.options.batch, self.world.size).total

    def replay(self, batch: Any) -> Replay:
        with self._lockstep.call():
            prepared, _, inputs = self._ready("training" if self.module.training else "fine-tuning", batch)
            step = self._state.step - 1
            arguments = self._state.arguments(
                prepared.plan.capture, prepared.function, inputs, "training", self._reduction, step
            )
            with torch.no_grad(), torch.autocast(self.world.device.type, enabled=False):
                values = prepared.execution.variables(arguments)
        return Replay(prepared.plan.capture, prepared.execution.program, values)

    def executions(self) -> list[Execution]:
        return self._programs.executions()

    def close(self) -> None:
        """Give back the process groups of the programs, once no backward is to come; every rank calls it.

        Without it they live as long as the process. Parameters and `state_dict` stay; what communicates is refused.
        Groups that other models or DTensors use stay too (`mesh.groups.SharedGroups`).
        """
        self._closed = True
        self._lockstep.end()
        self._communicator.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(
                f"this {type(self.module).__name__} was closed, so that its ranks talk no more; call close() after the "
                "last batch, or parallelize the model again"
            )

    # The state

    def full_state_dict(self) -> dict[str, Any]:
        self._refuse_closed()
        if self._split:
            refuse_lost_changes()
        return self._state.whole(self._communicator)

    def random_state(self) -> dict[str, int]:
        return {"seed": self._state.seed, "step": self._state.step, "evaluations": self._state.evaluations}

    def load_random_state(self, state: Mapping[str, int]) -> None:
        self._state.seed, self._state.step = state["seed"], state["step"]
        self._state.evaluations = state.get("evaluations", 0)  # older checkpoints have none
        self._pulse.set_steps(self._state.step)


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor, and is plain where a sum with DTensors gave another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient) * ctx.factor, None


def _used_buffers(capture: Capture) -> set[str]:
    """The names in the model of the buffers that a step reads or changes: what others hold is the script's."""
    used = {name for node in capture.nodes for name in node.operands}
    used.update((capture.loss, *capture.aux, *capture.mutations))
    return {value.label for value in capture.of_kind("buffer") if value.name in used}
