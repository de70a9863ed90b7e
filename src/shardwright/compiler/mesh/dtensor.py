"""Layouts as placements of ``torch.distributed.tensor``, and back.

Every axis of the mesh is one dim of the device mesh. Placements know no order of the axes on a dim but the mesh's,
and no units: a layout that needs them is refused. Torch has no placement for what the ranks at one coordinate of an
axis hold alone, as one pipeline stage does its parameters: that is `HeldBy`, one of ours, which stands in the spec of a
DTensor and so goes wherever that goes. Torch knows no operator for it; `split_tensor.SplitTensor` sees to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright.common import torch_private
from shardwright.compiler.mesh.groups import SharedGroups
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.distributed.control import world_group
from shardwright.errors import PlanError


class HeldBy(Placement):
    """The placement, on one mesh axis, of a tensor that the ranks at the coordinate ``holder`` hold alone.

    At other coordinates parts have no rows of ``dim``. Axes behind it may shard that dim of what the holder has.
    """

    def __init__(self, dim: int, holder: int) -> None:
        super().__init__()
        self.dim, self.holder = dim, holder

    def __eq__(self, other: object) -> bool:
        return type(other) is HeldBy and (self.dim, self.holder) == (other.dim, other.holder)

    def __hash__(self) -> int:
        return hash((HeldBy, self.dim, self.holder))

    def __repr__(self) -> str:
        return f"HeldBy(dim={self.dim}, holder={self.holder})"

    def __reduce__(self) -> tuple[type[HeldBy], tuple[int, int]]:
        return HeldBy, (self.dim, self.holder)


torch.serialization.add_safe_globals([HeldBy])


def is_held(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor that the ranks at one coordinate of an axis hold alone."""
    return isinstance(tensor, DTensor) and any(type(placed) is HeldBy for placed in tensor.placements)


def to_placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """One placement for every axis of ``mesh``, in mesh order.

    >>> to_placements(Layout.split(2, {1: ["b"]}, partial=["a"]), Mesh.of(a=2, b=2, c=2))
    [Partial(sum), Shard(dim=1), Replicate()]

    Raises:
        PlanError: where a dim's axes do not stand in mesh order, or a dim is cut by units.
    """
    placed: dict[str, Placement] = dict.fromkeys(layout.partial, Partial())
    for dim, split in enumerate(layout.dims):
        if split.axes != mesh.ordered(split.axes):
            raise PlanError(
                f"dim {dim} of {layout} is cut over {'·'.join(split.axes)}; as a DTensor it can be cut over these axes "
                f"in mesh order only: {'·'.join(mesh.ordered(split.axes))}"
            )
        if split.unit != 1:
            raise PlanError(
                f"dim {dim} of {layout} is cut between multiples of {split.unit}, which a DTensor cannot express; "
                "where the parts are even, Layout.normalised makes the unit 1"
            )
        placed |= dict.fromkeys(split.axes, Shard(dim))
        if split.holder is not None:
            placed[split.axes[0]] = HeldBy(dim, split.holder)
    return [placed.get(axis, Replicate()) for axis in mesh.names]


def from_placements(placements: Sequence[Placement], ndim: int, mesh: Mesh) -> Layout:
    """The layout of a tensor with ``ndim`` dims that has these placements on the axes of ``mesh``.

    >>> print(from_placements([Partial(), Shard(-1), Replicate()], 2, Mesh.of(a=2, b=2, c=2)))
    [-, b] Σa

    Raises:
        PlanError: where a placement is none of Shard, HeldBy, Replicate and a partial sum, their number is not the
            axes', or a dim is sharded over an axis before the one on which it is held.
    """
    if len(placements) != len(mesh.axes):
        raise PlanError(f"{len(placements)} placements {list(placements)} for the {len(mesh.axes)} axes of {mesh}")
    cut: dict[int, Split] = {}
    partial = []
    for axis, placement in zip(mesh.names, placements, strict=True):
        if type(placement) is Shard:
            dim = placement.dim % ndim
            before = cut.get(dim, Split())
            cut[dim] = replace(before, axes=(*before.axes, axis))
        elif type(placement) is HeldBy and placement.dim not in cut:
            cut[placement.dim] = Split((axis,), holder=placement.holder)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.append(axis)
        elif type(placement) is not Replicate:
            raise PlanError(
                f"placement {placement!r} on axis {axis} has no layout; "
                "those that have: Shard, Replicate, Partial('sum')"
            )
    return Layout(tuple(cut.get(dim, Split()) for dim in range(ndim)), tuple(partial))


def layout_of(tensor: DTensor) -> tuple[Layout, Mesh]:
    """Return how a DTensor is laid out, and on which mesh; axes without a name are called axis0, axis1, ...

    Raises:
        PlanError: as `from_placements` does.
    """
    return layout_on(tensor.device_mesh, tensor.placements, tensor.ndim)


def layout_on(devices: DeviceMesh, placements: Sequence[Placement], ndim: int) -> tuple[Layout, Mesh]:
    """Return how a DTensor of ``ndim`` dims with these placements is laid out, as `layout_of`."""
    names = devices.mesh_dim_names or tuple(f"axis{i}" for i in range(devices.ndim))
    kinds = tuple(type(placement) for placement in placements)  # of which unlike ones are equal
    return _layout_of(names, tuple(devices.shape), tuple(placements), kinds, ndim)


