"""The kind of a large mask from what it is made of, as it takes too long or too much memory to work it out.

A causal mask of 131,072 positions has 17 billion entries. It compares two rows of numbers, of which either grows, and
is joined by "and" with masks that hide nothing: what each query sees follows from a lookup of its number among those of
the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.capture.rewriting.known import Known
from shardwright.compiler.rules.table import Column, column

Mask = Literal["none", "causal", "other"]
KindOf = Callable[[Tensor | None, int, int], Mask]

LARGE = 1 << 22  # entries
_BOTH: Column[bool] = column(("__and__ bitwise_and logical_and", True))

_EXPANDS: Column[bool] = column(("expand", True))


class _Comparison(NamedTuple):
    """Whether the first of two numbers is to be the less one, and whether they may be equal."""

    first_less: bool
    equal: bool


_COMPARES: Column[_Comparison] = column(
    ("le", _Comparison(True, True)),
    ("lt", _Comparison(True, False)),
    ("ge", _Comparison(False, True)),
    ("gt", _Comparison(False, False)),
)


def kind_within(known: Known, name: str, queries: int, keys: int, kind_of: KindOf) -> Mask:
    """Return the kind of a known mask: of a large one from what it is made of, else by ``kind_of`` its entries."""
    by_parts = _kind_by_parts(known, name, queries, keys, kind_of) if queries * keys > LARGE else "other"
    if by_parts != "other":
        return by_parts
    value = known.value(name)
    return kind_of(value if value is None or value.ndim else value.expand(1), queries, keys)


def _kind_by_parts(known: Known, name: str, queries: int, keys: int, kind_of: KindOf) -> Mask:
    maker = known.maker(name)
    if maker is None:
        return "other"
    if _EXPANDS.of(maker.op):
        return kind_within(known, maker.operands[0], queries, keys, kind_of)
    if len(maker.operands) != 2:
        return "other"
    if _BOTH.of(maker.op):
        kinds = {kind_within(known, operand, queries, keys, kind_of) for operand in maker.operands}
        return "other" if "other" in kinds else "causal" if "causal" in kinds else "none"
    compares = _COMPARES.of(maker.op)
    return "other" if compares is None else _compared(known, maker, compares, queries, keys)


def _compared(known: Known, maker: Node, compares: _Comparison, queries: int, keys: int) -> Mask:
    """Return the kind of a mask in which a query sees the keys whose numbers are less than its own."""
    values = [known.value(operand) for operand in maker.operands]
    less, more = values if compares.first_less else values[::-1]
    of_keys, of_queries = _line(less, -1, keys), _line(more, -2, queries)
    if of_keys is None or of_queries is None or not bool((of_keys[1:] >= of_keys[:-1]).all()):
        return "other"
    seen = torch.searchsorted(of_keys, of_queries, right=compares.equal)
    if bool((seen == keys).all()):
        return "none"
    causal = torch.arange(1, queries + 1, device="cpu").clamp(max=keys)
    return "causal" if torch.equal(seen, causal) else "other"


def _line(value: Tensor | None, dim: int, size: int) -> Tensor | None:
    """Return the numbers of a tensor along a dim, of which it has so many; None where it has others along another."""
    if value is None or value.ndim < -dim or value.shape[dim] != size or value.numel() != size:
        return None
    return value.reshape(-1).contiguous()
