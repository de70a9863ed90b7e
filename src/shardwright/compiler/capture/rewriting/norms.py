"""Root mean square norms that a model spells out become torch's `rms_norm`, which GPUs compute by one kernel.

Only where the numbers are those of `rms_norm` to their rounding: the normalised numbers are multiplied by the weight as
they are. A model in half precision, as those of transformers, rounds them to it before, and is left as it is; under
autocast the same models norm float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Node, Value, without_unused
from shardwright.compiler.capture.rewriting.makers import Makers
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.row import named_arguments
from shardwright.compiler.rules.table import Column, column

Part = Literal["power", "mean", "sum", "root", "product"]
# The operators of which a norm consists: x * rsqrt(mean(x ** 2) + eps) * weight.
_PART: Column[Part] = column(
    ("pow", "power"),
    ("mean", "mean"),
    ("add", "sum"),
    ("rsqrt", "root"),
    ("mul", "product"),
)


def with_rms_norms(capture: Capture) -> Capture:
    """Return the capture in which norms that are spelled out are one operator each."""
    spelled, writer = _Spelled(capture), Writer(capture)
    for node in capture.nodes:
        norm = spelled.norm(node)
        if norm is None:
            writer.keep(node)
            continue
        x, weight = writer.value(norm.x.name), writer.value(norm.weight.name)
        writer.emit(node, "aten.rms_norm.default", (x, weight.shape, weight, norm.eps), x.shape, x.dtype)
        writer.name_last(node)
    return check(without_unused(writer.capture()))


@dataclass(frozen=True)
class _Norm:
    x: Value
    weight: Value
    eps: float


class _Spelled:
    """The norms of a graph, each by the operator that makes its result."""

    def __init__(self, capture: Capture) -> None:
        self._values, self._makers = capture.values, Makers(capture)

    def norm(self, node: Node) -> _Norm | None:
        """Return the norm whose last product a node is, None where it is none."""
        if node.pin is not None or _PART.of(node.op) != "product" or len(node.operands) != 2:
            return None
        for name, other in (node.operands, node.operands[::-1]):
            weight, product = self._values[name], self._inner(other, "product")
            if product is None or len(product.operands) != 2:
                continue
            for x_name, root in (product.operands, product.operands[::-1]):
                x, eps = self._values[x_name], self._eps(x_name, root)
                if eps is not None and weight.shape == x.shape[-1:] and _is_wide(x, weight):
                    return _Norm(x, weight, eps)
        return None

    def _eps(self, x: str, root: str) -> float | None:
        """Return what is added to the mean of the squares of ``x``, of which ``root`` is one over the root."""
        inverse = self._inner(root, "root")
        total = inverse and self._inner(inverse.operands[0], "sum")
        mean = total and self._inner(total.operands[0], "mean")
        power = mean and self._inner(mean.operands[0], "power")
        if power is None or mean is None or total is None or power.operands[0] != x:
            return None
        added, averaged, squared = (_arguments(each) for each in (total, mean, power))
        last = tuple(averaged.get("dim") or ()) in ((-1,), (len(self._values[x].shape) - 1,))
        if not last or not averaged["keepdim"] or averaged["dtype"] or squared["exponent"] != 2:
            return None
        eps = added["other"]
        return eps if isinstance(eps, float) and added["alpha"] == 1 else None

    def _inner(self, name: str, part: Part) -> Node | None:
        """Return the operator of a kind that makes a value which one operator alone reads."""
        maker = self._makers.for_one_reader(name)
        return maker if maker is not None and _PART.of(maker.op) == part else None


def _arguments(node: Node) -> dict[str, Any]:
    return named_arguments(node.op, node.args, dict(node.kwargs))


def _is_wide(*values: Value) -> bool:
    """Return whether values have one dtype, which is not of half precision."""
    return {value.dtype for value in values} in ({torch.float32}, {torch.float64})
