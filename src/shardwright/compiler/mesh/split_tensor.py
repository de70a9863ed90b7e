"""The tensors of a model that is split: DTensors that plain tensors go together with, and that know every operator.

A script's mask, its initial numbers or its average are plain tensors, which all ranks hold alike. Torch's DTensor takes
none of them. Here each counts as replicated, as `torch.distributed.tensor.experimental.implicit_replication` has it,
for the tensors of our models alone: parameters, their gradients, what optimizers keep for them, and what is made of
these. Whether plain tensors that are written into one are alike on all ranks is compared when the model is next used.
Arithmetic entry by entry, as of optimizers, is done on the parts as they are. What torch knows no way to do on parts,
such as a view that does not fit them, is done on the whole by every rank, and so are random numbers: torch would draw
equal ones for each part. So is nearly all that is done with a tensor that some ranks hold alone (`dtensor.HeldBy`),
which torch would take for replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

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
from shardwright.compiler.mesh.dtensor import (
    HeldBy,
    as_shards,
    gathered,
    is_held,
    layout_of,
    layout_on,
    part_like,
    replicated,
)
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
        if signatures.looks_for_overflows(func):
            return call.unscale(*args)
        if signatures.draws(func):
            refuse_unlike_generators(call.like, kwargs.get("generator"))
            return call.on_wholes()
        if call.has_held:
            return call.with_held()
        if signatures.writes_out(func) and not call.changes_partial:  # torch would give it another layout
            return call.on_wholes()
        try:
            return call.on_parts()
        except _NotOnPartsError:
            pass
        except (NotImplementedError, RuntimeError) as error:
            if not _knows_no_split(error) or call.changes_partial:
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

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return what this rank holds, as torch does."""
        if not is_held(self) or not torch.is_grad_enabled() or grad_placements is not None:
            found: Tensor = super().to_local(grad_placements=grad_placements)
            return found
        part: Tensor = _Part.apply(self)  # type: ignore[no-untyped-call]
        return part

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return the tensor in another layout, as torch does; what some ranks hold alone goes by way of the whole."""
        wanted = tuple(placements or self.placements)
        if HeldBy not in {type(placed) for placed in (*self.placements, *wanted)}:
            return super().redistribute(device_mesh, placements, **options)
        if wanted == self.placements:
            return self
        if any(placed.is_partial() for placed in wanted) or device_mesh not in (None, self.device_mesh):
            raise UsageError(
                f"a split tensor placed as {list(self.placements)} cannot be placed as {list(wanted)}; placements "
                "that it can have: Replicate(), Shard(dim), and its own"
            )
        if options.get("forward_dtype") or options.get("backward_dtype"):
            raise UsageError(f"redistribute() of a split tensor placed as {list(self.placements)} takes no dtypes")
        found: DTensor = _Redistributed.apply(self, wanted)  # type: ignore[no-untyped-call]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have a DTensor, which torch can load by itself, unless it does not know the layout."""
        if is_held(self):
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return torch_private.dtensor_of(self).__reduce_ex__(protocol)

    # What `torch.distributed.checkpoint` asks for: the methods are documented, the classes of what they return are not.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        if not is_held(self):
            return super().__create_write_items__(fqn, object)
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # half a second
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(torch_private.part_of(self))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> Any:
        if not is_held(self):
            return super().__create_chunk_list__()  # type: ignore[no-untyped-call]
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        part = torch_private.part_of(self)
        return [ChunkStorageMetadata(torch.Size(self._offsets), part.size())] if part.numel() else []

    @property
    def _offsets(self) -> tuple[int, ...]:
        layout, mesh = layout_of(self)
        return tuple(rows.start for rows in layout.local_slice(self.shape, mesh, dist.get_rank()))


torch.serialization.add_safe_globals([SplitTensor])
torch_private.let_optimizers_take_lists(SplitTensor)


class _Part(torch.autograd.Function):
    """`to_local`, whose gradient is laid out as the tensor is."""

    @staticmethod
    def forward(ctx: Any, tensor: SplitTensor) -> Tensor:
        ctx.like = tensor
        part = torch_private.part_of(tensor)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch_private.dtensor_like(ctx.like, gradient)


class _Redistributed(torch.autograd.Function):
    """A tensor in another layout, whose gradient is brought back to the first one."""

    @staticmethod
    def forward(ctx: Any, tensor: SplitTensor, placements: tuple[Placement, ...]) -> SplitTensor:
        ctx.placements = tensor.placements
        return placed_as(tensor, tensor.device_mesh, placements)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[SplitTensor, None]:
        return placed_as(gradient, gradient.device_mesh, ctx.placements), None


