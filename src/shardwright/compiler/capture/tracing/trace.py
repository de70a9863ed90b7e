"""Model, loss function and sample batch -> an exported program of functional operators.

The program is exported from a copy of the model whose tensors have no storage, so that capturing neither runs the
model nor changes anything of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from shardwright.common import torch_private, trees
from shardwright.compiler.capture.functional.decompositions import functional, join_names
from shardwright.compiler.capture.functional.hidden_aliases import refuse_hidden_changes
from shardwright.compiler.capture.functional.strided import index_strided
from shardwright.compiler.capture.tracing import attention, functions, refusals, regions, sources, written
from shardwright.compiler.capture.tracing.frozen import Reading
from shardwright.compiler.capture.tracing.gradients import GradientTaken, Replayed
from shardwright.compiler.capture.tracing.in_place import Buffers, InPlace, refuse_detaching, refuse_setting_data
from shardwright.compiler.capture.tracing.outside.copies import copy_of
from shardwright.compiler.capture.tracing.regions import NO_GRADIENT, kernels_to_trace
from shardwright.compiler.capture.tracing.replaced import (
    batch_norms_call,
    quiet_exporter,
    recurrent_layers_cast,
    sizes_written_as_numbers,
)
from shardwright.compiler.capture.tracing.sizes.open_sizes import OpenSizes, Sizes
from shardwright.compiler.capture.tracing.state.replay import Again, again
from shardwright.compiler.capture.tracing.values import answers
from shardwright.compiler.capture.tracing.values.checks import Check, Checks
from shardwright.compiler.capture.tracing.values.constants import Constants
from shardwright.compiler.rules.notation import Operand
from shardwright.errors import CaptureError, ShardwrightError

LossFunction = Callable[[Any, Any], Any]


@dataclass
class Trace:
    """An exported program, and what the loss function returned beside tensors.

    ``open_sizes`` are those that the program leaves open, ``sizes`` what they are in the graph that is made of it.
    """

    program: torch.export.ExportedProgram
    model: torch.nn.Module  # the copy that was traced
    aux: Any  # what the loss function returned beside the loss, an Operand where a tensor stands
    returns_aux: bool
    reading: Reading
    open_sizes: OpenSizes
    checks: tuple[Check, ...]  # that fail where elements of the last result are not 0
    sizes: Sizes = field(default_factory=dict)


class _Annotate(TorchFunctionMode):
    """Notes on every operator the user's line, and whether gradients are off there; refuses what is no graph.

    The exporter keeps no frame of the loss function, and forgets ``no_grad`` where it makes a graph functional.
    """

    def __init__(self, reading: Reading, *, beneath_autograd: bool) -> None:
        super().__init__()
        self.reading = reading
        self.beneath_autograd = beneath_autograd
        self.in_place = InPlace(reading.place_of)
        self.failed = ""  # where the function stands that raised first

    def begin(self, model: torch.nn.Module) -> None:
        """A step of ``model`` begins."""
        self.constants, self.checks = Constants(), Checks(_Step.forward.__code__)
        self.in_place.begin(model)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        known = self._answered(func, name, args, kwargs or {}, sys._getframe(1))
        if known is not None:
            return known
        frame = sources.users_frame(sys._getframe(1), until=_Step.forward.__code__)
        source = sources.describe_frame(frame) if frame is not None else ""
        where = sources.place_of(frame, source)
        refusals.refuse_backward(func, where)
        if func is torch.autograd.grad and not self.beneath_autograd:
            raise GradientTaken
        refusals.refuse_reading(name, args, where)
        refusals.refuse_hooks(name, where)
        refusals.refuse_freezing(func, name, args, kwargs or {}, where)
        refusals.refuse_closed_over((*args, *(kwargs or {}).values()), where)
        refusals.refuse_generator(name, (*args, *(kwargs or {}).values()), where)
        refusals.refuse_unknown_classes(name, args, kwargs or {}, where)
        refusals.refuse_max_norm(name, args, kwargs or {}, where)
        refuse_setting_data(func, where)
        refuse_detaching(name, args, where)
        before = self.in_place.before(args, kwargs or {})
        annotation = {sources.SOURCE: source, NO_GRADIENT: _without_gradient(func, kwargs or {}), **attention.chosen()}
        try:
            with fx_traceback.annotate(annotation), kernels_to_trace(name):
                result = written.in_place_of(func)(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or where
            raise
        result = list(result) if name == "__iter__" else result
        if name == "pad" and not torch.is_grad_enabled():  # the exporter gives it a gradient there, as no other
            result.requires_grad_(False)  # type: ignore[union-attr]
        refusals.refuse_unknown_shape(name, result, where)
        self.in_place.after(before, result, where)
        self.constants.after(func, name, args, kwargs or {}, result)
        self.checks.after(name, args, kwargs or {}, result)
        self.reading.origins.after(name, args, kwargs or {}, result)
        return iter(result) if name == "__iter__" else result

    def _answered(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType) -> Any:
        """Return what a function that asks for values is answered; None where it is another, or has no answer."""
        known = answers.answer(name, args, frame)
        if known is None and refusals.needs_value(name, args):
            values = [self.constants.value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            if all(value is not None for value in values):
                with torch_private.with_values():
                    return func(*values, **kwargs)
            known = self.checks.answer(name, args, kwargs, frame)
        if self.checks.asserts(name, args, kwargs, sources.users_frame(frame)):
            return ()
        return known


def _without_gradient(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether what a function returns has no gradient."""
    return not torch.is_grad_enabled() or (func is torch.autograd.grad and not kwargs["create_graph"])


