"""Prepares each step of torch's optimizers on the parameters of a parallel model, which may be DTensors.

An optimizer that was made before the parameters were sharded gets the new ones. An elementwise optimizer updates this
rank's shards (`split_tensor`). An optimizer whose arithmetic torch cannot shard (Adafactor, Muon) gets full gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

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


def note_successor(parameter: Tensor, successor: nn.Parameter) -> None:
    """Let every optimizer of ``parameter`` update ``successor`` in its place, from its next step on."""
    _replaced[parameter] = successor
    _changes[0] += 1


def note_trained(parameters: Iterable[nn.Parameter]) -> None:
    """Have optimizers that update these parameters, which a parallel model stores, looked at before each step."""
    watch_optimizers()
    for parameter in parameters:
        _trained[parameter] = True
    _changes[0] += 1


@cache
def watch_optimizers() -> None:
    """Look at every optimizer before its step; once per process.

    Cached so that it is done once.
    """
    register_optimizer_step_pre_hook(_before_step)


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
    if not isinstance(optimizer, WHOLE_GRADIENTS):
        return None
    _make_whole(optimizer)

    def prepared_after(given: Any) -> Any:
        """A closure, which computes gradients inside of the step, has them prepared when it returns."""
        if not callable(given):
            return given

        def closure() -> Any:
            loss = given()
            _make_whole(optimizer)
            return loss

        return closure

    return tuple(map(prepared_after, args)), {name: prepared_after(value) for name, value in kwargs.items()}


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
