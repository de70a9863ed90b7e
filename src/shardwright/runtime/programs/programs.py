"""The programs of a model: one for every shape of the global batch and every kind of step, made at its first use."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.common.trees import tree_flatten
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture, Filled
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.collectives import Communicator
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.backends.table import backend_moving
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.world import World
from shardwright.errors import ShardwrightError
from shardwright.launch.options.save_graphs import SaveGraphs
from shardwright.runtime.compiled.compiler import Compiler
from shardwright.runtime.graphs.unchanged import Remembered
from shardwright.runtime.programs.aux_outputs import refusing_gradients
from shardwright.runtime.programs.batches import described, difference
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution
from shardwright.runtime.programs.failures import with_text
from shardwright.runtime.programs.inputs import (
    InputPart,
    Keys,
    Rows,
    global_shapes,
    input_parts,
    local_inputs,
    look_at,
    rows_of_output,
    shown,
)
from shardwright.runtime.programs.planner import Planner

MOST_PROGRAMS = 64
MOST_VALUES = 16  # of Python for which one program is kept: a counter has a new one at every step
MANY_VALUES = 3  # of something that a program depends on: a fourth is warned of


@dataclass(frozen=True)
class PreparedProgram:
    """A program that can run batches of one shape: planned, lowered for this rank, its process groups made.

    ``unlike`` says in what these batches differ from the sample batch, beside their number of rows.
    """

    plan: Plan
    capture: Capture
    execution: Execution
    function: LossFunction  # what was captured
    shapes: tuple[tuple[int, ...], ...]
    input_layouts: tuple[Layout, ...]
    output_layouts: Mapping[str, Layout]
    unlike: str
    parts: dict[Hashable, list[InputPart]] = field(default_factory=dict, repr=False)
    """Cached by the rows that ranks were given: shapes and layouts are the program's, whose mesh and rank stay."""

    def inputs(self, tensors: Sequence[Tensor], rows: Rows, communicator: Communicator) -> list[Tensor]:
        """Return this rank's shard of every input, as the plan lays it out."""
        key = rows.mine, rows.total, rows.all_ranks
        parts = self.parts.get(key)
        if parts is None:
            parts, communicated = input_parts(self.shapes, self.input_layouts, rows, communicator)
            if not communicated:  # else all ranks do so together, each time
                self.parts[key] = parts
        return local_inputs(tensors, parts, communicator)

    def outputs(
        self, aux: Sequence[Tensor], rows: Rows, communicator: Communicator, *, whole: bool, loss: Tensor | None = None
    ) -> Any:
        """Return the auxiliary outputs, whole, or of those with rows the ones that this rank was given.

        With ``batch="global"``, where all ranks were given all rows, each keeps those that it has computed. What has a
        gradient in the graph refuses one, but for ``loss``, which may stand there, too.
        """
        capture, found = self.capture, list[Tensor]()
        for name, tensor in zip(capture.returned, aux, strict=True):
            shape, layout = capture.values[name].shape, self.output_layouts[name]
            found.append(rows_of_output(tensor.detach(), shape, layout, rows, communicator, whole=whole))
        if torch.is_grad_enabled():
            trained = [i for i, name in enumerate(capture.returned) if name in capture.aux_with_gradient]
            labels = capture.aux_spec.labels
            refusing = refusing_gradients([found[i] for i in trained], [labels[i] for i in trained]) if trained else ()
            for i, tensor in zip(trained, refusing, strict=True):
                found[i] = loss if loss is not None and capture.aux[i] == capture.loss else tensor
        return capture.aux_spec.unflatten(found)


class Kept(NamedTuple):
    """A program with values of Python for which it was captured, and the number of both, the same on all ranks."""

    remembered: Remembered
    prepared: PreparedProgram
    number: str


class Step(NamedTuple):
    """A step of some kind on a batch; ``key`` says on what its program depends beside the model, and how it is filled.

    That is the key of `Programs.keys` with the shapes of the global batch: equal on every rank without talking.

    ``filled`` is what this rank's part of the batch is found to hold, or the whole of it, where that is ``agreed``.
    """

    kind: StepKind
    batch: Any
    rows: Rows
    key: Hashable
    filled: frozenset[Filled] = frozenset()


