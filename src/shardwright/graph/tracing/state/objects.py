"""What a step reads inside objects that are no modules, as in ``self.config.scale``: each attribute by itself.

Whole objects cannot be compared, and most of what stands in one has nothing to do with a step. So the attributes of
those that a step can reach are watched while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from shardwright.graph.tracing.outside import (
    MISSING,
    NOT_PLAIN,
    Place,
    attributes,
    comparable,
    entries_of,
    in_slots,
    is_object,
    variables,
)

_MOST, _DEEPEST = 5_000, 8  # objects that are watched, and how far inside of each other


class ObjectReads:
    """Watches the objects that the attributes of ``traced``, closures and variables lead to."""

    def __init__(self, traced: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self.read: dict[Place, Any] = {}
        """Where what can be compared was read, and what it was then."""
        self._found: dict[int, tuple[Place, Any]] = {}
        for owner, module in traced.named_modules():
            for name, value in attributes(module):
                self._find(Place("attribute", owner, name), value)
        for place, value in variables(traced, loss_fn):
            self._find(place, value)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the loss function runs."""
        kinds = {type(value) for _, value in self._found.values() if is_object(value)}
        with ExitStack() as stack:
            for kind in kinds:
                try:
                    stack.enter_context(self._reads_of(kind))
                except TypeError:  # a class in C, as types.SimpleNamespace
                    self._take_all(kind)
            yield

    @contextmanager
    def _reads_of(self, kind: type) -> Iterator[None]:
        own, read = vars(kind).get("__getattribute__", MISSING), kind.__getattribute__

        def reading(value: Any, name: str) -> Any:
            got = read(value, name)  # type: ignore[call-arg]  # of the class, which takes the object first
            if not name.startswith("__"):
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

    def _take_all(self, kind: type) -> None:
        for _, value in list(self._found.values()):
            if type(value) is kind:
                for name, entry in entries_of(value) or ():
                    self._note(value, name, entry)

    def _note(self, value: Any, name: str, got: Any) -> None:
        """An attribute that stands in the object or its class was read, and no property, which reads others."""
        found = self._found.get(id(value))
        if found is None or found[1] is not value:
            return
        place = replace(found[0], path=f"{found[0].path}.{name}".lstrip("."))
        if place not in self.read and comparable(got) is not NOT_PLAIN and _stands(value, name, got):
            self.read[place] = comparable(got)

    def _find(self, place: Place, value: Any, depth: int = 0) -> None:
        if id(value) in self._found or isinstance(value, nn.Module) or len(self._found) >= _MOST or depth > _DEEPEST:
            return
        entries = entries_of(value)
        if entries is None:
            return
        self._found[id(value)] = place, value
        for name, entry in entries:
            if isinstance(name, (str, int)) and "." not in f"{name}":
                self._find(replace(place, path=f"{place.path}.{name}".lstrip(".")), entry, depth + 1)


def _stands(value: Any, name: str, got: Any) -> bool:
    for space in (getattr(value, "__dict__", {}), dict(in_slots(value))):
        if space.get(name, MISSING) is got:
            return True
    return any(vars(base).get(name, MISSING) is got for base in type(value).__mro__)
