"""Decides which values of a graph the backward of the loss comes to: no others have a gradient, nor a place in it.

A parameter that requires a gradient may lead to the loss only through what has none, as under ``no_grad``. Plain
PyTorch leaves its ``.grad`` at None. What is decided here is the same on all ranks, whatever parts they hold.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Names, Node, Value
from shardwright.compiler.rules.notation import Operand


def with_gradients_of_loss(capture: Capture) -> Capture:
    """Return the capture in which those values alone need a gradient that the backward of the loss comes to.

    An operator that it does not come to takes its operands detached, so that autograd knows as much at run time.
    """
    flowing = frozenset(name for name, value in capture.values.items() if value.needs_gradient)
    reached, known = _reached(capture, flowing)
    values = {
        name: replace(value, needs_gradient=False) if name in flowing - reached else value
        for name, value in capture.values.items()
    }
    nodes = _Detaching(capture, flowing, reached, known, values).nodes()
    return check(replace(capture, values=values, nodes=nodes, aux_with_gradient=flowing.intersection(capture.aux)))


def _reached(capture: Capture, flowing: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the values that the backward comes to, and all that autograd takes for such.

    It makes no difference between the results of one operator.
    """
    reached, known = {capture.loss} & flowing, set[str]()
    for node in reversed(capture.nodes):
        if not reached.isdisjoint(node.results):
            known.update(flowing.intersection(node.results))
            reached.update(flowing.intersection(node.operands))
    return frozenset(reached), frozenset(known | reached)


class _Detaching:
    """Writes the nodes of a capture once more, and adds to ``values`` what they make."""

    def __init__(
        self,
        capture: Capture,
        flowing: frozenset[str],
        reached: frozenset[str],
        known: frozenset[str],
        values: dict[str, Value],
    ) -> None:
        self._capture, self._flowing, self._reached, self._known = capture, flowing, reached, known
        self._values = values
        self._names = Names.of(capture)
        self._detached: dict[str, str] = {}
        self._nodes: list[Node] = []

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes, with a detach before each operator that would take something the backward comes to."""
        for node in self._capture.nodes:
            aside = not self._flowing.isdisjoint(node.results) and self._reached.isdisjoint(node.results)
            operands = tuple(self._detach(name, node) if aside else name for name in node.operands)
            self._nodes.append(replace(node, operands=operands))
        return tuple(self._nodes)

    def _detach(self, name: str, node: Node) -> str:
        if name not in self._known:
            return name
        if name not in self._detached:
            made = self._detached[name] = self._names.unused("detach")
            self._values[made] = replace(self._values[name], name=made, kind="result", label=made, needs_gradient=False)
            self._nodes.append(
                Node(made, "aten.detach.default", (Operand(0),), (), (name,), (made,), node.scope, node.source)
            )
        return self._detached[name]
