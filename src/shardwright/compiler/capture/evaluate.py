"""Run a captured graph as it is, whole and on one device: the reference for what is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.operators import attention_by, resolve, takes_device
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.register import is_function


def evaluate(
    capture: Capture,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Every value of the graph, by name; autograd sees it as it would see the model.

    ``parameters`` and ``buffers`` go by their labels, the first ones of those that are tied; ``inputs`` stand in the
    order of `flatten_batch`. What the graph writes to buffers is returned, not written.
    """
    values = dict(capture.constants)
    for value in capture.of_kind("parameter"):
        values[value.name] = parameters[value.label]
    for value in capture.of_kind("buffer"):
        values[value.name] = buffers[value.label]
    for value, tensor in zip(capture.of_kind("input"), inputs, strict=True):
        values[value.name] = tensor
    device = next(iter(values.values())).device if values else torch.device("cpu")
    values.update({name: tensor.to(device) for name, tensor in capture.constants.items()})
    for node in capture.nodes:
        results = call(node, [values[name] for name in node.operands], device)
        values.update(zip(node.results, results, strict=True))
    return values


def call(node: Node, operands: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The results of one node for these operands."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, Operand):
            return operands[arg.index]
        return [fill(a) for a in arg] if isinstance(arg, tuple) and not is_function(node.op) else arg

    kwargs = {name: fill(arg) for name, arg in node.kwargs}
    if takes_device(node.op):
        kwargs["device"] = device
    with attention_by(kwargs.pop("backends", None)):
        output = resolve(node.op)(*(fill(arg) for arg in node.args), **kwargs)
    if isinstance(output, (tuple, list)):
        return [tensor for tensor in output if isinstance(tensor, torch.Tensor)]
    return [output]
