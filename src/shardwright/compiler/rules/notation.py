"""The one-line language in which an operator says how it may be split.

    matmul     m k+, k+ n -> m n
    linear     ~ * k+, n k+, ! n -> ~ * n
    softmax    * d^ -> * d^
    view       (h d) -> h d

Operands stand left of the arrow, results right of it, separated by commas. Every dim names a *factor*; the same
name is the same loop of the computation. A strategy of the operator is an assignment of mesh axes to factors, and
nothing else. An axis splits one factor, or two where one is split along with the other.

    name       a factor that may be split; it must appear in every result, or carry a mark
    name+      splitting it leaves the results that do not name it partial (summed later)
    name&      splitting it takes a collective inside the operator, which makes the results that do not name it whole
    name&of    it is split only along with the factor ``of``, over the same axes: each rank holds its parts of both, and
               communicates inside the operator (written in each place where the name stands)
    name+&of   both: over axes that split ``of``, too, ranks communicate inside the operator; over others it is split
               alone, and leaves the results partial
    name^      it may not be split
    (a b)      a merged dim, a being the major factor; only the first factor above size 1 can be split
    *          any number of dims, aligned to the right; dims of size 1 broadcast and are not split
    ~          the operator is linear in the operands so marked together: partial values may come in there, and then
               leave as partial in the results so marked
    !          the operand is added once: on one of the ranks over which the result is partial. Its gradient is that of
               the whole sum all the same, on every one of them
    .          a dim that belongs to this place alone and may not be split

The marks are written, never inferred. In the manner of nnScaler's annotations and Shardy's sharding rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from shardwright.compiler.mesh.cached_hash import kept_hash
from shardwright.compiler.mesh.layout import WHOLE, Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import StrategyError

Shape = tuple[int, ...]
Dims = tuple[tuple[str, ...], ...]  # for every dim its factors, major first; () is a dim that is never split
FactorKind = Literal["free", "sum", "merged", "frozen"]
_Cuts = tuple[tuple[int, int] | None, ...]  # for every dim the position of its major factor, and the unit


@dataclass(frozen=True)
class Operand:
    """Stands in an operator's arguments for its ``index``-th tensor operand."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True)
class Factor:
    """One loop of an operator: its global size, and how it may be split: not at all if ``frozen``.

    Where ``along`` names another factor, it is split over axes that split that one, too; one that is summed may also be
    split alone.
    """

    name: str
    size: int
    kind: FactorKind
    along: str = ""


@kept_hash
@dataclass(frozen=True)
class Strategy:
    """An assignment of mesh axes to the factors of a rule, in the rule's order of factors.

    ``partial`` are the axes over which the operands marked ``~`` come in as partial sums.
    """

    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def used(self) -> frozenset[str]:
        """Every axis over which the ranks do different work."""
        return frozenset(axis for axes in self.axes for axis in axes) | frozenset(self.partial)


