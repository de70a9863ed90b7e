"""Tells torch's optimizers, in each step, of the parameters of a parallel model, which may be DTensors.

Those that were made before the parameters were split are given the new ones. Those that work entry by entry make their
step on the parts that this rank holds (`split_tensor`). Those whose arithmetic torch cannot split are given whole
gradients.

Torch's optimizers go through memory a dozen times unless they are asked for ``fused=True``, which goes through it
once: AdamW then takes a fifth of the time on a CPU, with the same numbers up to rounding. The kernels take for granted
that all of a parameter has one memory format, and compute something else or raise where it has not; so that is looked
at before each step. On a GPU they read the number of the step there, to which it is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.common.torch_private import part_of
from shardwright.compiler.mesh.dtensor import gathered, is_on_mesh_of_model, on_mesh, replicated
from shardwright.compiler.mesh.split_tensor import laid_out, split_tensor
from shardwright.compiler.plan.pricing.memory import WHOLE_GRADIENTS
from shardwright.errors import UsageError
from shardwright.runtime.programs.splitting import refuse_part_of_another
from shardwright.runtime.updates.optimizer_steps import note_load, note_step

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that were -> what they were replaced by
_trained: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the parameters of parallel models -> True
_changes = [0]  # how often one of these was added to
# Each entry that these update, and what they keep for it, follows from that entry, its gradient and what was kept.
_BY_ENTRY = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
# What they keep of a parameter as a whole. Of a parameter without dims this has the shape of what is kept for entries.
_NUMBERS = ("step", "eta", "mu", "mu_product")
# Those with kernels that round as the loops do; Adagrad's differ from its loop by more.
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_ALREADY_SAID = ("fused", "foreach")  # how steps are to be made, by who made the optimizer
_OTHERWISE = ("differentiable", "capturable")
_DEVICES = ("cpu", "cuda")
_WITH_ADDRESSES = (Tensor, nn.Parameter)  # of their numbers; a subclass may keep its numbers in other tensors
_DTYPES = (torch.float32, torch.float64)  # of narrower ones the kernels round less often than the loops
# The groups that take fused kernels in the step that runs.
_taking: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def note_successor(parameter: Tensor, successor: nn.Parameter) -> None:
    """Let every optimizer of ``parameter`` update ``successor`` in its place, from its next step on."""
    _replaced[parameter] = successor
    _changes[0] += 1


def note_trained(parameters: Iterable[nn.Parameter]) -> None:
    """Let optimizers update these parameters, as a parallel model stores them, as fast as they can."""
    watch_optimizers()
    for parameter in parameters:
        _trained[parameter] = True
    _changes[0] += 1


@cache
def watch_optimizers() -> None:
    """Look at every optimizer before and after its step; once per process.

    Cached so that it is done once.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@dataclass
class _Known:
    """The facts about an optimizer that was looked at, and whether it was given a state since its last step.

    ``parameters`` are those that it updated then, ``changes`` how often by then something had changed for parameters of
    this process. ``is_ours``: it updates those of a parallel model.
    """

    parameters: list[ref[Tensor]]
    changes: int
    has_split: bool
    is_ours: bool
    was_loaded: bool

    def updates(self, parameters: list[Tensor]) -> bool:
        """Return whether these are the very parameters that were looked at."""
        both = zip(self.parameters, parameters, strict=False)
        return len(self.parameters) == len(parameters) and all(then() is now for then, now in both)


