"""`sw.verify`: a right plan is within tolerance on real processes, a defect is found and named."""

import copy
import math

import pytest
import torch
from torch import nn

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.compiler.lower import local
from shardwright.compiler.lower.operators import randomness
from shardwright.compiler.mesh import collectives
from shardwright.data.loading.batch import Batch
from shardwright.errors import PlanError, UsageError
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.verification.compare import ONE_DEVICE, difference_of
from shardwright.runtime.verification.verify import verify


def built(name, rows=24):
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS[name]
    return make(), loss_fn, [batch_of(rows, seed) for seed in range(3)]


def verified(name, rows, options):
    """What a rank is told, and whether its model is what it was."""
    torch.set_num_threads(1)
    sw.init()
    model, loss_fn, batches = built(name, rows)
    before = copy.deepcopy(model.state_dict())
    found = verify(model, loss_fn, batches, **options)
    untouched = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    splits = found.plan.moved_bytes() > 0
    return found.ok, found.deviations, str(found), untouched and model.training and splits


# Defects: each patches one thing that every right plan relies on.


def unreduced_on_rank_one(patch):
    reduce = GradientReduction.reduce

    def lost(self, keys, gradients, *rest):
        reduced = reduce(self, keys, gradients, *rest)
        return [g * (1 + 1e-3 * key.endswith("layers_2_weight")) for key, g in zip(keys, reduced, strict=True)]

    if torch.distributed.get_rank() == 1:
        patch.setattr(GradientReduction, "reduce", lost)


def bias_on_every_rank(patch):
    patch.setattr(local.Site, "adds_bias", lambda self: True)


def statistics_of_the_part(patch):
    patch.setitem(local.LOCALISERS.facts, "aten._native_batch_norm_legit_functional", lambda site: site.same())


def count_of_the_part(patch):
    summed = collectives.AllReduce.forward

    def forgotten(ctx, x, comm, axes):
        total = summed(ctx, x, comm, axes)
        return total if x.is_floating_point() else x.clone()

    patch.setattr(collectives.AllReduce, "forward", staticmethod(forgotten))


def mask_of_the_part(patch):
    """Every rank draws the same mask: what drawing by local position would give."""
    kept = randomness.kept

    def everywhere(key, p, shape, offsets, local_shape, device):
        return kept(key, p, shape, [0] * len(shape), local_shape, device)

    patch.setattr(randomness, "kept", everywhere)


# defect -> the network, how it is split, and where the defect must show
DEFECTS = {
    unreduced_on_rank_one: ("perceptron", {"mode": "data"}, "gradients", "layers.2.weight"),
    bias_on_every_rank: ("perceptron", {"mode": "semi-auto", "pins": {"layers.2": ((1, 2), (1, 2))}}, "loss", "loss"),
    count_of_the_part: ("perceptron", {"mode": "data"}, "loss", "loss"),
    statistics_of_the_part: ("resnet", {"mode": "data"}, "buffers", "running_"),
    mask_of_the_part: ("transformer", {"mode": "data"}, "loss", "loss"),
}


# One that shows in the gradients, one in the loss, and one in buffers.
SOME = (unreduced_on_rank_one, count_of_the_part, statistics_of_the_part)


def verified_with_defects(defects):
    found = {}
    for defect in defects:
        name, options, _, _ = DEFECTS[defect]
        with pytest.MonkeyPatch.context() as patch:
            sw.init()
            defect(patch)
            found[defect.__name__] = verified(name, 8, options | {"steps": 1, "dtypes": ("float64",)})
    return found


