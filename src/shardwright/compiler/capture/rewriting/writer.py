"""Writes a capture anew, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.common.signatures import schema_parameters
from shardwright.compiler.capture.ir import Capture, Names, Node, Value
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.row import named_arguments


class Writer:
    """Writes the nodes of a new capture; what replaces a node gives its result the same name."""

    def __init__(self, capture: Capture) -> None:
        self._old = capture
        self._nodes: list[Node] = []
        self._values = {name: value for name, value in capture.values.items() if value.kind != "result"}
        self._names = Names.of(capture)

    def keep(self, node: Node) -> None:
        self._nodes.append(node)
        self._values.update({name: self._old.values[name] for name in node.results})

    def value(self, name: str) -> Value:
        """A value that is written already."""
        return self._values[name]

    def replaced(self, node: Node) -> Value:
        """The result of a node that is not kept."""
        return self._old.values[node.results[0]]

    def fill(self, arg: Any, node: Node) -> Any:
        """An argument of ``node`` with `Value` where its tensors go."""
        if isinstance(arg, Operand):
            return self._values[node.operands[arg.index]]
        return tuple(self.fill(a, node) for a in arg) if isinstance(arg, tuple) else arg

    def arguments(self, node: Node) -> dict[str, Any]:
        """The arguments of a node by name, with `Value` where its tensors go."""
        named = named_arguments(node.op, node.args, dict(node.kwargs))
        return {name: self.fill(arg, node) for name, arg in named.items()}

    def emit(
        self,
        like: Node,
        op: str,
        args: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Value:
        """Write an operator at the place of ``like``; its arguments hold `Value` where the tensors go."""
        operands: list[Value] = []

        def operand(arg: Any) -> Any:
            if isinstance(arg, Value):
                operands.append(arg)
                return Operand(len(operands) - 1)
            return tuple(operand(a) for a in arg) if isinstance(arg, (tuple, list)) else arg

        placed = tuple(operand(arg) for arg in args)
        named = tuple((name, operand(arg)) for name, arg in (kwargs or {}).items())
        name = self._names.unused(op.split(".")[1])
        flows = dtype.is_floating_point and any(value.needs_gradient for value in operands)
        value = Value(name, "result", like.name, tuple(shape), dtype, flows)
        names = tuple(value.name for value in operands)
        pin = like.pin if names == like.operands else None
        self._nodes.append(Node(name, op, placed, named, names, (name,), like.scope, like.source, pin))
        self._values[name] = value
        return value

    def emit_again(self, node: Node, changed: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Write ``node`` with some of its arguments changed, by name."""
        names = [parameter.name for parameter in schema_parameters(node.op)]
        defaults = [parameter.default for parameter in schema_parameters(node.op)]
        last = max(names.index(name) for name in changed)
        args = [self.fill(arg, node) for arg in node.args]
        args += defaults[len(args) : last + 1]
        for name, arg in changed.items():
            args[names.index(name)] = arg
        kwargs = {name: self.fill(arg, node) for name, arg in node.kwargs if name not in changed}
        return self.emit(node, node.op, args, shape, dtype, kwargs)

    def name_last(self, node: Node) -> None:
        """Give what was written last the name and the result of ``node``, which it replaces."""
        last = self._nodes[-1]
        del self._values[last.results[0]]
        self._nodes[-1] = replace(last, name=node.name, results=node.results)
        self._values[node.results[0]] = self._old.values[node.results[0]]

    def capture(self) -> Capture:
        return replace(self._old, nodes=tuple(self._nodes), values=self._values)
