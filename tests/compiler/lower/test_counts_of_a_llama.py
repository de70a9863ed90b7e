"""Counted in the program of a Llama of transformers in bf16: what would cost memory or time is there once, or not."""

from collections import Counter

import pytest
import torch

from shardwright.compiler.capture.rewriting import logits
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.table import row_of
from shardwright.runtime.compiled.compiler import in_stretches

LAYERS, WORDS = 3, logits.LARGE


def loss_fn(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


@pytest.fixture(scope="module")
def plan():
    """Training by four ranks, whose backward repeats each layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, num_hidden_layers=LAYERS, use_cache=False)
    ids = torch.zeros(8, 12, dtype=torch.long)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    captured = captured_step(model, loss_fn, {"input_ids": ids.to("meta"), "labels": ids.to("meta")}, {})
    return make_plan(captured, PlanRequest(Mesh.of(d=4), "data", recompute=("model.layers.*",)))


@pytest.mark.networks
def test_no_mask_no_logits_in_float32_and_each_value_cast_once(plan):
    values, nodes = plan.capture.values.values(), plan.capture.nodes
    assert not [value.name for value in values if value.dtype == torch.bool]
    assert {value.dtype for value in values if value.shape[-1:] == (WORDS,)} == {torch.bfloat16}
    casts = Counter(
        (node.call, node.operands, node.scope.split(".")[:3][-1]) for node in nodes if row_of(node.op).casts
    )
    assert len(casts) > 7 * LAYERS
    assert set(casts.values()) == {1}


@pytest.mark.networks
def test_gradients_are_reduced_in_buckets_alone(plan):
    program = lower(plan, 0)
    buckets = [one for one in program.instructions if one.kind == "bucket"]
    joined = sorted(value.label for bucket in buckets for value, _ in bucket.moves)
    assert joined == sorted(value.label for value in plan.capture.of_kind("parameter") if value.needs_gradient)
    backward = [collective for _, direction, collective in program.collectives() if direction == "backward"]
    assert len(backward) == len(joined), "each within a bucket"
    assert len(buckets) <= 2


@pytest.mark.networks
def test_equal_layers_are_one_kind_of_stretch(plan):
    _, stretches = in_stretches(lower(plan, 0))
    kinds = Counter(stretch.source for stretch in stretches)
    assert kinds.most_common(1)[0][1] == LAYERS
    assert len(kinds) <= 1 + 3, "a layer's, and those before and behind all"