@pytest.mark.parametrize(
    "defects", [SOME, pytest.param(tuple(set(DEFECTS) - set(SOME)), marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_a_defect_is_found_and_named(tmp_path, defects):
    by_rank = run_ranks(2, verified_with_defects, defects, env={"XDG_CACHE_HOME": str(tmp_path)}, timeout=110)
    for defect in defects:
        _, _, kind, tensor = DEFECTS[defect]
        (ok, deviations, text, _), others = (answers[defect.__name__] for answers in by_rank)
        assert not ok, defect
        assert others[0] is False, defect
        found = next(d for d in deviations if d.kind == kind and d.reference == ONE_DEVICE)
        assert found.largest > 1e3 * found.tolerance, defect
        assert tensor in found.name
        assert f"float64 {kind}: {found.name}" in text
        assert text.endswith("BEYOND TOLERANCE"), defect
        if defect is unreduced_on_rank_one:
            assert f"on rank 1 in step 1, {ONE_DEVICE} has" in text
            assert found.got == pytest.approx(found.expected * 1.001)


@pytest.mark.slow
def test_entries_whose_step_is_noise_are_counted_and_not_compared():
    [(ok, deviations, text, _)] = run_ranks(1, verified, "resnet", 24, {"mode": "data"})
    assert ok
    skipped = {(d.dtype, d.kind): (d.skipped, d.entries) for d in deviations if d.reference == ONE_DEVICE}
    entries = sum(p.numel() for p in built("resnet")[0].parameters())
    assert skipped["float64", "parameters"] == (0, entries)
    assert (
        12 <= skipped["float32", "parameters"][0] < entries / 100
    )  # the bias before the first batch norm and few more
    assert skipped["float32", "gradients"][0] == 0
    assert f"float32: {skipped['float32', 'parameters'][0]} of {entries} entries of parameters are not compared" in text


def through_a_saved_plan(path):
    """A plan that was made in float32 serves in both dtypes; another model's is refused."""
    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.request import PlanRequest

    torch.set_num_threads(1)
    world = sw.init()
    model, loss_fn, batches = built("perceptron")
    plan = make_plan(captured_step(model, loss_fn, batches[0], {}), PlanRequest(Mesh.of(tp=2), search="propagation"))
    if world.rank == 0:
        plan.save(path)
    found = verify(model, loss_fn, batches, path, steps=1)
    model.layers.append(nn.ReLU())
    try:
        verify(model, loss_fn, batches, path, steps=1)
    except PlanError as error:
        return (found.ok, found.plan == plan, len(found.deviations)), str(error)


def test_a_given_plan_is_verified_in_every_dtype(tmp_path):
    path = str(tmp_path / "plan.json")
    for found, refusal in run_ranks(2, through_a_saved_plan, path):
        assert found == (True, True, 12)
        assert refusal.startswith(f"{path}: the plan was made for ")
        assert refusal.endswith("plan again")


class Frozen(nn.Module):
    """A frozen layer, a mask with infinite entries, and a loss that can be made NaN."""

    def __init__(self):
        super().__init__()
        self.frozen, self.free = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x):
        return (self.mask + self.free(self.frozen(x))[:, None]).softmax(-1)


def loss_over(model, batch):
    return (batch[0][:, 0, None, None] / batch[1].sum() * model(batch[0]) ** 2).mean()


def with_odd_tensors():
    sw.init()
    sw.set_seed(1)
    # The batch differs between the ranks, of which rank 0's counts; a tuple is one batch.
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    found = [
        verify(Frozen(), loss_over, (x, torch.full((8,), divisor)), mode="data", steps=2, dtypes=("float32",))
        for divisor in (1.0, math.nan)
    ]
    return [(f.ok, {d.kind: (d.ok, d.skipped < d.entries) for d in f.deviations}) for f in found]


def test_frozen_parameters_and_infinite_buffers_are_compared_and_nan_is_no_proof():
    for (ok, kinds), (ok_with_nan, kinds_with_nan) in run_ranks(2, with_odd_tensors):
        assert ok
        assert set(kinds.values()) == {(True, True)}
        assert not ok_with_nan
        assert kinds_with_nan["loss"] == (False, True)


def refusals():
    world = sw.init()
    model, loss_fn, batches = built("perceptron")
    part = Batch([t[:12] for t in batches[0]], global_size=24, start=0, stop=12)
    found = []
    for batch, options in [
        (batches, {"steps": 0}),
        (batches, {"dtypes": ("float16",)}),
        (batches, {"lr": 0.0}),
        (batches, {"lr": 0.1 * (1 + world.rank)}),
        ([], {}),
        (part, {}),
        (batches, {"mesh": "dp=3"}),
    ]:
        with pytest.raises(UsageError) as error:
            verify(model, loss_fn, batch, **options)
        found.append(str(error.value))
    return found


def test_arguments_that_do_not_fit_are_refused():
    expected = [
        "steps=0 compares nothing; type a whole number from 1 on",
        "dtypes=('float16',) must name some of float64, float32",
        "lr=0.0 changes nothing; type a learning rate above 0",
        "ranks disagree about the arguments",
        "there is no batch; expected one global batch, or a list of them",
        "verify needs global batches, got Batch(samples 0 to 12 of 24",
        "the mesh dp=3 has 3 devices, the world has 2 ranks",
    ]
    for found in run_ranks(2, refusals):
        for message, start in zip(found, expected, strict=True):
            assert message.startswith(start)


def test_differences_of_entries_that_are_not_finite():
    a = torch.tensor([1.0, math.inf, math.nan, math.inf, math.nan, -math.inf])
    b = torch.tensor([3.0, math.inf, math.nan, 1.0, 1.0, math.inf])
    assert difference_of(a, b).tolist() == [2.0, 0.0, 0.0, math.inf, math.inf, math.inf]
    assert difference_of(torch.tensor([True, False]), torch.tensor([True, True])).tolist() == [0.0, 1.0]
