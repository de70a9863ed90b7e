"""Branches that do nothing but raise, as ``if labels.max() >= n: raise ValueError`` and ``assert x.isfinite().all()``.

A capture has no values, so that it cannot take a branch by one. Where the source proves that one outcome ends the step
with an error, it takes the other, and the program tells of each step whether it would have been the first: then the
model's own error is raised.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.capture.tracing.regions import NO_GRADIENT
from shardwright.compiler.capture.tracing.values.raising import Raises, raises_of
from shardwright.errors import UsageError


@dataclass(frozen=True)
class Check:
    """An error that the model raises by itself: the name of its class, its text, and the line."""

    error: str
    text: str
    source: str

    def raised(self) -> Exception:
        """Return the error of the model; where its class cannot be made of a text, one that quotes the line."""
        room, _, name = self.error.partition(":")
        try:
            kind: Any = importlib.import_module(room)
            for part in name.split("."):
                kind = getattr(kind, part)
            error: Exception = kind(self.text) if self.text else kind()
            if not isinstance(error, Exception):
                raise TypeError
        except Exception:
            error = UsageError(f"the model raises {name}: {self.text}")
        error.add_note(f"raised by the model, at {self.source}")
        return error


class Checks:
    """Watches one capture.

    Args:
        until: the code of the outermost frame of the step.
    """

    def __init__(self, until: CodeType) -> None:
        self._until = until
        self._made: dict[int, tuple[torch.Tensor, str, Sequence[Any]]] = {}  # by ids: reductions and comparisons
        self.found: list[Check] = []
        self._counts: list[torch.Tensor] = []

    @property
    def counts(self) -> torch.Tensor | None:
        """By how many elements each check fails, in one tensor; None without checks."""
        return torch.stack(self._counts) if self._counts else None

    def after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what a function has returned, of whose operand a check may be asked in parts."""
        if not isinstance(result, torch.Tensor) or kwargs or not args or not isinstance(args[0], torch.Tensor):
            return
        reduces, compares = name in _REDUCTIONS and len(args) == 1, name in _COMPARISONS and len(args) == 2
        if not result.ndim and (reduces or compares):
            self._made[id(result)] = result, name, args

    def answer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType) -> Any:
        """Return the answer to a function that asks for a value, which a check then proves; None without a proof."""
        condition = _condition(name, args, kwargs)
        if condition is None or torch_private.is_transformed(condition):
            return None
        if name == "item" and condition.dtype != torch.bool:
            inside = raises_of(frame, self._until, "number")
            return None if inside is None else args[0]
        found = raises_of(frame, self._until, "jump" if name == "__bool__" else "call")
        if found is None:
            return None
        self._note(condition, found.outcome, _check(found))
        return not found.outcome

    def asserts(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType | None) -> bool:
        """Note a check of ``torch._assert`` and its kind, which give nothing, and return whether it is one."""
        error = _ASSERTIONS.get(name)
        if error is None:
            return False
        condition, text = [*args, *kwargs.values(), _NOTHING_SAID][:2]
        if not isinstance(condition, torch.Tensor) or torch_private.is_transformed(condition):
            return False
        found = raises_of(frame, self._until, "call", error)
        if found is not None:
            self._note(condition, False, Check(f"builtins:{error.__name__}", f"{text}", found.source))
        return found is not None

    def _note(self, condition: torch.Tensor, outcome: bool, check: Check) -> None:
        with fx_traceback.annotate({sources.SOURCE: check.source, NO_GRADIENT: True}):
            count = self._count(condition.detach(), condition, outcome)
            self._counts.append(count.to(torch.int64).reshape(()))
        self.found.append(check)

    def _count(self, detached: torch.Tensor, condition: torch.Tensor, outcome: bool) -> torch.Tensor:
        """Return how often the outcome is there: of parts of a tensor the sums add up, and no rank needs the whole."""
        made, name, args = self._made.get(id(condition), (None, "", ()))
        if made is condition and (name, outcome) in (("all", False), ("any", True)):
            elements: torch.Tensor = args[0].detach()
            return (elements == 0).sum() if name == "all" else (elements != 0).sum()
        if made is condition and name in _COMPARISONS:
            reduced, reduction, of = self._made.get(id(args[0]), (None, "", ()))
            compare, by = _COMPARISONS[name]
            known = reduced is args[0] and outcome == by.get(reduction) and _is_number(args[1])
            # The largest of some numbers is not one where one of them is not, and is then not larger than any.
            if known and not (outcome and of[0].is_floating_point()):
                fails: torch.Tensor = compare(of[0].detach(), args[1])
                return fails.sum() if outcome else (~fails).sum()
        return (detached != 0) if outcome else (detached == 0)


_ASSERTIONS = {"_assert": AssertionError, "_assert_async": RuntimeError}
_NOTHING_SAID = "Expected Tensor with single nonzero value, but got zero"
_REDUCTIONS = ("all", "any", "max", "min", "amax", "amin")
# A comparison, and which of its outcomes for the largest or the smallest element is that of any element.
_COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], Any], Mapping[str, bool]]] = {
    "gt": (operator.gt, {"max": True, "amax": True, "min": False, "amin": False}),
    "ge": (operator.ge, {"max": True, "amax": True, "min": False, "amin": False}),
    "lt": (operator.lt, {"max": False, "amax": False, "min": True, "amin": True}),
    "le": (operator.le, {"max": False, "amax": False, "min": True, "amin": True}),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.ndim)


def _condition(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor whose truth a function asks for."""
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    first: torch.Tensor = args[0]
    if name in ("__bool__", "is_nonzero", "item") and first.numel() == 1:
        return first
    if name == "equal" and first.shape == args[1].shape:
        other: torch.Tensor = args[1]
        return torch.eq(first, other).all()
    if name == "allclose":
        return torch.isclose(*args, **kwargs).all()
    return None


def _check(found: Raises) -> Check:
    kind = found.error
    return Check(f"{kind.__module__}:{kind.__qualname__}", found.text, found.source)
