"""What the table says about an operator: one row, one column for each fact, with a default that is safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.rules import work
from shardwright.compiler.rules.notation import OpRule
from shardwright.compiler.rules.operator import Operator

Rule = str | Callable[[Operator], OpRule]
Directions = tuple[tuple[Collective, ...], tuple[Collective, ...]]  # forward and backward
# From the mesh, the axes over which an operator merges, and the local shape and element size of its first operand.
Inside = Callable[[Mesh, tuple[str, ...], tuple[int, ...], int], Directions]


@dataclass(frozen=True)
class Beside:
    """A tensor that an operator makes inside itself and keeps for its backward.

    It has the shape of an operand or of a result, ``times`` as many elements; ``itemsize`` is the bytes of each, None
    where they are those of the tensor that it is like.
    """

    like: Literal["operand", "result"]
    index: int
    itemsize: int | None = None
    times: float = 1.0


@dataclass(frozen=True)
class Saved:
    """What an operator keeps for its backward: operands and results by position, None being all of them.

    Tensors that are small beside these, such as the statistics of a normalisation, are left out. The operands that are
    ``factors`` of others are kept for the gradients of those alone, as a product keeps them.
    """

    operands: tuple[int, ...] | None = ()
    results: tuple[int, ...] | None = ()
    beside: tuple[Beside, ...] = ()
    factors: tuple[int, ...] = ()

    def within(self, operator: Operator) -> Saved:
        """The same of one operator, every position written out; an operand that it may lack is left out."""

        def chosen(positions: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
            return tuple(range(count)) if positions is None else tuple(i for i in positions if i < count)

        operands, results = len(operator.operands), len(operator.results)
        kept = chosen(self.operands, operands), chosen(self.results, results)
        return Saved(*kept, self.beside, chosen(self.factors, operands))

    def where(self, gradients: Sequence[bool]) -> Saved:
        """The same where only some of the operands have a gradient."""
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
    ``traffic``: the bytes that its forward reads and writes, from the bytes of its operands and results; None: all
    of them once.
    ``view``: its results lie in the memory of its operand, so that it computes and moves nothing.
    ``differentiable``: how many of its results, from the first on, carry a gradient; None: all that are not integers.
    ``draws``: it draws random numbers, and its rule and local form see to it that they do not depend on the split.
    ``inside``: the collectives that it does where a factor marked ``&`` is split.
    ``identity``: when a graph leaves it out, as its result is its operand.
    ``checks``: it makes nothing and only asserts, so that a graph leaves it out.
    ``casts``: it changes the dtype alone, so that a pin passes it.
    ``written_as``: the operator that a graph has in its place.
    ``broadcasts``: it expands each of its operands, which a graph has one by one.
    """

    rule: Rule | None = None
    saves: Saved | Callable[[Operator], Saved] | None = None
    flops: Callable[[Operator], int] = work.one_per_element
    traffic: Callable[[Sequence[int], Sequence[int]], int] | None = None
    view: bool = False
    differentiable: int | None = None
    draws: bool = False
    inside: Inside | None = None
    identity: Identity | None = None
    checks: bool = False
    casts: bool = False
    written_as: str | None = None
    broadcasts: bool = False

    def saved(self, operator: Operator) -> Saved:
        """What one operator keeps for its backward, by position among its operands and results."""
        if self.saves is None:
            saves = NOTHING if self.view else EVERYTHING
        else:
            saves = self.saves if isinstance(self.saves, Saved) else self.saves(operator)
        return saves.within(operator)
