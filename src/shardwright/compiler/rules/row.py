"""Facts about one operator: its arguments, its flops, its collectives, and the row of the table that holds them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardwright.common.signatures import schema_parameters
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.rules.notation import Operand, OpRule, Shape, parse


def named_arguments(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of an operator by the name that its schema gives it, defaults included."""
    parameters = schema_parameters(op)
    named = {parameter.name: parameter.default for parameter in parameters}
    return {**named, **{p.name: arg for p, arg in zip(parameters, args, strict=False)}, **kwargs}


def chosen_dims(given: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims of a tensor with ``ndim`` of them, counted from the front; None and [] are all.

    A tensor without dims has none to choose: torch takes 0 and -1 for its one element.
    """
    chosen = [given] if isinstance(given, int) else given
    return tuple(int(dim) % ndim for dim in chosen) if chosen and ndim else tuple(range(ndim))


@dataclass(frozen=True)
class Operator:
    """An operator as a rule sees it: its name, its arguments by name, and the shapes of its tensors."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every argument by its name in the operator's schema, defaults included."""
        return named_arguments(self.op, self.args, self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dim(self, name: str = "dim") -> int:
        """The argument ``name``, a dim of the first operand, counted from the front."""
        return int(self[name]) % max(len(self.operands[0]), 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """The argument ``name``, some dims of the first operand, counted from the front; None and [] are all."""
        return chosen_dims(self[name], len(self.operands[0]))

    @property
    def keeps_sums(self) -> bool:
        """Return whether a conversion to the argument ``dtype`` keeps partial sums: integers truncate them."""
        dtype = self.arguments.get("dtype")
        return dtype is None or bool(dtype.is_floating_point or dtype.is_complex)

    def bind(self, text: str, **sizes: int) -> OpRule:
        """The rule of this operator by one line of notation.

        The operands of the line are the tensor parameters of the operator's schema, in order; those that are None or
        a number here have no operand, and drop out.
        """
        left, _, right = text.partition("->")
        terms = left.split(",")
        if len(terms) > len(self.operands):
            tensors = [p.name for p in schema_parameters(self.op) if p.is_tensor]
            named = zip(tensors, terms, strict=False)
            placed = {arg.index: term for name, term in named if isinstance(arg := self[name], Operand)}
            text = f"{','.join(placed[index] for index in sorted(placed))}->{right}"
        return parse(text).bind(self.operands, self.results, sizes)


def term(dims: Iterable[str], *, linear: bool = False) -> str:
    """A tensor in notation. One without dims is written ``*^``, as many dims as there are: none."""
    return ("~ " if linear else "") + (" ".join(dims) or "*^")


def one_per_element(op: Operator) -> int:
    """One for each element of the largest operand or result."""
    return max((math.prod(shape) for shape in (*op.operands, *op.results)), default=0)


def none(op: Operator) -> int:
    """Nothing is computed: a lookup."""
    return 0


def product(op: Operator) -> int:
    """Matmul and bmm: two operations for each element of the result and each term of its sum."""
    return 2 * math.prod(op.results[0]) * op.operands[0][-1]


def product_with_bias(op: Operator) -> int:
    """addmm, baddbmm: the bias comes first."""
    return 2 * math.prod(op.results[0]) * op.operands[1][-1]


def convolution(op: Operator) -> int:
    """Every element of the result sums over a kernel of ``in_channels / groups`` channels."""
    return 2 * math.prod(op.results[0]) * math.prod(op.operands[1][1:])


def transposed_convolution(op: Operator) -> int:
    """Every element of the input is spread over a kernel of ``out_channels / groups`` channels."""
    return 2 * math.prod(op.operands[0]) * math.prod(op.operands[1][1:])


def attention(op: Operator) -> int:
    """Scores and their product with the values; half of it where the mask is causal; the softmax is small beside it."""
    query, key, value = op.operands[:3]
    *heads, rows, width = query
    whole = 2 * math.prod(heads) * rows * key[-2] * (width + value[-1])
    return whole // 2 if op["is_causal"] else whole


def balances(op: Operator, cuts: Cuts) -> bool:
    """Return whether ranks exchange rows for a ring in which all have as much to do: queries and keys are cut alike."""
    same_rows, over = op.operands[0][-2] == op.operands[1][-2], cuts.get("s", ())
    return bool(op["is_causal"] and same_rows and over and over == cuts["l"])


def causal_rows(op: Operator, cuts: Cuts, mesh: Mesh) -> float:
    """Return the work of the last queries beside the mean, where they are causal: they see the most keys."""
    rows, keys, count = op.operands[0][-2], op.operands[1][-2], mesh.extent(cuts.get("l", ()))
    if not op["is_causal"] or count == 1 or balances(op, cuts):
        return 1.0

    def seen(queries: int) -> int:
        """Return how many keys the first queries see, all together."""
        some = min(queries, keys)
        return some * (some + 1) // 2 + (queries - some) * keys

    ends = [min(math.ceil(rows / count) * at, rows) for at in range(count + 1)]
    return count * max(seen(end) - seen(start) for start, end in itertools.pairwise(ends)) / seen(rows)


def scores_in_blocks(op: Operator) -> int:
    """Return how many scores a ring makes in memory, block by block: all with a mask or dropout, none without."""
    query, key, _ = op.operands[:3]
    return math.prod(query[:-1]) * key[-2] if op["dropout_p"] or isinstance(op["attn_mask"], Operand) else 0


def recurrent(op: Operator) -> int:
    """Every weight matrix multiplies every step of every sequence."""
    steps = math.prod(op.operands[0][:-1])
    return 2 * steps * sum(math.prod(shape) for shape in op.operands[1:] if len(shape) == 2)


def looked_up(operands_bytes: Sequence[int], results_bytes: Sequence[int], itemsize: int) -> int:
    """The bytes that a lookup moves: it reads its indices and the rows that it is asked for, not the table."""
    return operands_bytes[1] + 2 * results_bytes[0]


def log_probabilities(operands_bytes: Sequence[int], results_bytes: Sequence[int], itemsize: int) -> int:
    """The bytes that a cross entropy moves: it writes the log-probabilities of all classes, which its backward reads.

    Logits of half precision are cast to float32 before.
    """
    logits_bytes, cast_bytes, wide = operands_bytes[0], 0, 4
    if itemsize < wide:
        cast_bytes, logits_bytes = logits_bytes * (wide + itemsize) // itemsize, logits_bytes * wide // itemsize
    return cast_bytes + 2 * logits_bytes + sum(operands_bytes[1:]) + sum(results_bytes)


Rule = str | Callable[[Operator], OpRule]
Directions = tuple[tuple[Collective, ...], tuple[Collective, ...]]  # forward and backward


Cuts = Mapping[str, tuple[str, ...]]
"""The axes that split each factor."""


@dataclass(frozen=True)
class Merged:
    """An operator that communicates inside itself, as rank 0 has it, which holds the largest parts.

    Its ranks are those along ``axes``; ``operands`` and ``results`` are the shapes of its parts, ``cuts`` the axes that
    split each factor, and ``apart`` the parts into which those axes cut its work over which it sums without merging.
    ``itemsize`` is that of its first operand.
    """

    operator: Operator
    axes: tuple[str, ...]
    ranks: int
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    itemsize: int
    cuts: Cuts
    apart: int


Inside = Callable[[Merged], Directions]


@dataclass(frozen=True)
class InternalTensor:
    """A tensor that an operator makes inside itself and keeps for its backward.

    It has the shape of an operand or of a result, ``times`` as many elements; ``itemsize`` is the bytes of each, None
    where they are those of the tensor that it is like. It is split as that one is, or over the axes that ``split``
    these dims of operands, together: pairs of an operand and a dim.
    """

    like: Literal["operand", "result"]
    index: int
    itemsize: int | None = None
    times: float = 1.0
    split: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Saved:
    """The tensors that an operator saves for its backward: operands and results by position, None being all of them.

    Tensors that are small beside these, such as the statistics of a normalisation, are left out. The operands that are
    ``factors`` of others are kept for the gradients of those alone, as a product keeps them.
    """

    operands: tuple[int, ...] | None = ()
    results: tuple[int, ...] | None = ()
    internal: tuple[InternalTensor, ...] = ()
    factors: tuple[int, ...] = ()

    def within(self, operator: Operator) -> Saved:
        """Return the pattern of one operator with every position written out; operands that it lacks are left out."""

        def chosen(positions: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
            return tuple(range(count)) if positions is None else tuple(i for i in positions if i < count)

        operands, results = len(operator.operands), len(operator.results)
        kept = chosen(self.operands, operands), chosen(self.results, results)
        return Saved(*kept, self.internal, chosen(self.factors, operands))

    def where(self, gradients: Sequence[bool]) -> Saved:
        """Return the pattern where only some of the operands have a gradient."""
        kept = self.operands or ()
        needed = {i for i in self.factors if any(gradients[j] for j in kept if j != i)}
        return replace(self, operands=tuple(i for i in kept if i in needed or i not in self.factors))


NOTHING = Saved()
OPERANDS = Saved(operands=None)
RESULTS = Saved(results=None)
EVERYTHING = Saved(operands=None, results=None)
FACTORS = Saved(operands=(0, 1), factors=(0, 1))

# An operator of which nothing is left in a graph when: always, or where operand and result do not differ in this.
Identity = Literal["always", "same dtype", "same shape", "no gradient"]


@dataclass(frozen=True)
class Row:
    """The facts about one operator, or about all its overloads.

    ``rule``: how it may be split, in notation or as a function that writes it; None: not at all.
    ``saves``: what it keeps for its backward; None: operands and results, and nothing where it is a view.
    ``flops``: floating-point operations of its forward, on the shapes that it is asked for.
    ``traffic``: the bytes that its forward reads and writes, from those of its operands, of its results, and of an
    entry of its first operand; None: all operands and results once.
    ``view``: its results lie in the memory of its operand, so that it computes and moves nothing.
    ``differentiable``: how many of its results, from the first on, carry a gradient; None: all that are not integers.
    ``draws``: it draws random numbers, and its rule and local form see to it that they do not depend on the split.
    ``inside``: the collectives that it does where a factor marked ``&`` is split.
    ``between``: the entries that it writes and reads between the operators that it consists of; its backward has
    gradients of what it keeps of them.
    ``in_blocks``: the numbers that it makes in memory where it communicates inside, instead of in the registers of a
    fused kernel.
    ``busiest``: the work of the rank that has most of it, beside the mean of all, where these axes split its factors;
    None: all have as much.
    ``identity``: when a graph leaves it out, as its result is its operand.
    ``checks``: it makes nothing and only asserts, so that a graph leaves it out.
    ``casts``: it changes the dtype alone, so that a pin passes it.
    ``written_as``: the operator that a graph has in its place.
    ``broadcasts``: it expands each of its operands, which a graph has one by one.
    """

    rule: Rule | None = None
    saves: Saved | Callable[[Operator], Saved] | None = None
    flops: Callable[[Operator], int] = one_per_element
    traffic: Callable[[Sequence[int], Sequence[int], int], int] | None = None
    view: bool = False
    differentiable: int | None = None
    draws: bool = False
    inside: Inside | None = None
    between: Callable[[Operator], int] | None = None
    in_blocks: Callable[[Operator], int] | None = None
    busiest: Callable[[Operator, Cuts, Mesh], float] | None = None
    identity: Identity | None = None
    checks: bool = False
    casts: bool = False
    written_as: str | None = None
    broadcasts: bool = False

    @property
    def multiplies(self) -> bool:
        """Return whether its flops are those of products: of matrices, of a convolution, of attention."""
        return self.flops not in (one_per_element, none)

    @property
    def looks_up(self) -> bool:
        """Return whether it picks rows of its first operand by the indices of its second."""
        return self.traffic is looked_up

    def saved(self, operator: Operator) -> Saved:
        """Return what one operator saves for its backward, by position among its operands and results."""
        if self.saves is None:
            saves = NOTHING if self.view else EVERYTHING
        else:
            saves = self.saves if isinstance(self.saves, Saved) else self.saves(operator)
        return saves.within(operator)


def batch_statistics(merged: Merged) -> Directions:
    """Forward, every rank gathers the mean and the summed squared deviations; backward, two sums are reduced."""
    statistics_bytes = _of_channels(merged)
    gathered = Collective("all_gather", merged.axes, statistics_bytes * merged.ranks)
    return (gathered,), (Collective("all_reduce", merged.axes, statistics_bytes),)


def running_statistics(merged: Merged) -> Directions:
    """The running mean and variance are averaged over the ranks; the normalisation itself needs no other part."""
    return (Collective("all_reduce", merged.axes, _of_channels(merged)),), ()


def class_statistics(merged: Merged) -> Directions:
    """Every rank merges two statistics of a share of the samples, and gathers one of all and the sum of each share."""
    logits, entry = merged.operands[0], max(merged.itemsize, 4)
    samples = logits[0] * math.prod(logits[2:])
    share = max(1, math.ceil(samples / merged.ranks))
    exchanged = Collective("all_to_all", merged.axes, 2 * share * entry * merged.ranks)
    return (exchanged, Collective("all_gather", merged.axes, (share + 1) * entry * merged.ranks)), ()


def ring_of_keys(merged: Merged) -> Directions:
    """Blocks of keys and values go to the next rank; backward their gradients follow, which return to their rank.

    The gradients are sums over the ranks, of float32 at least. A balanced ring exchanges rows before and after.
    """
    query, key, value = (math.prod(shape) for shape in merged.operands[:3])
    result, entry = math.prod(merged.results[0]), merged.itemsize
    block = Collective("shift", merged.axes, (key + value) * entry)
    gradients = Collective("shift", merged.axes, (key + value) * max(entry, 4))
    forward, backward = (block,) * (merged.ranks - 1), (block, gradients) * (merged.ranks - 1) + (gradients,)
    if not balances(merged.operator, merged.cuts):
        return forward, backward

    def exchanged(entries: int) -> Collective:
        return Collective("all_to_all", merged.axes, entries * entry)

    heads = exchanged(query + key + value)
    return (heads, *forward, exchanged(result)), (exchanged(2 * result), *backward, heads)


def _of_channels(merged: Merged) -> int:
    return 2 * merged.operands[0][1] * max(merged.itemsize, 4)
