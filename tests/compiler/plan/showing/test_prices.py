"""What a step takes: operators that do one thing after the other, the optimizer's step, and what is hidden."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.cost import PASSES_OVER_SCORES, Seconds
from shardwright.compiler.plan.pricing.hardware import Updating, shipped
from shardwright.compiler.plan.pricing.memory import ADAMW, states_of
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices

CPU = replace(shipped("cpu_host"), launch_s=1e-3, flops=(("float32", 1e9),), memory_bandwidth=1e8)
WIDTH, ROWS = 256, 64
BYTES = 4 * WIDTH * WIDTH
QUICK = {"launch_s": 1e-9, "flops": (("float32", 1e15),), "memory_bandwidth": 1e12}


@pytest.fixture(scope="module")
def plan():
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    captured = captured_step(model, lambda m, x: m(x).sum(), torch.ones(ROWS, WIDTH), {})
    return make_plan(captured, PlanRequest(Mesh.of(d=2), "data", hardware=CPU))


@pytest.mark.parametrize("at_once", [1.0, 0.25, 0.0])
def test_an_operator_takes_its_longest_part_and_what_is_not_done_at_once_of_the_others(plan, at_once):
    node, seconds = plan.capture.nodes[0], Seconds(replace(CPU, at_once=at_once))
    assert node.op == "aten.linear.default"
    work_s = 2 * ROWS * WIDTH**2 / 1e9 / 2
    traffic_s = (BYTES + 2 * 4 * ROWS * WIDTH) / 1e8 / 2
    forward = seconds.forward(plan.graph, node, plan.strategies[node.name], plan.mesh)
    assert forward == pytest.approx(work_s + (1 - at_once) * (traffic_s + 1e-3))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_fused_attention_multiplies_at_its_own_speed_and_its_backward_makes_the_scores_again(share):
    def loss_fn(weight, x):
        return F.scaled_dot_product_attention(x, x, x * weight.weight, is_causal=True).sum()

    captured = captured_step(torch.nn.Linear(8, 1, bias=False), loss_fn, torch.ones(2, 4, 64, 8), {})
    made = make_plan(captured, PlanRequest(Mesh.of(d=2), "data", hardware=CPU))
    [node] = [node for node in captured.nodes if "scaled_dot_product" in node.op]
    seconds = Seconds(replace(CPU, **QUICK | {"flops": (("float32", 1e9),)}, attention=share))
    given = made.graph, node, made.strategies[node.name], made.mesh
    # Scores and their product with the values, half of each, on half of the samples.
    forward_s = 2 * 2 * (2 * 4 * 64 * 64 * 8) / 2 / 2 / (1e9 * share)
    assert seconds.computing(*given) == pytest.approx(forward_s)
    assert seconds.backward(*given) == pytest.approx(2.5 * forward_s)
    assert seconds.floor(made.graph, node, 2) == pytest.approx(3.5 * forward_s)


def test_a_balanced_ring_takes_the_mean_with_the_exchange_of_rows_and_hides_blocks_beside_it():
    """A block travels beside all rounds but one. Where keys are whole, the last of P ranks sees all P blocks."""
    heads = torch.ones(1, 2, 64, 8)

    def loss_fn(weight, x):
        return F.scaled_dot_product_attention(x, x, x * weight.weight, is_causal=True).sum()

    captured, mesh = captured_step(torch.nn.Linear(8, 1, bias=False), loss_fn, heads, {}), Mesh.of(d=4)
    made = make_plan(captured, PlanRequest(mesh, "data", hardware=CPU))
    [node] = [node for node in captured.nodes if "scaled_dot_product" in node.op]
    ring = made.graph.rules[node.name].strategy({"s": ["d"]})
    h100 = replace(shipped("h100"), launch_s=1e-12, memory_bandwidth=1e15, attention=1.0)
    part = 2 * 16 * 8 * 4  # of queries, keys, values, the result, or their gradients
    block = gradients = 2 * part
    whole_s = 2 * (2 * 2 * 64 * 64 * 8) / 2
    forward, backward = made.graph.collectives_inside(node, ring, mesh)
    assert [c.bytes for c in forward] == [3 * part, *[block] * 3, part]
    assert [c.bytes for c in backward] == [2 * part, *[block, gradients] * 3, gradients, 3 * part]
    shift_s = Seconds(h100).collective(Collective("shift", ("d",), block), mesh)
    gathered = Collective("all_gather", ("d",), 4 * block)
    assert shift_s == pytest.approx(Seconds(h100).collective(gathered, mesh) / 3)
    exchanged = [Collective("all_to_all", ("d",), times * part) for times in (3, 1, 2)]
    into_s, out_s, back_s = (Seconds(h100).collective(each, mesh) for each in exchanged)
    alone = made.graph.rules[node.name].strategy({"l": ["d"]})
    for flops, hides, hidden in ((1e12, 0.0, 0), (1.0, 0.9, 0.9), (1.0, 1.0, 1.0)):
        seconds = Seconds(replace(h100, flops=(("float32", flops),), hides_gradients=hides))
        computing_s = seconds.computing(made.graph, node, ring, mesh)
        assert computing_s == pytest.approx(whole_s / flops / 4)
        busiest_s = seconds.computing(made.graph, node, alone, mesh)
        assert busiest_s == pytest.approx(whole_s / flops / 4 * (2 - 1 / 4), rel=0.02)  # ends of the triangle
        inside = seconds.inside(made.graph, node, ring, mesh)
        assert inside.forward == pytest.approx(3 * shift_s * (1 - hidden) + into_s + out_s)
        assert inside.backward == pytest.approx(7 * shift_s * (1 - hidden) + back_s + into_s)
        total = seconds.operator(made.graph, node, ring, mesh)
        assert total == pytest.approx(3.5 * computing_s + sum(inside))
    # Where computing is short, no more is hidden than it takes.
    quick = Seconds(replace(h100, flops=(("float32", 1e15),), hides_gradients=1.0))
    computing_s = quick.computing(made.graph, node, ring, mesh)
    expected = 3 * shift_s - computing_s * 3 / 4 + into_s + out_s
    assert quick.inside(made.graph, node, ring, mesh).forward == pytest.approx(expected)
    # On a backend that does not run collectives beside computing nothing is.
    assert Seconds(replace(h100, backend="gloo")).inside(made.graph, node, ring, mesh).forward >= 3 * shift_s * 0.99


def test_a_ring_with_a_mask_makes_its_scores_in_memory():
    heads, seen = torch.ones(1, 2, 64, 8), torch.ones(1, 1, 1, 64, dtype=torch.bool)

    def loss_fn(weight, batch):
        x, mask = batch
        return F.scaled_dot_product_attention(x, x, x * weight.weight, attn_mask=mask).sum()

    captured, mesh = captured_step(torch.nn.Linear(8, 1, bias=False), loss_fn, (heads, seen), {}), Mesh.of(d=4)
    made = make_plan(captured, PlanRequest(mesh, "data", hardware=CPU))
    [node] = [node for node in captured.nodes if "scaled_dot_product" in node.op]
    rule = made.graph.rules[node.name]
    seconds = Seconds(replace(shipped("h100"), launch_s=0.0, memory_bandwidth=1.0, at_once=1.0))
    usual, ring = (seconds.computing(made.graph, node, rule.strategy({of: ["d"]}), mesh) for of in ("l", "s"))
    assert ring - usual == pytest.approx(PASSES_OVER_SCORES * 4 * 2 * 64 * 64 / 4)


@pytest.mark.parametrize(("name", "times"), [("sgd", 3), ("adamw", 7)])
def test_the_step_of_the_optimizer_is_part_of_a_step(plan, name, times):
    """It reads parameters, gradients and states, and writes parameters and states."""
    prices = Prices(replace(plan, optimizer=states_of(name)), CPU)
    assert prices.updating_s == pytest.approx(times * BYTES / 1e8)
    assert prices.step_s == prices.computing_s + prices.communicating_s + prices.updating_s


MEASURED = {"updates": (Updating(0, 1e8), Updating(2, 2e7, 5e-3)), "split_s": 2e-3, "around_s": 0.25}


@pytest.mark.parametrize(
    ("per_entry", "bandwidth", "parameter_s"), [(0, 1e8, 0), (1, 1e8, 0), (2, 2e7, 5e-3), (3, 2e7, 5e-3)]
)
def test_optimizers_take_what_was_measured_of_those_with_as_many_states(plan, per_entry, bandwidth, parameter_s):
    prices = Prices(replace(plan, optimizer=replace(ADAMW, per_entry=per_entry)), replace(CPU, **MEASURED))
    assert prices.updating_s == pytest.approx((3 + 2 * per_entry) * BYTES / bandwidth + parameter_s)
    assert prices.step_s == prices.computing_s + prices.communicating_s + prices.updating_s + 0.25


def test_a_parameter_in_parts_takes_more_beside_its_bytes(plan):
    [weight] = plan.capture.of_kind("parameter")
    objective = Seconds(replace(CPU, **MEASURED))
    whole, part = (objective.leaf(weight, Layout.split(2, dims), plan.mesh) for dims in ({}, {0: plan.mesh.names}))
    assert part - 5e-3 - 2e-3 == pytest.approx((whole - 5e-3) / 2)


def test_where_one_parameter_is_stored_in_parts_all_take_more():
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    captured = captured_step(model, lambda m, x: m(x).sum(), torch.ones(ROWS, WIDTH), {})
    made = make_plan(captured, PlanRequest(Mesh.of(d=2), "data", hardware=CPU))
    first, *_ = captured.of_kind("parameter")
    split = replace(made, leaves={**made.leaves, first.name: Layout.split(2, {0: made.mesh.names})})
    known, unknown = replace(CPU, split_s=2e-3), CPU
    more_s = [Prices(plan, known).updating_s - Prices(plan, unknown).updating_s for plan in (made, split)]
    assert more_s == pytest.approx([0, 3 * 2e-3])


def test_the_search_stores_a_parameter_in_parts_where_whole_ones_take_long_to_update():
    """Links are fast here, so that gathering costs less than the states of the optimizer save."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    captured = captured_step(model, lambda m, x: m(x).sum(), torch.ones(ROWS, WIDTH), {})
    found = make_plan(captured, PlanRequest(Mesh.of(d=2), "auto", hardware=replace(CPU, memory_bandwidth=1e6)))
    [weight] = found.capture.of_kind("parameter")
    assert found.bytes_of(weight) == BYTES / 2
    objective = Seconds(found.hardware, ADAMW)
    assert found.cost == pytest.approx(Prices(found, found.hardware).step_s)
    assert objective.leaf(weight, found.leaves[weight.name], found.mesh) == pytest.approx(7 * BYTES / 2 / 1e6)


