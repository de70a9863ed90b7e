"""Moves a model to its device one tensor at a time: copied, broadcast from rank 0, and sharded.

So a device never holds more than its parts and one whole tensor beside them, and what fits no device can be trained.
Those on the meta device have no values: they are made module by module (`initialising`), and stored in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.agreement import from_rank_zero, together
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.errors import UsageError
from shardwright.runtime.placing.initialising import Init, Initialising
from shardwright.runtime.placing.members import Member, members, of_rank_zero
from shardwright.runtime.programs.splitting import Splitting, refuse_hooks, watch_split
from shardwright.runtime.updates.optimizers import note_successor


def place(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    device: torch.device,
    init: Init | None = None,
    seed: int = 0,
) -> None:
    """Bring the parameters and buffers of rank 0 to the devices of all ranks, each as it is laid out.

    Parameters become DTensors where some layout splits its own, and stay the plain tensors that they are where none
    does; those that an earlier call has made DTensors stay as they are.

    Args:
        layouts: by the names of `Module.named_parameters`; a parameter without one is whole on every rank.
        init: gives values to what is on the meta device; see `Initialising`.
        seed: that of its random numbers.

    Raises:
        UsageError: where ``init`` has nothing to do or does not do it, or hooks of parameters would be lost.
    """
    splitting = Splitting.of(model, layouts, mesh, device)
    found = _plain(model)
    makes_new = splitting.splits or any(member.tensor.is_meta for member in found)
    empty = _empty_on_rank_zero(found, init)
    together(ranks_by_collectives("looking for hooks"), lambda: refuse_hooks(model, splitting.splits, makes_new))
    if not makes_new:
        model.to(device)  # modules may do more than to move their tensors, such as joining the weights of an LSTM
        found = _plain(model)
    made: list[tuple[Member, Tensor]] = []
    Initialising(model, [member for member in found if member.name in empty], init, device).run(
        seed, of_rank_zero, lambda member, whole: made.append((member, _stored(member, whole, splitting)))
    )
    for member, tensor in made:
        _put(member, tensor)
    for member in found:
        if member.name not in empty:
            _put(member, _stored(member, of_rank_zero(_brought(member.tensor, device)), splitting))
    if splitting.splits:
        watch_split(model)


def _plain(model: nn.Module) -> list[Member]:
    """Return what no earlier call has stored as DTensors."""
    return [member for member in members(model) if not isinstance(member.tensor, DTensor)]


def _empty_on_rank_zero(found: list[Member], init: Init | None) -> frozenset[str]:
    """The names of the tensors that have no values on rank 0, whose values are those of all ranks."""

    def named() -> frozenset[str]:
        return frozenset(member.name for member in found if member.tensor.is_meta)

    empty = from_rank_zero(ranks_by_collectives("looking for what has no values"), named)
    if init is not None and not empty:
        raise UsageError(
            "init= gives values to parameters and buffers on the meta device, and this model has none there; leave "
            "init= out, or make the model within `with torch.device('meta'):`"
        )
    return empty


def _brought(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory of this rank's device for the whole of a tensor, with its values where it has some."""
    with torch.no_grad():
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _stored(member: Member, whole: Tensor, splitting: Splitting) -> Tensor:
    """Return what stands in the place of a member that is ``whole`` here."""
    before = member.tensor
    if not isinstance(before, nn.Parameter):
        return whole
    if splitting.splits:
        return splitting.part(member.name, before, whole)
    if before.is_meta:
        return whole if isinstance(whole, nn.Parameter) else nn.Parameter(whole, before.requires_grad)
    if whole is not before:
        before.data = whole.data
    return before


def _put(member: Member, stored: Tensor) -> None:
    if stored is member.tensor:
        return
    if isinstance(stored, nn.Parameter):
        note_successor(member.tensor, stored)
    member.put(stored)
