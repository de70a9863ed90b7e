"""The state of a model, an optimizer and the random generators as entries of a checkpoint, and back.

Everything is keyed by the names of parameters and nothing by position, so that neither the order of the parameters nor
how they are stored (split or whole) need be the same where the state is loaded. The optimizer's part has the form of
torch's own `get_optimizer_state_dict`:

    ("model", NAME)                               parameters, buffers, extra state of modules
    ("optimizer", "state", NAME, KEY)             what the optimizer keeps for a parameter
    ("optimizer", "param_groups", "0")            {"params": [NAME, ...], "lr": ..., ...}

A tensor that stands under several names is the same object under all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwright.checkpoint.format.manifest import Entry, TensorEntry
from shardwright.common import torch_private
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.control import group_moving
from shardwright.errors import CheckpointError

Path = tuple[str, ...]

# Options of a parameter group that say how a step is computed, not which: this run's own stay.
_HOW = ("foreach", "fused", "capturable", "differentiable")
# What optimizers keep as one number for a parameter, beside tensors that are laid out as the parameter is.
_NUMBERS = ("step", "eta", "mu", "mu_product")


# The model


class Parallelized(Protocol):
    """The part of `runtime.model.ParallelModel` that a checkpoint needs."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def plan(self) -> Plan | None: ...
    def adopt(self, optimizer: Optimizer) -> None: ...
    def random_state(self) -> dict[str, int] | None: ...
    def load_random_state(self, state: Mapping[str, int]) -> None: ...


def parallelized(model: Any) -> Parallelized | None:
    """``model`` if `sw.parallelize` returned it; None for a module of torch's, DistributedDataParallel among them."""
    return None if isinstance(model, nn.Module) else model


def module_of(model: Any) -> nn.Module:
    """The user's module in what `parallelize`, torch's DistributedDataParallel or torch.compile made of it."""
    while True:
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def model_state(module: nn.Module) -> dict[Path, Any]:
    """Parameters and persistent buffers as they are stored; tied ones are the same object under each name."""
    found = module.state_dict(keep_vars=True)
    return {("model", name): value for name, value in found.items()}


def put_model_state(module: nn.Module, state: Mapping[Path, Any]) -> None:
    """Hand the module what was not filled in place: what its own hooks made, and extra state.

    Modules that do more when they load are given all, as it is, so that they do it.
    """
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    given = {path[1]: value for path, value in state.items() if path[0] == "model" and id(value) not in own}
    if torch_private.acts_on_loads(module):
        whole = module.state_dict()
        whole.update(given)
        given = whole
    if given:
        module.load_state_dict(given, strict=False)


def broadcast_buffers(model: Any) -> None:
    """Give all ranks rank 0's buffers, where DistributedDataParallel would do so at its next forward."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    ours = parallelized(model)
    if isinstance(model, DistributedDataParallel) or (ours is not None and ours.plan is None):
        for buffer in module_of(model).buffers():
            dist.broadcast(buffer.detach(), 0, group=group_moving(buffer.device))


# The optimizer


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """The names of the parameters of each group, as `named_parameters` gives them.

    Raises `CheckpointError` where the optimizer updates something that is no parameter of the module.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a tensor of shape {list(parameter.shape)} that is no "
                    f"parameter of {type(module).__name__}; make the optimizer from the parameters of the model that "
                    "is saved or loaded (parallel.parameters())"
                )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[Path, Any]:
    """Return the state of the optimizer by the names of its parameters; those without state have no entries.

    Raises `CheckpointError` for an optimizer (LBFGS) whose state cannot be told apart by parameter.
    """
    groups = parameter_names(optimizer, module)
    found: dict[Path, Any] = {}
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor | int | float | str | None):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}, over all parameters "
                        "at once, which cannot follow the layout of any; save a checkpoint without optimizer=, and "
                        "its state_dict() by torch.save"
                    )
                found["optimizer", "state", name, key] = value
    for number, (names, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found["optimizer", "param_groups", str(number)] = {"params": names, **options}
    return found


def empty_optimizer_state(optimizer: Optimizer, module: nn.Module, entries: Iterable[Entry]) -> dict[Path, Any]:
    """Room for the state of this optimizer's parameters that is among ``entries``, laid out as the parameters are.

    Entries that are no tensors come as None.
    """
    parameters = dict(module.named_parameters())
    mine = {name for group in parameter_names(optimizer, module) for name in group}
    room: dict[Path, Any] = {}
    for entry in entries:
        if entry.path[:2] == ("optimizer", "state") and entry.path[2] in mine:
            room[entry.path] = _room_for(parameters[entry.path[2]], entry) if isinstance(entry, TensorEntry) else None
    return room


def _room_for(parameter: nn.Parameter, entry: TensorEntry) -> Tensor:
    if entry.shape == tuple(parameter.shape) and not (not entry.shape and entry.path[-1] in _NUMBERS):
        return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
    if not isinstance(parameter, DTensor) or not entry.shape:
        # Where it belongs, `Optimizer.load_state_dict` knows.
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    whole = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device)
    return DTensor.from_local(whole, parameter.device_mesh, run_check=False)


