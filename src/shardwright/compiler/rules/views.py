"""Rules of operators that move dims around, or read and write by index, written from their arguments and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from shardwright.compiler.rules.notation import OpRule, Shape
from shardwright.compiler.rules.row import Operator, term


def reshape(op: Operator) -> OpRule:
    """view, reshape, flatten, unflatten: the major factors that both shapes have in common.

    (4, 6) -> (24) is ``a b -> (a b)``; (12) -> (4, 3) is ``(a b) -> a b``. Of (4, 6) -> (6, 4) only the major factor
    2 is common; the rest is not split.
    """
    source, target = op.operands[0], op.results[0]
    if not math.prod(source):  # an empty tensor has no factors to match, and every size divides 0
        return op.bind(f"{term(['.'] * len(source), linear=True)} -> {term(['.'] * len(target), linear=True)}")
    left, right = ["."] * len(source), ["."] * len(target)  # what no factor names stays whole
    sizes: dict[str, int] = {}
    for here, there in _groups(source, target):
        _name_group(source, here, left, target, there, right, sizes)
    return op.bind(f"{term(left, linear=True)} -> {term(right, linear=True)}", **sizes)


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims of ``source`` and ``target`` that hold the same elements; dims of 1 left out."""
    rest = [iter([dim for dim, size in enumerate(shape) if size > 1]) for shape in (source, target)]
    while True:
        here, there = next(rest[0], None), next(rest[1], None)
        if here is None or there is None:
            return
        group = ([here], [there])
        # Both shapes hold as many elements in all, so that the side whose product is behind always has a dim left.
        while (a := math.prod(source[i] for i in group[0])) != (b := math.prod(target[i] for i in group[1])):
            if a < b:
                group[0].append(next(rest[0]))
            else:
                group[1].append(next(rest[1]))
        yield group


