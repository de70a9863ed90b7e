"""Random programs: a model of a chain of operators and a loss function, as Python source that is made while it runs.

Each step of a draft names an operator and picks its operands among the values that there are. A step whose line plain
PyTorch refuses picks others, and is left out where none serve, so that nearly every draft becomes a program.
"""

from __future__ import annotations

import itertools
import linecache
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
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
    picks: tuple[int, int, int]
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


def _steps() -> st.SearchStrategy[tuple[Step, ...]]:
    operators = st.one_of([st.sampled_from([(kind, template) for template in KINDS[kind]]) for kind in KINDS])
    picks = st.tuples(*[st.integers(0, 9)] * 3)
    around = st.sampled_from(["", "", "", "", "", "", "checkpoint", "no_grad"])
    one = st.builds(lambda op, picks, around: Step(*op, picks, around), operators, picks, around)
    # Operands that come twice and then once are what memos forget: the same operator again, with other picks.
    twice = st.builds(lambda step, picks: (step, replace(step, picks=picks)), one, picks)
    several = st.lists(st.one_of(st.tuples(one), st.tuples(one), twice), min_size=4, max_size=20)
    return several.map(lambda steps: tuple(itertools.chain(*steps))[:20])


DRAFTS = st.builds(
    Draft, _steps(), st.tuples(*[st.integers(0, len(ENDINGS) - 1)] * 3), st.integers(1, 9),
    st.sampled_from([False, False, False, True]), st.booleans(),
)  # fmt: skip


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


HOLE = re.compile(r"\{(?:M:)?([a-zBCDS])(\d?)[^{}]*(?:\{[BCDS]\}[^{}]*)*\}")


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
    steps: list[tuple[Step, tuple[str, ...]]] = field(default_factory=list)

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
        return [n for n in reversed(self.order) if isinstance(self.value(n), list)]

    def add(self, step: Step) -> None:
        for attempt in range(TRIES):
            lines = self._lines(step, attempt)
            if lines is not None and self._runs(lines):
                self.steps.append((step, lines))
                return

    def _lines(self, step: Step, attempt: int) -> tuple[str, ...] | None:
        """What a step says with its picks, or with others at a later attempt; None where nothing serves."""
        found: dict[str, str] = {}
        text = step.template
        new = len(self.steps)
        for hole in dict.fromkeys(re.findall(r"\{([tvmsynl])(\d)\}", text)):
            names = self.of(hole[0])
            if step.kind == "in place" and hole == ("t", "1"):
                names = [name for name in names if name not in GIVEN]  # which is refused by name, and proves little
            if not names:
                return None
            number = int(hole[1])
            found["".join(hole)] = names[
                (step.picks[number - 1] + attempt * number * (1 if number < 3 else 2)) % len(names)
            ]
        if "{o}" not in text and step.kind != "in place":
            text = self._around(step, text)
        for hole, name in found.items():
            text = text.replace(f"{{{hole}}}", name)
        text = text.replace("{o}", f"v{new}").replace("{p}", f"u{new}")
        first = self.value(next(iter(found.values()))) if found and next(iter(found))[0] in "vmst" else None
        if (text := self._sized(text, first, found)) is None:
            return None
        text = re.sub(r"\{M:(.*?\))\}", lambda made: self._module(made[1]), text)
        lines = text.split("\n")
        return ("with torch.no_grad():", *(f"    {line}" for line in lines)) if step.around == "no_grad" else (*lines,)

    def _around(self, step: Step, text: str) -> str:
        if step.around == "checkpoint" and "{t1}" in text:
            text = f"checkpoint(lambda t: {text.replace('{t1}', 't')}, {{t1}}, use_reentrant=False)"
        return f"{{o}} = {text}"

    def _sized(self, text: str, first: Any, found: dict[str, str]) -> str | None:
        shape = tuple(first.shape) if isinstance(first, Tensor) else ()
        sizes = {"C": shape[1:2], "D": shape[-1:]}
        if "s1" in found:
            sizes["S"] = self.value(found["s1"]).shape[-1:]
        for letter, size in sizes.items():
            if f"{{{letter}}}" in text:
                if not size:
                    return None
                text = text.replace(f"{{{letter}}}", str(size[0]))
        return text

    def _module(self, made: str) -> str:
        if made not in self.modules:
            name = f"self.m{len(self.modules)}"
            exec(f"{name} = {made}", self.scope)
            self.modules[made] = name
        return self.modules[made]

    def _runs(self, lines: Sequence[str]) -> bool:
        """Whether plain PyTorch runs these lines, and what they make is of use; the values are then there."""
        trial = dict(self.scope)
        try:
            exec("\n".join(lines), trial)
        except Exception:
            return False
        new = [name for name in trial if name not in self.scope and re.fullmatch(r"[uv]\d+", name)]
        tensors = [trial[name] for name in new if isinstance(trial[name], Tensor)]
        if any(t.numel() > LARGEST or t.ndim > MOST_DIMS or not t.numel() for t in tensors):
            return False
        if any(not t.isfinite().all() or float(t.detach().abs().max()) > 1e3 for t in tensors):
            return False
        self.scope = trial
        self.order += new
        return True

    def program(self, draft: Draft) -> Program | None:
        """What was built, with a loss of its last values; None where there is none of a gradient."""
        live = [name for name in self.tensors() if name not in GIVEN and self.value(name).requires_grad]
        if not live:
            return None
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
        return Program(draft, model, tuple(lines for _, lines in self.steps), outputs, tuple(losses))


def built(draft: Draft) -> Program | None:
    """Return the program of a draft, or None where plain PyTorch runs nothing of it; within `surroundings`."""
    torch.manual_seed(0)
    building = _Building.begun(draft)
    for step in draft.steps:
        building.add(step)
    return building.program(draft)
