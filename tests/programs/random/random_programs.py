"""Random programs: a model of a chain of operators and a loss function, as Python source that is made while it runs.

Each step of a draft names an operator and picks its operands among the values that there are. A step whose line plain
PyTorch refuses picks others, and is left out where none serve, so that nearly every draft becomes a program.
"""

from __future__ import annotations

import linecache
import math
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from random_operators import KINDS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LARGEST, MOST_DIMS, TRIES = 400, 4, 6
MODEL = """
self.w = nn.Parameter(torch.randn(4, 4))
self.v = nn.Parameter(torch.randn(4))
self.e = nn.Parameter(torch.randn(3, 4))
self.register_buffer("k", torch.randn(4, 4))
self.register_buffer("r", torch.ones(4))
""".strip().splitlines()
GIVEN = ["self.r", "self.k", "self.e", "self.v", "self.w", "s", "x"]
ENDINGS = """
{t1}.square().mean()
0.1 * {t1}.tanh().sum()
{t1}.flatten().logsumexp(0)
F.smooth_l1_loss({t1}, torch.zeros_like({t1}))
F.cross_entropy({m1}, y)
F.mse_loss({t1}, {t1}.detach() * 0.5)
F.cross_entropy({m1} @ {m1}.T, torch.arange(len({m1})))
{t1}.abs().amax()
({t1} - {t1}.mean(0)).square().sum() / len(x)
F.nll_loss({m1}.log_softmax(1), y, ignore_index=1, reduction="sum") * 0.1
""".strip().splitlines()
INPUTS, OUTPUTS = ("x", "s", "y"), ("a", "b", "c")


@dataclass(frozen=True)
class Step:
    """An operator, what it picks as operands, and what surrounds it: "no_grad", "checkpoint", or nothing."""

    kind: str
    template: str
    picks: tuple[int, ...]
    around: str = ""


