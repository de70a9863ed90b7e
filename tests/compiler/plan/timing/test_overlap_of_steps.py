"""The communication of a step that is hidden: what begins early, what is waited for, and that programs do the same."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.cost import overlaps
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices

LAYERS, WIDTH, ROWS = 6, 4096, 8 * 4096
H100 = shipped("h100")
KEPT = frozenset[str]()


@cache
def captured(rows, between):
    """The graph of layers, which all plans of them share."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), between()) for _ in range(LAYERS)]
        model, batch = nn.Sequential(*layers).bfloat16(), torch.ones(rows, WIDTH, dtype=torch.bfloat16)
        return captured_step(model, lambda m, x: m(x).sum(), batch, {})


def sharded(rows=ROWS, hardware=H100, recompute=(), again=None, between=nn.Identity):
    """Layers whose parameters are stored in parts by 8 devices; with ``again`` none is gathered again."""
    graph, mesh = RuledGraph.of(captured(rows, between)), Mesh.of(d=8)
    plan = fully_sharded(graph, PlanRequest(mesh, hardware=hardware, recompute=recompute))
    plan = replace(plan, hardware=hardware) if again is None else replace(plan, hardware=hardware, again=again)
    return plan, Prices(plan, hardware)


def of_a_layer(prices):
    """Seconds to gather a parameter, and to reduce and scatter its gradient."""
    moved = next(moved for moved in prices.transfers if moved.early_forward_s)
    return moved.forward_s, moved.gradient_s


def test_all_is_hidden_but_the_first_gather_and_the_last_gradient():
    plan, prices = sharded(again=KEPT)
    gather_s, reduce_s = of_a_layer(prices)
    assert gather_s < min(map(prices.forward_s, plan.capture.nodes[:LAYERS]))
    assert prices.time_line.together_s == pytest.approx((LAYERS - 1) * (gather_s + reduce_s))
    assert prices.hidden_s == pytest.approx(H100.hides_gradients * prices.time_line.together_s)
    assert prices.exposed_s == pytest.approx(prices.communicating_s - prices.hidden_s)
    assert prices.step_s == pytest.approx(prices.time_line.end_s + prices.updating_s)


def test_what_is_gathered_again_begins_one_use_ahead():
    """The loss needs no parameter: the first regather of the backward, of the last layer, is waited for."""
    plan, prices = sharded()
    assert len(plan.again) == LAYERS
    gather_s, reduce_s = of_a_layer(prices)
    regathered = sum(moved.again_s > 0 for moved in prices.transfers)  # the first layer's gradient needs no weight
    assert regathered == LAYERS - 1
    hidden = (LAYERS - 1) * (gather_s + reduce_s) + (regathered - 1) * gather_s
    assert prices.time_line.together_s == pytest.approx(hidden)


def test_a_block_that_is_recomputed_gathers_nothing_before_it_begins():
    plan, prices = sharded(recompute=("*",), between=nn.GELU)
    assert plan.computed_again
    _, reduce_s = of_a_layer(prices)
    behind = [moved for moved in prices.transfers if moved.again_s]
    assert behind
    assert prices.time_line.together_s <= (LAYERS - 1) * reduce_s + sum(moved.again_s for moved in behind)
    _, free = sharded(again=KEPT, between=nn.GELU)
    assert prices.exposed_s > free.exposed_s + LAYERS * of_a_layer(free)[0] * 0.9


@pytest.mark.parametrize("backend", ["gloo", "shm", "mpi"])
def test_other_backends_than_nccl_prefetch_nothing(backend):
    _, prices = sharded(hardware=replace(shipped("cpu_host"), backend=backend, hides_gradients=0.9), again=KEPT)
    assert not prices.hardware.prefetches
    assert prices.hidden_s == 0


def test_where_communication_takes_longer_than_computing_it_is_what_a_step_takes():
    _, prices = sharded(rows=8, again=KEPT)
    gather_s, _ = of_a_layer(prices)
    assert prices.exposed_s > prices.computing_s
    assert prices.time_line.together_s < prices.computing_s
    assert gather_s * LAYERS < prices.step_s


def test_programs_begin_what_the_time_line_does():
    """Each all-gather but the first begins behind another one, and each sum of gradients is waited for behind it."""
    plan, prices = sharded(again=KEPT)
    program = lower(plan, 0, overlap=True)
    kinds = [instruction.kind for instruction in program.instructions]
    assert kinds.count("begin") == kinds.count("late") == LAYERS - 1
    events = [each for each in prices.time_line.events if not each.work.backward]
    starts = {each.work.operator: each.start_s for each in events if each.work.stream == "computing"}
    gathers = [each for each in events if each.work.stream == "communicating" and each.work.operator in starts]
    assert len(gathers) == LAYERS
    assert all(each.end_s <= starts[each.work.operator] + 1e-12 for each in gathers)
    beside = (max(start for start in [-1.0, *starts.values()] if start < each.end_s) for each in gathers)
    assert sum(start >= 0 for start in beside) == LAYERS - 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llama_8b_on_64_gpus_exposes_a_tenth_of_its_step_at_most():
    """In bf16 within 80 GiB: a step takes a tenth more than it computes, and what is prefetched fits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16().train()
        ids = torch.zeros(64, 2048, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        captured = captured_step(model, lambda m, b: m(**b).loss, batch, {})
    hardware = replace(H100, ranks_per_host=8)
    plan = make_plan(captured, PlanRequest(Mesh.of(d=64), hardware=hardware, memory=80 * 2**30))
    prices = Prices(plan, hardware)
    assert prices.exposed_s <= 0.1 * prices.step_s
    assert prices.step_s <= 1.1 * prices.computing_s
    assert plan.gap < 0.02
    program = lower(plan, 0, overlap=hardware.prefetches)
    gathered = 5 * 32  # those of keys and values may be replicated, which are small
    assert [instruction.kind for instruction in program.instructions].count("begin") >= gathered
    assert peak_of(plan, program).bytes <= plan.memory


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(256, 256), nn.Parameter(torch.ones(8, 512, 256))

    def forward(self, x):
        return torch.bmm(self.first(x), self.weight.transpose(1, 2)).sum()


def test_only_parameters_and_casts_are_gathered_beside_computing():
    """A view is gathered where it is read."""
    with torch.device("meta"):
        captured = captured_step(Experts(), lambda m, x: m(x), torch.ones(8, 4096, 256), {})
    (view,) = (value for value in captured.values.values() if value.viewed)
    weight = next(value for value in captured.of_kind("parameter") if value.label == "weight")
    assert [overlaps(value, shared=False) for value in (view, weight)] == [False, True]
    assert overlaps(view, shared=True)  # in a bucket
    sharded = fully_sharded(RuledGraph.of(captured), PlanRequest(Mesh.of(d=8), hardware=H100))
    gathered = [moved for moved in Prices(sharded, H100).transfers if moved.value in (view.name, weight.name)]
    assert all(moved.overlaps == (moved.value == weight.name) for moved in gathered)
