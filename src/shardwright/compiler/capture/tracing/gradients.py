"""Loss functions that take gradients themselves: what autograd does in them becomes operators of the graph.

The exporter records operators above autograd, where those of a backward are not seen as made from the forward's. Such
a step is therefore traced beneath autograd first, with the operators of every backward in it, and what is exported is
that trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from shardwright.common import signatures, torch_private, trees

_DETACH = "shardwright_detach"  # the annotation of operators that detach, by their number


class GradientTaken(Exception):
    """The step takes a gradient, so that it must be traced beneath autograd."""


class Replayed(nn.Module):
    """The trace of a step, as a module that is exported in its place. ``step`` has ``model`` as its submodule."""

    def __init__(self, step: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.model = step.model
        self._traced = [_traced(step, tensors)]  # in a list: it is no submodule, whose tensors would count

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        [traced] = self._traced
        given = iter((*self.model.parameters(), *self.model.buffers(), *tensors))
        values: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(traced, str(node.target))
            elif node.op == "output":
                return list(fx.node.map_arg(node.args[0], lambda n: values[n]))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                with fx_traceback.annotate(node.meta.get("custom") or {}), _gradients_of(node):
                    values[node] = node.target(*args, **kwargs)
        raise AssertionError("a graph ends with its output")


def _gradients_of(node: fx.Node) -> AbstractContextManager[object]:
    """Return the mode of gradients in which an operator is called again.

    One that writes into a tensor that it is given, by ``out=``, is called without gradients, as autograd refuses it
    otherwise.
    """
    return torch.no_grad() if signatures.writes_out(node.target) else nullcontext()


def _traced(step: Any, tensors: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The operators of a step and of the backwards in it, as a function of parameters, buffers and ``tensors``."""
    detached: dict[int, tuple[torch.Tensor, int]] = {}  # held, so that no other takes its place
    kept: set[int] = set()

    def noting(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in trees.tree_leaves((args, kwargs)):
            _, number = detached.get(id(tensor), (None, -1))
            # Autograd keeps results detached, and gives them back their place in its graph where it uses them.
            if number >= 0 and tensor.grad_fn is not None:
                kept.add(number)
        if operator is not torch.ops.aten.detach.default:
            return operator(*args, **kwargs)
        number = len(detached)
        with fx_traceback.annotate({_DETACH: number}):
            result = operator(*args, **kwargs)
        detached[id(result)] = result, number
        return result

    def run(parameters: list[torch.Tensor], buffers: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        with torch_private.OperatorMode(noting):
            return step(*tensors)

    with torch.enable_grad():
        given = list(step.model.parameters()), list(step.model.buffers()), list(tensors)
        traced = torch_private.traced(run, *given, above_autograd=False)
    for node in traced.graph.nodes:
        if (node.meta.get("custom") or {}).get(_DETACH) in kept:
            node.replace_all_uses_with(_before_detached(node))
    return traced


def _before_detached(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten.detach.default:
        [node] = node.all_input_nodes
    return node
