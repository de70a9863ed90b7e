"""The callable that a user trains with: capture, plan, lower, then run the local program on each batch.

One program is made for every shape of the global batch and every mode (training, evaluation, prediction, autocast).
The first decides how parameters are stored; the plans of later shapes take the storage as given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.data.loading.batch import Batch
from shardwright.errors import UsageError
from shardwright.graph.capture import flatten_batch
from shardwright.graph.ir import Capture
from shardwright.graph.step import Kind
from shardwright.launch.asked.save_graphs import SaveGraphs
from shardwright.lower.lower import lower
from shardwright.mesh.collectives import all_gather
from shardwright.mesh.layout import Layout
from shardwright.mesh.processes import ProcessCommunicator
from shardwright.mesh.redistribute import redistribute
from shardwright.plan.plan import Plan
from shardwright.pulse import own_pulse
from shardwright.report.ir import save_graphs
from shardwright.run.buckets import GradientReduction
from shardwright.run.evaluation import Evaluation, metric_means
from shardwright.run.execute import Execution, Given
from shardwright.run.inputs import BatchKind, Rows, global_shapes, local_inputs, rows_of
from shardwright.run.model import ParallelModel, Replay
from shardwright.run.planner import Planner
from shardwright.run.storage import agree_on_weights, local_part, refuse_meta, split_parameters
from shardwright.torch_private import tree_flatten
from shardwright.world.agreement import from_rank_zero
from shardwright.world.ranks import ranks_by_collectives
from shardwright.world.world import World


@dataclass(frozen=True)
class Options:
    """How to run, as the user said it to `parallelize`."""

    batch: BatchKind | None
    gradients: Literal["mean", "sum"]
    save_graphs: SaveGraphs | None


@dataclass(frozen=True)
class _Prepared:
    """Everything that is needed to run batches of one shape."""

    plan: Plan
    execution: Execution
    shapes: tuple[tuple[int, ...], ...]
    input_layouts: tuple[Layout, ...]


class Parallel(ParallelModel):
    """A model that was captured, which runs by the programs of its plans.

    Of an auxiliary output each rank gets the rows of the batch that it was given; what has no such rows comes whole.
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
        refuse_meta(model)
        model.to(world.device)
        self.module = model
        self.options = options
        self.world = world
        self._planner = planner
        self._reduction = GradientReduction()
        self._programs: dict[str, _Prepared] = {}
        self._step = 0
        self._closed = False
        self._pulse = own_pulse()
        self._between_steps = True
        self._seed: int = from_rank_zero(ranks_by_collectives("drawing the seed"), torch.initial_seed)
        agree_on_weights(model)
        rows = rows_of(sample_batch, flatten_batch(sample_batch), options.batch)
        self.plan = planner.first_plan(sample_batch, rows, plan)
        """The plan of the sample batch's shape."""
        self._communicator = ProcessCommunicator(self.plan.mesh)
        self._storage = {v.label: self.plan.leaves[v.name] for v in self.plan.capture.of_kind("parameter")}
        names = {**{name: name for name in self._storage}, **self.plan.capture.tied}
        layouts = {name: self._storage[first] for name, first in names.items() if first in self._storage}
        split_parameters(model, layouts, self.plan.mesh, world.device)
        self._prepare(self._key("training", sample_batch, rows), self.plan)

    # Running

    def __call__(self, batch: Any) -> Any:
        """The loss of the global batch; in training mode it also updates buffers and advances the random numbers."""
        training = self.module.training
        self._tell_pulse(training)
        prepared, inputs = self._ready("training" if training else "evaluation", batch)
        loss, aux, new_buffers = self._run(prepared, inputs)
        assert loss is not None
        if training:
            self._step += 1
            self._store_buffers(prepared.plan.capture, new_buffers)
            if self.options.gradients == "sum":
                loss = _scaled_gradient(loss, self.world.size)
        spec = prepared.plan.capture.aux_spec
        return loss if spec is None else (loss, spec.unflatten([tensor.detach() for tensor in aux]))

    def _tell_pulse(self, training: bool) -> None:
        """All batches of an accumulation are one step."""
        if training and self._between_steps:
            self._pulse.begin_step()
        else:
            self._pulse.beat()
        self._between_steps = not training or not self._reduction.deferring

    def predict(self, batch: Any, *, gather: bool = True) -> Any:
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                prepared, inputs = self._ready("predict", batch)
                _, aux, _ = self._run(prepared, inputs)
                spec = prepared.plan.capture.aux_spec
                if spec is None:
                    raise UsageError(
                        "predict() gives what the loss function returns beside the loss; return (loss, output)"
                    )
                return spec.unflatten(self._whole(prepared.plan, aux) if gather else aux)
        finally:
            self.module.train(was_training)

    def samples(self, batch: Any) -> int:
        return batch.global_size if isinstance(batch, Batch) else self._rows(batch).total

    def evaluate(self, batch: Any) -> Evaluation:
        samples, result = self.samples(batch), self(batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        return Evaluation(float(loss), metric_means(aux, samples), samples)

    def _rows(self, batch: Any) -> Rows:
        return rows_of(batch, flatten_batch(batch), self.options.batch)

    def accumulate(self) -> AbstractContextManager[None]:
        return self._reduction.deferred()

    def replay(self, batch: Any) -> Replay:
        prepared, inputs = self._ready("training", batch)
        given = self._given(prepared.plan.capture, inputs, self._step - 1)
        with torch.no_grad(), torch.autocast(self.world.device.type, enabled=False):
            values = prepared.execution.variables(given)
        return Replay(prepared.plan.capture, prepared.execution.program, values)

    def _run(self, prepared: _Prepared, inputs: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        given = self._given(prepared.plan.capture, inputs, self._step)
        with torch.autocast(self.world.device.type, enabled=False):  # the casts are operators of the graph
            return prepared.execution(given)

    def _given(self, captured: Capture, inputs: Sequence[Tensor], step: int) -> Given:
        # Copies, since the backward may need what `_store_buffers` overwrites.
        buffers = [
            self._buffer(v.label).clone() if v.name in captured.mutations else self._buffer(v.label)
            for v in captured.of_kind("buffer")
        ]
        parameters = [
            self._reduction.join(value.name, local_part(self._parameter(value.label)))
            for value in captured.of_kind("parameter")
        ]
        constants = [captured.constants[value.name].to(self.world.device) for value in captured.of_kind("constant")]
        return Given(parameters, buffers, inputs, constants, self._seed, step)

    def _store_buffers(self, captured: Capture, new: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for name, value in zip(captured.mutations, new, strict=True):
                self._buffer(captured.values[name].label).copy_(value)

    def _whole(self, plan: Plan, aux: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for name, tensor in zip(plan.capture.aux, aux, strict=True):
            split = plan.outputs[name].dims[0] if plan.outputs[name].dims else None
            if split:
                size = plan.capture.values[name].shape[0]
                tensor = all_gather(tensor, self._communicator, dim=0, axes=split.axes, size=size, adjoint="slice")
            found.append(tensor)
        return found

    def executions(self) -> list[Execution]:
        return [prepared.execution for prepared in self._programs.values()]

    def close(self) -> None:
        """Give back the process groups of the programs, once no backward is to come; every rank calls it.

        Without it they live as long as the process. Parameters and `state_dict` stay; what communicates is refused.
        The groups of DTensors stay too, for the next model on equal axes (`mesh.dtensor.device_mesh`).
        """
        self._closed = True
        self._communicator.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(
                f"this {type(self.module).__name__} was closed, so that its ranks talk no more; call close() after the "
                "last batch, or parallelize the model again"
            )

    # Preparing

    def _ready(self, kind: Kind, batch: Any) -> tuple[_Prepared, list[Tensor]]:
        self._refuse_closed()
        tensors = [tensor.to(self.world.device) for tensor in flatten_batch(batch)]
        rows = rows_of(batch, tensors, self.options.batch)
        key = self._key(kind, batch, rows)
        if key not in self._programs:
            self._prepare(key, self._planner.later_plan(self.plan, self._storage, kind, batch, rows))
        prepared = self._programs[key]
        return prepared, local_inputs(tensors, prepared.shapes, prepared.input_layouts, rows, self._communicator)

    def _key(self, kind: Kind, batch: Any, rows: Rows) -> str:
        """What a program depends on beside the model: equal on every rank without talking."""
        leaves, spec = tree_flatten(batch)
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        others = [repr(leaf) for _, leaf in leaves if not isinstance(leaf, Tensor)]
        device = self.world.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        dtypes = [str(tensor.dtype) for tensor in tensors]
        return json.dumps([kind, global_shapes(tensors, rows), dtypes, others, str(spec), autocast])

    def _prepare(self, key: str, plan: Plan) -> None:
        program = lower(plan, self.world.rank)
        if self.options.save_graphs:
            save_graphs(self.options.save_graphs, plan, program, number=len(self._programs) + 1)
        axes = {collective.axes for _, _, collective in program.collectives()}
        axes |= {layout.dims[0].axes for layout in plan.outputs.values() if layout.dims and layout.dims[0]}
        self._communicator.prepare([*axes, plan.mesh.names])
        execution = Execution(program, self._communicator, self.world.device, self._reduction)
        inputs = plan.capture.of_kind("input")
        self._programs[key] = _Prepared(
            plan, execution, tuple(v.shape for v in inputs), tuple(plan.leaves[v.name] for v in inputs)
        )

    # The state, as torch's modules and optimizers know it

    def _parameter(self, name: str) -> nn.Parameter:
        return self._by_name[name]

    def _buffer(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self.module.get_submodule(owner), attribute)
        return tensor

    @cached_property
    def _by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def full_state_dict(self) -> dict[str, Tensor]:
        self._refuse_closed()
        return {name: self._gathered(name, tensor) for name, tensor in self.module.state_dict().items()}

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        shape, replicated = tuple(tensor.shape), Layout.replicated(tensor.ndim)
        layout = self._storage.get(self.plan.capture.tied.get(name, name), replicated)
        steps = redistribute(layout, replicated, (), shape, self.plan.mesh)
        self._communicator.prepare(step.axes for step in steps)
        with torch.no_grad():
            whole = tensor.to_local()
            for step in steps:
                whole = all_gather(whole, self._communicator, **step.arguments(shape))
        return whole

    def random_state(self) -> dict[str, int]:
        return {"seed": self._seed, "step": self._step}

    def load_random_state(self, state: Mapping[str, int]) -> None:
        self._seed, self._step = state["seed"], state["step"]
        self._pulse.set_steps(self._step)


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
