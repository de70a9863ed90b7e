"""A call in a local program as a value: passes look into its function and arguments, and `source` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.capture.tracing.literals import literal
from shardwright.errors import LoweringError


@dataclass(frozen=True)
class Name:
    """An argument that the program knows under this name: a variable of it, or what is around it, as ``comm``."""

    text: str


COMM, DEVICE, GUARD = Name("comm"), Name("device"), Name("guard")


@dataclass(frozen=True)
class Call:
    """A function of a program and its arguments: `Name`s, calls, plain values, and sequences of these.

    In what a localiser gives a `shardwright.compiler.rules.notation.Operand` stands for each local operand.
    """

    function: str  # "torch.ops.aten.linear.default", "ops.cross_entropy_sum", "kernels.embedding"
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def source(self) -> str:
        """The call as Python."""
        given = [_source(arg) for arg in self.args] + [f"{name}={_source(arg)}" for name, arg in self.kwargs]
        # "aten" is a name of the program's.
        function = self.function.removeprefix("torch.ops.") if self.calls_aten else self.function
        return f"{function}({', '.join(given)})"

    @property
    def calls_aten(self) -> bool:
        """Return whether the function is an operator of torch's own."""
        return self.function.startswith("torch.ops.aten.")

    @property
    def draws(self) -> bool:
        """Return whether it draws random numbers, by the key of an operator in the present step."""
        return any(isinstance(arg, Call) and arg.function == "key" for arg in self.args)

    def names(self) -> set[str]:
        """Return the names that stand in the arguments, of functions the first part."""
        return {arg.text.partition(".")[0] for arg in _leaves(self) if isinstance(arg, Name)}

    def renamed(self, new: Callable[[str], str]) -> Call:
        """Return the call with other names."""
        return self.mapped(lambda arg: Name(new(arg.text)) if isinstance(arg, Name) else arg)

    def mapped(self, change: Callable[[Any], Any]) -> Call:
        """Return the call with each argument changed, those within calls and sequences, too."""
        kwargs = tuple((name, _mapped(arg, change)) for name, arg in self.kwargs)
        return Call(self.function, _mapped(self.args, change), kwargs)


def random_key(number: int) -> Call:
    """Return what gives the key of the operator at position ``number`` of the graph in the present step: an int64."""
    return Call("key", (number,))


def _mapped(arg: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(arg, Call):
        return arg.mapped(change)
    return type(arg)(_mapped(each, change) for each in arg) if type(arg) in (list, tuple) else change(arg)


def _leaves(arg: Any) -> Iterator[Any]:
    if isinstance(arg, Call):
        yield from _leaves((*arg.args, *(value for _, value in arg.kwargs)))
    elif type(arg) in (list, tuple):
        for each in arg:
            yield from _leaves(each)
    else:
        yield arg


def _source(arg: Any) -> str:
    if isinstance(arg, Call):
        return arg.source
    if isinstance(arg, Name):
        return arg.text
    if type(arg) is list:
        return f"[{', '.join(map(_source, arg))}]"
    if type(arg) is tuple:
        return f"({', '.join(map(_source, arg))}{',' if len(arg) == 1 else ''})"
    if (found := literal(arg)) is None:
        raise LoweringError(f"an argument of type {type(arg).__name__} ({arg!r}) cannot be written into a program")
    return found