# Cached by the optimizer: what was found holds for the very parameters that were looked at, as long as none of this
# process was put in the place of another.
_known: WeakKeyDictionary[torch.optim.Optimizer, _Known] = WeakKeyDictionary()


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Return what the step is to be called with, None where it stays as it is."""
    known = look_at(optimizer)
    if known.has_split and known.was_loaded:
        _take_loaded(optimizer)
    known.was_loaded = False
    if known.is_ours and isinstance(optimizer, torch.optim.SparseAdam):
        _refuse_dense_gradients(optimizer)
    if known.has_split:
        note_step(optimizer, has_closure=any(map(callable, (*args, *kwargs.values()))))
    if isinstance(optimizer, WHOLE_GRADIENTS):
        prepare: Callable[[torch.optim.Optimizer], None] = _make_whole
    elif known.is_ours:
        prepare = take_fused_kernels
    else:
        return None
    prepare(optimizer)

    def prepared_after(given: Any) -> Any:
        """A closure, which computes gradients inside of the step, has them prepared when it returns."""
        if not callable(given):
            return given

        def closure() -> Any:
            loss = given()
            prepare(optimizer)
            return loss

        return closure

    return tuple(map(prepared_after, args)), {name: prepared_after(value) for name, value in kwargs.items()}


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    leave_fused_kernels(optimizer)


def _refuse_dense_gradients(optimizer: torch.optim.SparseAdam) -> None:
    """Say in place of torch why a gradient is dense that the model makes sparse.

    Raises:
        UsageError: where a gradient is dense.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                raise UsageError(
                    "SparseAdam updates the rows that a sparse gradient names, and that of a parameter of shape "
                    f"{list(parameter.shape)} is dense: where a plan splits a table or its lookups, ranks sum them so; "
                    "use torch.optim.Adam, which also moves the rows that no sample looked up, or Adagrad or SGD, "
                    "which give the same numbers for dense gradients"
                )


def look_at(optimizer: torch.optim.Optimizer) -> _Known:
    """Return what is known of an optimizer; one made before its parameters were split is given their successors.

    Raises:
        UsageError: where it has state already, which belongs to whole parameters.
    """
    updated, known = _updated(optimizer), _known.get(optimizer)
    if known is not None and known.changes == _changes[0] and known.updates(updated):
        return known
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            successor = _replaced.get(parameter)  # type: ignore[no-untyped-call]
            if successor is None:
                continue
            if optimizer.state.get(parameter):
                raise UsageError(
                    f"this {type(optimizer).__name__} has made steps with parameters that sw.parallelize has split "
                    "since; make it after sw.parallelize, from the parameters of what that returns, and load its state "
                    "with sw.checkpoint"
                )
            group["params"][at] = successor
    if known is None:
        optimizer.register_load_state_dict_post_hook(_note_loaded)
        optimizer.register_state_dict_pre_hook(leave_fused_kernels)  # where a step has failed
    updated = _updated(optimizer)
    _known[optimizer] = _Known(
        list(map(ref, updated)),
        _changes[0],
        has_split=any(map(_is_split, updated)),
        is_ours=any(parameter in _trained for parameter in updated),
        was_loaded=known is None or known.was_loaded,
    )
    return _known[optimizer]


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _note_loaded(optimizer: torch.optim.Optimizer) -> None:
    _known[optimizer].was_loaded = True


