"""The measure of a verification: two states of a model side by side, and the largest deviation of each kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.compiler.mesh.dtensor import gathered
from shardwright.runtime.verification.result import Deviation

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
# Of float32 parameters, in units of lr · steps, over entries whose gradient exceeded this part of the model's largest.
PARAMETER_TOLERANCE, GRADIENT_FLOOR = 1e-3, 1e-5
KINDS = ("loss", "gradients", "buffers", "parameters")
ONE_DEVICE, PLAIN = "one device", "plain PyTorch"

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """The state after a step, whole tensors by name; they hold until the next step."""

    loss: Tensors
    gradients: Tensors
    buffers: Tensors
    parameters: Tensors


def gradients_of(module: nn.Module) -> Tensors:
    """The gradients of all parameters, whole; without one is with one of zero, except to the optimizer."""
    named = module.named_parameters()
    return {name: gathered(p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in named}


def parameters_of(module: nn.Module) -> Tensors:
    """All parameters, whole."""
    return {name: gathered(parameter) for name, parameter in module.named_parameters()}


class Comparison:
    """The largest deviations from one reference so far, by kind."""

    def __init__(self, dtype: str, reference: str, lr: float, rank: int) -> None:
        self.dtype, self.reference, self.lr, self.rank = dtype, reference, lr, rank
        self.worst: dict[str, Deviation] = {}

    def add(self, step: int, got: State, expected: State, noise: Tensors) -> None:
        for kind in KINDS:
            noisy = kind == "parameters" and self.dtype == "float32"
            tolerance = PARAMETER_TOLERANCE * self.lr * step if noisy else TOLERANCES[self.dtype]
            pair = getattr(got, kind), getattr(expected, kind)
            deviation = self._deviation(kind, step, tolerance, *pair, noise if noisy else {})
            before = self.worst.get(kind)
            if before is None or deviation.largest / tolerance >= before.largest / before.tolerance:
                self.worst[kind] = deviation

    def _deviation(
        self, kind: str, step: int, tolerance: float, got: Tensors, expected: Tensors, noise: Tensors
    ) -> Deviation:
        largest, scale = 0.0, largest_of(expected)
        at: tuple[str, tuple[int, ...], float, float] = ("", (), 0.0, 0.0)
        for name, theirs in expected.items():
            difference = difference_of(got[name], theirs)
            if name in noise:
                difference = difference.where(~noise[name], 0)
            if difference.numel() and float(difference.max()) > largest:
                largest = float(difference.max())
                index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
                at = (name, index, _number(got[name][index]), _number(theirs[index]))
        if kind == "loss" and not math.isfinite(float(expected["loss"])):
            largest, at = math.inf, ("loss", (), float(got["loss"]), float(expected["loss"]))
        name, index, ours, reference = at
        return Deviation(
            self.dtype, self.reference, kind, largest / scale if scale else math.inf * largest if largest else 0.0,
            tolerance, name, step, index, self.rank, ours, reference,
            entries=sum(t.numel() for t in expected.values()),
            skipped=sum(int(mask.sum()) for mask in noise.values()),
        )  # fmt: skip


def _number(entry: Tensor) -> float:
    return float(entry.abs() if entry.is_complex() else entry)


def largest_of(tensors: Tensors) -> float:
    """The largest finite entry; masks of attention hold infinite ones."""
    finite = [t[t.isfinite()].abs() for t in tensors.values()]
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def difference_of(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| of every entry in double precision; 0 where both are the same, infinite ones and NaN included."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).where(~same, 0.0)
