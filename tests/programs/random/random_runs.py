"""Holds a random program against plain PyTorch under a plan on simulated ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_programs import Draft, Program, built, surroundings
from torch import Tensor

from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import CaptureError, PlanError, UsageError
from whole import run, splitting_hardware

Found = Mapping[str, Tensor | None]
EXACT, SINGLE, HALF = 1e-10, 2.0**-23, 2.0**-8  # single: of sums, whose parts are rounded as `float` does
DRAWS = 8  # of noise under autocast: where numbers nearly tie, as in a maximum, only some of them show it
MODES: Mapping[str, Mapping[str, Any]] = {
    "data": {"mode": "data"},
    "auto": {"mode": "auto"},
    "split": {"mode": "auto", "hardware": splitting_hardware()},
    "propagation": {"mode": "auto", "search": "propagation"},
    "recomputed": {"mode": "data", "recompute": ("*",)},
    "sharded": {"mode": "data"},
    "sharded, recomputed": {"mode": "data", "recompute": ("*",)},
    "stages": {"mode": "data", "microbatches": 3},
    "stages, recomputed": {"mode": "data", "microbatches": 2, "recompute": ("*",)},
}


@dataclass(frozen=True)
class Case:
    """How a program is split: a mode of `MODES` on so many ranks, or "single"."""

    mode: str
    ranks: int = 1

    def request(self) -> PlanRequest:
        if self.mode == "single":
            return PlanRequest(Mesh(()), "single")
        if self.mode.startswith("stages"):  # of one rank, or of two
            mesh = Mesh.of(pp=2, d=2) if self.ranks == 4 else Mesh.of(pp=self.ranks)
            return PlanRequest(mesh, **MODES[self.mode])
        return PlanRequest(Mesh.of(d=self.ranks), **MODES[self.mode])

    def plan(self, captured: Capture) -> Plan:
        """Return the plan of a graph, in which "sharded" parameters are gathered, and gathered anew, where they are."""
        plan = make_plan(captured, self.request())
        if not self.mode.startswith("sharded"):
            return plan
        again = [value.name for value in captured.values.values() if value.of_parameter][::2]
        return fully_sharded(plan.graph, self.request()).computing_again(plan.recomputed, frozenset(again))


CASES = [Case("single"), *(Case(mode, ranks) for ranks in (2, 3, 4) for mode in MODES)]


class Unlike(AssertionError):
    """A number that is not plain PyTorch's."""


def plain(made: Any, noise: float = 0.0, seed: int = 7) -> Found:
    """Return what plain PyTorch gives: loss, gradients, outputs and buffers, from values that are off by noise."""
    model, loss_fn, batch = copy.deepcopy(made)
    generator = torch.Generator().manual_seed(seed)
    floats = [t for t in (*model.parameters(), *batch) if t.is_floating_point()]
    if noise:
        with torch.no_grad():
            for t in floats:
                t.mul_(1 + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype))
    result = loss_fn(model, batch)
    loss, aux = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return found | {f"aux {name}": t.detach() for name, t in aux.items() if isinstance(t, Tensor)}


def apart(ours: Found, theirs: Found) -> tuple[float, str]:
    """Return the largest deviation, against the largest entry of what is of its kind, and where it is."""
    largest: dict[str, float] = {}
    for name, tensor in theirs.items():
        if tensor is not None and tensor.numel():
            kind = name.split(" ")[0]
            largest[kind] = max(largest.get(kind, 1e-5), float(tensor.detach().abs().max()))
    worst = 0.0, ""
    for name, tensor in theirs.items():
        mine = ours.get(name)
        if tensor is None or mine is None:
            if (tensor is None) != (mine is None):
                return float("inf"), f"{name} is {_there(mine)}, plain PyTorch's is {_there(tensor)}"
        elif mine.shape != tensor.shape:
            return float("inf"), f"{name} has the shape {[*mine.shape]}, plain PyTorch's {[*tensor.shape]}"
        elif tensor.numel():
            deviation = float((mine.double() - tensor.double()).abs().max()) / largest[name.split(" ")[0]]
            worst = max(worst, (deviation if deviation == deviation else float("inf"), name))
    return worst


