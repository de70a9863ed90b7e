"""The site of an operator: one operator of the graph on one rank, for which a localiser returns the local call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.capture.operators import is_ours
from shardwright.compiler.lower.call import Call
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import OpRule, Shape, Strategy
from shardwright.compiler.rules.register import is_function
from shardwright.compiler.rules.row import Operator, named_arguments

# A device in a call stands for the one that the program runs on.
ANY_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Site:
    """One operator of the graph on one rank.

    ``number`` is its position in the graph; ``splits_parameters`` says whether the plan shards any parameter.
    """

    node: Node
    rule: OpRule
    strategy: Strategy
    mesh: Mesh
    rank: int
    values: Mapping[str, Value]
    number: int
    splits_parameters: bool = False

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every argument by its name in the operator's schema, defaults included."""
        return named_arguments(self.node.op, self.node.args, dict(self.node.kwargs))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def operand_shape(self, index: int) -> Shape:
        """The global shape of an operand."""
        return self.values[self.node.operands[index]].shape

    def result_shape(self, index: int = 0) -> Shape:
        """The global shape of a result."""
        return self.values[self.node.results[index]].shape

    def operand_layout(self, index: int) -> Layout:
        return self.rule.operand_layout(index, self.strategy)

    def result_layout(self, index: int = 0) -> Layout:
        return self.rule.result_layout(index, self.strategy, self.mesh)

    def operand_slice(self, index: int, rank: int | None = None) -> tuple[slice, ...]:
        """The part of an operand that this rank holds, or another."""
        holder = self.rank if rank is None else rank
        return self.operand_layout(index).local_slice(self.operand_shape(index), self.mesh, holder)

    def result_slice(self, index: int = 0) -> tuple[slice, ...]:
        """The part of a result that this rank makes."""
        return self.result_layout(index).local_slice(self.result_shape(index), self.mesh, self.rank)

    def local_operand_shape(self, index: int) -> list[int]:
        return [part.stop - part.start for part in self.operand_slice(index)]

    def local_result_shape(self, index: int = 0) -> list[int]:
        return [part.stop - part.start for part in self.result_slice(index)]

    def result_offsets(self, index: int = 0) -> list[int]:
        """Return where the part of a result that this rank makes starts."""
        return [part.start for part in self.result_slice(index)]

    def is_first(self, axes: Iterable[str]) -> bool:
        """Return whether this rank stands at coordinate 0 of all these axes."""
        at = self.mesh.coordinates(self.rank)
        return all(at[axis] == 0 for axis in axes)

    def adds_bias(self) -> bool:
        """Return whether a bias joins here: on the first of the ranks that the result is a sum over."""
        return self.is_first(self.result_layout().partial)

    @cached_property
    def merged_axes(self) -> tuple[str, ...]:
        """The axes along which the operator communicates inside itself."""
        return self.rule.merged_axes(self.strategy, self.mesh)

    @cached_property
    def operator(self) -> Operator:
        """The operator as its rule sees it."""
        shapes = (tuple(self.values[name].shape for name in names) for names in (self.node.operands, self.node.results))
        return Operator(self.node.op, self.node.args, dict(self.node.kwargs), *shapes)

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return self.node.op.split(".")[1]

    def same(self, **changed: Any) -> Call:
        """Return the call of the operator with some arguments changed."""
        if is_function(self.node.op):
            return Call("ops.apply_function", (self.node.op, *self.node.args), self.node.kwargs)
        function = f"ops.{self.name}" if is_ours(self.node.op) else f"torch.ops.{self.node.op}"
        if not changed:
            return Call(function, self.node.args, self.node.kwargs)
        names = list(self.arguments)[: len(self.node.args)]
        args = tuple(changed.get(name, arg) for name, arg in zip(names, self.node.args, strict=True))
        kwargs = {**dict(self.node.kwargs), **{name: arg for name, arg in changed.items() if name not in names}}
        return Call(function, args, tuple(kwargs.items()))


Localiser = Callable[[Site], Call]