def _name_group(
    source: Shape, here: list[int], left: list[str], target: Shape, there: list[int], right: list[str],
    sizes: dict[str, int],
) -> None:  # fmt: skip
    """Write the factors of one group, major first, as long as the dims of one side are made of those of the other."""
    # Elements are numbered row-major: a factor that is cut off the front of both sides cuts both tensors into the same
    # runs of consecutive elements. So the largest common factor of the two foremost remainders is taken off each.
    queues = [[(dim, source[dim]) for dim in here], [(dim, target[dim]) for dim in there]]
    written: tuple[dict[int, list[str]], dict[int, list[str]]] = ({}, {})
    while queues[0] and queues[1]:
        (a, rest_a), (b, rest_b) = queues[0][0], queues[1][0]
        common = math.gcd(rest_a, rest_b)
        if common == 1:  # a dim of 4 against one of 9: nothing that lies behind is aligned on both sides either
            break
        name = f"f{len(sizes)}"
        sizes[name] = common
        for queue, dim, rest, side in ((queues[0], a, rest_a, 0), (queues[1], b, rest_b, 1)):
            written[side].setdefault(dim, []).append(name)
            queue[0] = (dim, rest // common)
            if rest == common:
                queue.pop(0)
        # 4 against 6 have 2 in common and leave 2 and 3: both foremost dims are cut short, and what comes behind the
        # factor is not the major part of either. Where one is used up, the next dim of its side continues the other.
        if common not in (rest_a, rest_b):
            break
    for side, texts in ((0, left), (1, right)):
        for dim, names in written[side].items():
            # The factor that is split must be the major one of its dim, and all factors of a dim multiply to its size.
            unnamed = next((rest for d, rest in queues[side] if d == dim and rest > 1), 1)
            if unnamed > 1:  # the minor remainder that the other side does not have as a factor of its own
                name = f"f{len(sizes)}"
                sizes[name] = unnamed
                names = [*names, f"{name}^"]
            texts[dim] = f"({' '.join(names)})" if len(names) > 1 else names[0]


def permute(op: Operator) -> OpRule:
    """Return the rule of permute, transpose and t, by the order of the dims of the operand in the result."""
    n = len(op.operands[0])
    order = list(range(n))
    if "dims" in op.arguments:
        order = [dim % n for dim in op["dims"]]
    elif "dim0" in op.arguments and n:
        a, b = op["dim0"] % n, op["dim1"] % n
        order[a], order[b] = order[b], order[a]
    elif n:
        order.reverse()  # t
    left = term((f"d{i}" for i in range(n)), linear=True)
    return op.bind(f"{left} -> {term((f'd{i}' for i in order), linear=True)}")


def expand(op: Operator) -> OpRule:
    """expand: a dim that appears or grows is new in the result, and the gradient is summed over it."""
    new = len(op.results[0]) - len(op.operands[0])
    right = [f"d{i}" for i in range(len(op.results[0]))]
    left = [right[new + i] if size == op.results[0][new + i] else "." for i, size in enumerate(op.operands[0])]
    return op.bind(f"{term(left, linear=True)} -> {term(right, linear=True)}")


def repeat(op: Operator) -> OpRule:
    """repeat: dims that are repeated stay whole, unless a dim of size 1 is repeated, which is an expand."""
    new = len(op.results[0]) - len(op.operands[0])
    shape = (1,) * new + op.operands[0]
    # The two halves of abcd, each repeated twice, would give abab cdcd in place of abcd abcd.
    right = [
        f"d{i}" if size in (1, result) else "."
        for i, (size, result) in enumerate(zip(shape, op.results[0], strict=True))
    ]
    left = [name if size == result else "." for name, size, result in zip(right, shape, op.results[0], strict=True)]
    return op.bind(f"{term(left[new:], linear=True)} -> {term(right, linear=True)}")


def squeeze(op: Operator) -> OpRule:
    """squeeze, unsqueeze, and every other operator that inserts or removes dims of size 1 only."""
    # Which dims of size 1 appear or go does not matter, as none of them can be split: the others keep their order.
    left = [f"d{i}" if size != 1 else "." for i, size in enumerate(op.operands[0])]
    kept = iter(name for name in left if name != ".")
    right = ["." if size == 1 else next(kept) for size in op.results[0]]
    return op.bind(f"{term(left, linear=True)} -> {term(right, linear=True)}")


def select(op: Operator) -> OpRule:
    """Return the rule of select: its dim stays whole and disappears."""
    n, dim = len(op.operands[0]), op.dim()
    left = term(("." if i == dim else f"d{i}" for i in range(n)), linear=True)
    return op.bind(f"{left} -> {term((f'd{i}' for i in range(n) if i != dim), linear=True)}")


def split(op: Operator) -> OpRule:
    """split, chunk: the dim that is cut in the program stays whole, also where there is one piece only."""
    # The sizes of the pieces are arguments of the operator, of which a part would have others.
    return _whole_dims(op, [op.dim()])


def pad(op: Operator) -> OpRule:
    """Return the rule of pad: padded dims stay whole; linear if the padding is zero or from the tensor itself."""
    n = len(op.operands[0])
    amounts = op["pad"] if "pad" in op.arguments else op["padding"]
    # Amounts come in pairs, from the last dim on. A dim that gets none may be split, though its amount is given as 0.
    touched = [n - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    return _whole_dims(op, touched, linear=op.arguments.get("value", 0) in (0, None))


def slice_(op: Operator) -> OpRule:
    """slice(dim, start, end, step): the dim stays whole unless all of it is taken."""
    dim = op.dim()
    whole = op.operands[0][dim] == op.results[0][dim]
    return _whole_dims(op, [] if whole else [dim])


def roll(op: Operator) -> OpRule:
    """Return the rule of roll and flip: the dims that move stay whole."""
    return _whole_dims(op, list(op.dims("dims")))


def _whole_dims(op: Operator, whole: Sequence[int], *, linear: bool = True) -> OpRule:
    dims = ["." if i in whole else f"d{i}" for i in range(len(op.operands[0]))]
    return op.bind(f"{term(dims, linear=linear)} -> {', '.join([term(dims, linear=linear)] * len(op.results))}")


def unbind(op: Operator) -> OpRule:
    """Return the rule of unbind, which is several selects."""
    n, dim = len(op.operands[0]), op.dim()
    left = term(("." if i == dim else f"d{i}" for i in range(n)), linear=True)
    right = term((f"d{i}" for i in range(n) if i != dim), linear=True)
    return op.bind(f"{left} -> {', '.join([right] * len(op.results))}")


def unfold(op: Operator) -> OpRule:
    """Return the rule of unfold: windows over a dim, which stays whole, become a new last dim."""
    dim = op.dim("dimension")
    dims = ["." if i == dim else f"d{i}" for i in range(len(op.operands[0]))]
    return op.bind(f"{term(dims, linear=True)} -> {term([*dims, '.'], linear=True)}")


def repeat_interleave(op: Operator) -> OpRule:
    """Return the rule of repeat_interleave: its dim stays whole, or all dims where it has none."""
    if op["dim"] is None:  # the tensor is flattened first
        return op.bind(f"{term(['.'] * len(op.operands[0]), linear=True)} -> ~ .")
    return _whole_dims(op, [op.dim()])


def scatter_slice(op: Operator) -> OpRule:
    """slice_scatter(x, source, dim, ...), select_scatter: the dim stays whole; linear in both together."""
    dim, n = op.dim(), len(op.operands[0])
    dims = ["." if i == dim else f"d{i}" for i in range(n)]
    # The source of select_scatter is one slice, and has no such dim.
    source = dims if len(op.operands[1]) == n else dims[:dim] + dims[dim + 1 :]
    return op.bind(f"{term(dims, linear=True)}, {term(source, linear=True)} -> {term(dims, linear=True)}")


def cat(op: Operator) -> OpRule:
    """Return the rule of cat: the dim that is joined stays whole; linear in all operands together."""
    dim = op["dim"] % len(op.results[0])
    dims = term(("." if i == dim else f"d{i}" for i in range(len(op.results[0]))), linear=True)
    # An operand of shape (0,) joins anything: a relic of torch that has no dims to name.
    left = ["~ ." if shape == (0,) and len(op.results[0]) > 1 else dims for shape in op.operands]
    return op.bind(f"{', '.join(left)} -> {dims}")


def stack(op: Operator) -> OpRule:
    """Return the rule of stack: the new dim stays whole; linear in all operands together."""
    n = len(op.operands[0])
    dim = op["dim"] % (n + 1)
    names = [f"d{i}" for i in range(n)]
    right = [*names[:dim], ".", *names[dim:]]
    return op.bind(f"{', '.join([term(names, linear=True)] * len(op.operands))} -> {term(right, linear=True)}")


def last_whole(count: int, *, linear: bool = False) -> Callable[[Operator], OpRule]:
    """The rule of an operator that keeps the shape and needs the last ``count`` dims whole (tril, triu, fft)."""

    def write(op: Operator) -> OpRule:
        n = len(op.operands[0])
        return _whole_dims(op, list(range(n - count, n)), linear=linear)

    return write


def cast(op: Operator) -> OpRule:
    """A copy, perhaps of another dtype. Partial sums pass through unless they are truncated to integers."""
    linear = "~ " if op.keeps_sums else ""
    return op.bind(f"{linear}* -> {linear}*")


def cast_like(op: Operator) -> OpRule:
    """to(x, other): a copy in the dtype of another tensor, whose values are not read.

    Partial sums do not pass, as the dtype may be one of integers.
    """
    x, other = op.operands
    names = [f"d{i}" for i in range(len(x))]
    # Dims that are as long, counted from the last, are split together, so that neither tensor has to be moved.
    new = len(x) - len(other)
    beside = [names[new + i] if new + i >= 0 and x[new + i] == size else "." for i, size in enumerate(other)]
    return op.bind(f"{term(names)}, {term(beside)} -> {term(names)}")


def like_shape(op: Operator) -> OpRule:
    """new_zeros, new_full: dims of the operand, whose values are not read, go with equal dims of the result."""
    left, right = op.operands[0], op.results[0]
    names = [f"d{i}" for i in range(len(right))]
    shared = [names[i] if i < len(right) and size == right[i] else "." for i, size in enumerate(left)]
    return op.bind(f"{term(shared)} -> {term(names)}")


def index_select(op: Operator) -> OpRule:
    """Return the rule of index_select: the rows that are selected may be split."""
    dim = op.dim()
    names = [f"d{i}" for i in range(len(op.operands[0]))]
    left = term(("v^" if i == dim else name for i, name in enumerate(names)), linear=True)
    right = term(("i" if i == dim else name for i, name in enumerate(names)), linear=True)
    return op.bind(f"{left}, {term(['i'] * len(op.operands[1]))} -> {right}")


def gather(op: Operator) -> OpRule:
    """Return the rule of gather: dims may be split in which the index is as long as the operand."""
    dim = op.dim()
    x, index = op.operands
    left = [f"d{i}" if i != dim and size == index[i] else "." for i, size in enumerate(x)]
    right = [f"d{i}" if i == dim or size == x[i] else "." for i, size in enumerate(index)]
    return op.bind(f"{term(left, linear=True)}, {term(right)} -> {term(right, linear=True)}")


def scatter(op: Operator) -> OpRule:
    """Return the rule of scatter and scatter_add: the dims that all tensors have in full may be split."""
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
    """The rule of index_add, index_copy and index_fill (x, dim, index, source or value): other dims may be split."""

    def write(op: Operator) -> OpRule:
        dim, n = op.dim(), len(op.operands[0])
        x = term(("." if i == dim else f"d{i}" for i in range(n)), linear=linear)
        sources = [x if len(shape) == n else term(["."] * len(shape)) for shape in op.operands[2:]]
        return op.bind(f"{', '.join([x, term(['.'] * len(op.operands[1])), *sources])} -> {x}")

    return write
