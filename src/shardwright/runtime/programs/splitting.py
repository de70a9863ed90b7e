"""Parameters as DTensors: how a model comes to hold this rank's parts.

Either all parameters are plain tensors (none is split) or all are DTensors on the mesh of the plan: torch's foreach
and fused optimizers, `clip_grad_norm_` and `GradScaler` refuse a mixture. Where an earlier `parallelize` stores them
already, as for the other loss of a pair, a later plan takes them so. A DTensor cannot take the place of a plain
parameter inside the same Python object (`torch.utils.swap_tensors` refuses objects of different slots).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.common import torch_private
from shardwright.compiler.mesh.dtensor import (
    device_mesh,
    gathered,
    is_of_another_rank,
    layout_of,
    on_own_mesh,
    to_placements,
)
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.split_tensor import laid_out, split_tensor
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.agreement import together
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.errors import UsageError

# Parameter -> whoever runs a program with it as a plain tensor.
_whole: MutableMapping[nn.Parameter, weakref.ref[object]] = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Splitting:
    """The storage of the parameters of a model on this rank: all DTensors, or, with ``splits`` False, all plain.

    ``layouts`` are those of parameters by the names of `Module.named_parameters`; others are whole on every rank.
    """

    layouts: Mapping[str, Layout]
    mesh: Mesh
    device: torch.device
    splits: bool

    @staticmethod
    def of(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, device: torch.device) -> Splitting:
        """Return DTensors where some layout splits its parameter, or an earlier call has made some of the model's.

        Raises:
            UsageError: where parameters are split and torch is older than 2.12.
        """
        splits = any(of.split_axes for of in layouts.values()) or is_split(model)
        if splits and older_than(torch.__version__, 2, 12):
            raise UsageError(
                "this plan shards parameters, for which torch 2.12 or newer is needed, and this is "
                f"{torch.__version__}; type pip install 'torch>=2.12', or choose mode=\"data\" without memory="
            )
        return Splitting(layouts, mesh, device, splits)

    def part(self, name: str, parameter: nn.Parameter, whole: Tensor) -> nn.Parameter:
        """This rank's part of a parameter that is ``whole`` here, as the DTensor that takes the parameter's place."""
        layout = self.layouts.get(name, Layout.replicated(parameter.ndim))
        part = whole.detach()[layout.local_slice(parameter.shape, self.mesh, dist.get_rank())].clone()
        stored = DTensor.from_local(
            part,
            device_mesh(self.mesh, self.device.type),
            to_placements(layout, self.mesh),
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(split_tensor(stored), requires_grad=parameter.requires_grad)


def watch_split(model: nn.Module) -> None:
    """Say what to call where the modules of a split model are called by hand."""
    holding = (module for module in model.modules() if any(True for _ in module.parameters(recurse=False)))
    for module in {model, *holding}:
        module.register_forward_pre_hook(_refuse_plain_inputs, with_kwargs=True)


def _refuse_plain_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say in place of torch what to call, where a module that is split is called by hand.

    Raises:
        UsageError: where plain tensors meet DTensors.
    """
    plain = any(isinstance(x, Tensor) and not isinstance(x, DTensor) for x in (*args, *kwargs.values()))
    if plain and is_split(module):
        raise UsageError(
            f"this {type(module).__name__} holds this rank's parts of its parameters, which take no plain tensors; "
            "call parallel(batch), or parallel.predict(batch) with sw.parallelize(..., predict_fn=...); other numbers, "
            "as of an average, are loaded first: parallel.load_state_dict(average.module.state_dict())"
        )


def older_than(version: str, *least: int) -> bool:
    """Return whether a version as "2.11.0+cu130" is older than one of these numbers."""
    return tuple(int(word) for word in version.split(".")[: len(least)]) < least


def is_split(model: nn.Module) -> bool:
    """Return whether parameters are DTensors, of which this rank may hold a part."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def as_stored(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state with every tensor laid out as the one of that name in the model; a collective call."""
    own = model.state_dict(keep_vars=True)
    refuse_parts_of_others(state.items())
    found = copy.copy(state) if isinstance(state, dict) else dict(state)  # a copy keeps what torch notes beside it
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
            found[name] = _laid_out(value, own[name])
    return found


def refuse_parts_of_others(loaded: Iterable[tuple[str, Any]]) -> None:
    """Refuse DTensors that hold the parts of another rank, among values that are loaded by their names.

    Where there are any, which all ranks find alike, all ranks compare.

    Raises:
        UsageError: on all ranks.
    """
    read = [(name, value) for name, value in loaded if isinstance(value, DTensor)]
    if read:
        together(ranks_by_collectives("loading a state"), lambda: _refuse_parts_of_others(read))


def _refuse_parts_of_others(read: Sequence[tuple[str, DTensor]]) -> None:
    for name, value in read:
        refuse_part_of_another(name, value)


