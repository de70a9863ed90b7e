"""Masks of attention that are known at capture are left out: causal ones become ``is_causal``.

Models of libraries build masks of the whole batch, (batch, heads, queries, keys), with which attention has no fast
kernel. And a lookup by the positions in their own order, ``x[batch[:, None], positions]``, by which some are built, is
a view: written as one it is split as ``x`` is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Filled, Node, Pin, without_unused
from shardwright.compiler.capture.rewriting.known import Known, constant_dims
from shardwright.compiler.capture.rewriting.large_masks import Mask, kind_within
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.row import named_arguments
from shardwright.compiler.rules.table import Column, column, row_of

ATTENTION: Column[bool] = column(("scaled_dot_product_attention", True))
_EMBEDDING: Column[bool] = column(("embedding", True))
_LOOKUP: Column[bool] = column(("index.Tensor", True))
_ROWS = 1 << 22  # entries of a mask that are compared at a time


def without_known_masks(capture: Capture, filled: Collection[Filled] = ()) -> Capture:
    """Return the capture in which no attention takes a mask that hides nothing, or that is the causal one.

    Args:
        filled: what is known of the inputs; the capture says which of it has decided about a mask, and what would.
    """
    masks = _Masks(capture, frozenset(filled))
    nodes = tuple(masks.without(node) if ATTENTION.of(node.op) else node for node in capture.nodes)
    found = replace(capture, nodes=nodes, conditions=masks.conditions, filled=masks.conditions.intersection(filled))
    return check(without_unused(found))


class _Masks:
    """What is known of the masks of a graph, and ``conditions`` on which it would be known of others."""

    def __init__(self, capture: Capture, filled: frozenset[Filled]) -> None:
        self._capture, self._filled = capture, filled
        self._known = Known(capture)
        self._places = {value.name: place for place, value in enumerate(capture.of_kind("input"))}
        self._makers = {result: node for node in capture.nodes for result in node.results}
        self._kinds: dict[tuple[str, int, int], Mask] = {}
        self._tokens = {self._seen(node.operands[1]) for node in capture.nodes if _EMBEDDING.of(node.op)}
        self.conditions: frozenset[Filled] = frozenset()

    def without(self, node: Node) -> Node:
        """Return an attention without its mask where that is known."""
        mask = mask_of(node)
        if mask is None:
            return node
        queries, keys = (self._capture.values[name].shape[-2] for name in node.operands[:2])
        key = mask, queries, keys
        if key not in self._kinds:
            self._kinds[key] = self._kind(*key)
        kind = self._kinds[key]
        return node if kind == "other" else _without_mask(node, causal=kind == "causal")

    def _kind(self, mask: str, queries: int, keys: int) -> Mask:
        if self._known.has(mask):
            return kind_within(self._known, mask, queries, keys, kind_of)
        inputs = self._inputs(mask)
        for number in (1, 0) if inputs else ():
            known = Known(self._capture, dict.fromkeys(inputs, number))
            kind = kind_within(known, mask, queries, keys, kind_of) if known.has(mask) else "other"
            if kind != "other":
                needed = frozenset((self._places[name], number) for name in inputs)
                self.conditions |= needed
                return kind if needed <= self._filled else "other"
        return "other"

    def _seen(self, name: str) -> str:
        """The value that a value is a view of."""
        while (maker := self._makers.get(name)) is not None and row_of(maker.op).view:
            name = maker.operands[0]
        return name

    def _inputs(self, mask: str) -> frozenset[str]:
        """The inputs from which a mask follows, all of whole numbers; none where it follows from something else.

        Tokens, which are embedded, are not all 1 in any batch that is worth a look at each step.
        """
        found, open_names, seen = set[str](), [mask], {mask}
        while open_names:
            name = open_names.pop()
            if self._known.has(name):
                continue
            if name in self._places and not self._capture.values[name].dtype.is_floating_point:
                if name in self._tokens:
                    return frozenset()
                found.add(name)
            elif name in self._makers:
                further = [operand for operand in self._makers[name].operands if operand not in seen]
                seen.update(further)
                open_names += further
            else:
                return frozenset()
        return frozenset(found)


def mask_of(node: Node) -> str | None:
    """Return the value that masks an attention; None where it takes none."""
    mask = named_arguments(node.op, node.args, dict(node.kwargs))["attn_mask"]
    return node.operands[mask.index] if isinstance(mask, Operand) else None


def kind_of(mask: Tensor | None, queries: int, keys: int) -> Mask:
    """Return whether a mask hides nothing, or what ``is_causal`` hides: of query i the keys behind the i-th.

    None, of which nothing is known, is another.
    """
    if mask is None or mask.ndim < 1 or any(dim < mask.ndim - 2 for dim in _varying(mask)):
        return "other"
    rows = mask[(0,) * max(mask.ndim - 2, 0)].expand(queries, keys)
    if not {0, 1}.intersection(_varying(rows)) and rows.numel():
        return "none" if _sees(rows[0, 0]).item() else "other"
    step, positions = max(_ROWS // max(keys, 1), 1), torch.arange(keys, device="cpu")
    for start in range(0, queries, step):
        block = rows[start : start + step]
        seen, hidden = _sees(block), _hides(block)
        causal = positions <= torch.arange(start, start + len(block), device="cpu")[:, None]
        if not torch.equal(seen, causal) or not torch.equal(hidden, ~causal):
            return "other"
    return "causal" if rows.numel() else "other"


def _varying(mask: Tensor) -> list[int]:
    same = set(constant_dims(mask))
    return [dim for dim, size in enumerate(mask.shape) if size > 1 and dim not in same]


def _sees(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _hides(mask: Tensor) -> Tensor:
    """Of numbers that are added the infinite one, and the one that models write for it: its exponential is 0, too."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def _without_mask(node: Node, *, causal: bool) -> Node:
    named = named_arguments(node.op, node.args, dict(node.kwargs))
    at = named["attn_mask"].index
    named |= {"attn_mask": None, "is_causal": causal}

    def moved(arg: object) -> object:
        return Operand(arg.index - (arg.index > at)) if isinstance(arg, Operand) else arg

    positional = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    args = tuple(moved(named[name]) for name in positional)
    kwargs = tuple((name, arg) for name, arg in named.items() if name not in positional)
    operands = tuple(name for i, name in enumerate(node.operands) if i != at)
    pin = node.pin and Pin(
        tuple(of for i, of in enumerate(node.pin.operands) if i != at), node.pin.results, node.pin.source
    )
    return replace(node, args=args, kwargs=kwargs, operands=operands, pin=pin)