def split_tensor(tensor: DTensor) -> SplitTensor:
    """Return a DTensor of this rank's part, without autograd, as one that goes together with plain tensors."""
    found: SplitTensor = torch_private.dtensor_of(tensor, SplitTensor)
    return found


def laid_out(value: Tensor, own: DTensor) -> SplitTensor:
    """Return ``value``, whole or a DTensor, laid out as ``own``, which has its shape. All ranks call it together."""
    part = part_like(value, own)
    return split_tensor(DTensor.from_local(part, own.device_mesh, own.placements, shape=own.shape, stride=own.stride()))


def placed_as(value: Tensor, devices: DeviceMesh, placements: Sequence[Placement]) -> SplitTensor:
    """Return ``value``, whole or a DTensor, with other placements. All ranks call it together."""
    whole = gathered(value)
    layout, mesh = layout_on(devices, placements, whole.ndim)
    part = whole[layout.local_slice(whole.shape, mesh, dist.get_rank())].clone()
    return split_tensor(DTensor.from_local(part, devices, placements, shape=whole.shape, stride=whole.stride()))


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
    if is_held(tensor):
        return gathered(tensor).item()
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
    def has_held(self) -> bool:
        """Return whether some ranks hold an operand alone."""
        return any(map(is_held, trees.tree_leaves((self._args, self._kwargs))))

    def with_held(self) -> Any:
        """Return what the operator gives where some ranks hold operands alone, on parts if that gives the same."""
        operator = self._operator
        if signatures.keeps_layout(operator) and is_held(self._args[0]):
            return _entry_by_entry(operator, self._args, self._kwargs, [[self._args[0]]])
        if signatures.is_norm(operator, signatures.arguments_of(operator, self._args, self._kwargs)):
            args, kwargs = trees.tree_map(self._shards, (self._args, self._kwargs))
            return trees.tree_map(_own, operator(*args, **kwargs))
        if signatures.is_entrywise(operator) and (alike := self._laid_alike()):
            self._note_plain()
            return _entry_by_entry(operator, *alike)
        return self.on_wholes()

    def _shards(self, leaf: Any) -> Any:
        return as_shards(leaf) if is_held(leaf) else self._stand_in(leaf)

    def _laid_alike(self) -> tuple[tuple[Any, ...], dict[str, Any], list[list[Tensor]]] | None:
        """Return operands of which those with others that some ranks hold alone are laid out as these.

        None where they cannot be, as of other shapes, or where one that the operator changes would have to be.
        """
        given = [*self._args, *self._kwargs.values()]
        lists = [each for each in given if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
        single = [each for each in given if isinstance(each, Tensor)]
        written = self._written()
        made: dict[int, Tensor] = {}
        for line in [[*single, *together] for together in zip(*lists, strict=False)] or [single]:
            own = next((leaf for leaf in line if isinstance(leaf, DTensor) and is_held(leaf)), None)
            for leaf in line:
                if own is None or leaf.ndim == 0 or (isinstance(leaf, DTensor) and leaf.placements == own.placements):
                    continue
                if id(leaf) in written or leaf.shape != own.shape:
                    return None
                made[id(leaf)] = laid_out(leaf, own)
        args, kwargs = trees.tree_map(lambda leaf: made.get(id(leaf), leaf), (self._args, self._kwargs))
        lines = _lines(args, kwargs)
        return (args, kwargs, lines) if lines else None

    def _written(self) -> set[int]:
        """Return the ids of the tensors that the operator writes into."""
        return {
            id(leaf)
            for at, name in signatures.written_operands(self._operator)
            for leaf in trees.tree_leaves(self._kwargs.get(name, self._args[at] if at < len(self._args) else None))
        }

    def unscale(self, gradients: Sequence[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        """Divide gradients; all ranks find what is infinite on one: torch reduces that as the first one is laid out."""
        parts = [torch_private.part_of(each) if isinstance(each, DTensor) else each for each in gradients]
        self._operator(parts, found_inf, scale)
        split = [each.placements for each in gradients if isinstance(each, DTensor)]
        for axis, placed in enumerate(zip(*split, strict=True)):
            if not all(each.is_replicate() for each in placed):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))

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
            written = self._written()
            for of, changed in wholes.values():
                if id(of) in written:  # others may be addends, as norms are, which have no part of a whole
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


def _knows_no_split(error: Exception) -> bool:
    """Return whether an error says that torch's DTensor knows no way to do an operator on parts, and has not begun."""
    text = str(error)
    return "Sharding propagation failed" in text or "sharding strategy" in text
