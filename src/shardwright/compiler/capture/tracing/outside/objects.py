"""The attributes that a step reads of objects that are no modules, as in ``self.config.scale``, one by one.

Whole objects cannot be compared, and most of what stands in one has nothing to do with a step. So the attributes of
those that a step can reach are watched while it is captured. What functions of installed packages read of them is left
out: trainers and loggers count steps and keep time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any

from torch import nn

from shardwright.compiler.capture.tracing import sources
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.code import StepCode
from shardwright.compiler.capture.tracing.outside.entries import attributes, entries_of, in_slots, is_object
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.values import MISSING, NOT_PLAIN, comparable

_MOST, _DEEPEST = 5_000, 8  # objects that are watched, and how far inside of each other


class ObjectReads:
    """Watches the objects that the attributes of ``traced``, closures and variables lead to."""

    def __init__(self, traced: nn.Module, step: StepCode) -> None:
        self.read: dict[Place, Any] = {}
        """The values that were read and can be compared, by their places."""
        self._found: dict[int, tuple[Place, Any]] = {}
        self._own: dict[CodeType, bool] = {}
        self._names = step.names
        for owner, module in traced.named_modules():
            for name, value in attributes(module):
                self._find(Place("attribute", owner, name), value)
        for place, value in step.variables():
            self._find(place, value)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the loss function runs."""
        thread = threading.get_ident()  # what others read is not of the step
        kinds = {type(value) for _, value in self._found.values() if is_object(value)}
        with ExitStack() as stack:
            for kind in kinds:
                try:
                    stack.enter_context(self._reads_of(kind, thread))
                except Exception:  # a class in C, as types.SimpleNamespace, or one that does not let itself be changed
                    self._take_all(kind)
            yield
        self._found.clear()

    @contextmanager
    def _reads_of(self, kind: type, thread: int) -> Iterator[None]:
        own, read = vars(kind).get("__getattribute__", MISSING), kind.__getattribute__

        def reading(value: Any, name: str) -> Any:
            got = read(value, name)  # type: ignore[call-arg]  # of the class, which takes the object first
            own_thread = not name.startswith("__") and threading.get_ident() == thread
            if own_thread and self._is_own(sys._getframe(1).f_code):
                self._note(value, name, got)
            return got

        kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            if own is MISSING:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own  # type: ignore[method-assign]

    def _is_own(self, code: CodeType) -> bool:
        """Return whether this is code of the user's own."""
        if code not in self._own:
            self._own[code] = sources.is_users(code.co_filename) and not sources.package_of(code.co_filename)
        return self._own[code]

    def _take_all(self, kind: type) -> None:
        """Note what functions of the step name: of such a class it cannot be told what is read."""
        for _, value in list(self._found.values()):
            if type(value) is kind:
                for name, entry in entries_of(value) or ():
                    if name in self._names:
                        self._note(value, name, entry)

    def _note(self, value: Any, name: str, got: Any) -> None:
        """An attribute was read that stands in the object or its class, or is made up; a property reads others."""
        found = self._found.get(id(value))
        if found is None or found[1] is not value:
            return
        place = replace(found[0], path=f"{found[0].path}.{name}".lstrip("."))
        if place not in self.read and comparable(got) is not NOT_PLAIN and _stands(value, name, got):
            self.read[place] = comparable(got)

    def _find(self, place: Place, value: Any, depth: int = 0) -> None:
        if id(value) in self._found or safe.is_a(value, nn.Module) or len(self._found) >= _MOST or depth > _DEEPEST:
            return
        entries = entries_of(value)
        if entries is None:
            return
        self._found[id(value)] = place, value
        for name, entry in entries:
            if type(name) in (str, int) and "." not in f"{name}":
                self._find(replace(place, path=f"{place.path}.{name}".lstrip(".")), entry, depth + 1)


def _stands(value: Any, name: str, got: Any) -> bool:
    for space in (safe.variables(value), dict(in_slots(value))):
        if space.get(name, MISSING) is got:
            return True
    of_class = [vars(base)[name] for base in type(value).__mro__ if name in vars(base)]
    return not of_class or of_class[0] is got