def hidden_s(layers, width, **hardware):
    """What is hidden of a step of data parallelism; the gradients and the backward of one layer, each in seconds."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        captured = captured_step(model, lambda m, x: m(x).sum(), torch.ones(ROWS, width), {})
    plan = make_plan(captured, PlanRequest(Mesh.of(d=2), "data", hardware=replace(CPU, **hardware)))
    prices = Prices(plan, plan.hardware)
    gradients_s = sum(moved.seconds for moved in prices.moved if moved.in_buckets)
    assert prices.step_s == prices.computing_s + prices.communicating_s + prices.updating_s - prices.hidden_s
    return prices.hidden_s, gradients_s / layers, prices.computes_s[plan.capture.nodes[0].name] * 2 / 3


def test_gradients_are_hidden_behind_what_is_left_of_the_backward():
    """Each layer's gradient is large enough to travel alone, from when it is there until those before it are done."""
    hidden, gradient, backward = hidden_s(3, 2048, hides_gradients=0.5)
    assert gradient < backward
    assert hidden == pytest.approx(0.5 * 2 * gradient)  # that of the first layer is there when all is done
    hidden, gradient, backward = hidden_s(3, 2048, hides_gradients=0.5, **QUICK)
    assert gradient > backward
    assert hidden == pytest.approx(0.5 * 2 * backward)
    assert hidden_s(3, 2048)[0] == 0


def test_gradients_in_one_bucket_have_nothing_to_hide_behind():
    """It begins when the last of them is there. All but the last begin before where first and last are small."""
    assert hidden_s(3, WIDTH, hides_gradients=0.5)[0] == 0
    hidden, gradient, _ = hidden_s(3, 512, hides_gradients=0.5, backend="nccl")
    assert hidden == pytest.approx(0.5 * 2 * gradient)


def test_a_gradient_is_copied_into_its_bucket():
    """It is read and written once more, whether it is small or large."""
    objective = Seconds(CPU)
    for width in (WIDTH, 2048):
        size = 4 * width * width
        reduced_s = CPU.shared_s("all_reduce", size, 2, "inside")
        found_s = objective.collective(Collective("all_reduce", ("d",), size), Mesh.of(d=2), shared=True)
        assert found_s == pytest.approx(reduced_s + 2 * size / 1e8)
