"""Rules that users register for their own operators, and the names of `torch.autograd.Function` classes in graphs.

A function's name leads back to its class in any process that has imported what defines it: ``autograd.net:Clip.apply``
is ``Clip.apply`` of the module ``net``. Dots within the names of module and class are slashes there, so that the names
of all operators have three parts.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

import torch

from shardwright.common import signatures
from shardwright.compiler.rules.layers import refuse_drawing
from shardwright.compiler.rules.notation import Pattern, parse
from shardwright.compiler.rules.row import Row
from shardwright.compiler.rules.table import REGISTERED, TABLE, key_of
from shardwright.errors import CaptureError, StrategyError, UsageError

_NAMESPACE, _OVERLOAD = "autograd", "apply"


def name_of(function: type[torch.autograd.Function]) -> str:
    """The name of a function in graphs, and in the table of rules: ``autograd.package/net:Clip.apply``."""
    where = f"{function.__module__}:{function.__qualname__}".replace(".", "/")
    return f"{_NAMESPACE}.{where}.{_OVERLOAD}"


def is_function(op: str) -> bool:
    """Return whether an operator of a graph is such a function."""
    return op.startswith(f"{_NAMESPACE}.")


def called(op: str) -> str:
    """A function by the name that its user knows: ``Clip``."""
    return _path(op)[1]


def function_of(op: str) -> type[torch.autograd.Function]:
    """The class that a name stands for in this process.

    Raises:
        CaptureError: where the module is not imported here, or has no such class.
    """
    module, path = _path(op)
    found: Any = reduce(lambda of, name: getattr(of, name, None), path.split("."), sys.modules.get(module))
    if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
        raise CaptureError(
            f"{module} has no torch.autograd.Function of the name {path}, which the captured graph calls\n"
            "Define it at the top level of a module that every rank imports."
        )
    return found


def _path(op: str) -> tuple[str, str]:
    module, _, path = op.removeprefix(f"{_NAMESPACE}.").removesuffix(f".{_OVERLOAD}").replace("/", ".").partition(":")
    return module, path


def register_rule(op: str | type, rule: str) -> None:
    """Say how an operator that has no rule may be split, so that ranks share its work; without one each runs it whole.

    Every rank calls this with the same, before `parallelize`, and so does what plans beforehand: best where the
    operator is defined. On local parts the operator is called as it is on whole tensors, with the same other arguments.
    Whether its results and gradients are then the parts of the whole ones is what the rule promises; `sw.verify` checks
    it by training beside plain PyTorch. Nothing else does, and a wrong rule gives wrong numbers.

    Args:
        op: an operator of any namespace of `torch.library`, ``"mylib::scale"`` or ``"mylib.scale"``, for all its
            overloads or for one of them, ``"mylib::scale.default"``; or a subclass of `torch.autograd.Function`.
        rule: the dims of each tensor that the operator takes, then of each that it returns. Dims of one name are one
            loop of the computation. ``b`` may be split; ``n^`` may not; a part of ``k+`` gives a part of a sum; ``*``
            stands for any number of dims; ``.`` is a dim that is not split.

    >>> @torch.library.custom_op("mylib::scale", mutates_args=())
    ... def scale(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    ...     return x * factors
    >>> register_rule("mylib::scale", "b n, n -> b n")
    >>> register_rule("mylib::scale", "b^ n, n -> b^ n")
    Traceback (most recent call last):
        ...
    shardwright.errors.UsageError: mylib.scale.default has the rule 'b n, n -> b n' already, got 'b^ n, n -> b^ n'

    Raises:
        UsageError: where there is no such operator, or it has a rule already.
        StrategyError: where the rule is none, or does not fit what the operator takes and returns.
        CaptureError: for a `torch.autograd.Function` that does not stand at the top level of a module.
    """
    names = _overloads(op)
    for name in names:
        _refuse_known(name, rule)
        _refuse_misfit(name, rule)
    REGISTERED.update({name: Row(rule) for name in names})


def registered_rules() -> dict[str, str]:
    """The rules that were registered, by the full names of their operators."""
    return {name: str(row.rule) for name, row in sorted(REGISTERED.items())}


def _overloads(op: str | type) -> tuple[str, ...]:
    """The full names of the operators that a user means, ``mylib.scale.default``."""
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        function_of(name_of(op))  # every rank must find the class by its name
        return (name_of(op),)
    name = op.replace("::", ".", 1) if isinstance(op, str) else ""
    if name.count(".") not in (1, 2):
        raise UsageError(
            "register_rule takes the name of an operator, as in 'mylib::scale', or a subclass of "
            f"torch.autograd.Function, got {op!r}"
        )
    found = signatures.overloads_of(name)
    if not found:
        raise UsageError(
            f"torch has no operator {op!r}; define it first, as with torch.library.custom_op, or import what does"
        )
    return found


def _refuse_known(name: str, rule: str) -> None:
    """An operator has one rule for good: plans and programs were made with it."""
    known = REGISTERED.get(name)
    if known is None and key_of(name) in TABLE:
        raise UsageError(f"{name} has a rule already, of Shardwright's own; give one to operators that have none")
    if known is not None and known.rule != rule:
        raise UsageError(f"{name} has the rule {known.rule!r} already, got {rule!r}")
    refuse_drawing(name)


def _refuse_misfit(name: str, rule: str) -> None:
    """Refuse notation that is none, that needs more than the operator itself, or has another number of tensors."""
    if not isinstance(rule, str):
        raise StrategyError(f"a rule is a text as in 'b n, n -> b n', got {rule!r}")
    pattern = parse(rule)
    _refuse_marks(pattern)
    for what, terms, wanted in (
        ("takes", pattern.operands, signatures.tensors_taken(name)),
        ("returns", pattern.results, signatures.tensors_returned(name)),
    ):
        if wanted is not None and len(terms) != wanted:
            raise StrategyError(f"{name} {what} {wanted} tensors, and the rule {rule!r} has {len(terms)}")


def _refuse_marks(pattern: Pattern) -> None:
    if pattern.along or any(kind == "merged" for _, kind in pattern.kinds):
        raise StrategyError(
            f"the rule {pattern.text!r} has a dim with &, which takes a collective inside the operator; "
            "write ^ where that dim must stay whole"
        )
    if any(term.added for term in pattern.operands):
        raise StrategyError(
            f"the rule {pattern.text!r} has an operand with !, which some ranks would have to leave out; "
            "add it to the operator's result instead"
        )