@lru_cache(maxsize=1024)
def _layout_of(
    names: tuple[str, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], _: tuple[type, ...], ndim: int
) -> tuple[Layout, Mesh]:
    """`layout_of`, for the tensors of a model, which are many and laid out in few ways.

    Cached by all that `layout_of` reads of a tensor. The types of placements are among it, since unlike ones are equal.
    """
    mesh = Mesh(tuple(Axis(name, size) for name, size in zip(names, sizes, strict=True)))
    return from_placements(placements, ndim, mesh), mesh


# Cached by the world, the type of devices, and the names and sizes of the axes, all that a device mesh is made of.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh]]
_made = WeakKeyDictionary()


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The device mesh with the axes of ``mesh``, over the whole world. All ranks call it together.

    ``device_type`` is ``"cpu"`` or ``"cuda"``. Equal axes have one device mesh, whose process groups are those of the
    programs and live as long as the world: torch takes equal device meshes for one, and may communicate over the
    groups of the first.

    Raises:
        PlanError: where the mesh has no axis; a DTensor lives on one at least.
    """
    if not mesh.axes:
        raise PlanError("a mesh without axes is no device mesh; on one device parameters are plain tensors")
    made = _made.setdefault(world_group(), {})
    key = (device_type, tuple(mesh.sizes.items()))
    if key not in made:
        groups = SharedGroups.of_world().take(mesh, [(name,) for name in mesh.names])
        ranks = torch.arange(mesh.size, device="cpu").reshape(tuple(mesh.sizes.values()))
        made[key] = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.names)
    return made[key]


def is_on_mesh_of_model(tensor: DTensor) -> bool:
    """Return whether a DTensor lies on a mesh that `device_mesh` made, or on one that torch takes for the same."""
    world = dist.group.WORLD
    return world is not None and tensor.device_mesh in _made.get(world, {}).values()


def is_of_another_rank(tensor: DTensor) -> bool:
    """Return whether a DTensor has the part of another rank, as in a file that this one has not written.

    A file of another rank with the same place on the axes that split the tensor has what this rank holds.
    """
    devices, there = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if there is None:
        return True
    if all(placed.is_replicate() for placed in tensor.placements):
        return False
    here = (devices.mesh == dist.get_rank()).nonzero().tolist()
    if not is_on_mesh_of_model(tensor):  # what splits it is gathered over the groups of the rank that has saved it
        return here != [list(there)]
    axes = [axis for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    return len(here) != 1 or any(here[0][axis] != there[axis] for axis in axes)


def on_own_mesh(tensor: DTensor) -> DTensor:
    """Return the tensor on the equal mesh of this process, if there is one: a file's has groups of who saved it."""
    world = dist.group.WORLD
    made = _made.get(world, {}).values() if world is not None else ()
    own = next((each for each in made if each == tensor.device_mesh), tensor.device_mesh)
    return tensor if own is tensor.device_mesh else on_mesh(tensor, own)


def on_mesh(tensor: DTensor, devices: DeviceMesh) -> DTensor:
    """Return the tensor on ``devices``, an equal mesh, without autograd."""
    with torch.no_grad():
        part = tensor.to_local()
    return DTensor.from_local(part, devices, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def replicated(whole: Tensor, devices: DeviceMesh) -> DTensor:
    """A tensor that is whole on every rank as a DTensor."""
    return DTensor.from_local(whole, devices, [Replicate()] * devices.ndim, shape=whole.shape, stride=whole.stride())


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank, without autograd; a plain tensor is whole. All ranks call it together."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if is_held(tensor):
        tensor = from_holders(tensor)
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):  # the minor axis first; at once, torch would warn of several gathers
        if not placements[axis].is_replicate():
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def from_holders(tensor: DTensor) -> DTensor:
    """Return a copy in which ranks at all coordinates have what the holders of a tensor have.

    All ranks call it together.
    """
    (layout, mesh), devices = layout_of(tensor), tensor.device_mesh
    assert layout.held is not None
    name, holder = layout.held
    axis, rest = mesh.names.index(name), layout.without(name)
    placements = [Replicate() if at == axis else placed for at, placed in enumerate(tensor.placements)]
    if devices.get_local_rank(axis) == holder:
        part = torch_private.part_of(tensor).detach().clone(memory_format=torch.contiguous_format)
    else:
        shape = rest.local_shape(tensor.shape, mesh, dist.get_rank())
        part = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if part.numel():
        entries = torch.view_as_real(part) if part.is_complex() else part
        dist.broadcast(entries.view(-1).view(torch.uint8), group=devices.get_group(axis), group_src=holder)
    return DTensor.from_local(part, devices, placements, shape=tensor.shape, stride=tensor.stride())


def as_shards(tensor: DTensor) -> DTensor:
    """Return a DTensor of the same parts that torch takes for shards, for what it does alike however long these are.

    A part without entries is one zero there, so that it has a largest entry.
    """
    placements = [Shard(placed.dim) if type(placed) is HeldBy else placed for placed in tensor.placements]
    part = torch_private.part_of(tensor).detach()
    part = part if part.numel() else part.new_zeros([1] * part.ndim)
    return DTensor.from_local(part, tensor.device_mesh, placements, shape=tensor.shape, stride=tensor.stride())


def part_like(value: Tensor, own: DTensor) -> Tensor:
    """Return this rank's part of ``value``, a DTensor or whole, laid out as ``own``, which has its shape.

    It is the memory of ``value`` where that is laid out so. All ranks call it together.
    """
    with torch.no_grad():
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (own.device_mesh, own.placements):
            return value.to_local()
        layout, mesh = layout_of(own)
        return gathered(value)[layout.local_slice(own.shape, mesh, dist.get_rank())].to(own.device).clone()
