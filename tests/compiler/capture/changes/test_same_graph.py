"""Values of Python that a step reads and that its graph does not depend on: the program stays the one that was made."""

import copy
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.runtime.programs import planner, programs


class Counting(nn.Module):
    """Reads ``config.step``, by which nothing goes but every tenth step, and what it may return beside the loss."""

    def __init__(self, config):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 3), config

    def forward(self, x):
        out, step = self.linear(x), self.config.step
        if step % 10 == 9:
            out = out * 2
        weights = torch.tensor(self.config.weights)
        return out * weights, {"step": step if self.config.tells else None, "inverse": 1 / weights}


def loss_fn(model, batch):
    out, beside = model(batch[0])
    return F.cross_entropy(out, batch[1]), beside


NEGATIVE, POSITIVE = (1.0, -0.0, 3.0), (1.0, 0.0, 3.0)  # equal, and not the same
# Before which step of a loop that counts something else is changed, and how many programs are there after each step.
CHANGES = {4: ("step", 9), 5: ("weights", NEGATIVE), 6: ("weights", POSITIVE), 7: ("tells", True)}
PROGRAMS = [1, 1, 1, 1, 2, 3, 3, 4, 5]


def counted():
    """Whether steps are those of plain PyTorch, how many programs there are after each, what was called, what said."""
    sw.init()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    config = SimpleNamespace(step=0, tells=False, weights=POSITIVE)
    model, batch = Counting(config), [torch.randn(6, 4), torch.randint(3, (6,))]
    plain, right, made, calls = copy.deepcopy(model), [], [], Counter()
    plain.config = config
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    for name in ("lower", "Execution"):
        counting(calls, programs, name)
    counting(calls, planner, "make_plan"), counting(calls, planner.Plan, "for_capture")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(len(PROGRAMS)):
            config.step += 1
            if number in CHANGES:
                setattr(config, *CHANGES[number])
            (loss, beside), (expected, known) = parallel(batch), loss_fn(plain, batch)
            right.append(loss.item() == pytest.approx(expected.item(), rel=1e-12))
            assert (beside["step"], beside["inverse"].tolist()) == (known["step"], known["inverse"].tolist())
            made.append(len(parallel.executions()))
    return right, made, calls, [str(w.message) for w in said if "captured anew" in str(w.message)]


def counting(calls, where, name):
    called = getattr(where, name)

    def call(*args, **kwargs):
        calls[name] += 1
        return called(*args, **kwargs)

    setattr(where, name, call)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_value_by_which_the_graph_does_not_go_makes_no_other_program(ranks):
    for rank, (right, made, calls, said) in enumerate(run_ranks(ranks, counted)):
        assert all(right)
        assert made == PROGRAMS
        others = PROGRAMS[-1] - 1
        assert calls["lower"] == calls["Execution"] == others
        assert calls["for_capture"] + calls["make_plan"] <= 2 * others
        assert len(said) == (rank == 0)


def evaluated_in_between(most_programs):
    programs.MOST_PROGRAMS = most_programs
    sw.init()
    config = SimpleNamespace(step=0, tells=False, weights=POSITIVE)
    model, batch = Counting(config), [torch.randn(6, 4), torch.randint(3, (6,))]
    parallel, found = sw.parallelize(model, loss_fn, batch, "single", batch="global"), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 10, 20, 30, 40, 0):
            config.step = 0
            parallel.evaluate(batch)
            found.append(id(parallel.executions()[-1]))
            config.step = step
            parallel(batch)
    return found


def test_the_values_of_one_program_are_forgotten_before_another_program():
    [found] = run_ranks(1, evaluated_in_between, 3)
    assert len(set(found)) == 1


def captured_anew():
    """For which values of a counter the model is captured, where one program is kept for three of them."""
    programs.MOST_VALUES = 3
    sw.init()
    config = SimpleNamespace(step=0, tells=False, weights=POSITIVE)
    model, batch = Counting(config), [torch.randn(6, 4), torch.randint(3, (6,))]
    parallel, calls, found = sw.parallelize(model, loss_fn, batch, "data", batch="global"), Counter(), []
    counting(calls, planner.Planner, "later_plan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 1, 2, 0, 3, 0, 2, 1):
            config.step = step
            before = calls["later_plan"]
            parallel(batch)
            found += [step] * (calls["later_plan"] - before)
    return found, len(parallel.executions())


def test_a_program_is_kept_for_the_values_that_were_used_last():
    assert run_ranks(2, captured_anew) == [([1, 2, 3, 1], 1)] * 2
