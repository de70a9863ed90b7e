"""The numbers of a traced program for one batch: the sizes of its tensors, and what Python computes of sizes.

Where all sizes are known these are the numbers of the trace. Where a trace left sizes open, they follow from the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwright.common import signatures, torch_private
from shardwright.compiler.capture.tracing.sizes.open_sizes import Sizes
from shardwright.errors import CaptureError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Numbers:
    """The numbers of one program where its open sizes are ``sizes``.

    All methods raise CaptureError for a number that does not follow from the sizes.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._known: dict[Any, int] = {}
        self._of_node: dict[str, Any] = {}

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of a traced tensor."""
        sizes: tuple[Any, ...] = tuple(tensor.shape)
        return tuple(size if type(size) is int else self._size(size) for size in sizes)

    def plain(self, value: Any) -> Any:
        """A value that is no tensor, with a number in place of what stands for one."""
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if isinstance(value, _NUMBERS):
            raise CaptureError(f"{value} is computed of open sizes")
        return value

    def add(self, node: fx.Node) -> bool:
        """Return whether a node of the program makes a number of sizes; it is then known by `of`."""
        val = node.meta.get("val")
        if not isinstance(val, _NUMBERS) or torch_private.is_unknown(val):
            return False
        self._of_node[node.name] = self._computed(node, val)
        return True

    def of(self, node: fx.Node) -> Any:
        """The number that a node makes; None for one that makes a tensor."""
        return self._of_node.get(node.name)

    def _computed(self, node: fx.Node, val: Any) -> Any:
        """Return what the node computes, by the function that it calls: an expression may round in another way."""
        if signatures.is_operator(node.target):  # the size of a tensor
            return self.plain(val)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        found = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(val, torch.SymInt) and found != self._size(val):
            raise CaptureError(f"{node.name} is {found}, and {self._size(val)} by its expression")
        return found

    def _size(self, size: torch.SymInt) -> int:
        expression = torch_private.expression_of(size)
        if expression not in self._known:
            found = expression.xreplace(self._sizes)
            if not found.is_Integer:
                raise CaptureError(f"a size is {found}, no whole number")
            self._known[expression] = int(found)
        return self._known[expression]
