"""Families of Hugging Face transformers, configured small, train on two ranks as plain PyTorch trains them on one."""

import functools
import importlib.util

import pytest
from families import FAMILIES, KINDS

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import ShardwrightError
from shardwright.runtime.verification.plain import PlainModel

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
NAMED = {family.name: family for family in FAMILIES}
# As many as a test has, so that each is done within its time beside other programs too.
AT_ONCE = 4
in_groups = pytest.mark.parametrize(
    "names", [list(NAMED)[at : at + AT_ONCE] for at in range(0, len(NAMED), AT_ONCE)], ids=" ".join
)
# Operators that have no rule yet, and run whole.
WHOLE: set[str] = set()


def trained(family, parallelize):
    """The losses of three AdamW steps, and the plan."""
    import torch

    batches = [family.batch(step) for step in range(3)]
    parallel = parallelize(family.model(), family.loss, batches[0])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, parallel.plan


def usual(name):
    """One of the two usual modes: families take turns."""
    mode = ("data", "auto")[list(NAMED).index(name) % 2]
    return {mode: {"mode": mode}}


# Searches that split what they can, over a second axis too.
GRID = {
    "tp=4": {"mode": "auto", "mesh": "tp=4", "search": "propagation", "inputs": "whole"},
    "dp=2,tp=2": {"mode": "auto", "mesh": "dp=2,tp=2", "search": "propagation"},
}


def of_all(names, modes):
    """For each family and mode how far the losses are from plain PyTorch's, or what was refused."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sw.init()
    found = {}
    if "bloom" in names:
        from transformers.models.bloom.modeling_bloom import GeLUFunction

        sw.register_rule(GeLUFunction, "* -> *")
    for name in names:
        family = NAMED[name]
        expected, _ = trained(family, lambda model, loss_fn, batch: PlainModel(model, loss_fn))
        for mode, options in (modes or usual(name)).items():
            parallelize = functools.partial(sw.parallelize, batch="global", **options)
            try:
                got, plan = trained(family, parallelize)
            except ShardwrightError as error:
                found[name, mode] = str(error), 0.0, []
                continue
            apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(got, expected, strict=True)]
            found[name, mode] = max(apart), tolerance(family, plan), sorted({node.op for node in plan.graph.unlisted})
    return found


def tolerance(family, plan):
    """How far losses may be apart: rounding in float64, or in float32 where some of the model computes in that."""
    import torch

    if family.dtype == torch.float32:
        return 3e-5
    values = plan.capture.values.values()
    return 1e-6 if any(v.kind == "result" and v.dtype == torch.float32 for v in values) else 1e-9


def check(names, modes=None, ranks=2):
    for found in run_ranks(ranks, of_all, names, modes, timeout=850):
        for (name, mode), (apart, allowed, whole) in found.items():
            assert not isinstance(apart, str), f"{name}, {mode}: {apart}"
            assert apart <= allowed, f"{name}, {mode}: the losses are {apart:.1e} apart"
            assert set(whole) <= WHOLE, f"{name}, {mode}"


def test_there_are_families_enough():
    assert len({name.partition(":")[0] for name in NAMED}) >= 40
    assert {family.kind for family in FAMILIES} == set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@in_groups
def test_families_train_as_on_one_device(names):
    check(names)


# Those that the planner is measured with at their published sizes.
PUBLISHED = ("gpt2", "llama", "bert", "vit", "t5", "resnet", "mixtral")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PUBLISHED)
def test_families_split_by_operators_train_as_on_one_device(name):
    check([name], GRID, ranks=4)
