"""Mixtures of experts of transformers with experts on different devices are those of one device."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from exact_models import NAMED, mixture
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.explain import Explainer
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from whole import plain, run, same

EXPERTS = "*.mlp.experts"


def pins(tokens, experts, inner=1):
    """Pins that cut tokens, experts, and the inner dim of these, into so many parts."""
    return {EXPERTS: ((tokens, 1), (tokens, 1), (tokens, 1), (experts, 1, inner, 1), (experts, 1, inner))}


def batch_of(seed=0, rows=4, length=6):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(3, 64, (rows, length), generator=generator) for _ in range(2))
    return ids, labels.masked_fill(labels < 12, -100)


def loss_fn(model, batch):
    """With the loss of balance, over the global batch, where the model has one."""
    ids, labels = batch
    found = model(input_ids=ids, output_router_logits=True) if "mixtral" in model.config.model_type else model(ids)
    loss = F.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    return loss if getattr(found, "aux_loss", None) is None else loss + 0.1 * found.aux_loss


def by_loops(model):
    """The model whose experts are called one after the other, as transformers does without a grouped product."""
    reference = copy.deepcopy(model)
    reference.config._experts_implementation = "eager"
    return reference


def gradients(found):
    return {name: tensor for name, tensor in found.items() if not name.startswith(("aux", "buffer"))}


def exchanged(plan):
    """How often rows or their numbers travel inside of experts, by direction."""
    nodes = [node for node in plan.capture.nodes if node.op == "shardwright.experts"]
    inside = [plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh) for node in nodes]
    assert inside, "there are experts"
    return Counter(
        direction for ways in inside for direction, way in zip(("forward", "backward"), ways, strict=True) for _ in way
    )


@pytest.mark.parametrize(
    ("name", "sizes", "cut"),
    [
        ("deepseek_v3", {"dp": 2, "ep": 2}, (4, 2)),
        *slow(
            ("qwen3_moe", {"ep": 4}, (4, 4)),
            ("qwen2_moe", {"ep": 2, "tp": 2}, (2, 2, 2)),
            ("mixtral", {"ep": 2, "tp": 3}, (1, 2, 1)),
        ),
    ],
)
def test_mixtures_with_experts_on_devices_are_those_of_one(name, sizes, cut):
    model, batch = mixture(name), batch_of()
    for path, module in model.named_modules():  # as `pins=` has it, too
        if path.endswith("mlp.experts"):
            sw.shard(module, pins(*cut)[EXPERTS])
    captured = captured_step(model, loss_fn, batch, {})
    plan = make_plan(captured, PlanRequest(Mesh.of(**sizes), "auto", "propagation"))
    layers = sum(node.op == "shardwright.experts" for node in captured.nodes)
    tokens, experts = cut[:2]
    rows = {"forward": 3 * layers, "backward": 2 * layers} if tokens > 1 and experts > 1 else {}
    assert exchanged(plan) == rows
    used = [plan.target(node, 3).layout for node in captured.nodes if node.op == "shardwright.experts"]
    assert {layout.slices(plan.mesh)[0] for layout in used} == {experts}
    same(gradients(run(plan, model, batch)), gradients(plain(by_loops(model), loss_fn, batch)))


def test_layers_that_are_recomputed_send_their_rows_once_more():
    model, batch = mixture("qwen3_moe"), batch_of()
    captured = captured_step(model, loss_fn, batch, pins(2, 2))
    request = PlanRequest(Mesh.of(ep=2), "auto", "propagation", recompute=("model.layers.*",))
    plan = make_plan(captured, request)
    program = lower(plan, 0)
    assert program.source.count("kernels.experts(") == 2
    [experts] = [i for i in program.instructions if i.call.function == "kernels.experts"]
    sent = [direction for _, direction, _ in experts.collectives(plan.mesh)]
    assert (sent.count("forward"), sent.count("backward")) == (3, 3 + 2)
    same(gradients(run(plan, model, batch)), gradients(plain(by_loops(model), loss_fn, batch)))


@pytest.mark.slow
def test_experts_under_autocast():
    """Rows are cast to the dtype of the experts before they are sent, as a model of transformers casts them."""

    def in_bfloat16(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    model, batch = NAMED["qwen3_moe"].model(), batch_of()
    captured = captured_step(model, in_bfloat16, batch, pins(2, 2))
    [first, _] = [node for node in captured.nodes if node.op == "shardwright.experts"]
    assert {captured.values[first.operands[i]].dtype for i in (0, 3, 4)} == {torch.float32}
    alone = captured_step(model, in_bfloat16, batch, {})
    whole = make_plan(alone, PlanRequest(Mesh.of(ep=1), "auto", "propagation"))
    plan = make_plan(captured, PlanRequest(Mesh.of(ep=2), "auto", "propagation"))
    assert exchanged(plan) == {"forward": 6, "backward": 4}
    same(gradients(run(plan, model, batch)), gradients(run(whole, model, batch)), 2e-2)


def test_a_search_sends_tokens_to_experts_and_says_so():
    """Experts of published widths on 2 hosts: weights are too large to gather, and tokens few beside them."""
    config = transformers.MixtralConfig(num_hidden_layers=1, use_cache=False)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(4, 1024, dtype=torch.long)
    captured = captured_step(model, lambda model, b: model(input_ids=b, labels=b).loss, ids, {})
    hardware = shipped("h100").on_hosts([str(rank // 2) for rank in range(4)])
    plan = make_plan(captured, PlanRequest(Mesh.of(ranks=4), hardware=hardware))
    assert exchanged(plan) == {"forward": 3, "backward": 2}
    axes = [axis for axis in plan.mesh.axes if axis.name.startswith("ep")]
    assert axes, plan.mesh
    node = next(node for node in captured.nodes if node.op == "shardwright.experts")
    told = Explainer(plan, hardware).answer(node.name)
    assert f"rows go to the devices of their experts, and results back, over {'·'.join(a.name for a in axes)}." in told
    assert "kernels.experts(" in lower(plan, 0).source


def five_steps(name, ranks, backend):
    """Losses of five steps and the parameters then, of a rank that has some of the experts, or of one device."""
    model = mixture(name)
    if ranks:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        sw.init(backend=backend)
        given = {"mode": "auto", "search": "propagation", "batch": "global", "mesh": f"ep={ranks}"}
        model = sw.parallelize(model, loss_fn, batch_of(), pins=pins(ranks, ranks), **given)
        assert exchanged(model.plan) == {"forward": 3, "backward": 2}
    else:
        model.config._experts_implementation = "eager"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        loss = model(batch_of(step)) if ranks else loss_fn(model, batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append((model(batch_of(7)) if ranks else loss_fn(model, batch_of(7))).item())
    named = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return losses, {name: value.detach().tolist() for name, value in named.items()}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "backend"), [("mixtral", 2, "shm"), ("deepseek_v3", 2, "gloo"), ("qwen3_moe", 4, "gloo")]
)
def test_processes_train_mixtures(name, ranks, backend):
    losses, parameters = five_steps(name, 0, backend)  # here, where transformers is imported
    for found, after in run_ranks(ranks, partial(five_steps, name, ranks, backend)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-10, atol=0)
        assert after.keys() == parameters.keys()
        for key, expected in parameters.items():
            ours, theirs = (torch.tensor(x, dtype=torch.float64) for x in (after[key], expected))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_microbatches_send_their_own_rows():
    """Experts of pipeline stages: each microbatch sends its rows among the ranks of its stage."""
    model, batch = mixture("qwen3_moe", layers=2), batch_of()
    captured = captured_step(model, loss_fn, batch, pins(2, 2))
    request = PlanRequest(Mesh.parse("pp=2,ep=2"), "auto", "propagation", microbatches=2)
    plan = make_plan(captured, request)
    assert lower(plan, 0).source.count("kernels.experts(") == 2
    same(gradients(run(plan, model, batch)), gradients(plain(by_loops(model), loss_fn, batch)))
