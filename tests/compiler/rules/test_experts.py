"""Experts on different devices, to which tokens are sent, give what one device gives, forward and backward."""

import pytest
import torch
from rule_cases import CASES, Draw, explore

from rulecheck import Invocation, check, evaluate, operator_of, rule_for, site_of, whole
from shardwright.compiler.lower.local import localise
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.rules.notation import parse
from shardwright.compiler.rules.register import register_rule
from shardwright.compiler.rules.table import internal_collectives
from shardwright.errors import StrategyError, WorldError

EXPERTS = "shardwright.experts.default"
MESHES = [
    Mesh.of(ep=2), Mesh.of(ep=3), Mesh.of(ep=4), Mesh.of(ep=6), Mesh.of(ep=2, tp=2), Mesh.of(dp=2, ep=3),
    Mesh.of(dp=2, ep=2, tp=2),
]  # fmt: skip


def invocation(tokens, experts, chosen=None, width=3, inner=4, gates=2, choices=2):
    torch.manual_seed(0)

    def x(*shape):
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    chosen = torch.randint(0, experts, (tokens, choices)) if chosen is None else chosen
    up, down = x(experts, gates, inner, width), x(experts, width, inner)
    return Invocation(EXPERTS, (x(tokens, width), chosen, x(*chosen.shape), up, down, "silu"))


def test_experts_are_split_alone_or_along_with_tokens():
    rule = parse("t d^, e+&t d^ -> t d^").bind([(8, 3), (4, 3)], [(8, 3)])
    assert str(rule) == "t d^, e+&t d^ -> t d^"
    mesh = Mesh.of(a=2, b=2, c=2)
    strategy = rule.strategy({"t": ["a", "b"], "e": ["b", "c"]})
    assert [str(rule.operand_layout(i, strategy)) for i in range(2)] == ["[a·b, -]", "[b·c, -]"]
    assert rule.merged_axes(strategy, mesh) == ("b",)
    # Over c each device adds what its experts give; over a it has other tokens, and the same experts.
    assert str(rule.result_layout(0, strategy, mesh)) == "[a·b, -] Σc"
    assert [rule.operand_gradient_partial(i, strategy, mesh) for i in range(2)] == [("c",), ("a",)]
    found = {(rule.operand_layout(0, s).slices(mesh)[0], rule.operand_layout(1, s).slices(mesh)[0])
             for s in rule.strategies(mesh)}  # fmt: skip
    assert {(8, 4), (4, 2), (4, 4), (2, 4), (8, 1), (1, 4), (1, 1)} <= found
    assert all(rule.strategy(dict(zip("tde", s.axes, strict=True))) == s for s in rule.strategies(mesh))
    assert rule.most_parts(32) == 32


def test_a_rule_of_a_user_says_nothing_of_communication():
    with pytest.raises(StrategyError, match="has a dim with &, which takes a collective inside the operator"):
        register_rule("aten::trapz.x", "t+&d, d -> d")


@pytest.mark.parametrize("examples", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_experts_on_devices_give_what_one_device_gives(examples):
    """Tokens that are sent, experts and tokens that do not divide, devices without any of them, and tensor parallel."""
    [make] = [make for op, make in CASES if op == EXPERTS]
    sent = 0

    def body(d: Draw) -> None:
        nonlocal sent
        made, mesh = make(d, EXPERTS), d.pick(MESHES)
        rule = rule_for(made)
        along = [axis for axis in mesh.names if d.pick([True, True, False]) and axis != "tp"]
        assignment = {"t": [*along], "e": [*along]}
        for axis in mesh.names:
            if axis not in along:
                assignment.setdefault(d.pick(["t", "e", "f"]), []).append(axis)
        allowed = {rule.factors[at].name for at in rule.splittable}
        assignment = {name: axes for name, axes in assignment.items() if name in allowed}
        strategy = rule.strategy(assignment)
        torch.manual_seed(0)
        check(made, mesh, strategy)
        sent += bool(rule.merged_axes(strategy, mesh))

    explore(examples, body)
    assert sent > examples / 3


@pytest.mark.parametrize(
    "chosen",
    [
        torch.full((6, 2), 7),  # all of the last expert, on one device
        torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]),  # two devices get none
        torch.tensor([[7, 0], [8, 8], [1, 8], [8, 2], [3, 8], [8, 8]]),  # experts that there are not give nothing
        torch.zeros(0, 2, dtype=torch.int64),
    ],
)
@pytest.mark.parametrize("parts", [2, 6])
def test_experts_and_devices_that_get_nothing(chosen, parts):
    made = invocation(len(chosen), 8, chosen)
    rule = rule_for(made)
    axes = ["ep"] if "t" in {rule.factors[at].name for at in rule.splittable} else []
    check(made, Mesh.of(ep=parts), rule.strategy({"t": axes, "e": ["ep"]}))


