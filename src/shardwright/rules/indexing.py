"""Rules of operators that read or write by index. What is indexed stays whole; the dims beside it may be split."""

from __future__ import annotations

from shardwright.rules.notation import OpRule
from shardwright.rules.operator import Operator, term


def index_select(op: Operator) -> OpRule:
    """index_select(x, dim, index): the rows that are asked for may be split."""
    dim = op.dim()
    names = [f"d{i}" for i in range(len(op.operands[0]))]
    left = term(("v^" if i == dim else name for i, name in enumerate(names)), linear=True)
    right = term(("i" if i == dim else name for i, name in enumerate(names)), linear=True)
    return op.bind(f"{left}, {term(['i'] * len(op.operands[1]))} -> {right}")


def gather(op: Operator) -> OpRule:
    """gather(x, dim, index): dims in which the index is as long as the operand go along with it."""
    dim = op.dim()
    x, index = op.operands
    left = [f"d{i}" if i != dim and size == index[i] else "." for i, size in enumerate(x)]
    right = [f"d{i}" if i == dim or size == x[i] else "." for i, size in enumerate(index)]
    return op.bind(f"{term(left, linear=True)}, {term(right)} -> {term(right, linear=True)}")


def scatter(op: Operator) -> OpRule:
    """scatter(x, dim, index, src or value), scatter_add: the dims that all tensors have in full may be split."""
    dim = op.dim()
    sizes = list(zip(*op.operands, strict=True))
    dims = term("." if i == dim or len(set(size)) > 1 else f"d{i}" for i, size in enumerate(sizes))
    return op.bind(f"{', '.join([dims] * len(op.operands))} -> {dims}")


def index(op: Operator) -> OpRule:
    """x[..., i, j, ...] with tensors of indices, which may be split where they stand side by side."""
    indices = list(op["indices"])
    x = op.operands[0]
    indices += [None] * (len(x) - len(indices))
    at = [i for i, given in enumerate(indices) if given is not None]
    drawn = len(op.results[0]) - (len(x) - len(at))  # the dims of the indices, broadcast together
    kept = [f"d{i}" for i in range(len(x)) if i not in at]
    left = ["." if i in at else f"d{i}" for i in range(len(x))]
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    asked = [f"i{k}" for k in range(drawn)]
    shape = op.results[0][first : first + drawn]
    terms = [term(left, linear=True)]
    for one in op.operands[1:]:
        names = asked[drawn - len(one) :]
        sizes = shape[drawn - len(one) :]
        terms.append(term(n if a == b else "." for n, a, b in zip(names, one, sizes, strict=True)))
    return op.bind(f"{', '.join(terms)} -> {term([*kept[:first], *asked, *kept[first:]], linear=True)}")