@dataclass(frozen=True)
class OpRule:
    """A rule bound to the shapes of one operator of a graph."""

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear_operands: frozenset[int] = frozenset()
    linear_results: frozenset[int] = frozenset()
    added_operands: frozenset[int] = frozenset()
    listed: bool = True  # False: the operator has no rule and is replicated

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {factor.name: factor.size for factor in self.factors}

    @cached_property
    def splittable(self) -> tuple[int, ...]:
        """The positions of the factors that a strategy may give axes to."""
        minor = {name for dims in (*self.operands, *self.results) for dim in dims for name in dim[1:]}
        found = {f.name: f for f in self.factors if f.kind != "frozen" and f.name not in minor and f.size > 1}
        alone = {name for name, f in found.items() if not f.along or f.along in found or f.kind == "sum"}
        return tuple(i for i, f in enumerate(self.factors) if f.name in alone)

    @cached_property
    def along(self) -> dict[int, int]:
        """The positions of the factors that are split along with others, and of these."""
        positions = {factor.name: at for at, factor in enumerate(self.factors)}
        return {at: positions[factor.along] for at, factor in enumerate(self.factors) if factor.along}

    @cached_property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the factors that one axis may split together: one alone, or one along with another."""
        alone = [(at,) for at in self.splittable if at not in self.along or self.factors[at].kind == "sum"]
        together = ((at, of) for at, of in self.along.items() if at in self.splittable and of in self.splittable)
        return (*alone, *together)

    def shared(self, at: int, strategy: Strategy) -> tuple[str, ...]:
        """Return the axes of a factor that split the one, too, that it is split along with."""
        others = strategy.axes[self.along[at]] if at in self.along else ()
        return tuple(axis for axis in strategy.axes[at] if axis in others)

    def divides(self, at: int, axes: Sequence[str], mesh: Mesh) -> bool:
        """Return whether the factor at a position, and one that it is split only along with, divide over some axes."""
        together = (at,) if self.factors[at].kind == "sum" else (at, self.along.get(at, at))
        return not any(self.factors[i].size % mesh.extent(axes) for i in together)

    def most_parts(self, devices: int) -> int:
        """No strategy with even parts shares the operator among more of so many devices, on whichever mesh of them.

        A factor is cut into as many parts as some axes together have ranks, which divides its size and the devices.
        """
        own = [self.factors[way[0]] for way in self.ways if len(way) == 1]
        return min(devices, math.prod(math.gcd(factor.size, devices) for factor in own))

    @cached_property
    def _of_operands(self) -> tuple[_Cuts, ...]:
        return tuple(map(self._cuts, self.operands))

    @cached_property
    def _of_results(self) -> tuple[_Cuts, ...]:
        return tuple(map(self._cuts, self.results))

    def _cuts(self, dims: Dims) -> _Cuts:
        positions = {factor.name: at for at, factor in enumerate(self.factors)}
        return tuple((positions[dim[0]], math.prod(self.sizes[n] for n in dim[1:])) if dim else None for dim in dims)

    @cached_property
    def _summed_for(self) -> tuple[tuple[int, ...], ...]:
        """For every result the positions of the factors that are summed and that it does not name."""
        named = [{name for dim in dims for name in dim} for dims in self.results]
        summed = [(at, factor.name) for at, factor in enumerate(self.factors) if factor.kind == "sum"]
        return tuple(tuple(at for at, name in summed if name not in of) for of in named)

    @cached_property
    def _not_held(self) -> tuple[tuple[int, ...], ...]:
        """For every operand the positions of the factors over which ranks do different work on the same part of it."""
        held = [{cut[0] for cut in cuts if cut} for cuts in self._of_operands]
        for index in self.added_operands:
            held[index] |= {at for at, factor in enumerate(self.factors) if factor.kind == "sum"}
        return tuple(tuple(at for at in range(len(self.factors)) if at not in of) for of in held)

    def operand_layout(self, index: int, strategy: Strategy) -> Layout:
        """Return the layout that operand ``index`` must have for the operator to run on local parts."""
        return _layout(self._of_operands[index], strategy, strategy.partial if index in self.linear_operands else ())

    def result_layout(self, index: int, strategy: Strategy, mesh: Mesh) -> Layout:
        """Return the layout of result ``index`` when every operand is laid out as `operand_layout` says."""
        partial = [*strategy.partial] if index in self.linear_results else []
        for at in self._summed_for[index]:
            inside = self.shared(at, strategy)
            partial += [axis for axis in strategy.axes[at] if axis not in inside]
        return _layout(self._of_results[index], strategy, mesh.ordered(partial))

    def operand_gradient_partial(self, index: int, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which the gradient of operand ``index`` comes out of the operator's backward as partial.

        They are those over which the ranks do different work on the same part of the operand (design: duality).
        """
        partial = [] if index in self.linear_operands or index in self.added_operands else [*strategy.partial]
        for at in self._not_held[index]:
            partial += strategy.axes[at]
        if self.along:  # the operand is split over an axis by one of two factors, and does not name the other
            split = {axis for cut in self._of_operands[index] if cut for axis in strategy.axes[cut[0]]}
            partial = [axis for axis in partial if axis not in split]
        return mesh.ordered(partial)

    def merged_axes(self, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which the operator communicates inside itself."""
        merged = [axis for at, f in enumerate(self.factors) if f.kind == "merged" for axis in strategy.axes[at]]
        return mesh.ordered({*merged, *(axis for at in self.along for axis in self.shared(at, strategy))})

    def cuts(self, strategy: Strategy) -> dict[str, tuple[str, ...]]:
        """Return the axes over which a strategy splits each factor, by its name."""
        return {factor.name: axes for factor, axes in zip(self.factors, strategy.axes, strict=True)}

    def replicated(self) -> Strategy:
        """The strategy that splits nothing."""
        return Strategy(((),) * len(self.factors))

    def strategy(self, assignment: Mapping[str, Sequence[str]], partial: Sequence[str] = ()) -> Strategy:
        """A strategy from factor names; a factor that is split only along with another gives it its axes, too.

        Raises:
            StrategyError: where a factor is unknown or may not be split, or an axis is used twice.
        """
        allowed = {self.factors[i].name for i in self.splittable}
        joined = {name: tuple(axes) for name, axes in assignment.items()}
        for factor in self.factors:
            if given := joined.get(factor.name, ()) if factor.along else ():
                others: tuple[str, ...] = joined.get(factor.along, ())
                if factor.kind != "sum":
                    joined[factor.along] = (*others, *(axis for axis in given if axis not in others))
                assignment = {**assignment, factor.along: [axis for axis in others if axis not in given]}
        used = [axis for axes in assignment.values() for axis in axes] + list(partial)
        if len(set(used)) != len(used):
            raise StrategyError(f"an axis can split one factor only, got {assignment} with partial {list(partial)}")
        for name, axes in assignment.items():
            if axes and name not in allowed:
                raise StrategyError(f"factor {name!r} may not be split; those that may: {sorted(allowed)}")
        return Strategy(tuple(joined.get(f.name, ()) for f in self.factors), tuple(partial))

    def strategies(self, mesh: Mesh, *, partial: bool = True) -> Iterator[Strategy]:
        """Every strategy whose parts are even; with ``partial``, those that take partial operands too.

        Axes on one factor stand in mesh order. The replicated strategy comes first.
        """
        choices: list[tuple[int, ...]] = [(), *self.ways]
        if partial and self.linear_operands:
            choices.append((-1,))
        names = mesh.names
        for chosen in itertools.product(choices, repeat=len(names)):
            cut: dict[int, tuple[str, ...]] = {}
            for axis, way in zip(names, chosen, strict=True):
                for at in way:
                    cut[at] = (*cut.get(at, ()), axis)
            axes = tuple([cut.get(at, ()) for at in range(len(self.factors))])
            if all(factor.size % mesh.extent(of) == 0 for factor, of in zip(self.factors, axes, strict=True) if of):
                yield Strategy(axes, cut.get(-1, ()))

    def __str__(self) -> str:
        mark = {"free": "", "sum": "+", "merged": "&", "frozen": "^"}
        kinds = {f.name: mark[f.kind] + ("&" if f.along and f.kind == "sum" else "") + f.along for f in self.factors}

        def side(tensors: tuple[Dims, ...], linear: frozenset[int], added: frozenset[int] = frozenset()) -> str:
            texts = []
            for i, dims in enumerate(tensors):
                words = ["~"] * (i in linear) + ["!"] * (i in added)
                for dim in dims:
                    names = " ".join(name + kinds[name] for name in dim)
                    words.append(f"({names})" if len(dim) > 1 else names or ".")
                texts.append(" ".join(words))
            return ", ".join(texts)

        operands = side(self.operands, self.linear_operands, self.added_operands)
        return f"{operands} -> {side(self.results, self.linear_results)}"


def _layout(cuts: _Cuts, strategy: Strategy, partial: tuple[str, ...]) -> Layout:
    axes = strategy.axes
    return Layout(tuple([Split(axes[cut[0]], cut[1]) if cut and axes[cut[0]] else WHOLE for cut in cuts]), partial)


@dataclass(frozen=True)
class _Term:
    """One operand or result of a parsed pattern; a dim is a tuple of factor names, ``("*",)``, or ``()`` for a dot."""

    dims: Dims
    linear: bool
    added: bool


@dataclass(frozen=True)
class Pattern:
    """A parsed line of notation, not yet bound to shapes."""

    text: str
    operands: tuple[_Term, ...]
    results: tuple[_Term, ...]
    kinds: tuple[tuple[str, FactorKind], ...]
    along: tuple[tuple[str, str], ...] = ()

    def bind(self, operands: Sequence[Shape], results: Sequence[Shape], sizes: dict[str, int] | None = None) -> OpRule:
        """Name every dim of these shapes. ``sizes`` gives the factors that never stand alone.

        Raises:
            StrategyError: where the shapes do not fit the pattern.
        """
        kinds: dict[str, FactorKind] = dict(self.kinds)
        found: dict[str, int] = dict(sizes or {})
        terms = [*zip(self.operands, operands, strict=False), *zip(self.results, results, strict=False)]
        if (len(self.operands), len(self.results)) != (len(operands), len(results)):
            raise self._misfit(operands, results, "another number of tensors")
        expanded = [self._expand(term, shape, operands, results) for term, shape in terms]
        for dims, (_, shape) in zip(expanded, terms, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) == 1 and found.setdefault(dim[0], size) != size:
                    raise self._misfit(operands, results, f"{dim[0]} is {found[dim[0]]} and {size}")
        for dims, (_, shape) in zip(expanded, terms, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                unknown = [name for name in dim if name not in found]
                if unknown or (dim and math.prod(found[name] for name in dim) != size):
                    raise self._misfit(operands, results, f"({' '.join(dim)}) is not {size}")
        without_ones = [tuple(tuple(n for n in dim if len(dim) == 1 or found[n] > 1) for dim in d) for d in expanded]
        names = dict.fromkeys(name for dims in without_ones for dim in dims for name in dim)
        along = dict(self.along)
        kind_of = {name: kinds.get("*" if name[0] == "*" else name, "free") for name in names}
        return OpRule(
            tuple(Factor(name, found[name], kind_of[name], along.get(name, "")) for name in names),
            tuple(without_ones[: len(operands)]),
            tuple(without_ones[len(operands) :]),
            frozenset(i for i, term in enumerate(self.operands) if term.linear),
            frozenset(i for i, term in enumerate(self.results) if term.linear),
            frozenset(i for i, term in enumerate(self.operands) if term.added),
        )

    def _expand(self, term: _Term, shape: Shape, operands: Sequence[Shape], results: Sequence[Shape]) -> Dims:
        """Replace ``*`` by as many factors as the shape has dims left: *0 is the last of them, *1 the one before."""
        if ("*",) not in term.dims:
            if len(term.dims) != len(shape):
                raise self._misfit(operands, results, f"{len(term.dims)} dims expected, got {shape}")
            return term.dims
        at = term.dims.index(("*",))
        missing = len(shape) - (len(term.dims) - 1)
        if missing < 0:
            raise self._misfit(operands, results, f"at least {len(term.dims) - 1} dims expected, got {shape}")
        star = tuple(() if shape[at + i] == 1 else (f"*{missing - 1 - i}",) for i in range(missing))
        return term.dims[:at] + star + term.dims[at + 1 :]

    def _misfit(self, operands: Sequence[Shape], results: Sequence[Shape], why: str) -> StrategyError:
        shapes = f"{', '.join(map(str, operands))} -> {', '.join(map(str, results))}"
        return StrategyError(f"the rule {self.text!r} does not fit the shapes {shapes}: {why}")


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Parse a line of notation.

    Cached by the text, of which the frozen pattern is a function.

    >>> rule = parse("m k+, k+ n -> m n").bind([(16, 32), (32, 8)], [(16, 8)])
    >>> print(rule)
    m k+, k+ n -> m n
    >>> mesh = Mesh.of(a=2, b=4)
    >>> strategy = rule.strategy({"m": ["a"], "k": ["b"]})
    >>> print(rule.operand_layout(0, strategy), rule.operand_layout(1, strategy), rule.result_layout(0, strategy, mesh))
    [a, b] [b, -] [a, -] Σb

    Raises:
        StrategyError: where the text is not of the language.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise StrategyError(f"a rule is written as 'operands -> results', got {text!r}")
    kinds: dict[str, FactorKind] = {}
    along: dict[str, str] = {}
    operands = tuple(_parse_term(term, kinds, along, text) for term in left.split(",") if term.strip())
    results = tuple(_parse_term(term, kinds, along, text) for term in right.split(","))
    read = {name for term in operands for dim in term.dims for name in dim}
    for term in results:
        written = {name for dim in term.dims for name in dim}
        lost = sorted(name for name in read - written if kinds.get(name, "free") == "free")
        if lost:
            raise StrategyError(
                f"{lost} disappear in a result of {text!r}; mark them with + (summed), & (merged) or ^ (not split)"
            )
    if lacking := sorted(of for of in along.values() if of not in read or of in along):
        raise StrategyError(f"{text!r} splits a factor along with {', '.join(lacking)}, which no operand names alone")
    return Pattern(text, operands, results, tuple(kinds.items()), tuple(along.items()))


_MARKS: dict[str, FactorKind] = {"+": "sum", "&": "merged", "^": "frozen"}


def _parse_term(text: str, kinds: dict[str, FactorKind], along: dict[str, str], whole: str) -> _Term:
    dims: list[tuple[str, ...]] = []
    linear = added = False
    merged: list[str] | None = None
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "~":
            linear = True
        elif token == "!":
            added = True
        elif token == "(" and merged is None:
            merged = []
        elif token == ")" and merged is not None:
            dims.append(tuple(merged))
            merged = None
        elif token == "." and merged is None:
            dims.append(())
        else:
            marked, _, of = token.partition("&")
            token = (marked if marked.endswith("+") else f"{marked}&") if of else token
            name = token.rstrip("+&^")
            if (
                not (name == "*" or name.isidentifier())
                or len(token) - len(name) > 1
                or (name == "*" and merged)
                or (of and not (of.isidentifier() and name.isidentifier()))
            ):
                raise StrategyError(f"cannot read {token + of!r} in the rule {whole!r}")
            if of:
                along[name] = of
            mark = _MARKS.get(token[-1], "free")
            if mark != "free" or name not in kinds:
                kinds[name] = mark
            if merged is None:
                dims.append((name,))
            else:
                merged.append(name)
    if merged is not None:
        raise StrategyError(f"a bracket is not closed in the rule {whole!r}")
    return _Term(tuple(dims), linear, added)


def replicated_rule(operands: Sequence[Shape], results: Sequence[Shape]) -> OpRule:
    """The rule of an operator without a line: nothing is split."""
    return OpRule((), tuple(((),) * len(s) for s in operands), tuple(((),) * len(s) for s in results), listed=False)