@dataclass(frozen=True)
class Draft:
    """What is drawn of a program: ``autocast`` computes in bfloat16 where plain autocast does."""

    steps: tuple[Step, ...]
    endings: tuple[int, ...]
    rows: int
    autocast: bool = False
    aux: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Autocast leaves float64 alone."""
        return torch.float32 if self.autocast else torch.float64


def draft_of(number: int, longest: int = 20) -> Draft:
    """Return the draft of that number, the same one in every process, of at most so many operators.

    It is not made of strategies of hypothesis, which draws most examples by changing a step of the one before: kinds of
    operators that few of its examples have are what a search is for.
    """
    drawn = random.Random(number)
    steps: list[Step] = []
    length = drawn.randint(4, longest)
    while len(steps) < length:
        kind = drawn.choice([*KINDS])
        around = drawn.choice(["", "", "", "", "", "", "checkpoint", "no_grad"])
        if kind == "in place" and drawn.random() < 0.7:
            around = ""  # what changes a tensor behind the back of autograd is refused, and proves little
        template = drawn.choice(KINDS[kind])
        for _ in range(drawn.choice([1, 1, 1, 2])):  # the same again, with other operands, is what memos forget
            picks = tuple(int(drawn.expovariate(0.4)) for _ in range(3))
            steps.append(Step(kind, template, picks, around))
    endings = tuple(drawn.randrange(len(ENDINGS)) for _ in OUTPUTS)
    rows, autocast, aux = drawn.randint(1, 9), drawn.random() < 0.25, drawn.random() < 0.5
    return Draft(tuple(steps[:length]), endings, rows, autocast, aux)


@contextmanager
def surroundings(draft: Draft) -> Iterator[None]:
    """Inside, new tensors are of the draft's dtype and from the same random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(draft.dtype)
    torch.manual_seed(0)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=draft.autocast), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def batch_of(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of numbers, sequences and labels."""
    return torch.randn(rows, 4), torch.randn(rows, 3, 4), torch.randint(0, 4, (rows,))


@dataclass(frozen=True)
class Program:
    """A program as its source, which defines ``Net`` and ``loss_fn``."""

    draft: Draft
    model: tuple[str, ...]  # lines of __init__
    forward: tuple[tuple[str, ...], ...]  # lines of each step
    outputs: tuple[str, ...]
    losses: tuple[str, ...]

    @property
    def source(self) -> str:
        """Return the module that a person can run."""
        losses = " + ".join(self.losses)
        beside = f', {{"seen": {OUTPUTS[0]}.detach(), "rows": len(x)}}' if self.draft.aux else ""
        lines = [
            "import math", "import torch, torch.nn.functional as F", "from torch import nn",
            "from torch.utils.checkpoint import checkpoint", "",
            "class Net(nn.Module):", "    def __init__(self):", "        super().__init__()",
            *(f"        {line}" for line in self.model),
            "    def forward(self, x, s, y):",
            *(f"        {line}" for step in self.forward for line in step),
            f"        return {', '.join(self.outputs)},",
            "def loss_fn(model, batch):", "    x, s, y = batch",
            f"    {', '.join(OUTPUTS[: len(self.outputs)])}, = model(x, s, y)",
            f"    return {losses}{beside}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        autocast = 'torch.autocast("cpu", torch.bfloat16).__enter__()\n' if self.draft.autocast else ""
        return (
            f"{self.source}torch.set_default_dtype({self.draft.dtype}); torch.manual_seed(0)\n{autocast}"
            f"rows = {self.draft.rows}\n"
            "batch = torch.randn(rows, 4), torch.randn(rows, 3, 4), torch.randint(0, 4, (rows,))\n"
            "model = Net()\n"
        )

    def made(self) -> tuple[nn.Module, Any, tuple[Tensor, Tensor, Tensor]]:
        """Return the model, the loss function and the batch, the same ones each time; within `surroundings`."""
        torch.manual_seed(0)
        batch = batch_of(self.draft.rows)
        name = f"<random program {hash(self.source):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        scope: dict[str, Any] = {"__name__": "random_program"}
        exec(compile(self.source, name, "exec"), scope)
        return scope["Net"](), scope["loss_fn"], batch


OPERAND = re.compile(r"\{([tvmsynl]\d)\}")
HOLE = re.compile(r"\{([tvmsynl]\d|[opCDS])\}")
MODULE = re.compile(r"\{M:(.*?\))\}")
NEW = re.compile(r"[uv]\d+")


class _Scratch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for line in MODEL:
            exec(line, {"self": self, "nn": nn, "torch": torch})


@dataclass
class _Building:
    """A program that grows, with the values that its lines have made so far."""

    scope: dict[str, Any]
    order: list[str] = field(default_factory=lambda: list(GIVEN))  # latest last
    modules: dict[str, str] = field(default_factory=dict)  # how it is made -> its name
    steps: list[tuple[str, ...]] = field(default_factory=list)

    @staticmethod
    def begun(draft: Draft) -> _Building:
        batch = batch_of(draft.rows)
        tools = {"torch": torch, "nn": nn, "F": F, "math": math, "checkpoint": checkpoint}
        return _Building({**tools, "self": _Scratch(), **dict(zip(INPUTS, batch, strict=True))})

    def value(self, name: str) -> Any:
        return getattr(self.scope["self"], name[5:]) if name.startswith("self.") else self.scope[name]

    def tensors(self, dims: int | None = None, least: int = 0) -> list[str]:
        """The names of tensors of floats, the latest first."""
        return [
            name for name in reversed(self.order)
            if isinstance(value := self.value(name), Tensor) and value.is_floating_point() and value.ndim >= least
            and (dims is None or value.ndim == dims)
        ]  # fmt: skip

    def of(self, hole: str) -> list[str]:
        """The names that may stand in a hole of that letter."""
        if hole == "t":
            return self.tensors(least=0)
        if hole in "vms":
            return self.tensors("vms".index(hole) + 1)
        if hole == "y":
            return ["y"]
        if hole == "n":
            return [n for n in reversed(self.order) if isinstance(self.value(n), int | float)] + ["0.5", "2"]
        lists = [n for n in reversed(self.order) if isinstance(self.value(n), list)]
        return lists + [f"[{name}, {name}]" for name in self.tensors()[:2]]

    def add(self, step: Step) -> None:
        """Add what plain PyTorch runs of a step, with its picks or others, and leave it out where it runs none."""
        for attempt in range(TRIES):
            modules = dict(self.modules)
            try:
                lines = self._lines(step, attempt)
                self._run(lines)
            except Exception:
                self.modules = modules
                continue
            self.steps.append(lines)
            return

    def _lines(self, step: Step, attempt: int) -> tuple[str, ...]:
        """Return what a step says with its picks, or with others at a later attempt; raise where nothing serves."""
        text, filled = step.template, self._picked(step, attempt)
        if "{o}" not in text and step.kind != "in place":
            if step.around == "checkpoint" and "{t1}" in text:
                text = f"checkpoint(lambda t: {text.replace('{t1}', 't')}, {{t1}}, use_reentrant=False)"
            text = f"{{o}} = {text}"
        filled |= {"o": f"v{len(self.steps)}", "p": f"u{len(self.steps)}"} | self._sizes(filled)
        text = HOLE.sub(lambda hole: filled[hole[1]], text)
        text = MODULE.sub(lambda module: self._module(module[1]), text)
        lines = text.split("\n")
        return ("with torch.no_grad():", *(f"    {line}" for line in lines)) if step.around == "no_grad" else (*lines,)

    def _picked(self, step: Step, attempt: int) -> dict[str, str]:
        """Return the names that the holes for values are filled with."""
        found = {}
        for hole in dict.fromkeys(OPERAND.findall(step.template)):
            names, number = self.of(hole[0]), int(hole[1])
            if step.kind == "in place" and hole == "t1":
                names = [name for name in names if name not in GIVEN]  # which is refused by name, and proves little
            found[hole] = names[(step.picks[number - 1] + attempt * number) % len(names)]
        return found

    def _sizes(self, picked: dict[str, str]) -> dict[str, str]:
        shapes = [tuple(getattr(self.value(name), "shape", ())) for hole, name in picked.items() if hole[0] in "vmst"]
        found = {"C": shapes[0][1:2], "D": shapes[0][-1:]} if shapes else {}
        if "s1" in picked:
            found["S"] = tuple(self.value(picked["s1"]).shape[-1:])
        return {letter: str(size[0]) for letter, size in found.items() if size}

    def _module(self, made: str) -> str:
        """Return the name of a module that is made so, which the model is given once."""
        if made not in self.modules:
            name = f"self.m{len(self.modules)}"
            exec(f"{name} = {made}", self.scope)
            self.modules[made] = name
        return self.modules[made]

    def _run(self, lines: Sequence[str]) -> None:
        """Run lines, whose values are then there; raise where plain PyTorch does or what they make is of no use."""
        trial = dict(self.scope)
        exec("\n".join(lines), trial)
        new = [name for name in trial if name not in self.scope and NEW.fullmatch(name)]
        for tensor in [trial[name] for name in new if isinstance(trial[name], Tensor)]:
            if not 0 < tensor.numel() <= LARGEST or tensor.ndim > MOST_DIMS:
                raise ValueError(f"it has the shape {[*tensor.shape]}")
            if not tensor.isfinite().all() or float(tensor.detach().abs().max()) > 1e3:
                raise ValueError("it is no number of use")
        self.scope = trial
        self.order += new

    def program(self, draft: Draft) -> Program | None:
        """What was built, with a loss of its last values; None where there is none of a gradient."""
        trained = [name for name in self.tensors() if self.value(name).requires_grad]
        live = [name for name in trained if name not in GIVEN] or trained
        outputs, losses = tuple(live[: len(OUTPUTS)]), []
        for letter, name, ending in zip(OUTPUTS, outputs, draft.endings, strict=False):
            for text in (ENDINGS[ending], ENDINGS[0]):
                filled = text.replace("{t1}", letter).replace("{m1}", letter)
                try:
                    exec(filled, {**self.scope, letter: self.value(name)})
                except Exception:
                    continue
                losses.append(filled)
                break
        model = (*MODEL, *(f"{name} = {made}" for made, name in self.modules.items()))
        return Program(draft, model, tuple(self.steps), outputs, tuple(losses))


def built(draft: Draft) -> Program | None:
    """Return the program of a draft, or None where plain PyTorch runs nothing of it; within `surroundings`."""
    torch.manual_seed(0)
    building = _Building.begun(draft)
    for step in draft.steps:
        building.add(step)
    return building.program(draft)
