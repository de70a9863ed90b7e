"""Numbers that operators draw by position have the distribution that torch says they have."""

import itertools
import math

import pytest
import torch
from scipy import stats

from shardwright.compiler.lower.operators import draws, randomness
from shardwright.errors import UsageError

CPU = torch.device("cpu")
N = 20_000
PLACE = ((N,), (0,))
SURE = 1e-4  # of a right distribution, one test in 10 000 would fail; keys are fixed


def like(dtype=torch.float64):
    return torch.empty(N, dtype=dtype)


CONTINUOUS = {
    "rand": (lambda: draws.rand(1, *PLACE, (N,), torch.float64, CPU), stats.uniform()),
    "uniform": (lambda: draws.uniform(like(), -2, 3, 2, *PLACE), stats.uniform(-2, 5)),
    "randn": (lambda: draws.randn(3, *PLACE, (N,), torch.float64, CPU), stats.norm()),
    "normal": (lambda: draws.normal_like(like(), 1, 3, 4, *PLACE), stats.norm(1, 3)),
    "exponential": (lambda: draws.exponential(like(), 2, 5, *PLACE), stats.expon(scale=0.5)),
    "cauchy": (lambda: draws.cauchy(like(), 1, 2, 6, *PLACE), stats.cauchy(1, 2)),
    "log_normal": (lambda: draws.log_normal(like(), 0.5, 0.7, 7, *PLACE), stats.lognorm(0.7, scale=math.exp(0.5))),
    "slopes": (lambda: draws.rrelu(-torch.ones(N, dtype=torch.float64), 0.1, 0.4, 8, *PLACE), stats.uniform(-0.4, 0.3)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name):
    draw, distribution = CONTINUOUS[name]
    assert stats.kstest(draw().numpy(), distribution.cdf).pvalue > SURE


def fits(counts, probabilities):
    """Whether counts are those of these probabilities, by chi squared."""
    expected = torch.as_tensor(probabilities, dtype=torch.float64) * counts.sum()
    often = expected > 5
    rest = (counts[~often].sum() - expected[~often].sum()).abs()
    assert rest <= 5 * math.sqrt(max(float(expected[~often].sum()), 1))
    return stats.chisquare(counts[often], expected[often] * counts[often].sum() / expected[often].sum()).pvalue > SURE


WHOLE = {
    "randint": (lambda: draws.randint(1, -3, 7, *PLACE, (N,), torch.int64, CPU) + 3, [0.1] * 10),
    "random": (lambda: draws.random(like(torch.int32), 0, 3, 2, *PLACE).long(), [1 / 3] * 3),
    "geometric": (lambda: draws.geometric(like(torch.int16), 0.3, 3, *PLACE).long(), stats.geom(0.3).pmf(range(60))),
    "bernoulli": (lambda: draws.bernoulli(like(torch.int64), 0.3, 4, *PLACE), [0.7, 0.3]),
    "few events": (lambda: draws.poisson(torch.full((N,), 0.7), 5, *PLACE).long(), stats.poisson(0.7).pmf(range(30))),
    "many": (lambda: draws.poisson(torch.full((N,), 60.0), 6, *PLACE).long(), stats.poisson(60).pmf(range(200))),
    "choices": (lambda: draws.multinomial(WEIGHTS, N, True, 7, *PLACE, (N,)), [0.1, 0.0, 0.6, 0.3, 0.0]),
}
WEIGHTS = torch.tensor([1.0, 0.0, 6.0, 3.0, 0.0])


@pytest.mark.parametrize("name", WHOLE)
def test_distributions_of_whole_numbers(name):
    draw, probabilities = WHOLE[name]
    counts = torch.bincount(draw(), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert fits(counts, probabilities)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)


def test_choices_without_replacement_come_in_the_order_in_which_one_would_draw_them():
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(N, 4)
    chosen = draws.multinomial(weights, 2, False, 1, (N, 4), (0, 0), (N, 4))
    pairs = list(itertools.permutations(range(4), 2))
    p = weights[0].tolist()
    counts = torch.tensor([((chosen == torch.tensor(pair)).all(1)).sum() for pair in pairs])
    assert counts.sum() == N
    assert fits(counts, [p[a] * p[b] / (1 - p[a]) for a, b in pairs])


def test_permutations_are_all_as_likely():
    orders = torch.stack([draws.randperm(key, 4, torch.int64, CPU) for key in range(2400)])
    _, counts = orders.unique(dim=0, return_counts=True)
    assert fits(counts, [1 / 24] * 24)
    large = draws.randperm(1, 100_000, torch.int32, CPU)
    assert large.dtype == torch.int32
    assert torch.equal(large.sort()[0].long(), torch.arange(100_000))
    assert abs(torch.corrcoef(torch.stack([large.double(), torch.arange(100_000.0)]))[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("low", "high"), [(0, 3 << 16), (-(1 << 40), 3 << 40), (0, (1 << 63) - 1), (-(1 << 63), 1 << 63)]
)
def test_large_ranges_are_drawn_from_evenly(low, high):
    drawn = randomness.integers(1, low, high, *PLACE, (N,), CPU)
    exact = [(number - low) / (high - low) for number in drawn.tolist()]
    assert all(0 <= number < 1 for number in exact)
    assert stats.kstest(exact, "uniform").pvalue > SURE
    lowest = torch.bincount(drawn & 7, minlength=8)
    assert fits(lowest, [1 / 8] * 8)


def test_no_range_is_left():
    drawn = randomness.integers(1, -(1 << 62), (1 << 63) - 1, *PLACE, (N,), CPU)
    assert -(1 << 62) <= int(drawn.min()) < -(1 << 61)
    assert int(drawn.max()) > 1 << 62


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_dtype_keeps_the_bounds(dtype):
    for low, numbers in (
        (0, draws.rand(1, *PLACE, (N,), dtype, CPU)),
        (0, draws.uniform(like(dtype), 0.0, 1.0, 2, *PLACE)),
        (-3, draws.uniform(like(dtype), -3.0, -2.0, 3, *PLACE)),
    ):
        assert numbers.dtype == dtype
        assert low <= numbers.min()
        assert numbers.max() < low + 1
    assert set(draws.randint(4, 100, 103, *PLACE, (N,), dtype, CPU).tolist()) == {100, 101, 102}
    waits = draws.exponential(like(dtype), 1.0, 5, *PLACE)
    assert waits.min() > 0
    assert (-waits.log()).isfinite().all()
    assert abs(float(draws.randn(6, *PLACE, (N,), dtype, CPU).double().var()) - 1) < 0.04


def test_a_gradient_flows_by_the_slopes_and_not_into_what_was_drawn_by():
    x = torch.tensor([-2.0, 3.0, -1.0], requires_grad=True)
    y, slopes = draws.rrelu(x, 0.1, 0.4, 1, (3,), (0,), True)
    y.sum().backward()
    assert torch.equal(x.grad, slopes)
    assert slopes[1] == 1
    assert torch.equal(y, x.detach() * slopes)
    mean, std = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    draws.normal(mean, std, 1, (3,), (0,), (3,), torch.float32, CPU).sum().backward()
    assert torch.equal(mean.grad, torch.zeros(3))
    assert torch.equal(std.grad, torch.zeros(3))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: draws.normal(0.0, torch.tensor([1.0, -1.0]), 1, (2,), (0,), (2,), torch.float32, CPU), "deviation"),
        (lambda: draws.bernoulli(torch.zeros(2), torch.tensor([0.5, 1.5]), 1, (2,), (0,)), "between 0 and 1"),
        (lambda: draws.poisson(torch.tensor([1.0, math.inf]), 1, (2,), (0,)), "rate of Poisson numbers"),
        (lambda: draws.multinomial(torch.tensor([0.0, 0.0]), 1, True, 1, (1,), (0,), (1,)), "sum is not above 0"),
        (lambda: draws.multinomial(torch.tensor([2.0, -1.0]), 1, False, 1, (2,), (0,), (2,)), "not all 0 or more"),
        (lambda: draws.randint_below(torch.zeros(2), torch.tensor(0), torch.int64, 1, (2,), (0,)), "there is none"),
        (lambda: draws.refuse_range(0, 300, torch.uint8), "torch.uint8 has 0 to 255 only"),
    ],
)
def test_what_cannot_be_drawn_by_is_refused(draw, words):
    with pytest.raises(UsageError, match=words):
        draw()
