"""One operator of a graph as a rule sees it: its name, its arguments by name, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.common.signatures import schema_parameters
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
    """What a rule may depend on."""

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
        """Whether a conversion to the argument ``dtype`` leaves partial sums what they are: integers truncate them."""
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
