"""The parameters and buffers of a model, each with the modules that hold it, and the values of rank 0 for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.distributed.control import group_moving
from shardwright.distributed.ranks import alone


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter or buffer of a model: ``name`` is the first of its names there, ``holders`` have it as attributes."""

    tensor: Tensor
    name: str
    holders: tuple[tuple[nn.Module, str], ...]

    def put(self, tensor: Tensor) -> None:
        """Let all who hold it hold ``tensor`` in its place."""
        for module, attribute in self.holders:
            setattr(module, attribute, tensor)


def members(model: nn.Module) -> list[Member]:
    """All parameters and buffers, in the order of `Module.named_modules`; one that several modules hold comes once."""
    found: dict[int, Member] = {}
    for path, module in model.named_modules():
        for name, tensor in own_tensors(module).items():
            known = found.get(id(tensor), Member(tensor, f"{path}.{name}".lstrip("."), ()))
            found[id(tensor)] = replace(known, holders=(*known.holders, (module, name)))
    return list(found.values())


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module itself holds, by the names of its attributes."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def agree_on_weights(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):  # an earlier `parallelize` has agreed on those
            of_rank_zero(tensor)


def of_rank_zero(tensor: Tensor) -> Tensor:
    """Return the tensor with the values of rank 0."""
    if not alone():
        dist.broadcast(tensor.data, 0, group=group_moving(tensor.device))
    return tensor
