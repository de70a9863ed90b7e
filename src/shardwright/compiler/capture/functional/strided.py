"""``as_strided`` as an index into the elements of a tensor.

Where elements lie in memory is not what a graph says: a part of a tensor, or one that was gathered, lies otherwise. And
torch's derivative of ``as_strided_scatter``, which a write into such a view becomes (``fill_diagonal_`` is one), gives
the gradient to the elements that are written over, and none to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwright.common import signatures, torch_private
from shardwright.errors import CaptureError

aten = torch.ops.aten


def index_strided(program: ExportedProgram, source_of: Callable[[fx.Node], str]) -> None:
    """Replace ``as_strided`` and ``as_strided_scatter`` by indices, in place.

    Args:
        source_of: where the user calls an operator.

    Raises:
        CaptureError: where elements are read that the tensor does not have, or sizes are open.
    """
    graph = program.graph
    for target, replacement in ((aten.as_strided.default, _read), (aten.as_strided_scatter.default, _written)):
        for node in graph.find_nodes(op="call_function", target=target):
            new = replacement(_Strided(graph, node, source_of(node)))
            program.graph_signature.replace_all_uses(node.name, new.name)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


class _Strided:
    """Writes the operators in the place of one node."""

    def __init__(self, graph: fx.Graph, node: fx.Node, source: str) -> None:
        self._graph, self._node, self._source = graph, node, source
        x = node.args[0]
        assert isinstance(x, fx.Node)
        self.x, self.val = x, x.meta["val"]
        names = [parameter.name for parameter in signatures.schema_parameters(str(node.target))]
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        self.size, self.stride = list(given["size"]), list(given["stride"])
        offset = given.get("storage_offset")
        self.offset = 0 if offset is None else offset - self.val.storage_offset()
        self.source = given.get("src")

    def add(self, operator: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator on nodes, with the annotations of the node that is replaced."""
        values, named = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        with self._graph.inserting_before(self._node), torch.no_grad(), torch_private.mode_of(self.val):
            made = self._graph.call_function(operator, args, kwargs)
            made.meta = {**self._node.meta, "val": operator(*values, **named)}
        return made

    def in_memory(self) -> tuple[list[int], fx.Node]:
        """Return the order of dims in which the tensor lies in memory, and its elements in that order.

        Raises:
            CaptureError: where other elements lie between those of the tensor, or would be read.
        """
        shape, strides = tuple(self.val.shape), self.val.stride()
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        numbers = (*shape, *strides, *self.size, *self.stride, last)
        order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim])) if _known(numbers) else []
        if not _known(numbers) or not _is_dense([shape[d] for d in order], [strides[d] for d in order]):
            raise self._error("looks into a tensor that does not lie in memory as one piece of known size")
        if not 0 <= self.offset <= last < math.prod(shape):
            raise self._error(f"reads element {last} of the memory of a tensor that has {math.prod(shape)}")
        permuted = self.add(aten.permute.default, self.x, order) if order != sorted(order) else self.x
        return order, self.add(aten.reshape.default, permuted, [-1])

    def _error(self, what: str) -> CaptureError:
        return CaptureError(
            f"as_strided {what}, at {self._source}\n"
            "Write .contiguous() in front of it, or index the tensor: x[rows, columns]."
        )

    def positions(self) -> fx.Node:
        """Return where the elements of the view stand among those in memory, in one dim."""
        device = {"device": self.val.device}
        total = self.add(aten.full.default, [1] * len(self.size), self.offset, dtype=torch.int64, **device)
        for dim, (count, step) in enumerate(zip(self.size, self.stride, strict=True)):
            if count > 1 and step:
                line = self.add(aten.arange.start_step, 0, count * step, step, dtype=torch.int64, **device)
                apart = [count if d == dim else 1 for d in range(len(self.size))]
                total = self.add(aten.add.Tensor, total, self.add(aten.reshape.default, line, apart))
        return self.add(aten.reshape.default, self.add(aten.expand.default, total, self.size), [-1])


def _known(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int for number in numbers)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether such a tensor lies in memory element by element."""
    return all(
        n == 1 or step == math.prod(shape[dim + 1 :]) for dim, (n, step) in enumerate(zip(shape, strides, strict=True))
    )


def _read(view: _Strided) -> fx.Node:
    _, elements = view.in_memory()
    found = view.add(aten.index.Tensor, elements, [view.positions()])
    return view.add(aten.reshape.default, found, view.size)


def _written(view: _Strided) -> fx.Node:
    order, elements = view.in_memory()
    assert isinstance(view.source, fx.Node)
    flat = view.add(aten.reshape.default, view.source, [-1])
    found = view.add(aten.index_put.default, elements, [view.positions()], flat)
    shape = view.val.shape
    found = view.add(aten.reshape.default, found, [shape[dim] for dim in order])
    if order == sorted(order):
        return found
    return view.add(aten.permute.default, found, [order.index(dim) for dim in range(len(order))])
