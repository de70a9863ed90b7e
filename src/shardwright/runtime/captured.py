"""A model that was captured: its programs, its state, and the steps that a user takes with them.

One program is made for every shape of the global batch and every mode (training, evaluation, prediction, autocast).
The first decides how parameters are stored; the plans of later shapes take the storage as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwright.compiler.capture.capture import StepKind, flatten_batch
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.mesh.changed import refuse_lost_changes
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.plan.plan import Plan
from shardwright.data.loading.batch import Batch
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.distributed.world import World
from shardwright.errors import UsageError
from shardwright.launch.options.save_graphs import SaveGraphs
from shardwright.launch.progress_notes import waiting_for
from shardwright.runtime.compiled.compiler import Compiler
from shardwright.runtime.freed_memory import keep_freed_memory
from shardwright.runtime.graphs.batch_key import look_at
from shardwright.runtime.model import ParallelModel, Replay
from shardwright.runtime.parts import Asked, NotAsExpected, Parts
from shardwright.runtime.placing.initialising import Init
from shardwright.runtime.placing.placing import place
from shardwright.runtime.programs.batches import SameBatch, tensors_of
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, Outputs, StepArguments
from shardwright.runtime.programs.inputs import BatchKind, Rows, height_of, rows_of
from shardwright.runtime.programs.planner import Planner
from shardwright.runtime.programs.programs import PreparedProgram, Programs, Step
from shardwright.runtime.programs.splitting import is_split
from shardwright.runtime.programs.storage import ModelState, layouts_by_name
from shardwright.runtime.replicas import Replicas, summed_axes


@dataclass(frozen=True)
class Options:
    """How to run, as the user said it to `parallelize`."""

    batch: BatchKind | None
    gradients: Literal["mean", "sum"]
    save_graphs: SaveGraphs | None
    init: Init | None = None
    compile: bool = False


class _Given(NamedTuple):
    """What this one of ``size`` ranks was given for a step, on its device.

    ``key`` says on what the graph depends beside its sizes, and ``asked`` is the question which rows the others have.
    One is made at each step.
    """

    kind: StepKind
    batch: Any
    key: str
    tensors: Sequence[Tensor]
    by: BatchKind | None
    size: int
    asked: Asked | None = None

    def rows(self) -> Rows:
        """Which rows this rank was given."""
        return rows_of(self.batch, self.tensors, self.by, self.size) if self.asked is None else self.asked.rows()


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
        self.plan = planner.first_plan(sample_batch, rows, plan)
        lockstep = Lockstep() if self.plan.mode == "single" else Lockstep.of_all_ranks()
        self._same_batch, self._parts = SameBatch(lockstep), Parts(lockstep, world.device.type != "cpu")
        self._communicator = communicator_over(self.plan.mesh, lockstep)
        if world.device.type == "cpu":
            keep_freed_memory()
        with waiting_for(f"placing the parameters of {type(model).__name__}"):
            place(model, layouts_by_name(self.plan), self.plan.mesh, world.device, options.init, seed)
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
            axes=[axis.name for axis in self.plan.mesh.axes if axis.size > 1],
            summed=partial(summed_axes, self.plan.capture, self._programs.executions()[0].program),  # of training
            together=self.plan.mode != "single",
        )
        if self._pulse.steps.told and planner.request.hardware is not None:
            from shardwright.compiler.report.plans.expected import expected  # loaded where somebody reads it

            self._pulse.steps.tell({"plan": expected(self.plan, planner.request.hardware)})

    # Running

    def _called(self, batch: Any) -> Any:
        """The loss of the global batch; where it has gradients it also advances the random numbers."""
        return self._called_on(batch)[0]

    def _counted(self, batch: Any) -> tuple[Any, int]:
        with self._lockstep.call():
            self._refuse_failed()
            result, rows = self._called_on(batch)
        return result, rows.total

    def _called_on(self, batch: Any) -> tuple[Any, Rows]:
        """What a call gives for a batch, and which rows of it this rank was given."""
        training = self.module.training
        self._tell_pulse(training)
        self._replicas.begin()
        kind: StepKind = "training" if training else "fine-tuning" if torch.is_grad_enabled() else "evaluation"
        prepared, rows, (loss, aux, new_buffers) = self._checked(kind, batch)
        assert loss is not None
        self._state.store_buffers(prepared.plan.capture, new_buffers)
        if training:
            self._tell_computed(rows.total, loss)
        self._draw_others(kind, prepared)
        if kind != "evaluation" and self.options.gradients == "sum":
            loss = _scaled_gradient(loss, self.world.size)
        if self._split and loss.requires_grad:
            loss = _scaled_gradient(loss, 1)
        if prepared.plan.capture.aux_spec is None:
            return loss, rows
        return (loss, prepared.outputs(aux, rows, self._communicator, whole=False, loss=loss)), rows

    def _tell_pulse(self, training: bool) -> None:
        """Say that a step begins; all batches of an accumulation are one step."""
        if training and self._between_steps:
            self._pulse.begin_step()
        else:
            self._pulse.beat()
        self._between_steps = not training or not self._reduction.deferring

    def _predicted(self, batch: Any, gather: bool) -> Any:
        prepared, rows, (_, aux, new_buffers) = self._checked("predict", batch)
        self._state.store_buffers(prepared.plan.capture, new_buffers)
        self._draw_others("predict", prepared)
        return prepared.outputs(aux, rows, self._communicator, whole=gather)

    def _draw_others(self, kind: StepKind, prepared: PreparedProgram) -> None:
        """Let the next call of its kind draw other random numbers; evaluations change nothing for the training."""
        if kind in ("training", "fine-tuning"):
            self._state.step += 1
        elif prepared.execution.program.draws:
            self._state.evaluations += 1

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
            return self._summed(height_of(tensors))
        return rows_of(batch, tensors, self.options.batch, self.world.size).total

    def replay(self, batch: Any) -> Replay:
        with self._lockstep.call():
            self._refuse_failed()
            given = self._given("training" if self.module.training else "fine-tuning", batch)
            try:
                prepared, inputs = self._ready(given, given.rows())
            except Exception as error:
                self._note_unanswered(given.asked, error)
                raise
            arguments = self._arguments(prepared, inputs, self._state.step - 1)
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

    def _checked(self, kind: StepKind, batch: Any) -> tuple[PreparedProgram, Rows, Outputs]:
        """Compute the same, and raise what the model itself raises; on a GPU, which is not waited for, the next call
        does."""
        self._raise_failed()
        found = self._computed(kind, batch)
        self._unchecked = found[0].execution
        if self.world.device.type == "cpu":
            self._raise_failed()
        return found

    def _raise_failed(self) -> None:
        before, self._unchecked = self._unchecked, None
        if before is not None:
            before.raise_failed()

    def _computed(self, kind: StepKind, batch: Any) -> tuple[PreparedProgram, Rows, Outputs]:
        """The program for the batch, which rows of it this rank was given, and what the program makes of it."""
        given = self._given(kind, batch)
        try:
            if given.asked is not None and given.asked.expected is not None:
                try:
                    return self._computed_expecting(given, given.asked, given.asked.expected)
                except NotAsExpected as other:
                    if other.error is not None:
                        raise other.error from None
            rows = given.rows()
            prepared, inputs = self._ready(given, rows)
            return prepared, rows, self._run(given.kind, prepared, inputs)
        except Exception as error:
            self._note_unanswered(given.asked, error)
            raise

    def _note_unanswered(self, asked: Asked | None, error: Exception) -> None:
        """Ranks that answer a question after this one has given up would take it for one of theirs."""
        if asked is not None and asked.under_way:
            self._note_failure(error)

    def _computed_expecting(self, given: _Given, asked: Asked, rows: Rows) -> tuple[PreparedProgram, Rows, Outputs]:
        """The same, begun before the others have said which rows they have.

        Raises:
            NotAsExpected: where they have others, or no program for these is there.
        """
        step = Step.of(given.kind, given.batch, given.key, given.tensors, rows)
        kept = self._programs.known(step)
        if kept is None:
            raise NotAsExpected
        prepared = kept.prepared

        def compute() -> Outputs:
            return self._run(given.kind, prepared, prepared.inputs(given.tensors, rows, self._communicator))

        first = partial(asked.confirm, partial(self._programs.come, step, kept))
        return prepared, rows, self._lockstep.after(first, compute)

    def _given(self, kind: StepKind, batch: Any) -> _Given:
        """What this rank was given for a step; where each has its own part, with a question what others have."""
        self._refuse_closed()
        self._structure.refuse_changes()
        if self._split:
            refuse_lost_changes()
        look = look_at(batch)
        found = look.tensors if look else tensors_of(batch)
        device = self.world.device
        tensors = [x if x.device == device else x.to(device, non_blocking=True) for x in found]
        key = self._programs.keys.of(kind, batch, look)
        if isinstance(batch, Batch) or self.options.batch != "local" or self.world.size == 1:
            if self.options.batch == "global" and not isinstance(batch, Batch):
                self._same_batch.check(tensors)
            return _Given(kind, batch, key, tensors, self.options.batch, self.world.size)
        height = height_of(tensors)
        asked = self._parts.ask(tensors, height, key, self._same_batch.beside_rows(tensors, height))
        return _Given(kind, batch, key, tensors, self.options.batch, self.world.size, asked)

    def _ready(self, given: _Given, rows: Rows) -> tuple[PreparedProgram, list[Tensor]]:
        """The program for what was given, and this rank's part of its inputs."""
        if not rows.total and any(tensor.ndim for tensor in given.tensors):
            raise UsageError("the batch is empty; expected at least one sample")
        prepared = self._programs.of(Step.of(given.kind, given.batch, given.key, given.tensors, rows))
        return prepared, prepared.inputs(given.tensors, rows, self._communicator)

    def _run(self, kind: StepKind, prepared: PreparedProgram, inputs: Sequence[Tensor]) -> Outputs:
        self._compare(self._replicas)
        arguments = self._arguments(prepared, inputs, self._state.number(kind))
        device = self.world.device.type
        try:
            if not torch.is_autocast_enabled(device):
                return prepared.run(arguments)
            with torch.autocast(device, enabled=False):  # whose casts are operators of the graph
                return prepared.run(arguments)
        except Exception as error:
            self._failed_in_step(error)
            raise

    def _arguments(self, prepared: PreparedProgram, inputs: Sequence[Tensor], step: int) -> StepArguments:
        return self._state.arguments(prepared.plan.capture, prepared.function, inputs, step, self._reduction)

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
