"""The attributes of modules that a step reads and sets, in order, with their lines."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside.entries import is_object
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.safe import is_a
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, PLAIN, comparable
from shardwright.compiler.capture.tracing.sources import callers_line

Name = tuple[str, str]
"""The path of a module, and an attribute of it."""


class Seen:
    """Watches one capture. Lines are as `callers_line` gives them."""

    def __init__(self) -> None:
        self.plain: dict[Place, None] = {}  # where plain values were read, or nothing
        self.objects: dict[Place, None] = {}  # where objects were read that cannot be compared, and are no collections
        self.read: dict[Name, str] = {}  # what a step may change, or nothing, before the step set it
        self.set: dict[Name, str] = {}
        self.read_plain: set[Name] = set()  # all other values that were read before the step set them
        self.read_then: set[Name] = set()  # once it was set

    def reads(self, name: Name, value: Any) -> None:
        """An attribute is read, and is ``value``."""
        if comparable(value) is not NOT_PLAIN:
            self.plain.setdefault(Place("attribute", *name))
        elif is_object(value):
            self.objects.setdefault(Place("attribute", *name))
        if name in self.set:
            self.read_then.add(name)
        elif name not in self.read and (value is None or not (is_a(value, PLAIN) or callable(value))):
            self.read[name] = callers_line()
        else:
            self.read_plain.add(name)

    def misses(self, module: nn.Module, name: Name) -> None:
        """An attribute is read that a module does not have; parameters, buffers and modules are none either."""
        registered = (*torch_private.members(module), torch_private.buffers_in(module))
        if any(known.get(name[1]) is not None for known in registered):
            self.read_then.add(name)
            return
        if name not in self.set:
            self.read.setdefault(name, callers_line())
        finds_more = type(module).__getattr__ is not nn.Module.__getattr__  # as wrappers do, in the module they wrap
        if not finds_more and not any(name[1] in known for known in registered):
            self.plain.setdefault(Place("attribute", *name))

    def sets(self, name: Name) -> None:
        """An attribute is set to another object."""
        self.set.setdefault(name, callers_line())
