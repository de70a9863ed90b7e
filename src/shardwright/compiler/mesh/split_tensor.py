"""The tensors of a model that is split: DTensors that plain tensors go together with, and that know every operator.

A script's mask, its initial numbers or its average are plain tensors, which all ranks hold alike. Torch's DTensor takes
none of them. Here each counts as replicated, as `torch.distributed.tensor.experimental.implicit_replication` has it,
for the tensors of our models alone: parameters, their gradients, what optimizers keep for them, and what is made of
these. Whether plain tensors that are written into one are alike on all ranks is compared when the model is next used.
Arithmetic entry by entry, as of optimizers, is done on the parts as they are. What torch knows no way to do on parts,
such as a view that does not fit them, is done on the whole by every rank, and so are random numbers: torch would draw
equal ones for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from shardwright.common import signatures, torch_private, trees
from shardwright.compiler.mesh.changed import (
    keep_part,
    note_copies,
    note_data_taken,
    note_plain,
    refuse_unlike_generators,
    set_data,
    set_items,
)
from shardwright.compiler.mesh.dtensor import gathered, part_like, replicated
from shardwright.errors import UsageError

_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data


class SplitTensor(DTensor):
    """A DTensor of a model that is split. `split_tensor` makes one."""

    __torch_function__ = torch_private.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if signatures.is_entrywise(func) and (lines := _lines(args, kwargs)):
            return _entry_by_entry(func, args, kwargs, lines)
        if signatures.reads_number(func):
            return _number(args[0])
        call = _Call(func, args, kwargs)
        if signatures.draws(func):
            refuse_unlike_generators(call.like, kwargs.get("generator"))
            return call.on_wholes()
        if signatures.writes_out(func) and not call.changes_partial:  # torch would give it another layout
            return call.on_wholes()
        try:
            return call.on_parts()
        except _NotOnPartsError:
            pass
        except (NotImplementedError, RuntimeError) as error:
            if not torch_private.knows_no_split(error) or call.changes_partial:
                raise
        return call.on_wholes()

    @property
    def data(self) -> Any:
        """Return the numbers without autograd."""
        note_data_taken(self)
        return _DATA.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if not set_data(self, new):
            _DATA.__set__(self, new)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write to the whole, of which each rank keeps its part."""
        set_items(self, index, value)

    @property
    def grad(self) -> Any:
        """The gradient, a split tensor."""
        return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, gradient: Any) -> None:
        if isinstance(gradient, Tensor) and not isinstance(gradient, DTensor) and gradient.shape == self.shape:
            note_plain("grad =", [gradient])
            gradient = laid_out(gradient, self)
        _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__delete__(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse what torch refuses, in words that say what serves."""
        raise UsageError(
            f"a split tensor of shape {list(self.shape)} is no array of NumPy, as each rank holds a part; call "
            "tensor.full_tensor().numpy() on every rank"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have a DTensor, which torch can load by itself."""
        return torch_private.dtensor_of(self).__reduce_ex__(protocol)


torch_private.let_optimizers_take_lists(SplitTensor)


def split_tensor(tensor: DTensor) -> SplitTensor:
    """Return a DTensor of this rank's part, without autograd, as one that goes together with plain tensors."""
    found: SplitTensor = torch_private.dtensor_of(tensor, SplitTensor)
    return found


def laid_out(value: Tensor, own: DTensor) -> SplitTensor:
    """Return ``value``, whole or a DTensor, laid out as ``own``, which has its shape. All ranks call it together."""
    part = part_like(value, own)
    return split_tensor(DTensor.from_local(part, own.device_mesh, own.placements, shape=own.shape, stride=own.stride()))


def _lines(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[Tensor]]:
    """Return the tensors that an operator takes together: those of a call, or at each place of its lists.

    It is empty where some are not laid out alike, so that the operator cannot be done part by part.
    """
    given = [*args, *kwargs.values()]
    lists = [each for each in given if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
    single = [each for each in given if isinstance(each, Tensor)]
    lines = [[*single, *together] for together in zip(*lists, strict=False)] or [single]
    return lines if len({len(each) for each in lists}) < 2 and all(map(_are_alike, lines)) else []


def _are_alike(tensors: list[Tensor]) -> bool:
    """Return whether tensors are laid out alike, none as addends; a plain number goes together with all."""
    first = next((tensor for tensor in tensors if isinstance(tensor, SplitTensor)), None)
    if first is None:
        return True
    layout = first.shape, first.device_mesh, first.placements
    return not any(placed.is_partial() for placed in first.placements) and all(
        (tensor.shape, tensor.device_mesh, tensor.placements) == layout
        if isinstance(tensor, SplitTensor)
        else not isinstance(tensor, DTensor) and tensor.ndim == 0
        for tensor in tensors
    )


def _entry_by_entry(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], lines: list[list[Tensor]]) -> Any:
    """Return what an operator gives whose results follow, each entry, from those of its operands at the same place."""
    given: dict[int, Tensor] = {}  # by the id of its part

    def part(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [part(each) for each in value]
        if not isinstance(value, SplitTensor):
            return value
        found = torch_private.part_of(value)
        given[id(found)] = value
        return found

    def own(made: Any, line: list[Tensor]) -> Any:
        if id(made) in given:
            return given[id(made)]
        like = next((each for each in line if isinstance(each, SplitTensor)), None)
        return torch_private.dtensor_like(like, made) if like is not None and isinstance(made, Tensor) else made

    result = operator(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if isinstance(result, (list, tuple)):
        lines = lines if len(lines) > 1 or len(result) == 1 else lines * len(result)
        return type(result)(own(made, line) for made, line in zip(result, lines, strict=True))
    return own(result, lines[0])


def _number(tensor: DTensor) -> Any:
    """Return the number that a tensor of one entry stands for; torch reads what this rank holds."""
    part = tensor.to_local()
    if all(placed.is_replicate() for placed in tensor.placements):
        return part.item()
    if part.dtype == torch.bool:  # any() of the parts
        return bool(DTensor.from_local(part.int(), tensor.device_mesh, tensor.placements).full_tensor().item())
    return tensor.full_tensor().item()


class _NotOnPartsError(Exception):
    """Torch has not done on parts what was asked."""


class _Call:
    """One operator that is called with tensors of a model that is split."""

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._operator, self._args, self._kwargs = operator, args, kwargs
        tensors = [leaf for leaf in trees.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.like = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
        self._mesh: DeviceMesh = self.like.device_mesh
        self._plain = [t for t in tensors if not isinstance(t, DTensor) and t.ndim]
        self._stand_ins: dict[int, tuple[Tensor, DTensor]] = {}  # by the id of what was given
        self._changes = signatures.changes_operands(operator)

    @property
    def changes_partial(self) -> bool:
        """Return whether the operator changes an operand of which each rank holds an addend."""
        leaves = trees.tree_leaves((self._args, self._kwargs)) if self._changes else []
        placements = [placed for leaf in leaves if isinstance(leaf, DTensor) for placed in leaf.placements]
        return any(isinstance(placed, Partial) for placed in placements)

    def on_parts(self) -> Any:
        """Return what torch's DTensors give."""
        args, kwargs = trees.tree_map(self._stand_in, (self._args, self._kwargs))
        result = self._operator(*args, **kwargs)
        given = {id(stand_in): tensor for tensor, stand_in in self._stand_ins.values()}
        if self._changes:
            self._keep_layouts()
        self._note_plain()
        if signatures.is_view(self._operator):
            note_copies(self._args[0], self._operator, result)
        return trees.tree_map(lambda leaf: given.get(id(leaf)) if id(leaf) in given else _own(leaf), result)

    def _keep_layouts(self) -> None:
        """Let operands be laid out as those that stood for them are now, as by ``x.t_()``.

        Raises:
            _NotOnPartsError: where torch has worked on a copy in another layout, and gives that layout to the tensor.
        """
        split = [(tensor, made) for tensor, made in self._stand_ins.values() if isinstance(tensor, SplitTensor)]
        if signatures.changes_view(self._operator):
            for tensor, made in split:
                torch_private.keep_layout(tensor, made)
        elif any(tensor.placements != made.placements for tensor, made in split):
            if signatures.takes_lists(self._operator):
                raise UsageError(
                    f"{self._operator} cannot change these tensors on the parts that ranks hold; change them one by one"
                )
            raise _NotOnPartsError

    def _stand_in(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (not isinstance(leaf, SplitTensor) and leaf.ndim == 0):
            return leaf
        if isinstance(leaf, DTensor) and not isinstance(leaf, SplitTensor):
            return leaf
        if id(leaf) not in self._stand_ins:
            made = torch_private.dtensor_of(leaf) if isinstance(leaf, SplitTensor) else replicated(leaf, self._mesh)
            self._stand_ins[id(leaf)] = leaf, made
        return self._stand_ins[id(leaf)][1]

    def on_wholes(self) -> Any:
        """Return what the operator gives on whole tensors, of which those that it changes keep their parts."""
        wholes: dict[int, tuple[DTensor, Tensor]] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in wholes:
                wholes[id(leaf)] = leaf, gathered(leaf)
            return wholes[id(leaf)][1]

        args, kwargs = trees.tree_map(whole, (self._args, self._kwargs))
        result = self._operator(*args, **kwargs)
        if self._changes:
            for of, changed in wholes.values():
                keep_part(torch_private.part_of(of), changed, of)
            self._note_plain()
        given = {id(changed): of for of, changed in wholes.values()}
        plain = {id(tensor) for tensor in self._plain}
        if signatures.is_view(self._operator):
            note_copies(self._args[0], self._operator, result)

        def own(leaf: Any) -> Any:
            if id(leaf) in given:
                return given[id(leaf)]
            if not isinstance(leaf, Tensor) or id(leaf) in plain:
                return leaf
            return split_tensor(replicated(leaf, self._mesh))

        return trees.tree_map(own, result)

    def _note_plain(self) -> None:
        if self._changes and self._plain:
            note_plain(f"{self._operator.overloadpacket.__name__}()", self._plain)


def _own(leaf: Any) -> Any:
    return split_tensor(leaf) if type(leaf) is DTensor else leaf
