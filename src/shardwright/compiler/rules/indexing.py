"""Rules of operators that read or write by index. What is indexed stays whole; the dims beside it may be split."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.compiler.rules.notation import OpRule
from shardwright.compiler.rules.operator import Operator, term


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


def index_put(op: Operator) -> OpRule:
    """x[..., i, j, ...] = values: the dims behind those that are indexed may be split, where the values have them too.

    An index may be a mask, over as many dims of x as it has itself; no shape tells which it is.
    """
    x, *given, values = op.operands
    indices = op["indices"]
    first = next(i for i, index in enumerate(indices) if index is not None)
    between = sum(index is None for index in indices[first:])
    covered = first + between + sum(max(len(shape), 1) for shape in given)
    names = ["." if i < covered else f"d{i}" for i in range(len(x))]
    source = ["."] * len(values)
    for back in range(1, min(len(x), len(values)) + 1):
        source[-back] = names[-back] if values[-back] == x[-back] else "."
    whole = [term(["."] * len(shape)) for shape in given]
    return op.bind(f"{', '.join([term(names), *whole, term(source)])} -> {term(names)}")


def index_written(*, linear: bool = False) -> Callable[[Operator], OpRule]:
    """The rule of index_add, index_copy and index_fill (x, dim, index, source or value): the dims beside ``dim`` may
    be split."""

    def write(op: Operator) -> OpRule:
        dim, n = op.dim(), len(op.operands[0])
        x = term(("." if i == dim else f"d{i}" for i in range(n)), linear=linear)
        sources = [x if len(shape) == n else term(["."] * len(shape)) for shape in op.operands[2:]]
        return op.bind(f"{', '.join([x, term(['.'] * len(op.operands[1])), *sources])} -> {x}")

    return write
