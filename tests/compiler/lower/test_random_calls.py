"""What people call to draw random numbers gives the same numbers however the batch and the model are split."""

from functools import cache

import pytest
import torch
import torch.distributions as distributions
import torch.nn.functional as F
from torch import nn

from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.table import row_of
from shardwright.errors import StrategyError, UsageError
from whole import run, same

pytestmark = pytest.mark.usefixtures("float64")
D = distributions


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Parameter(torch.randn(8, 4))  # a program has names of its own, such as this one
        self.lstm = nn.LSTM(8, 4, num_layers=3, dropout=0.3, batch_first=True, bidirectional=True, proj_size=2)
        self.gru = nn.GRU(8, 4, num_layers=2, dropout=0.3)
        self.rnn = nn.RNN(8, 4, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return x @ self.key


def hidden_elsewhere(x, logits):
    y = logits.clone()
    return F.dropout(y, 0.4, True, True) + F.rrelu(logits * 2, training=True, inplace=True)


# A call, given the batch (n, 8) and logits (n, 4) that depend on parameters.
CALLS = {
    "rand": lambda x, logits: torch.rand(len(x), 3),
    "rand half": lambda x, logits: torch.rand(len(x), 3, dtype=torch.float16),
    "complex": lambda x, logits: torch.randn(len(x), 2, dtype=torch.complex128).abs(),
    "randint": lambda x, logits: torch.randint(0, 10, (len(x), 3)),
    "randint to": lambda x, logits: torch.randint(1 << 40, (len(x),), dtype=torch.int64),
    "randint like": lambda x, logits: torch.randint_like(x, 3, 10),
    "randint below": lambda x, logits: torch.randint_like(x, torch.tensor(9)),
    "randperm": lambda x, logits: torch.randperm(len(x)),
    "normal of means": lambda x, logits: torch.normal(logits, 2.0),
    "normal of deviations": lambda x, logits: torch.normal(1.0, logits.exp()),
    "normal of both": lambda x, logits: torch.normal(logits, x[:, :4].exp()),
    "normal of numbers": lambda x, logits: torch.normal(1.0, 2.0, (len(x), 3)),
    "normal_": lambda x, logits: torch.empty(len(x), 3, dtype=torch.float32).normal_(),
    "normal_ of the model": lambda x, logits: logits.clone().normal_(1, 2),
    "uniform_": lambda x, logits: x.new_empty(len(x), 3).uniform_(-1, 2),
    "exponential_": lambda x, logits: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x, logits: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x, logits: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x, logits: torch.empty_like(x).log_normal_(),
    "random_": lambda x, logits: torch.empty_like(x).random_(),
    "random_ below": lambda x, logits: torch.empty_like(x, dtype=torch.uint8).random_(200),
    "random_ between": lambda x, logits: torch.empty_like(x, dtype=torch.int8).random_(-100, 100),
    "random_ from": lambda x, logits: torch.empty_like(x, dtype=torch.int32).random_(3, None),
    "bernoulli": lambda x, logits: torch.bernoulli(logits.sigmoid()),
    "bernoulli of": lambda x, logits: torch.bernoulli(logits, 0.3),
    "bernoulli_": lambda x, logits: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of tensors": lambda x, logits: torch.empty_like(x).bernoulli_(x[:1].sigmoid()),
    "multinomial": lambda x, logits: torch.multinomial(logits.softmax(-1), 5, replacement=True),
    "multinomial without": lambda x, logits: torch.multinomial(logits.softmax(-1), 3),
    "multinomial of one": lambda x, logits: torch.multinomial(logits.softmax(-1)[0], 40, True),
    "poisson": lambda x, logits: torch.poisson(logits.exp()),
    "rrelu": lambda x, logits: F.rrelu(logits, training=True),
    "in place": hidden_elsewhere,
    "gumbel": lambda x, logits: F.gumbel_softmax(logits, tau=0.5),
    "hard gumbel": lambda x, logits: F.gumbel_softmax(logits, hard=True),
    "alpha dropout": lambda x, logits: F.alpha_dropout(logits, 0.3, True),
    "dropout of channels": lambda x, logits: F.dropout2d(x.view(len(x), 2, 2, 2), 0.4, True),
    "alpha dropout of channels": lambda x, logits: F.feature_alpha_dropout(x.view(len(x), 4, 2), 0.4, True),
    "fractional pooling": lambda x, logits: F.fractional_max_pool2d(x.view(-1, 1, 1, 8), (1, 2), output_size=(1, 5)),
    "Normal": lambda x, logits: D.Normal(logits, 1.0, validate_args=False).rsample(),
    "Uniform": lambda x, logits: D.Uniform(logits, logits + 2, validate_args=False).rsample(),
    "Categorical": lambda x, logits: D.Categorical(logits=logits, validate_args=False).sample(),
    "Bernoulli": lambda x, logits: D.Bernoulli(logits=logits, validate_args=False).sample(),
    "Exponential": lambda x, logits: D.Exponential(logits.exp(), validate_args=False).rsample(),
    "Laplace": lambda x, logits: D.Laplace(logits, logits.exp(), validate_args=False).rsample(),
    "masked": lambda x, logits: torch.where(torch.randint(0, 2, x.shape) > 0, x, 0.0),
    "mixed up": lambda x, logits: (lambda order: 0.3 * logits + 0.7 * logits[order])(torch.randperm(len(x))),
}


def loss_fn(model, x):
    logits = model(x)
    found = {name: call(x, logits) for name, call in CALLS.items()}
    found["lstm"], (found["h"], found["c"]) = model.lstm(x[:, None].expand(-1, 3, -1))
    found["gru"] = model.gru(x[None].expand(3, -1, -1))[0]
    found["rnn"] = model.rnn(x[:, None].expand(-1, 3, -1))[0]
    real = [value.double().tanh().square() for value in found.values() if value.requires_grad]
    return sum((value.sum() for value in real), logits.sum()), found


@cache
def captured():
    torch.manual_seed(1)
    model, x = Model(), torch.randn(12, 8)
    return captured_step(model, loss_fn, x, {}), model, x


@cache
def on_one_device():
    graph, model, x = captured()
    return run(make_plan(graph, PlanRequest(Mesh(()), "single")), model, x, seed=3)


@pytest.mark.parametrize(
    ("mesh", "search"),
    [
        pytest.param(Mesh.of(d=5), "data", marks=pytest.mark.slow),  # parts of 3, and an empty one
        (Mesh.of(d=3), "propagation"),
    ],
    ids=str,
)
def test_any_split_draws_the_same(mesh, search):
    graph, model, x = captured()
    request = PlanRequest(mesh, "data") if search == "data" else PlanRequest(mesh, "auto", search)
    plan = make_plan(graph, request)
    assert {node.op for node in plan.graph.unlisted} == set()
    found, wanted = run(plan, model, x, seed=3), on_one_device()
    same(found, wanted)
    for name in graph.aux:
        if not wanted[f"aux {name}"].is_floating_point():
            assert torch.equal(found[f"aux {name}"], wanted[f"aux {name}"])


def test_a_split_batch_splits_what_is_drawn_for_it():
    graph, _, _ = captured()
    plan = make_plan(graph, PlanRequest(Mesh.of(d=2), "data"))
    # Those that are told a size alone are drawn whole, and cut.
    drawing = [node for node in graph.nodes if row_of(node.op).draws and node.operands]
    assert {node.op for node in drawing} == {node.op for node in drawing if plan.strategies[node.name].used}


def test_operators_and_seeds_draw_other_numbers():
    graph, model, x = captured()
    wanted = on_one_device()
    other = run(make_plan(graph, PlanRequest(Mesh(()), "single")), model, x, seed=4)
    drawn = [wanted[f"aux {name}"] for name in graph.aux]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i] if a.shape == b.shape)
    assert not any(torch.equal(wanted[f"aux {name}"], other[f"aux {name}"]) for name in graph.aux)


