"""Checks each captured graph after each rewrite."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.rules.notation import Operand
from shardwright.errors import CaptureError


def check(capture: Capture) -> Capture:
    """Return the capture, if it is well formed: operands are defined before their use, and everything once.

    Raises:
        CaptureError: where it is not, which is a defect of a rewrite; names the operator.
    """
    defined = {value.name for value in capture.values.values() if value.kind != "result"}
    names: set[str] = set()
    for node in capture.nodes:
        _check_node(node, capture, defined)
        if node.name in names:
            raise CaptureError(f"two operators are called {node.name}")
        names.add(node.name)
        defined.update(node.results)
    given = [capture.loss] if capture.loss else []
    for name in (*given, *capture.aux, *capture.mutations.values()):
        if name not in defined:
            raise CaptureError(f"the output {name} is made by no operator")
    for name in capture.values:
        if name not in defined:
            raise CaptureError(f"the value {name} is made by no operator")
    for name in capture.mutations:
        if name not in capture.values or capture.values[name].kind != "buffer":
            raise CaptureError(f"{name} is changed, and is not a buffer")
    return capture


def _check_node(node: Node, capture: Capture, defined: set[str]) -> None:
    where = f"{node.name} = {node.op}"
    for name in node.operands:
        if name not in defined:
            raise CaptureError(f"{where} reads {name} before it is made")
    for name in node.results:
        if name in defined:
            raise CaptureError(f"{where} makes {name} a second time")
        if name not in capture.values or capture.values[name].kind != "result":
            raise CaptureError(f"{where} makes {name}, which is not a result of the graph")
    indices = list(_indices((node.args, tuple(value for _, value in node.kwargs))))
    if indices != list(range(len(node.operands))):
        raise CaptureError(f"{where} has {len(node.operands)} operands, and its arguments name {indices}")
    if node.pin is not None and (len(node.pin.operands), len(node.pin.results)) != (
        len(node.operands),
        len(node.results),
    ):
        raise CaptureError(f"{where} is pinned with another number of tensors: {node.pin}")


def _indices(arg: Any) -> list[int]:
    if isinstance(arg, Operand):
        return [arg.index]
    return [index for item in arg for index in _indices(item)] if isinstance(arg, tuple) else []