def lookups_as_views(capture: Capture) -> Capture:
    """Return the capture in which lookups by all positions in their own order are views."""
    known, writer = Known(capture), Writer(capture)
    for node in capture.nodes:
        if not (_LOOKUP.of(node.op) and node.pin is None and _write_view(node, capture, known, writer)):
            writer.keep(node)
    return check(without_unused(writer.capture()))


def _write_view(node: Node, capture: Capture, known: Known, writer: Writer) -> bool:
    """Write a lookup of every dim, ``x[i, j]``, in which each index counts along a dim of its own, in their order."""
    x, shape = capture.values[node.operands[0]], capture.values[node.results[0]].shape
    indices = node.operands[1:]
    if len(indices) != len(x.shape) or None in node.args[1] or not all(map(known.has, indices)):
        return False
    counted: list[int] = []
    for size, name in zip(x.shape, indices, strict=True):
        dim = _counts_along(known.value(name), size, len(shape))
        after = counted[-1] if counted else -1
        dim = after + 1 if dim is None and size == 1 else dim
        if dim is None or dim <= after or dim >= len(shape) or shape[dim] != size:
            return False
        counted.append(dim)
    if any(size != 1 for dim, size in enumerate(shape) if dim not in counted):
        return False
    value, sizes = writer.value(x.name), list(x.shape)
    for dim in range(len(shape)):
        if dim not in counted:
            sizes.insert(dim, 1)
            value = writer.emit(node, "aten.unsqueeze.default", (value, dim), sizes, x.dtype)
    if value is writer.value(x.name):
        value = writer.emit(node, "aten.alias.default", (value,), sizes, x.dtype)
    writer.name_last(node)
    return True


def _counts_along(index: Tensor | None, size: int, ndim: int) -> int | None:
    """Return the dim, of ``ndim``, along which an index is 0, 1, ... up to ``size``, and constant along all others."""
    if index is None or index.dtype == torch.bool:
        return None
    varying = _varying(index)
    if len(varying) != 1 or index.shape[varying[0]] != size:
        return None
    at = varying[0]
    line = index[tuple(slice(None) if dim == at else 0 for dim in range(index.ndim))]
    return ndim - index.ndim + at if torch.equal(line, torch.arange(size, device="cpu", dtype=line.dtype)) else None
