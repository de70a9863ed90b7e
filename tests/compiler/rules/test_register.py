"""Rules that users register: what has one is split, what cannot have one is refused, and a wrong one is found."""

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.register import name_of
from shardwright.compiler.rules.table import REGISTERED, rule_of
from shardwright.errors import CaptureError, ShardwrightError, StrategyError, UsageError
from shardwright.runtime.programs import plan_cache
from whole import like_plain, plan_of


def _operator(name, compute, backward):
    made = torch.library.custom_op(f"registered_tests::{name}", compute, mutates_args=())
    made.register_fake(lambda x, *_: torch.empty_like(x))
    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return made


def _scaled(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return x * factors


def _scaled_backward(ctx, gradient):
    x, factors = ctx.saved_tensors
    return gradient * factors, (gradient * x).flatten(0, -2).sum(0)


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


scaled = _operator("scaled", _scaled, _scaled_backward)
centred = _operator("centred", _centred, lambda ctx, gradient: gradient - gradient.mean(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.factors = nn.Linear(8, 16), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return centred(scaled(self.up(x), self.factors))


def loss_fn(model, batch):
    return model(batch).square().mean()


@pytest.fixture(autouse=True)
def _as_before():
    before = dict(REGISTERED)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    REGISTERED.clear()
    REGISTERED.update(before)


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(12, 8)


def register_both():
    sw.register_rule("registered_tests::scaled", "* n, n -> * n")
    sw.register_rule("registered_tests.centred.default", "b^ n -> b^ n")


def test_an_operator_with_a_rule_is_split_and_gives_what_plain_pytorch_gives():
    register_both()
    model, batch = net()
    plans = like_plain(model, loss_fn, batch)
    assert not any(plan.graph.unlisted for plan in plans)
    assert any(plans[0].strategies["scaled"].axes)


def test_a_rule_binds_to_each_call():
    register_both()
    model, batch = net()
    rules = RuledGraph.of(captured_step(model, loss_fn, batch, {})).rules
    assert [str(rules[name]) for name in ("scaled", "centred")] == ["*0 n, n -> *0 n", "b^ n -> b^ n"]


@pytest.mark.parametrize(
    ("op", "rule", "error", "message"),
    [
        ("registered_tests::nope", "b -> b", UsageError, "torch has no operator 'registered_tests::nope'; define it"),
        ("nowhere::scaled.other", "b -> b", UsageError, r"torch has no operator 'nowhere::scaled\.other'"),
        ("scaled", "b -> b", UsageError, r"takes the name of an operator, as in 'mylib::scale', .* got 'scaled'"),
        (3, "b -> b", UsageError, "got 3"),
        ("aten::relu", "b -> b", UsageError, r"aten\.relu\.default has a rule already, of Shardwright's own"),
        ("aten::binomial", "*, * -> *", StrategyError, "draws random numbers from each device's own"),
        ("registered_tests::scaled", "* n, n => * n", StrategyError, "a rule is written as 'operands -> results'"),
        ("registered_tests::scaled", None, StrategyError, "a rule is a text"),
        ("registered_tests::scaled", "* n -> * n", StrategyError, r"takes 2 tensors, and the rule '\* n -> .*' has 1"),
        ("registered_tests::scaled", "* n, n -> * n, * n", StrategyError, r"returns 1 tensors, .* has 2"),
        ("registered_tests::scaled", "* n, m -> * n", StrategyError, r"\['m'\] disappear in a result"),
        ("registered_tests::scaled", "b& n, n -> b n", StrategyError, r"a dim with &, .* write \^ where"),
        ("registered_tests::scaled", "b n, ! n -> b n", StrategyError, r"an operand with !, .* operator's result"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(op, rule, error, message):
    with pytest.raises(error, match=message):
        sw.register_rule(op, rule)
    assert not any("registered_tests" in name for name in REGISTERED)


def test_a_rule_stands_for_good():
    register_both()
    register_both()
    with pytest.raises(UsageError, match=r"has the rule '\* n, n -> \* n' already, got 'b n, n -> b n'"):
        sw.register_rule("registered_tests::scaled", "b n, n -> b n")


class Clip(torch.autograd.Function):
    """One that can be found by its name."""


def test_a_function_with_a_backward_of_its_own_has_a_rule_by_its_name():
    class Local(torch.autograd.Function):
        """One that no other process finds."""

    sw.register_rule(Clip, "~ * -> ~ *")
    assert str(rule_of(name_of(Clip), (Operand(0),), {}, [(8, 4)], [(8, 4)])) == "~ *1 *0 -> ~ *1 *0"
    with pytest.raises(UsageError, match=r"rule .* already"):
        sw.register_rule(Clip, "* -> *")
    with pytest.raises(CaptureError, match="Define it at the top level of a module"):
        sw.register_rule(Local, "* -> *")


def test_shapes_that_do_not_fit_the_rule_are_told():
    sw.register_rule("registered_tests::scaled", "b c n, n -> b c n")
    model, batch = net()
    with pytest.raises(StrategyError, match=r"'b c n, n -> b c n' does not fit the shapes \(12, 16\).*3 dims expected"):
        plan_of(model, loss_fn, batch, Mesh.of(d=2), "data")


def test_a_plan_is_remembered_with_its_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, batch = net()
    captured = captured_step(model, loss_fn, batch, {})
    request = PlanRequest(Mesh.of(d=4), search="propagation")
    whole = plan_cache.remembered(RuledGraph.of(captured), request)
    whole.save(tmp_path / "plan.json")
    register_both()
    split = plan_cache.remembered(RuledGraph.of(captured), request)
    assert split == make_plan(captured, request)
    assert any(split.strategies["scaled"].axes)
    with pytest.raises(
        ShardwrightError, match=r"made with another rule of registered_tests\.scaled\.default than \*0 n"
    ):
        Plan.load(tmp_path / "plan.json", RuledGraph.of(captured))


def _verified_and_disagreeing():
    torch.set_num_threads(1)
    world = sw.init()
    model, batch = net()
    sw.register_rule("registered_tests::scaled", "* n, n -> * n")
    sw.register_rule("registered_tests::centred", "b n -> b n")  # the mean is over all of b
    found = sw.verify(model, loss_fn, batch, steps=1, mode="data", dtypes=("float64",))
    REGISTERED.pop("registered_tests.centred.default")
    if world.rank:
        sw.register_rule("registered_tests::centred", "b^ n -> b^ n")
    try:
        sw.parallelize(model, loss_fn, batch, batch="global")
    except UsageError as error:
        return found.ok, str(found), str(error)
    return None


def test_a_wrong_rule_is_found_by_verify_and_ranks_must_have_the_same():
    for ok, text, error in run_ranks(2, _verified_and_disagreeing):
        assert not ok
        assert "loss" in text
        assert "ranks disagree about the rules of sw.register_rule: rank 0 has" in error
        assert "all ranks must call parallelize with the same" in error