@dataclass
class _Call:
    """The module that is traced, and what is learnt from its calls; the exporter resets attributes of modules."""

    loss_fn: LossFunction
    batch: Callable[[Sequence[Any]], Any]
    mode: _Annotate
    reading: Reading
    once: bool  # else the step runs again and again
    aux: Any = None
    returns_aux: bool = False
    checks: tuple[Check, ...] = ()


class _Step(torch.nn.Module):
    """The training step as a function of the tensors of the batch; ``model`` is its only submodule."""

    def __init__(self, model: torch.nn.Module, call: _Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        call = self.call
        refused = refusals.seeding_refused(), refusals.transforms_refused()
        buffers = Buffers(self.model)
        call.mode.begin(self.model)
        call.reading.origins.begin(self.model, tensors)
        watched = call.reading.watch() if call.once else call.reading.looked_at()
        averages = batch_norms_call(written.averaging_batch_norm)
        with (
            watched,
            call.mode,
            functions.captured(),
            averages,
            recurrent_layers_cast(),
            refused[0],
            refused[1],
            attention.every_backend(),
        ):
            output = call.loss_fn(self.model, call.batch(tensors))
        loss, aux = _loss_and_aux(output)
        found: list[torch.Tensor] = []

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            found.append(leaf)
            return Operand(len(found) - 1)

        call.aux, call.returns_aux = trees.tree_map(operand, aux), output is not loss
        call.checks, counts = tuple(call.mode.checks.found), call.mode.checks.counts
        found += [] if counts is None else [counts]
        moved = call.reading.origins.is_moved
        return buffers.written([loss, *found], tensors, call.reading.lines, moved, keeps_new=not call.once)


def _loss_and_aux(output: Any) -> tuple[torch.Tensor, Any]:
    pair = isinstance(output, (tuple, list)) and len(output) == 2
    loss, aux = (output[0], output[1]) if pair else (output, ())
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            "the loss function must return the loss, or (loss, anything else worth having), "
            f"got {type(output).__name__}"
        )
    if loss.shape != () or not loss.is_floating_point():
        raise CaptureError(
            f"the loss must be one floating-point number, got {str(loss.dtype).removeprefix('torch.')}"
            f"{list(loss.shape)}; reduce it with .mean() or .sum()"
        )
    return loss, aux


def capture_device(model: torch.nn.Module, device: torch.device | None = None) -> torch.device:
    """Return the device for which the model is traced.

    It is ``device`` where the model is on its way there, else that of its first parameter or buffer that is not on
    meta, else the CPU.
    """
    if device is not None:
        return device
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _copy_without_storage(model: torch.nn.Module, device: torch.device, mode: Any) -> torch.nn.Module:
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{name} is not initialised; run the model on one batch before it is captured")
        empty = torch_private.empty_like_on(tensor, device, mode)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy_of(model, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied, which capturing it needs: {error}\n"
            "Give the class of the module that fails a __deepcopy__."
        ) from error


@dataclass(frozen=True)
class _Sample:
    """A step that is to be traced, and the batch for which that is."""

    model: torch.nn.Module
    loss_fn: LossFunction
    leaves: Sequence[Any]
    spec: Any
    train: bool
    in_training: bool
    device: torch.device

    def step(self, mode: Any, *, beneath_autograd: bool, once: bool) -> _Step:
        """The step of a copy of the model, whose tensors are those of ``mode``, run ``once`` or again and again."""
        copied = _copy_without_storage(self.model, self.device, mode)
        if self.model.training != self.in_training:  # else single modules may be in another mode, which is kept
            copied.train(self.in_training)
        reading = Reading(self.model, copied, self.loss_fn)
        annotate = _Annotate(reading, beneath_autograd=beneath_autograd)
        call = _Call(_with_autocast(self.loss_fn, self.device), self._batch, annotate, reading, once)
        return _Step(copied, call)

    def tensors(self, mode: Any) -> tuple[torch.Tensor, ...]:
        """Those of the batch, of the same shapes, without storage."""
        given = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return tuple(torch_private.empty_like_on(tensor, self.device, mode) for tensor in given)

    def again(self) -> Again | None:
        """Return what the step does when it runs again and again, as the exporter runs it."""
        mode = torch_private.fake_mode()
        step = self.step(mode, beneath_autograd=True, once=False)
        call = step.call

        def run(batch: Sequence[torch.Tensor]) -> Any:
            return step(*batch), call.aux

        with mode, torch_private.exporting():
            return again(step.model, run, lambda: self.tensors(mode), call.reading.begins, self.loss_fn)

    def _batch(self, given: Sequence[Any]) -> Any:
        tensors = iter(given)
        filled = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return trees.tree_unflatten(filled, self.spec)


