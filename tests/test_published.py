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
def eager_and_compiled(published, rows):
    return [published.predicted(run) for run in rows]


def test_a_step_is_predicted_with_and_without_fused_operators(published, rows, eager_and_compiled):
    ratios = [found.hidden / run.published_s for found, run in zip(eager_and_compiled, rows, strict=True)]
    assert all(abs(ratio - 1) <= published.WITHIN for ratio in ratios), ratios
    eager, compiled = (found.computes for found in eager_and_compiled)
    gained = rows[0].published_s - rows[1].published_s
    assert eager - compiled == pytest.approx(gained, rel=0.25)


def test_what_is_computed_again_and_what_is_stored_where_is_counted(published, rows, eager_and_compiled):
    run, some = rows[1], eager_and_compiled[1]
    nothing, all_but_the_end = (
        published.predicted(replace(run, again=again)) for again in ("nothing", "layers but their end")
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