class Programs:
    """Makes each program at its first use, on all ranks together, and keeps it.

    Args:
        first: the plan of the sample batch's shape, which decides how parameters are stored.
        storage: these layouts, by the names of the parameters; later plans take them as they are.
    """

    def __init__(
        self,
        planner: Planner,
        first: Plan,
        storage: Mapping[str, Layout],
        communicator: Communicator,
        reduction: GradientReduction,
        world: World,
        dumps: SaveGraphs | None,
        lockstep: Lockstep,
        compiler: Compiler | None = None,
    ) -> None:
        self.keys = Keys(planner.captures)
        """The keys of graphs: all that the graph of a step depends on beside the model and the sizes of the batch."""
        self._planner = planner
        self._first = first
        self._storage = storage
        self._communicator = communicator
        self._reduction = reduction
        self._world = world
        self._dumps = dumps
        self._lockstep = lockstep
        self._compiler = compiler
        self._made = 0
        self._sample: dict[str, str] = {}
        # Cached by `Step.key`, which is `Captures.key` and the shapes of the global batch, and by how the batch is
        # filled; of several under one key that is used whose values of Python are what they were (`Remembered`). The
        # model is the planner's.
        self._by_key: dict[Hashable, list[Kept]] = {}
        # Cached by `Step.key`.
        self.conditions: dict[Hashable, frozenset[Filled]] = {}
        """On what of a batch's numbers graphs have said that they depend; none where no batch came yet."""

    def add_first(self, sample_batch: Any, rows: Rows) -> None:
        """Make the program of the first plan."""
        self._sample = described(sample_batch)
        tensors = [leaf for _, leaf in tree_flatten(sample_batch)[0] if isinstance(leaf, Tensor)]
        key = self.keys.of("training", sample_batch, look_at(sample_batch))
        step_key = key, global_shapes(tensors, rows)
        self._prepare(Step("training", sample_batch, rows, step_key, self._first.capture.filled), self._first, "")

    def of(self, step: Step) -> PreparedProgram:
        """The program of a step to which all ranks come; each says that it does, where it came to another before.

        Of several the one used last comes last: ranks forget alike those that were not used for longest.
        """
        place = step.key, step.filled & self.conditions.get(step.key, frozenset())
        known = self._by_key[place] = self._by_key.pop(place, [])
        for kept in known:
            if kept.remembered.holds():
                compiled = kept.prepared.execution.compiled
                left_out = "" if compiled is None else compiled.left_out  # where ranks differ, they round unlike
                self._lockstep.same(f"{kept.number}:{left_out}", partial(_said, step, known, left_out))
                if known[-1] is not kept:
                    known.append(known.pop(known.index(kept)))
                return kept.prepared
        self._lockstep.same("another" if step.rows.agreed else str(place), partial(_said, step, known))
        if step.key not in self.conditions:  # of which the step says all that its rank has found
            del self._by_key[place]
            step = step._replace(filled=frozenset.intersection(*from_all_ranks(step.filled)))
        unlike = difference(step.batch, self._sample) if step.kind != "predict" else ""
        with torch.inference_mode(False):  # whose tensors can be no part of a program
            plans = [each.prepared.plan for each in known]
            try:
                plan = self._planner.later_plan(
                    self._first, self._storage, step.kind, step.batch, step.rows, plans, step.filled
                )
            except ShardwrightError as error:  # on all ranks, since rank 0 has met it for all
                if unlike:
                    with_text(error, unlike)
                raise
            same = next((each.prepared for each in known if each.prepared.plan is plan), None)
            return self._prepare(step, plan, unlike) if same is None else self._prepare_again(step, same)

    def executions(self) -> list[Execution]:
        """The programs that were made so far, each with a count of its runs."""
        return list({kept.prepared.execution: None for known in self._by_key.values() for kept in known})

    def _prepare_again(self, step: Step, prepared: PreparedProgram) -> PreparedProgram:
        """Keep a program for values of Python, too, with which the graph is the same."""
        remembered, known = self._remember(step, prepared.plan, prepared.function)
        of_program = [kept for kept in known if kept.prepared is prepared]
        if len(of_program) >= MOST_VALUES:
            known.remove(of_program[0])
        known.append(Kept(remembered, prepared, str(self._made)))
        return prepared

    def _remember(self, step: Step, plan: Plan, function: LossFunction) -> tuple[Remembered, list[Kept]]:
        """Return what a step reads of Python now, the same on all ranks, and the programs for it, with room for one."""
        self._made += 1
        remembered = Remembered(plan.capture, self._planner.module, function)
        remembered.agree()
        self._make_room()
        conditions = self.conditions[step.key] = self.conditions.get(step.key, frozenset()) | plan.capture.conditions
        known = self._by_key.setdefault((step.key, step.filled & conditions), [])
        self._warn_of_many(known, remembered)
        return remembered, known

    def _prepare(self, step: Step, plan: Plan, unlike: str) -> PreparedProgram:
        function = self._planner.captures.function(step.kind)
        remembered, known = self._remember(step, plan, function)
        backend = backend_moving(self._world.device.type, self._world.backend)
        buckets = backend.buckets if len(set(self._world.hosts)) == 1 else backend.buckets_between
        program = lower(plan, self._world.rank, buckets.bytes, buckets.first_bytes, backend.overlaps)
        if self._dumps:
            from shardwright.compiler.report.ir import save_graphs  # loaded where graphs are saved

            save_graphs(self._dumps, plan, program, number=self._made)
        axes = set(program.groups)
        outputs = {name: plan.on_devices(layout) for name, layout in plan.outputs.items()}
        axes |= {layout.dims[0].axes for layout in outputs.values() if layout.dims and layout.dims[0]}
        self._communicator.prepare([*axes, plan.devices.names])
        execution = Execution(
            program, plan.capture, self._communicator, self._world.device, self._reduction, self._compiler
        )
        inputs = plan.capture.of_kind("input")
        shapes, layouts = tuple(v.shape for v in inputs), tuple(plan.stored[v.name] for v in inputs)
        prepared = PreparedProgram(plan, plan.capture, execution, function, shapes, layouts, outputs, unlike)
        known.append(Kept(remembered, prepared, str(self._made)))
        return prepared

    def _make_room(self) -> None:
        """Forget what was not used for longest, where too much is kept: at first values whose program has others."""
        while sum(map(len, self._by_key.values())) >= MOST_PROGRAMS:
            every = [(known, kept) for known in self._by_key.values() for kept in known]
            programs = Counter(id(kept.prepared) for _, kept in every)
            several = ((known, kept) for known, kept in every if programs[id(kept.prepared)] > 1)
            known, kept = next(several, every[0])
            known.remove(kept)

    def _warn_of_many(self, known: list[Kept], new: Remembered) -> None:
        """Say which value makes programs that differ in nothing else."""
        if len(known) == MANY_VALUES and self._world.rank == 0:
            changed = ", ".join(map(str, new.differing(known[-1].remembered))) or "a hook or an object of the model"
            warnings.warn(
                f"the model is captured anew for each value of {changed}, {MANY_VALUES + 1} times so far; a value that "
                "changes often belongs into the batch, as a tensor",
                stacklevel=2,
            )


_IN_WORDS: Mapping[StepKind, str] = {
    "training": "",
    "fine-tuning": " in evaluation mode, with gradients",
    "evaluation": " in evaluation mode",
    "predict": " to predict",
}


def _said(step: Step, known: Sequence[Kept], left_out: str = "") -> str:
    """Return what a rank passes, for the others; ``known`` are the programs for such batches."""
    values = {place: value for kept in known for place, value in kept.remembered.changed().items()}
    words = f"passes a batch of {shown([leaf for _, leaf in tree_flatten(step.batch)[0] if isinstance(leaf, Tensor)])}"
    words += _IN_WORDS[step.kind]
    words += "".join(f" with {place} = {value!r}" for place, value in values.items())
    words += "".join(f", tensor {place + 1} holding {number} in every entry" for place, number in sorted(step.filled))
    return words + (f", which it computes with {left_out} uncompiled" if left_out else "")