def _there(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"


@dataclass
class Held:
    """A program that plain PyTorch runs and whose numbers mean something, with what plain PyTorch gives."""

    program: Program
    expected: Found
    tolerance: float
    captured: Capture | None = None

    def capture(self) -> Capture:
        """Return the graph, captured once. Raises as `captured_step` does."""
        if self.captured is None:
            with surroundings(self.program.draft):
                self.captured = captured_step(*self.program.made(), {})
        return self.captured

    def hold(self, case: Case) -> None:
        """Raise `Unlike` where a plan gives other numbers than plain PyTorch."""
        captured = self.capture()
        with surroundings(self.program.draft):
            model, _, batch = self.program.made()
            with torch.autocast("cpu", enabled=False):
                try:
                    plan = case.plan(captured)
                except UsageError as error:
                    if "which no module matches" in str(error):
                        return  # nothing to recompute
                    raise
                found = run(plan, model, batch)
        ours = {"aux seen" if name.startswith("aux ") else name: tensor for name, tensor in found.items()}
        kept = {f"buffer {name}": b for name, b in model.named_buffers()}  # those that no step changes
        deviation, where = apart(kept | ours, self.expected)
        if deviation > self.tolerance:
            raise Unlike(f"{where}, off by {deviation:.3g}" if deviation < float("inf") else where)


def reference(draft: Draft) -> Held | None:
    """Return the program of a draft; None where plain PyTorch cannot run it, or rounding decides about its numbers."""
    with surroundings(draft):
        while (program := built(draft)) is not None:
            made = program.made()
            try:
                expected = plain(made)
                noise, draws = (HALF, DRAWS) if draft.autocast else (1e-12, 3)
                moved = max(apart(plain(made, noise, seed), expected)[0] for seed in range(7, 7 + draws))
                with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
                    kept = plain(made)
            except Exception:
                if (draft := without_last_write(draft)) is None:
                    return None
                continue
            break
        else:
            return None
    if not all(
        t is None or (t.isfinite().all() and t.abs().max() < 1e4) for t in expected.values() if t is None or t.numel()
    ):
        return None
    if all(tensor is None for name, tensor in expected.items() if name.startswith("gradient")):
        return None
    if apart(kept, expected)[0] > 1e-6:
        return None  # torch's own gradient is wrong: `kron` does not see that its operand is changed meanwhile
    if moved > (0.1 if draft.autocast else 1e-9):
        return None
    exact = 4 * SINGLE if ".float()" in program.source else EXACT
    return Held(program, expected, max(4 * HALF, 6 * moved) if draft.autocast else exact)


def without_last_write(draft: Draft) -> Draft | None:
    """Return the draft without its last write in place, which a backward may refuse; None where there is none."""
    writes = [at for at, step in enumerate(draft.steps) if step.kind == "in place"]
    return replace(draft, steps=draft.steps[: writes[-1]] + draft.steps[writes[-1] + 1 :]) if writes else None


def refused(error: Exception) -> bool:
    """Return whether an error refuses clearly: of a class that does, and in words that tell what to write."""
    remedies = "by an out-of-place one", "Consider cloning the tensor before mutating it"  # in torch's own words
    raw = str(error).startswith("the model cannot be captured") and not any(said in str(error) for said in remedies)
    no_stages = isinstance(error, PlanError) and re.search("microbatches|are no . stages|not there yet", str(error))
    return bool(no_stages) or (isinstance(error, CaptureError | UsageError) and not raw)


@dataclass(frozen=True)
class Verdict:
    """What came of a draft: "held", "refused", "of no use", or the kind of what was found, with the case it was in."""

    kind: str
    case: Case | None = None
    error: Exception | None = None

    def __bool__(self) -> bool:
        """Whether something was found."""
        return self.kind not in ("held", "refused", "of no use")


def _kind_of(error: Exception) -> str:
    """Return what is alike in what is said of programs of one kind."""
    first, *others = str(error).split("\n")
    said = first if first.endswith(":") else " ".join([first, *others[:1]])
    said = re.sub(r", at <random .*|(gradient of|buffer) \S+|-?\d[\d.]*(e-?\d+)?|%\w+", "_", said)
    return f"{type(error).__name__}: {said[:140]}"


def verdict(draft: Draft, cases: Sequence[Case]) -> Verdict:
    """Return what comes of a draft under one plan after the other, until something does."""
    held = reference(draft)
    if held is None:
        return Verdict("of no use")
    for case in cases:
        try:
            held.hold(case)
        except Exception as error:
            if case.mode.startswith("stages") and refused(error):
                continue  # what goes through no stages goes with other plans
            return Verdict("refused" if refused(error) else _kind_of(error), case, error)
    return Verdict("held")


def smallest(draft: Draft, found: Verdict) -> Draft:
    """Return the draft with as few steps as still show what was found."""
    assert found.case is not None

    def kept(other: Draft) -> Draft:
        return other if verdict(other, [found.case]).kind == found.kind else draft

    for plainer in ({"aux": False}, {"autocast": False}, {"endings": (0, 0, 0)}):
        draft = kept(replace(draft, **plainer))
    for at in reversed(range(len(draft.steps))):
        draft = kept(replace(draft, steps=draft.steps[:at] + draft.steps[at + 1 :]))
    for at, step in enumerate(draft.steps):
        if step.around:
            draft = kept(replace(draft, steps=(*draft.steps[:at], replace(step, around=""), *draft.steps[at + 1 :])))
    return draft


def told(draft: Draft, found: Verdict) -> str:
    """Return what was found and the smallest program that shows it, as a person can run it."""
    program = reference(small := smallest(draft, found))
    assert program is not None
    assert found.case is not None
    found = verdict(small, [found.case])  # of the same kind, with other names
    return f"{found.case}: {type(found.error).__name__}: {found.error}\n{program.program}"
