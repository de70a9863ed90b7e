"""Constant folding at capture, of values that follow from shapes and constants alone, such as causal masks.

A mask is mostly the same for every sample and head. So that it takes no memory for each of them, a tensor has a stride
of 0 along each dim in which it is constant, and what works entry by entry works on one entry of such dims.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.common import signatures
from shardwright.compiler.capture.evaluate import call
from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.operators import is_of_torch, resolve
from shardwright.compiler.rules.table import Column, column, row_of

MOST_BYTES = 1 << 31  # of one tensor that is folded; larger masks stay operators of the graph
# Operators that work entry by entry and have no tag that says so, and those that make tensors of one number.
_ENTRYWISE: Column[bool] = column(("__and__ __or__ __xor__ where _to_copy", True))
_FILLING: Column[bool] = column(("full zeros ones new_full new_zeros new_ones", True))


class Known:
    """The values of a graph that constant folding knows.

    Args:
        filled: values that are taken to hold this number in every entry.
    """

    def __init__(self, capture: Capture, filled: Mapping[str, int] | None = None) -> None:
        self._capture, self._filled = capture, filled or {}
        self._names = {*self._filled, *(name for name in capture.constants if name not in capture.outside)}
        self._makers: dict[str, Node] = {}
        for node in capture.nodes:
            if self._names.issuperset(node.operands) and _is_fixed(node):
                self._names.update(node.results)
                self._makers.update(dict.fromkeys(node.results, node))

    def has(self, name: str) -> bool:
        """Return whether a value follows from what is known."""
        return name in self._names

    def maker(self, name: str) -> Node | None:
        """Return the operator that makes a known value; None of what is given."""
        return self._makers.get(name)

    def value(self, name: str) -> Tensor | None:
        """Return the tensor of a value that is known, on the CPU; None where folding takes too much memory."""
        nodes = self._makers_of(name)
        reads = Counter(operand for node in nodes for operand in node.operands)
        values: dict[str, Tensor] = {}

        def given(operand: str) -> Tensor:
            reads[operand] -= 1
            found = values[operand] if operand in values else self._leaf(operand)
            if not reads[operand]:
                values.pop(operand, None)
            return found

        for node in nodes:
            made = _folded(node, [given(operand) for operand in node.operands], self._capture)
            if made is None:
                return None
            values.update(zip(node.results, made, strict=True))
        return values[name] if name in values else self._leaf(name)

    def _makers_of(self, name: str) -> list[Node]:
        """The operators that lead to a value, in order."""
        found: dict[str, Node] = {}
        open_names = [name]
        while open_names:
            maker = self._makers.get(open_names.pop())
            if maker is not None and maker.name not in found:
                found[maker.name] = maker
                open_names += maker.operands
        return [node for node in self._capture.nodes if node.name in found]

    def _leaf(self, name: str) -> Tensor:
        value = self._capture.values[name]
        if name in self._filled:
            return torch.full((), self._filled[name], dtype=value.dtype, device="cpu").expand(value.shape)
        return self._capture.constants[name].cpu()


def _is_fixed(node: Node) -> bool:
    """Return whether the results of an operator follow from its operands: nothing is drawn, nor left unwritten."""
    if not is_of_torch(node.op) or "empty" in node.op:
        return False
    return not row_of(node.op).draws and not signatures.draws(resolve(node.op))


def _folded(node: Node, operands: list[Tensor], capture: Capture) -> list[Tensor] | None:
    cpu, results = torch.device("cpu"), [capture.values[name] for name in node.results]
    if _FILLING.of(node.op):
        args = tuple(() if arg == results[0].shape else arg for arg in node.args)
        node = replace(node, args=args, kwargs=tuple((k, () if k == "size" else arg) for k, arg in node.kwargs))
    elif _ENTRYWISE.of(node.op) or signatures.is_entrywise(resolve(node.op)):
        operands = [_narrow(operand) for operand in operands]
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]
        if math.prod(shape) * results[0].dtype.itemsize > MOST_BYTES:
            return None
    elif not row_of(node.op).view and sum(value.bytes for value in results) > MOST_BYTES:
        return None
    made = call(node, operands, cpu)
    return [collapsed(x.expand(value.shape)) for x, value in zip(made, results, strict=True)]


def _narrow(tensor: Tensor) -> Tensor:
    """The tensor with one entry of each dim along which it is constant."""
    for dim in constant_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def constant_dims(tensor: Tensor) -> Iterator[int]:
    """Return the dims, longer than 1, along which a tensor of `Known` is constant."""
    return (dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0)


def collapsed(tensor: Tensor) -> Tensor:
    """Return the tensor with a stride of 0 along each dim in which it is constant."""
    shape = tensor.shape
    if not tensor.numel():
        return tensor
    tensor = _narrow(tensor)
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            first = tensor.narrow(dim, 0, 1)
            if torch.equal(first, tensor.narrow(dim, size - 1, 1)) and bool((tensor == first).all()):
                tensor = first
    return tensor.expand(shape)