def test_dropout_of_nothing_between_recurrent_layers_is_what_plain_pytorch_gives():
    torch.manual_seed(2)
    model, x = Model(), torch.randn(4, 3, 8)
    for layer in (model.lstm, model.rnn):
        layer.dropout = 1e-12  # is drawn, and drops nothing

    def loss(model, x):
        return model.lstm(x)[0].square().sum() + model.rnn(x)[0].sum()

    graph = captured_step(model, loss, x, {})
    found = run(make_plan(graph, PlanRequest(Mesh.of(d=2), "data")), model, x)
    loss(model, x).backward()
    torch.testing.assert_close(found["loss"], loss(model, x).detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[f"gradient of {name}"], parameter.grad)


# The same as plain PyTorch where nothing is left to chance


# Refusals


def with_a_generator(model, x):
    return model(x).sum() * torch.rand(3, generator=torch.Generator()).sum()


def with_a_generator_in_place(model, x):
    return model(x).sum() * torch.empty(3).normal_(generator=torch.Generator()).sum()


def seeding(model, x):
    torch.manual_seed(0)
    return model(x).sum() * torch.rand(3).sum()


def binomial(model, x):
    return model(x).sum() * torch.binomial(torch.full((3,), 4.0), torch.full((3,), 0.3)).sum()


@pytest.mark.parametrize(
    ("loss", "what", "line", "remedy"),
    [
        (with_a_generator, r"rand\(\) is given a torch.Generator", "torch.rand(3, generator", "Leave generator= out"),
        (
            with_a_generator_in_place,
            r"normal_\(\) is given a torch",
            "normal_(generator",
            "pass them in with the batch",
        ),
        (seeding, r"torch.manual_seed\(\) is called while", "torch.manual_seed(0)", "before sw.parallelize"),
        (binomial, r"aten.binomial.default draws random numbers", "torch.binomial(", "pass them in with the batch"),
    ],
)
def test_what_cannot_be_drawn_by_position_is_refused(loss, what, line, remedy):
    with pytest.raises(StrategyError, match=what) as error:
        capture(Model(), loss, torch.randn(4, 8))
    where, _, after = str(error.value).partition("\n")
    assert line in where
    assert remedy in after
    assert torch.manual_seed.__module__ == "torch.random"


def test_a_range_that_a_dtype_does_not_have_is_refused():
    def loss(model, x):
        return model(x).sum() * torch.randint(0, 300, (3,), dtype=torch.uint8).sum()

    plan = make_plan(captured_step(Model(), loss, torch.randn(4, 8), {}), PlanRequest(Mesh(()), "single"))
    with pytest.raises(UsageError, match=r"from 0 to below 300: torch.uint8 has 0 to 255 only, at test_random_calls"):
        lower(plan, 0)


@torch.library.custom_op("random_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient)


def test_an_operator_of_somebody_elses_that_draws_is_refused_when_it_runs():
    def loss(model, x):
        return noisy(model(x)).sum()

    model, x = Model(), torch.randn(4, 8)
    plan = make_plan(captured_step(model, loss, x, {}), PlanRequest(Mesh.of(d=2), "data"))
    with pytest.raises(StrategyError, match=r"random_tests.noisy.default, at .*return noisy.*own generator"):
        run(plan, model, x)