def test_each_row_is_sent_once_there_and_once_back():
    """As many bytes as the plan says, where routing is balanced; and twice the same numbers to the last bit."""
    chosen = torch.arange(8).view(4, 2).repeat(2, 1)  # each device has two rows for each of its own and others' experts
    made, mesh = invocation(8, 8, chosen), Mesh.of(dp=2, ep=2, tp=2)
    rule = rule_for(made)
    strategy = rule.strategy({"t": ["dp", "ep"], "e": ["ep", "tp"]})
    tensors = [arg for arg in made.args if isinstance(arg, torch.Tensor)]
    layouts = [rule.operand_layout(i, strategy) for i in range(5)]
    forward, backward = internal_collectives(operator_of(made, whole(made)), rule, strategy, mesh, 8)

    def run(comm):
        here = [x[y.local_slice(x.shape, mesh, comm.rank)].detach() for x, y in zip(tensors, layouts, strict=True)]
        here = [x.requires_grad_(x.is_floating_point()) for x in here]
        call = localise(site_of(made, rule, strategy, mesh, comm.rank, whole(made)))
        [found] = evaluate(call, here, comm)
        gradients = torch.autograd.grad(found.square().sum(), [x for x in here if x.requires_grad])
        assert comm.collectives == [*forward, *backward]
        return [found.detach(), *gradients]

    first, second = simulate(mesh, run), simulate(mesh, run)
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    # Two tokens of a device with two rows each, of which half are for experts over tp: 2 rows of 3 numbers.
    assert [c.bytes for c in forward] == [2 * 2 * 8, 2 * 3 * 8, 2 * 3 * 8]


def test_rows_that_nobody_waits_for_are_found():
    def run(comm):
        comm.exchange_rows(torch.ones(3, 2), [1, 2], [2, 2], ("a",))

    with pytest.raises(WorldError, match=r"rank 0 was to receive \[2, 2\] rows of the members, and 1, 1 came"):
        simulate(Mesh.of(a=2), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_kernels_compute_experts_of_a_device(dtype):
    """Widths that torch's kernel takes: results and gradients are as near to float64 as those of one device."""
    torch.manual_seed(0)
    made = invocation(24, 4, width=16, inner=32)
    rule, mesh = rule_for(made), Mesh.of(ep=2)
    strategy = rule.strategy({"t": ["ep"], "e": ["ep"]})
    tensors = [arg for arg in made.args if isinstance(arg, torch.Tensor)]
    exact = whole(made)[0]
    exact = [exact.detach(), *torch.autograd.grad(exact.sum(), [x for x in tensors if x.requires_grad])]

    def run(comm, rank=0, layouts=None):
        layouts = layouts or [Layout.replicated(x.ndim) for x in tensors]
        here = [x[y.local_slice(x.shape, mesh, rank)].detach() for x, y in zip(tensors, layouts, strict=True)]
        here = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in here]
        how = strategy if comm else rule.replicated()
        [found] = evaluate(localise(site_of(made, rule, how, mesh, rank, whole(made))), here, comm)
        return [found.detach(), *torch.autograd.grad(found.sum(), [x for x in here if x.requires_grad])]

    layouts = [rule.operand_layout(i, strategy) for i in range(5)]
    ranks = simulate(mesh, lambda comm: run(comm, comm.rank, layouts))
    found = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    for ours, one, true in zip(found, run(None), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours - true).abs().max() <= 1.5 * (one - true).abs().max() + torch.finfo(dtype).eps


def test_a_plan_that_splits_over_an_axis_twice_is_refused():
    rule = rule_for(invocation(8, 4))
    with pytest.raises(StrategyError, match="an axis can split one factor only"):
        rule.strategy({"t": ["a"], "f": ["a"]})
    with pytest.raises(StrategyError, match="an axis can split one factor only"):
        rule.strategy({"e": ["a"], "f": ["a"]})