def refuse_part_of_another(name: str, value: DTensor) -> None:
    """Refuse a DTensor that has the part of another rank, which is loaded as ``name``.

    Raises:
        UsageError: on this rank alone.
    """
    if is_of_another_rank(value):
        raise UsageError(
            f"{name} is the part of a tensor that another rank has saved: of split parameters torch.save writes "
            "what one rank holds. Save with sw.checkpoint.save, or what parallel.full_state_dict() gives"
        )


def _laid_out(value: Tensor, own: Tensor) -> Tensor:
    """``value`` as a DTensor where ``own`` is one, as a plain tensor where that is; torch tells where shapes differ."""
    value = on_own_mesh(value) if isinstance(value, DTensor) else value
    if not isinstance(own, DTensor):
        return gathered(value)
    alike = isinstance(value, DTensor) and (value.device_mesh, value.placements) == (own.device_mesh, own.placements)
    if alike or value.shape != own.shape:
        return value
    return laid_out(value, own)


class _LocalPart(torch.autograd.Function):
    """`DTensor.to_local` of a split tensor, whose gradients are split tensors and lie in memory as their parameters."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        part = torch_private.part_of(parameter)
        ctx.like, ctx.stride = parameter, part.stride()
        ctx.set_materialize_grads(False)  # a parameter without a gradient is not to get zeros
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None
        if gradient.is_sparse:  # of a table that an earlier plan splits, and this one has whole
            gradient = gradient.to_dense()
        if gradient.stride() != ctx.stride:  # autograd would copy a plain parameter's, too
            gradient = gradient.new_empty_strided(gradient.shape, ctx.stride).copy_(gradient)
        return torch_private.dtensor_like(ctx.like, gradient)


def local_part(parameter: Tensor, differentiable: bool = True) -> Tensor:
    """Return what this rank holds of a parameter, detached where it is not to be ``differentiable``."""
    if isinstance(parameter, DTensor):
        part: Tensor = _LocalPart.apply(parameter) if differentiable else torch_private.part_of(parameter).detach()  # type: ignore[no-untyped-call]
        return part
    return parameter if differentiable else parameter.detach()


@dataclass(frozen=True)
class Stored:
    """Layouts by the names of the parameters, and the mesh that they speak of; None where no parameter is split."""

    layouts: Mapping[str, Layout]
    mesh: Mesh | None

    def refuse(self, plan: Plan) -> None:
        """Refuse a plan that stores a parameter in another way.

        Raises:
            UsageError: where there is such a parameter.
        """
        for value in plan.capture.of_kind("parameter"):
            stored = self.layouts.get(value.label)
            if stored is not None and (plan.stored[value.name] != stored or self.mesh not in (None, plan.devices)):
                raise UsageError(
                    f"the given plan stores {value.label} as {plan.stored[value.name]} on {plan.devices}, an earlier "
                    f"sw.parallelize as {stored} on {self.mesh or 'no mesh'}; leave plan= out, so that one is made"
                )


def stored_before(model: nn.Module) -> Stored:
    """Return how the parameters of ``model`` are stored that an earlier `parallelize` holds.

    Where one is held whole all must stay whole, as torch's optimizers refuse a mixture of plain tensors and DTensors.

    Raises:
        UsageError: where some are split and others held whole, or two meshes split them.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    split = {name: layout_of(p) for name, p in named.items() if isinstance(p, DTensor)}
    held = [name for name, p in named.items() if p in _whole and _whole[p]() is not None]
    meshes = list(dict.fromkeys(mesh for _, mesh in split.values()))
    if len(meshes) > 1 or (split and held):
        name = held[0] if held else next(reversed(split))
        raise UsageError(
            f"earlier calls of sw.parallelize store {next(iter(split))} and {name} in ways that do not go together; "
            "call it first on the module that has both, then on its parts"
        )
    if held:
        return Stored({name: Layout.replicated(p.ndim) for name, p in named.items()}, None)
    return Stored({name: layout for name, (layout, _) in split.items()}, meshes[0] if meshes else None)


def note_whole(model: nn.Module, holder: object) -> None:
    """Note that ``holder`` runs programs with the plain parameters of ``model``, for as long as it lives."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            _whole[parameter] = weakref.ref(holder)


def refuse_hooks(model: nn.Module, splits: bool, makes_new: bool) -> None:
    """Refuse hooks of parameters where ``makes_new`` says that others are put in their places.

    Raises:
        UsageError: where there is one, which its parameter's successor would not have.
    """
    named = model.named_parameters() if makes_new else ()
    hooked = [n for n, p in named if torch_private.has_hook(p)]
    if hooked:
        why = "the plan splits parameters" if splits else "parameters are on the meta device"
        raise UsageError(
            f"{hooked[0]} has a hook (register_hook), and {why}, which makes new ones; register hooks after "
            "sw.parallelize, on the parameters of what it returns"
        )
