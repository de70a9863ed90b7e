"""The measure of a verification: the largest deviations between two states of a model, by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.compiler.mesh.dtensor import gathered
from shardwright.compiler.plan.plan import Plan

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
    """Return the parameters of a module by name, each as a whole tensor."""
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


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of one kind from one reference, and where it is: tensor, step, index and rank.

    ``got`` and ``expected`` are the entries there; ``skipped`` of ``entries`` are not compared (float32 parameters).
    """

    dtype: str
    reference: str
    kind: str
    largest: float
    tolerance: float
    name: str
    step: int
    index: tuple[int, ...]
    rank: int
    got: float
    expected: float
    entries: int
    skipped: int

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def where(self) -> str:
        at = str(list(self.index)) if self.index else ""
        return f"{self.name}{at}, step {self.step}" if self.largest else ""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. ``ok`` says whether every deviation is within its tolerance; it prints as a table.

    ``how`` says what was run: so many steps of AdamW, or a loop of the user's.
    """

    plan: Plan
    how: str
    deviations: tuple[Deviation, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(deviation.ok for deviation in self.deviations)

    def __str__(self) -> str:
        plan = self.plan
        rows = [("dtype", "against", "what", "largest", "tolerance", "", "where")]
        for d in self.deviations:
            verdict = "ok" if d.ok else "BEYOND"
            numbers = f"{d.largest:.1e}", f"{d.tolerance:.0e}"
            rows.append((d.dtype, d.reference, d.kind, *numbers, verdict, d.where))
        lines = [
            f"{self.how} on {counted(plan.devices.size, 'rank')}: "
            f"mode {plan.mode}, search {plan.search}, mesh {plan.shown_mesh}",
            "",
            _table(rows),
            "",
            *self.notes,
            *(_accusation(d) for d in self.deviations if not d.ok),
            "within tolerance: the plan gives what one device gives" if self.ok else "BEYOND TOLERANCE",
        ]
        return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, which is in the plural unless the number is 1."""
    return f"{number} {noun}" + "s" * (number != 1)


def _accusation(d: Deviation) -> str:
    return (
        f"{d.dtype} {d.kind}: {d.name}{list(d.index) if d.index else ''} is {d.got:.9g} on rank {d.rank} "
        f"in step {d.step}, {d.reference} has {d.expected:.9g}"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
