"""Predictions beside published steps: two quick rows, and what fusing, recomputing and sharding change between rows."""

import importlib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from shardwright.compiler.plan.timing.prices import Prices

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def published():
    """The benchmark as a module, with its rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("published")


@pytest.fixture(scope="module")
def rows(published):
    """Llama-3 8B on 8 GPUs, without and with torch.compile."""
    found = [run for run in published.RUNS if run.name.startswith("Llama-3 8B") and run.mesh.sizes == {"dp": 8}]
    assert [run.kernels for run in found] == ["eager", "compiled"]
    return found


@pytest.fixture(scope="module")
def plans_of_rows(published, rows):
    """The plans of each row for a model of one and of two layers."""
    return [[published.plan_of(run, layers) for layers in (1, 2)] for run in rows]


@pytest.fixture(scope="module")
def eager_and_compiled(published, rows, plans_of_rows):
    return [published.predicted(run, plans) for run, plans in zip(rows, plans_of_rows, strict=True)]


def test_a_step_is_predicted_with_and_without_fused_operators(published, rows, eager_and_compiled):
    ratios = [found.hidden / run.published_s for found, run in zip(eager_and_compiled, rows, strict=True)]
    assert all(abs(ratio - 1) <= published.WITHIN for ratio in ratios), ratios
    eager, compiled = (found.computes for found in eager_and_compiled)
    gained = rows[0].published_s - rows[1].published_s
    assert eager - compiled == pytest.approx(gained, rel=0.25)


def test_what_is_computed_again_and_what_is_stored_where_is_counted(published, rows, plans_of_rows, eager_and_compiled):
    run, plans, some = rows[1], plans_of_rows[1], eager_and_compiled[1]
    nothing, all_but_the_end = (
        published.predicted(replace(run, again=again), plans) for again in ("nothing", "layers but their end")
    )
    assert nothing.computes < some.computes < all_but_the_end.computes < 4 / 3 * nothing.computes
    states = published.predicted(replace(run, sharded="optimizer"))
    # Gradients in float32 and parameters in 16 bits go once; FSDP gathers parameters once more.
    assert 0.7 * some.parameters < states.parameters < 0.8 * some.parameters
    assert states.optimizer == pytest.approx(some.optimizer, rel=1e-3)


def test_every_run_names_its_source_and_who_is_far_off_why(published):
    assert len(published.RUNS) == len({(run.name, run.mesh, run.source) for run in published.RUNS})
    assert all(run.source and run.published_s > 0 for run in published.RUNS)


def test_hardly_anything_is_computed_between_what_makes_activations_and_what_reads_them(published):
    """So that their collectives begin no earlier than they are waited for: what programs could hide is priced here."""
    (run,) = (run for run in published.RUNS if run.name.startswith("Llama-3 8B") and "tp" in run.mesh.sizes)
    plan = published.plan_of(run, 2)
    prices, nodes = Prices(plan, published.board(run.hardware)), plan.capture.nodes
    forward, backward = (
        [0.0, *accumulate(map(of, nodes))] for of in (prices.forward_s, prices.backward_s)
    )  # the seconds before each operator
    place = {node.name: at for at, node in enumerate(nodes)}
    made = {result: at for at, node in enumerate(nodes) for result in node.results}
    sent_s = hidden_s = 0.0
    for transfer, moved in prices.moving:
        if transfer.value not in made or plan.capture.values[transfer.value].begins_early:
            continue
        first, reader = made[transfer.value] + 1, place.get(transfer.consumers[0][0], len(nodes))
        sent_s += moved.seconds
        hidden_s += min(moved.forward_s, forward[reader] - forward[first])
        hidden_s += min(moved.gradient_s, backward[reader] - backward[first])
    assert sent_s > 0.1 * prices.step_s
    assert 0 < hidden_s < 0.01 * prices.step_s


@pytest.fixture(scope="module")
def mixtral(published):
    """Mixtral 8x7B on 64 H100s, in 4 stages."""
    (run,) = (run for run in published.RUNS if run.name == "Mixtral 8x7B")
    return run


@pytest.mark.slow
def test_a_step_of_experts_is_predicted(published, mixtral):
    """Stages in turn wait less, and experts that are computed again get their tokens again."""
    plans = [published.plan_of(mixtral, layers) for layers in (1, 2)]
    found = published.predicted(mixtral, plans)
    assert abs(found.hidden / mixtral.published_s - 1) <= published.WITHIN
    waiting = published.predicted(replace(mixtral, chunks=1), plans)
    # Besides 16 micro-batches some three are waited for, less long than the last stage's, which has the vocabulary;
    # with eight stages in turn some three eighths.
    assert waiting.computes / found.computes == pytest.approx((16 + 3) / (16 + 3 / 8), rel=0.04)
    again = published.predicted(replace(mixtral, again="norms and experts"), plans)
    assert again.activations == pytest.approx(found.activations * (2 + 2 + 2) / (2 + 2), rel=0.02)


@pytest.mark.slow
def test_experts_are_split_over_neighbours_and_tokens_are_sent_among_these(published):
    """Over two of tensor parallelism and four replicas of attention, of which each host has all."""
    run = next(run for run in published.RUNS if run.name == "Mixtral 8x22B")
    assert (run.replicas, run.tp, run.of_experts) == (8, 2, ("ep", "tp"))
    plan = published.plan_of(run, 1)
    (node,) = (node for node in plan.capture.nodes if node.op == "shardwright.experts")
    there, back = plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh)
    assert [c.bytes for c in there[1:]] == [c.bytes for c in back] == [2 * 2048 * 6144 * 2] * 2  # of 2 experts each
    assert {(c.kind, c.axes) for c in (*there, *back)} == {("all_to_all", ("ep", "tp"))}
    moved = {
        plan.capture.values[transfer.value].label.removeprefix("layers.0."): published._both_ways(plan, transfer, step)
        for transfer in plan.transfers
        for step in transfer.steps
        if plan.capture.values[transfer.value].kind == "parameter"
    }
    over = {label: sent.axes for label, (_, sent) in moved.items()}
    assert (over["experts.down"], over["heads.q.weight"], over["router.weight"]) == (
        ("dp",), ("dp", "ep"), ("dp", "ep", "tp"),
    )  # fmt: skip


def test_tokens_that_go_to_a_host_once(published):
    """Of eight experts out of 128 on four hosts, 3.6 hosts have some: 0.45 of what an all-to-all sends between them."""
    runs = [run for run in published.RUNS if run.name == "Qwen3 235B"]
    between = published.Collective("all_to_all", ("ep", "tp"), 1000)
    by_host, plain = (next(run for run in runs if run.dispatch == way) for way in ("DeepEP", "all-to-all"))
    assert by_host.mesh.extent(by_host.of_experts) == 32
    assert published.once_for_each_place(by_host, between).bytes == pytest.approx(454, abs=1)
    in_a_row = replace(by_host, neighbours=True)
    assert published.once_for_each_place(in_a_row, between).bytes == 1000 // 8
    assert published.once_for_each_place(plain, between) == between


def test_speeds_of_megatron_are_steps(published):
    """Its page has both for Qwen3; of Mixtral its log says so, when all scores counted (Megatron-LM issue 756)."""
    runs = importlib.import_module("published_runs")
    for step_s, tera in ((19.7, 245), (17.6, 276), (24.2, 200), (29.0, 167)):
        assert runs._mixture_s(runs.QWEN3_235B, 2048, 256, tera, causal=True) == pytest.approx(step_s, rel=0.01)
    shape = replace(runs.MIXTRAL_8X7B, length=2048)
    assert runs._mixture_s(shape, 128, 16, 235.7, causal=False) == pytest.approx(5.540, rel=1e-3)