def match_groups(
    optimizer: Optimizer, module: nn.Module, saved: Sequence[Mapping[str, Any]], kind: str, strict: bool
) -> list[Mapping[str, Any]]:
    """For each group of ``optimizer`` the saved one with the same parameters.

    ``kind`` is the class of the optimizer that was saved. With ``strict=False`` parameters that only one side knows
    make no difference.

    Raises:
        CheckpointError: where the optimizer or its groups are others.
    """
    ours = type(optimizer).__name__
    if strict and kind != ours:
        raise CheckpointError(f"the checkpoint has the state of {kind}, not of {ours}; make the optimizer a {kind}")
    groups = parameter_names(optimizer, module)
    known = {name for group in saved for name in group["params"]}
    mine = {name for names in groups for name in names}
    common = known & mine if not strict else known | mine
    left = list(saved)
    matched = []
    for number, (names, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        theirs = next((g for g in left if set(g["params"]) & common == set(names) & common), None)
        if theirs is None:
            raise CheckpointError(_other_groups(number, names, saved))
        left.remove(theirs)
        options = {key for key in group if key not in ("params", "param_names", "initial_lr")}
        if strict and options != theirs.keys() - {"params", "initial_lr"}:
            only = ", ".join(sorted(options ^ (theirs.keys() - {"params", "initial_lr"})))
            raise CheckpointError(
                f"the options of {ours} are others in the checkpoint ({only}): it was saved by another optimizer of "
                "that name, or another version of torch"
            )
        matched.append(theirs)
    if any(set(group["params"]) & common for group in left):
        raise CheckpointError(_too_few_groups(len(groups), saved))
    return matched


def _other_groups(number: int, names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> str:
    ours = set(names)
    near = max(range(len(saved)), key=lambda i: len(ours & set(saved[i]["params"])), default=None)
    text = f"group {number} of the optimizer ({_some(names)}) has no group of the same parameters in the checkpoint"
    if near is not None:
        theirs = set(saved[near]["params"])
        for what, found in (("only in ours", ours - theirs), ("only in the checkpoint's", theirs - ours)):
            text += f"; {what}: {_some(sorted(found))}" if found else ""
    return text + "; make the same groups as the run that was saved"


def _too_few_groups(count: int, saved: Sequence[Mapping[str, Any]]) -> str:
    theirs = "; ".join(_some(group["params"]) for group in saved)
    return f"the optimizer has {count} groups, the checkpoint {len(saved)}: {theirs}; make the same groups"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no parameters"


def put_optimizer_state(
    optimizer: Optimizer, module: nn.Module, matched: Sequence[Mapping[str, Any]], state: Mapping[Path, Any]
) -> None:
    """Give ``optimizer`` the filled ``state`` and the options of the groups that `match_groups` gave."""
    numbered: dict[int, dict[str, Any]] = {}
    given: list[tuple[nn.Parameter, str, Tensor]] = []
    by_name: dict[str, dict[str, Any]] = {}
    for path, value in state.items():
        if path[:2] == ("optimizer", "state"):
            by_name.setdefault(path[2], {})[path[3]] = value
    groups, number = [], 0
    for names, group, saved in zip(parameter_names(optimizer, module), optimizer.param_groups, matched, strict=True):
        options = {key: value for key, value in saved.items() if key not in ("params", *_HOW)}
        indices = list(range(number, number + len(names)))
        number += len(names)
        groups.append({**group, **options, "params": indices})
        for index, name, parameter in zip(indices, names, group["params"], strict=True):
            if name in by_name:
                numbered[index] = by_name[name]
                given += [(parameter, k, v) for k, v in by_name[name].items() if isinstance(v, Tensor) and v.ndim]
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    for parameter, key, value in given:  # torch casts to the parameter's dtype, which need not be that of its state
        if optimizer.state[parameter][key].dtype != value.dtype:
            optimizer.state[parameter][key] = value.to(parameter.device)


# Random numbers


def random_state() -> dict[str, Any]:
    """The generators of this process: Python's, numpy's, torch's, and that of the current GPU where one is in use."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def put_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of this process to what `random_state` has returned."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