def trace(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    leaves: Sequence[Any],
    spec: Any,
    *,
    train: bool,
    in_training: bool,
    open_dims: Sequence[Collection[int]] = (),
    device: torch.device | None = None,
) -> Trace:
    """Export the step for a batch of these leaves.

    Args:
        train: whether gradients flow.
        in_training: the mode of the model.
        device: as of which the model is traced, wherever its tensors are now; by default that of these.
        open_dims: the dims of every tensor of the batch whose sizes are left open; none by default.

    Raises:
        CaptureError: where the step is not one graph; the message names the user's line and the remedy.
    """
    refusals.refuse_compiled(model)
    sample = _Sample(model, loss_fn, leaves, spec, train, in_training, capture_device(model, device))
    try:
        return _trace(sample, open_dims)
    except GradientTaken:
        if any(open_dims):  # the first of its two traces would not note what it decides
            raise CaptureError("sizes cannot be left open where the loss function takes a gradient") from None
        return _trace(sample, beneath_autograd=True)


def _trace(sample: _Sample, open_dims: Sequence[Collection[int]] = (), *, beneath_autograd: bool = False) -> Trace:
    mode = torch_private.fake_mode()
    step, tensors = sample.step(mode, beneath_autograd=beneath_autograd, once=True), sample.tensors(mode)
    call = step.call
    with (
        warnings.catch_warnings(),
        quiet_exporter(),
        sizes_written_as_numbers(sources.is_users),
        fx_traceback.preserve_node_meta(),
        torch.set_grad_enabled(sample.train),
        torch.autocast(sample.device.type, enabled=False),
    ):
        warnings.simplefilter("ignore")  # the exporter's own deprecations, and advice about its internals
        try:
            program, open_sizes = _exported(step, tensors, open_dims, beneath_autograd=beneath_autograd)
        except Exception:
            call.reading.judge(sample.again)  # what a step leaves may be what the exporter stumbles over
            raise
        call.reading.judge(sample.again)
    return Trace(program, step.model, call.aux, call.returns_aux, call.reading, open_sizes, call.checks)


def _exported(
    step: _Step, tensors: tuple[torch.Tensor, ...], open_dims: Sequence[Collection[int]], *, beneath_autograd: bool
) -> tuple[torch.export.ExportedProgram, OpenSizes]:
    """The program of functional operators, and the sizes that it leaves open."""
    try:
        exported = Replayed(step, tensors) if beneath_autograd else step
        program = torch.export.export(exported, tensors, strict=False, dynamic_shapes=_dynamic_shapes(open_dims))
        open_sizes = OpenSizes(_inputs(program))
        regions.inline(program)
        join_names(program)
        refuse_hidden_changes(program.graph, sources.source_of)
        made = functional(program, regions.is_without_gradient)
        index_strided(made, sources.source_of)
        return made, open_sizes
    except CaptureError as error:
        raise refusals.of_installed(error, error.__traceback__, step.model) from error.__cause__
    except (ShardwrightError, GradientTaken):
        raise
    except Exception as error:
        explained = refusals.explained(error, step.call.mode.failed)
        explained.__cause__ = error
        raise refusals.of_installed(explained, error.__traceback__, step.model) from error


def _dynamic_shapes(open_dims: Sequence[Collection[int]]) -> Any:
    """Open dims as the exporter takes them."""
    return (tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in open_dims),) if open_dims else None


def _inputs(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """The tensors that stand for those of the batch."""
    names = set(program.graph_signature.user_inputs)
    return [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def _with_autocast(loss_fn: LossFunction, device: torch.device) -> LossFunction:
    """The loss function under the autocast that is on around the capture, as a region of the graph."""
    if not torch.is_autocast_enabled(device.type):
        return loss_fn
    dtype = torch.get_autocast_dtype(device.type)

    def within_autocast(model: Any, batch: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return loss_fn(model, batch)

    return within_autocast
