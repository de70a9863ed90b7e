"""A Llama whose sequence is split over ranks is the Llama of one device: rings of keys, and all-to-alls over heads."""

import dataclasses
from functools import partial

import pytest
import torch
import transformers
from exact_models import WIDTH, WORDS, llama
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright as sw
import whole
from ranks import run_ranks
from shardwright.compiler.capture.rewriting.masks import ATTENTION
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import spaces
from shardwright.compiler.plan.explain import Explainer
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.compiler.plan.request import PlanRequest
from whole import plain, run, same, splitting_hardware


def batch_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (1, length), generator=generator) for _ in range(2))
    return ids, labels.masked_fill(labels == 3, -100)


def loss_fn(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())


def split_by(monkeypatch, captured, request, factors):
    """The plan of a request in which rules that have one of these factors split it over all axes, where they can."""
    usual = spaces.choices_of

    def choices(rule, mesh, row):
        found = usual(rule, mesh, row)
        at = next((i for i, factor in enumerate(rule.factors) if factor.name in factors(rule)), None)
        return found if at is None else tuple(s for s in found if set(s.axes[at]) == set(mesh.names)) or found

    with monkeypatch.context() as patched:
        patched.setattr(spaces, "choices_of", choices)
        return make_plan(captured, request)


def in_a_ring(monkeypatch, captured, request):
    """The plan of a request whose every attention splits keys over all axes."""
    return split_by(monkeypatch, captured, request, lambda rule: ["s"] if rule.along else [])


def by_heads(rule):
    """Attention by heads, and products along the sequence."""
    return ["*0"] if rule.along or {"n", "k"} <= rule.sizes.keys() else []


def linked_hardware():
    """Slow devices on a quick network, which has its price all the same."""
    slow, linked = splitting_hardware(), Curve((Segment(0, 1e-6, 1e9),))
    links = tuple(dataclasses.replace(link, curve=linked) for link in slow.links)
    flops = tuple((dtype, 1e9) for dtype, _ in slow.flops)
    return dataclasses.replace(slow, flops=flops, memory_bandwidth=1e10, links=links)


def gradients(found):
    return {name: tensor for name, tensor in found.items() if not name.startswith(("aux", "buffer"))}


