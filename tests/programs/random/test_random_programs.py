"""Random programs give under every plan what plain PyTorch gives, or are refused."""

from collections import Counter

import pytest
import random_runs
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_programs import Draft, Step, draft_of
from random_runs import CASES, Unlike, apart, reference, refused, told, verdict

pytestmark = pytest.mark.networks
SINGLE, *SPLIT = CASES


def hold_many(count, plans, longest):
    counts = Counter()

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 10**9), st.lists(st.sampled_from(SPLIT), min_size=plans, max_size=plans, unique=True))
    def hold(number, cases):
        draft = draft_of(number, longest)
        found = verdict(draft, [SINGLE, *cases])
        assert not found, f"program {number}, {told(draft, found)}"
        counts[found.kind] += 1

    hold()
    if count > 50:  # of few some may be refused by chance
        assert counts["refused"] < 0.1 * counts.total(), "programs are refused so often that little is held"
        assert counts["held"] > 0.8 * counts.total(), counts


@pytest.mark.filterwarnings("ignore")  # of torch about operators, and of ours about what is written beside the graph
@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_random_programs(count):
    """Each is captured once, which is what takes time, and held under two plans."""
    hold_many(count, plans=2, longest=7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_longer_random_programs():
    """300 of them; explore.py holds thousands."""
    hold_many(300, plans=2, longest=20)


def draft(*steps, **options):
    return Draft(tuple(Step(*step) for step in steps), (0, 0, 0), **{"rows": 5} | options)


def test_a_program_prints_as_a_script_that_gives_the_same_numbers():
    program = reference(
        draft(("products", "{M:nn.Linear({D}, 4)}({t1})", (0, 0, 0)), ("in place", "{t1}.mul_(0.5)", (0, 0, 0)))
    )
    scope = {}
    before = torch.get_default_dtype()
    try:
        exec(str(program.program), scope)
        loss = scope["loss_fn"](scope["model"], scope["batch"])
    finally:
        torch.set_default_dtype(before)
    loss.backward()
    assert "v0.mul_(0.5)" in str(program.program)
    found = {f"gradient of {name}": p.grad for name, p in scope["model"].named_parameters()} | {"loss": loss.detach()}
    expected = {name: tensor for name, tensor in program.expected.items() if not name.startswith("buffer")}
    assert apart(found, expected)[0] == 0.0


def test_a_program_whose_gradient_rounding_decides_about_is_of_no_use():
    """Two numbers of bfloat16 are the largest, or nearly: plain PyTorch gives each its part, or one of them all."""
    assert reference(draft_of(20430)) is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda found: found | {"loss": found["loss"] * (1 + 1e-9)}, "loss, off by 1e-09"),
        (lambda found: found | {"gradient of v": torch.zeros(4)}, "gradient of v is a tensor, plain PyTorch's is None"),
        (lambda found: found | {"gradient of w": None}, "gradient of w is None, plain PyTorch's is a tensor"),
        (lambda found: found | {"buffer r": found["buffer r"] + 1e-6}, "buffer r, off by"),
    ],
)
def test_what_differs_is_told(monkeypatch, wrong, told):
    program = reference(draft(("products", "{m1} @ {m2}", (1, 1, 0)), aux=True))
    monkeypatch.setattr(random_runs, "run", lambda plan, model, batch: wrong(program.expected))
    with pytest.raises(Unlike, match=told):
        program.hold(SINGLE)


@pytest.fixture(scope="module")
def cells():
    """A program, which is captured once for every plan."""
    steps = (
        ("cells", "{o}, {p} = {M:nn.LSTMCell({D}, 4)}({m1}, ({m2}, {m3}))", (0, 0, 0)),
        ("over the batch", "{m1} @ {m1}.T", (0, 0, 0)),
        ("norms", "{M:nn.BatchNorm1d({C})}({t1})", (0, 0, 0)),
        ("in place", "{t1}[1:] = {t2}", (0, 3, 0), "no_grad"),
    )
    held = reference(draft(*steps, rows=3))
    assert held is not None, "it is of no use"
    return held


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case.ranks in (2, 4)), id=str(case)) for case in CASES]
)
def test_one_program_under_every_plan(case, cells):
    try:
        cells.hold(case)
    except Exception as error:
        if not refused(error):
            raise