def _is_split(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and is_on_mesh_of_model(parameter)


def _take_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Lay out what `Optimizer.load_state_dict` was given for split parameters, DTensors of a file or whole tensors.

    Raises:
        UsageError: where the file is that of another rank.
    """
    states = [(p, kept) for p, kept in optimizer.state.items() if isinstance(p, DTensor) and _is_split(p) and kept]
    for parameter, kept in states:
        for key, value in kept.items():
            if _is_to_lay_out(optimizer, parameter, key, value):
                if isinstance(value, DTensor):
                    refuse_part_of_another(f"{key!r} of an optimizer's state", value)
                kept[key] = _laid_out(optimizer, parameter, value)
    if states:
        note_load()


def _is_to_lay_out(optimizer: torch.optim.Optimizer, parameter: DTensor, key: str, value: Any) -> bool:
    if isinstance(value, DTensor) or not isinstance(value, Tensor) or key in _NUMBERS:
        return isinstance(value, DTensor)
    return isinstance(optimizer, WHOLE_GRADIENTS) or (
        isinstance(optimizer, _BY_ENTRY) and value.shape == parameter.shape
    )


def _laid_out(optimizer: torch.optim.Optimizer, parameter: DTensor, value: Tensor) -> DTensor:
    """Return what was loaded as a step would have left it; all ranks call it together."""
    devices = parameter.device_mesh
    if isinstance(value, DTensor):
        if value.device_mesh == devices:
            return split_tensor(on_mesh(value, devices))
        value = gathered(value)
    if isinstance(optimizer, WHOLE_GRADIENTS) or value.shape != parameter.shape:
        return split_tensor(replicated(value, devices))
    return laid_out(value, parameter)


def _make_whole(optimizer: torch.optim.Optimizer) -> None:
    """Gather the gradients of split parameters, and what is kept for them, on every rank; the parameters stay split."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(parameter.grad, DTensor):
                parameter.grad = _whole(parameter.grad)
            kept = optimizer.state.get(parameter, {})
            kept.update({key: _whole(value) for key, value in kept.items() if isinstance(value, DTensor)})


def _whole(tensor: DTensor) -> DTensor:
    return replicated(gathered(tensor), tensor.device_mesh)


# Steps by fused kernels.


def take_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let the step that begins take fused kernels for each group where that gives the same.

    The group must leave open how its steps are made. First steps, in which the states are made, are left as they are.
    The number of a step is put where its parameter is, as the kernels want it, without waiting for a GPU.
    """
    leave_fused_kernels(optimizer)
    _taking[optimizer] = [group for group in optimizer.param_groups if _is_to_fuse(optimizer, group)]
    for group in _taking[optimizer]:
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device, non_blocking=True)


def leave_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Leave the settings of an optimizer as they were before its step.

    The kernels do not tell autograd that they write to parameters, as the loops do: without that a backward after the
    step would be taken for right that reads the parameters of its forward.
    """
    for group in _taking.pop(optimizer, ()):
        group["fused"] = None
        updated = [parameter for parameter in group["params"] if parameter.grad is not None]
        increment_version([*updated, *(part_of(each) for each in updated if isinstance(each, DTensor))])


def _is_to_fuse(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    if not isinstance(optimizer, _KINDS) or torch.compiler.is_compiling():
        return False
    if any(group.get(name) is not None for name in _ALREADY_SAID) or any(group.get(name) for name in _OTHERWISE):
        return False
    numbers = [group["lr"], *group.get("betas", ())]
    if any(isinstance(number, Tensor) for number in numbers):  # which the loops round otherwise
        return False
    keeps = not isinstance(optimizer, torch.optim.SGD) or group["momentum"] != 0
    updated = [parameter for parameter in group["params"] if parameter.grad is not None]
    return all(_lie_alike(parameter, optimizer.state.get(parameter, {}), keeps) for parameter in updated)


def _lie_alike(parameter: Tensor, state: Mapping[str, Any], keeps: bool) -> bool:
    """Return whether a parameter, its gradient and its states have their numbers in one order.

    With ``keeps``, there must be states.
    """
    kept = [value for name, value in state.items() if name != "step" and value is not None]
    step = state.get("step")
    if parameter.device.type not in _DEVICES or parameter.dtype not in _DTYPES or (keeps and not kept):
        return False
    if step is not None and not (
        isinstance(step, Tensor) and (step.is_cpu or step.device == parameter.device) and step.dtype == torch.float32
    ):
        return False
    placements = getattr(parameter, "placements", None)
    for value in (parameter, parameter.grad, *kept):
        part = part_of(value) if isinstance(value, DTensor) else value
        if (
            type(part) not in _WITH_ADDRESSES
            or (value.layout, value.device, value.dtype) != (torch.strided, parameter.device, parameter.dtype)
            or value.shape != parameter.shape
            or getattr(value, "placements", None) != placements
            or not part.is_contiguous()
            or part.is_neg()
            or part.is_conj()
        ):
            return False
    return True