class LargestBesideTheSequence(TorchDispatchMode):
    """The most numbers of a tensor that has the whole sequence as a dim."""

    def __init__(self, length):
        super().__init__()
        self.length, self.largest = length, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and self.length in tensor.shape:
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.parametrize("sizes", [pytest.param({"d": 3}, marks=pytest.mark.slow), {"a": 2, "b": 2}])
def test_a_llama_in_a_ring_is_that_of_one_device(sizes, monkeypatch):
    """Nothing holds the keys of the whole sequence, nor a mask of it: at most the rotary tables have so many rows."""
    length, heads, layers = 60, 3, 1
    model, batch = llama(heads, heads, length, layers), batch_of(length)
    captured = captured_step(model, loss_fn, batch, {})
    plan = in_a_ring(monkeypatch, captured, PlanRequest(Mesh.of(**sizes), hardware=linked_hardware()))
    shifted = [p.collective for p in plan.collectives() if p.collective.kind == "shift"]
    ranks = plan.mesh.size
    # Of each layer a block forward, a block and its gradients backward, which return at last.
    assert len(shifted) == layers * (3 * (ranks - 1) + 1)
    assert {collective.bytes for collective in shifted} == {2 * heads * WIDTH * length // ranks * 8}
    watched, original = [], whole.simulate

    def watching(mesh, fn):
        def one(comm):
            with LargestBesideTheSequence(length) as watch:
                found = fn(comm)
            watched.append(watch.largest)
            return found

        return original(mesh, one)

    monkeypatch.setattr(whole, "simulate", watching)
    same(gradients(run(plan, model, batch)), gradients(plain(model, loss_fn, batch)))
    assert max(watched) <= length * WIDTH < length * heads * WIDTH < length * length


@pytest.mark.slow
def test_microbatches_of_stages_go_through_rings(monkeypatch):
    length = 12
    ids, labels = torch.randint(0, WORDS, (2, 4, length), generator=torch.Generator().manual_seed(0))
    model, batch = llama(3, 3, length), (ids, labels.masked_fill(labels == 3, -100))
    captured = captured_step(model, loss_fn, batch, {})
    request = PlanRequest(Mesh.parse("pp=2,cp=2"), hardware=linked_hardware(), microbatches=2, schedule="1f1b")
    plan = in_a_ring(monkeypatch, captured, request)
    assert [lower(plan, rank).source.count("kernels.balanced_ring_attention(") for rank in range(4)] == [2] * 4
    same(gradients(run(plan, model, batch)), gradients(plain(model, loss_fn, batch)))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_llama_with_padding_in_a_ring_is_that_of_one_device(ranks, monkeypatch):
    """A mask of the queries here, and of all keys, is all that there is of it."""
    length = 12
    ids, labels = torch.randint(0, WORDS, (2, 3, length), generator=torch.Generator().manual_seed(0))
    seen = (torch.arange(length) < torch.tensor([[length], [5], [9]])).long()
    batch = ids, labels.masked_fill(seen == 0, -100), seen

    def padded(model, batch):
        ids, labels, seen = batch
        return F.cross_entropy(model(input_ids=ids, attention_mask=seen).logits.flatten(0, 1), labels.flatten())

    model = llama(3, 3, length, layers=1)
    captured = captured_step(model, padded, batch, {})
    plan = in_a_ring(monkeypatch, captured, PlanRequest(Mesh.of(d=ranks), hardware=linked_hardware()))
    attention = [node for node in captured.nodes if ATTENTION.of(node.op)]
    assert [plan.target(node, i).layout.slices(plan.mesh)[2:] for node in attention for i in (1, 3)] == [
        (ranks, 1), (ranks, 1)
    ] * len(attention)  # fmt: skip
    assert [p for p in plan.collectives() if p.collective.kind == "shift"]
    same(gradients(run(plan, model, batch)), gradients(plain(model, padded, batch)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_that_divide_are_exchanged_for_the_sequence(ranks, monkeypatch):
    """Where all else is split along the sequence, attention by heads takes all-to-alls, and nothing else."""
    model, batch = llama(4, 2, 64, layers=1), batch_of(64)
    captured = captured_step(model, loss_fn, batch, {})
    request = PlanRequest(Mesh.of(d=ranks), hardware=linked_hardware())
    plan = split_by(monkeypatch, captured, request, by_heads)
    inside = {name for node in captured.nodes if "self_attn" in node.scope for name in node.results}
    moved = [transfer for transfer in plan.transfers if transfer.value in inside and transfer.steps]
    kinds = [[step.kind for step in transfer.steps] for transfer in moved]
    assert kinds == [["all_to_all"]] * 4  # of queries, keys and values, and back
    for node in captured.nodes:
        if ATTENTION.of(node.op):
            assert {plan.target(node, i).layout.slices(plan.mesh) for i in range(3)} == {(1, ranks, 1, 1)}
    same(gradients(run(plan, model, batch)), gradients(plain(model, loss_fn, batch)))


def test_the_search_exchanges_heads_where_that_is_the_quickest():
    captured = captured_step(llama(4, 2, 256, layers=1), loss_fn, batch_of(256), {})
    plan = make_plan(captured, PlanRequest(Mesh.of(d=4), hardware=linked_hardware()))
    attention = [plan.target(node, 1).layout for node in captured.nodes if ATTENTION.of(node.op)]
    assert {layout.slices(plan.mesh) for layout in attention} == {(1, 4, 1, 1)}
    exchanged = [
        transfer.value for transfer in plan.transfers if [step.kind for step in transfer.steps] == ["all_to_all"]
    ]
    assert len(exchanged) == 4


@pytest.mark.slow
def test_a_llama_of_published_widths_with_128k_tokens():
    """On 8 hosts of 8 GPUs the search splits heads within each, and keys and queries between them, in a ring."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, 131072, dtype=torch.long)
    captured = captured_step(model, lambda model, b: model(input_ids=b, labels=b).loss, ids, {})
    hardware = shipped("h100").on_hosts([str(rank // 8) for rank in range(64)])
    plan = make_plan(captured, PlanRequest(Mesh.of(ranks=64), hardware=hardware, memory=80 * 2**30))
    assert {name.split(".")[0] for name in plan.mesh.names} == {"cp"}
    attention = [node for node in captured.nodes if ATTENTION.of(node.op)]
    for node in attention:
        assert [plan.target(node, i).layout.slices(plan.mesh) for i in range(3)] == [(1, 8, 8, 1)] * 3
    assert "of them go round over cp" in Explainer(plan, hardware).answer(attention[0].name)


def test_a_ring_may_begin_anew_in_the_backward(monkeypatch):
    """A layer that is recomputed sends its keys round once more."""
    model, batch = llama(3, 3, 12, layers=1), batch_of(12)
    captured = captured_step(model, loss_fn, batch, {})
    request = PlanRequest(Mesh.of(d=3), hardware=splitting_hardware(), recompute=("model.layers.*",))
    plan = in_a_ring(monkeypatch, captured, request)
    shifted = [p.direction for p in plan.collectives() if p.collective.kind == "shift"]
    assert (shifted.count("forward"), shifted.count("backward")) == (2, 2 + 5)
    assert lower(plan, 0).source.count("kernels.balanced_ring_attention(") == 2
    same(gradients(run(plan, model, batch)), gradients(plain(model, loss_fn, batch)))


def five_steps(path):
    """Losses of five steps, and the parameters then, of a rank that trains by a plan; of one device without a path."""
    model = llama(3, 1, 21)
    if path is not None:
        torch.set_num_threads(1)
        sw.init()
        model = sw.parallelize(model, loss_fn, batch_of(21), "auto", batch="global", plan=path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        loss = model(batch_of(21, step)) if path is not None else loss_fn(model, batch_of(21, step))
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = model.state_dict() if path is None else {n: p.full_tensor() if hasattr(p, "full_tensor") else p
                                                     for n, p in model.named_parameters()}  # fmt: skip
    return losses, {name: after[name].detach().tolist() for name in dict(llama(3, 1, 21).named_parameters())}


@pytest.mark.slow
def test_processes_train_a_llama_in_a_ring(monkeypatch, tmp_path):
    captured = captured_step(llama(3, 1, 21), loss_fn, batch_of(21), {})
    plan = in_a_ring(monkeypatch, captured, PlanRequest(Mesh.of(d=3), hardware=splitting_hardware()))
    assert [p for p in plan.collectives() if p.collective.kind == "shift"]
    (tmp_path / "plan.json").write_text(plan.to_json())
    losses, parameters = five_steps(None)
    for found, after in run_ranks(3, partial(five_steps, str(tmp_path / "plan.json"))):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-10, atol=0)
        for name, expected in parameters.items():
            torch.testing.assert_close(
                torch.tensor(after[name], dtype=torch.float64), torch.tensor(expected, dtype=torch.float64),
                rtol=0, atol=1e-9,
            )  # fmt: skip
