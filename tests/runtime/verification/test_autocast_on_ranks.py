"""bf16 autocast on two ranks is as far from exact numbers as on one device, and apart from its numbers by rounding."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwright as sw
from models import NETWORKS, Transformer, next_token
from ranks import run_ranks
from whole import same

BATCH = NETWORKS["transformer"][2](8)
ROUNDING = 2.0**-8  # of bfloat16
PLANS = {"data": {"mode": "data"}, "tensor parallel": {"mode": "auto", "search": "propagation"}}


def network():
    torch.manual_seed(0)
    return Transformer(dropout=0.0)


def one_step(parameters, loss):
    loss.backward()
    assert {p.grad.dtype for _, p in parameters} == {torch.float32}
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in parameters}
    return {"loss": loss.detach().float(), **{f"gradient of {n}": gradient.clone() for n, gradient in whole.items()}}


def on_two_ranks():
    torch.set_num_threads(1)
    sw.init()
    found = {}
    for name, options in PLANS.items():
        parallel = sw.parallelize(network(), next_token, BATCH, batch="global", **options)
        assert any(isinstance(p, DTensor) for p in parallel.parameters()) == (name != "data")
        with torch.autocast("cpu", torch.bfloat16):
            loss = parallel(BATCH)
        found[name] = one_step([*parallel.named_parameters()], loss)
    return found


def on_one_device(autocast):
    model = network()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = next_token(model, BATCH)
    return one_step([*model.named_parameters()], loss)


def apart(ours, reference):
    """The design's measure."""
    largest = {name: float(t.abs().max()) for name, t in reference.items()}
    of_kind = max(of for name, of in largest.items() if name != "loss")
    return max(
        float((ours[name] - t).abs().max()) / (largest[name] if name == "loss" else of_kind)
        for name, t in reference.items()
    )


@pytest.mark.slow
def test_bf16_on_two_ranks_is_bf16_on_one_device():
    exact, rounded = on_one_device(False), on_one_device(True)
    assert apart(rounded, exact) > ROUNDING / 8, "it does compute in bf16"
    for found in run_ranks(2, on_two_ranks):
        for ours in found.values():
            same(ours, rounded, 2 * ROUNDING)
            assert apart(ours, exact) < 1.5 * apart(rounded, exact)
