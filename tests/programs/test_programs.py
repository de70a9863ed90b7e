"""Whole programs as people write them: N ranks give what plain PyTorch gives, or say why they do not."""

import inspect
import itertools
import types

import adaptation
import decisions
import drawing
import generative
import pytest
import sequences
import vision

from ranks import run_ranks
from side_by_side import PLANS, TOLERANCE, compared

ROOMS = (adaptation, decisions, drawing, generative, sequences, vision)
PROGRAMS: dict[str, types.FunctionType] = {
    name: function
    for room in ROOMS
    for name, function in vars(room).items()
    if inspect.isgeneratorfunction(function) and list(inspect.signature(function).parameters) == ["parallelize"]
}
# What draws inside the loss draws by position, which plain PyTorch does not.
DRAWING = {"diffusion", "mixup_in_the_step", "discrete_latents"}
# program -> what is said, and under which plans
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {}
QUICK = {"gan", "lora"}


def test_there_are_programs_enough():
    assert len(PROGRAMS) >= 20
    assert QUICK | DRAWING | set(REFUSED) <= set(PROGRAMS)


def ran(name, plans):
    return compared(PROGRAMS[name], plans, "one device" if name in DRAWING else "plain PyTorch")


def check(name, ranks, plans):
    words, where = REFUSED.get(name, ("", ()))
    for found in run_ranks(ranks, ran, name, plans, timeout=280):
        for plan, result in found.items():
            if plan in where:
                assert words in str(result), plan
            else:
                assert not isinstance(result, str), f"{plan}: {result}"
                assert result[0] < TOLERANCE, f"{plan}: {result[1]} is {result[0]:.1e} off"


@pytest.mark.parametrize("name", sorted(QUICK))
def test_two_ranks_give_what_plain_pytorch_gives(name):
    check(name, 2, ("propagation",))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "ranks"), list(zip(sorted(PROGRAMS), itertools.cycle((2, 3)), strict=False)))
def test_any_plan_gives_what_plain_pytorch_gives(name, ranks):
    """Every second program on three ranks, whose parts are uneven."""
    check(name, ranks, tuple(PLANS))
