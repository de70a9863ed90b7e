"""sw.parallelize with real processes: batches, accumulation, optimizers, refusals. The promise: test_promise.py."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwright as sw
from models import NETWORKS, Branching
from ranks import run_ranks
from shardwright.compiler.mesh.layout import chunk
from shardwright.data.loading.batch import Batch
from shardwright.errors import CaptureError, ShardwrightError, UsageError
from shardwright.runtime.parallel import EagerFallback

GRID = {"mesh": "dp=2,tp=2", "search": "propagation"}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def deviation(ours, reference):
    """The design's measure: against the largest entry of the tensor, or of its kind in the model."""
    largest = max(float(t.abs().max()) for t in reference.values() if t.is_floating_point())
    return max(
        float((ours[n].double() - t.double()).abs().max()) / max(largest, float(t.abs().max()), 1e-300)
        for n, t in reference.items()
    )


def rows_of(batch, start, stop):
    return Batch([t[start:stop] for t in batch], global_size=len(batch[0]), start=start, stop=stop)


def one_step(kind, mode, options, rows):
    """Loss and gradients of one batch, given to the ranks in one of three ways."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    sample, whole = batch_of(16), batch_of(rows, seed=3)
    parts = {
        "global": lambda batch: batch,
        "loader": lambda batch: rows_of(batch, *chunk(0, len(batch[0]), world.size, world.rank)),
        # uneven on purpose: the last rank takes what the others leave
        "local": lambda batch: [t[world.rank :][:1] if world.rank < world.size - 1 else t[world.rank :] for t in batch],
    }
    chosen = None if kind == "loader" else kind
    parallel = sw.parallelize(make(), loss_fn, parts[kind](sample), mode, batch=chosen, **options)
    loss, logits = parallel(parts[kind](whole))
    loss.backward()
    predicted = parallel.predict(parts[kind](whole))
    return loss.item(), {n: full(p.grad) for n, p in parallel.named_parameters()}, logits.shape[0], predicted


@pytest.mark.parametrize(
    ("kind", "mode", "options", "rows"),
    [("local", "auto", GRID, 7), pytest.param("loader", "auto", GRID, 3, marks=pytest.mark.slow)],
)
def test_a_batch_of_any_shape_given_in_any_way(kind, mode, options, rows):
    [(loss, gradients, _, predicted)] = run_ranks(1, one_step, "global", "single", {}, rows)
    everyone = run_ranks(4, one_step, kind, mode, options, rows)
    for theirs in everyone:
        assert theirs[0] == pytest.approx(loss, rel=1e-12)
        assert deviation(theirs[1], gradients) < 1e-12
        assert theirs[3].shape == (rows, 12)
        torch.testing.assert_close(theirs[3], predicted, rtol=1e-12, atol=1e-12)
    assert sum(theirs[2] for theirs in everyone) == rows


def accumulated(micro_batches, gradients, mode, options):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    model = make()
    model.layers[0].bias.requires_grad_(False)
    parallel = sw.parallelize(model, loss_fn, batch_of(8), mode, batch="global", gradients=gradients, **options)
    for seed in range(micro_batches - 1):
        with parallel.accumulate():
            parallel(batch_of(8, seed))[0].backward()
    parallel(batch_of(8, micro_batches - 1))[0].backward()
    scale = world.size if gradients == "sum" else 1
    for parameter in parallel.parameters():
        if parameter.requires_grad:
            parameter.grad /= scale
    norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)
    found = {n: full(p.grad) for n, p in parallel.named_parameters() if p.requires_grad}
    assert model.layers[0].bias.grad is None
    return full(norm).item(), found


@pytest.mark.parametrize(
    ("ranks", "mode", "options", "gradients"),
    [(2, "data", {}, "sum"), pytest.param(4, "auto", GRID, "mean", marks=pytest.mark.slow)],
)
def test_accumulation_clipping_sums_and_frozen_parameters(ranks, mode, options, gradients):
    [(norm, expected)] = run_ranks(1, accumulated, 3, "mean", "single", {})
    for their_norm, theirs in run_ranks(ranks, accumulated, 3, gradients, mode, options):
        assert their_norm == pytest.approx(norm, rel=1e-10)
        assert deviation(theirs, expected) < 1e-10


OPTIMIZERS = [
    ("SGD", {"foreach": True, "momentum": 0.9}),
    ("AdamW", {"fused": True}),
    *((kind, {}) for kind in ("Adafactor", "Muon")),
]


def optimized():
    """What each of the optimizers makes of the same parameters, or says."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    split = {"mesh": "tp=2", "pins": {"layers.0": ((1, 1), (2, 1), None)}} if world.size > 1 else {}
    parallel = sw.parallelize(make(), loss_fn, batch_of(8), "semi-auto", batch="global", **split)
    before = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    found = []
    for kind, options in OPTIMIZERS:
        parallel.load_state_dict(before)
        found.append(optimized_by(kind, options, parallel, batch_of, is_split=world.size > 1))
    return found


def optimized_by(kind, options, parallel, batch_of, is_split):
    parameters = [p for p in parallel.parameters() if kind != "Muon" or p.ndim == 2]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.01, **options)
    for seed in range(2):
        batch = batch_of(8, seed)

        def closure(batch=batch):
            parallel.zero_grad()
            loss, _ = parallel(batch)
            loss.backward()
            return loss

        if kind in ("Adafactor", "AdamW"):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert all(isinstance(value, DTensor) == is_split for value in kept)
    assert set(optimizer.state) <= set(parameters)
    return {n: t.clone() for n, t in parallel.full_state_dict().items()}


def test_optimizers_update_split_parameters_as_whole_ones():
    [expected] = run_ranks(1, optimized)
    for answers in run_ranks(2, optimized):
        for how, theirs, whole in zip(OPTIMIZERS, answers, expected, strict=True):
            assert deviation(theirs, whole) < 1e-10, how


def stepped_oddly():
    """What an optimizer with hooks of its own sees, and what is left of one whose step fails."""
    sw.init()
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    parallel = sw.parallelize(
        make(),
        loss_fn,
        batch_of(8),
        "semi-auto",
        batch="global",
        mesh="tp=2",
        pins={"layers.0": ((1, 1), (2, 1), None)},
    )
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, foreach=True)
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda optimizer, *_: seen.extend(optimizer.param_groups[0]["params"]))
    parallel(batch_of(8))[0].backward()
    optimizer.step()
    assert len(seen) == 2 * len(list(parallel.parameters()))
    assert all(isinstance(parameter, DTensor) for parameter in seen)
    before = optimizer.state_dict()["state"]
    optimizer.param_groups[0]["betas"] = "none"
    with pytest.raises(ValueError, match="too many values to unpack"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == list(parallel.parameters())
    assert all(optimizer.state_dict()["state"][at][key] is kept[key] for at, kept in before.items() for key in kept)
    assert all(isinstance(parameter.grad, DTensor) for parameter in parallel.parameters())


def test_hooks_on_steps_see_whole_parameters_and_a_failing_step_leaves_them():
    run_ranks(2, stepped_oddly)


def uncaptured(mode):
    sw.init()
    sw.set_seed(0)
    _, loss_fn, batch_of = NETWORKS["perceptron"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with sw.parallelize(Branching(), loss_fn, batch_of(8), mode, batch="global") as parallel:
                loss, _ = parallel(batch_of(8))
                loss.backward()
        except CaptureError as error:
            return str(error)
    return loss.item(), [str(w.message) for w in caught if w.category is EagerFallback]


def test_what_cannot_be_captured_runs_by_ddp_aloud_or_is_refused():
    everyone = run_ranks(2, uncaptured, "data")
    assert everyone[0][0] == pytest.approx(everyone[1][0])
    assert "item" in everyone[0][1][0]
    assert everyone[1][1] == []
    for message in run_ranks(2, uncaptured, "auto"):
        assert "models.py" in message


def failing_within(mode):
    """A rule for an operator of the model that fails as no refusal does."""
    sw.init()
    sw.set_seed(0)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    batch = batch_of(8)

    def fail(*_):
        raise IndexError("no such dim")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr("shardwright.runtime.programs.planner.remembered", fail)
        warnings.simplefilter("always")
        model = make()
        expected = loss_fn(model, batch)
        expected = float(expected[0] if isinstance(expected, tuple) else expected)
        try:
            parallel = sw.parallelize(model, loss_fn, batch, mode, batch="global")
        except CaptureError as error:
            return str(error)
        with parallel:
            loss = parallel(batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            assert loss.item() == pytest.approx(expected)
    return [str(w.message) for w in caught if w.category is EagerFallback]


def test_an_error_within_is_no_other_than_one_of_the_capture():
    said = r"fails with IndexError: no such dim, at .*test_parallel.py:\d+\nThis is a fault of "
    [told], others = run_ranks(2, failing_within, "data")
    assert re.search(said, told), told
    assert others == []
    for message in run_ranks(2, failing_within, "auto"):
        assert re.search(said, message), message


class Normed(Branching):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)


def without_global_statistics():
    """A model that cannot be captured, and needs statistics of the global batch: what its refusal names runs."""
    sw.init()
    _, loss_fn, batch_of = NETWORKS["perceptron"]
    with pytest.raises(CaptureError, match=r"item.*\n(.*\n)*Or give sw.parallelize batch_norm='per-replica'"):
        sw.parallelize(Normed(), loss_fn, batch_of(8), "data", batch="global")
    with pytest.raises(CaptureError) as error:  # nor does it run so where the graph is needed
        sw.parallelize(Normed(), loss_fn, batch_of(8), "auto", batch="global")
    assert "per-replica" not in str(error.value)
    with (
        pytest.warns(EagerFallback),
        sw.parallelize(Normed(), loss_fn, batch_of(8), "data", batch="global", batch_norm="per-replica") as parallel,
    ):
        return parallel(batch_of(8))[0].item()


def test_a_refusal_for_batch_norm_names_what_runs():
    assert run_ranks(1, without_global_statistics)


def refused(options):
    world = sw.init()
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    options = {"batch": "global", **options}
    if options.pop("disagree", False):
        options["gradients"] = "sum" if world.rank else "mean"
    try:
        sw.parallelize(make(), loss_fn, batch_of(8), **options)
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}"


REFUSED = [
    ({"mode": "automatic"}, "UsageError: mode='automatic' is unknown; choose one of 'single', 'data', 'semi-auto'"),
    (
        {"mode": "hybrid_parallel"},
        "UsageError: mode='hybrid_parallel' is unknown; choose one of 'single', 'data', 'semi",
    ),
    ({"mode": "semi_auto_parallel", "mesh": "dp=3"}, "UsageError: the mesh dp=3 has 3 devices, the world has 2 ranks"),
    ({"search": "guess"}, "UsageError: search='guess' is unknown; choose one of None, 'propagation', 'recursive'"),
    ({"gradients": "average"}, "UsageError: gradients='average' is unknown; choose one of 'mean', 'sum'"),
    ({"batch": "whole"}, "UsageError: batch='whole' is unknown; choose one of None, 'local', 'global'"),
    ({"batch": None}, "UsageError: the batch is made of plain tensors: say batch='local'"),
    ({"mesh": "dp=3"}, "UsageError: the mesh dp=3 has 3 devices, the world has 2 ranks"),
    ({"mesh": "dp:2"}, "UsageError: a mesh is written as dp=2,tp=4; got 'dp:2'"),
    ({"inputs": {"image": (2, 1)}}, "UsageError: inputs names ['image'], the batch has ['0', '1']"),
    ({"pins": {"layers.7": ((2, 1), None)}}, "StrategyError: "),
    ({"pins": {"layers.2": ((7, 1), None)}}, "StrategyError: "),
    ({"plan": "/does/not/exist.json"}, "PlanError: cannot read the plan /does/not/exist.json: No such file"),
    ({"disagree": True}, "UsageError: ranks disagree about the arguments: rank 0 has"),
]


def all_refused():
    return [refused(options) for options, _ in REFUSED]


def test_what_does_not_fit_is_refused_on_every_rank():
    for texts in run_ranks(2, all_refused):
        for (options, message), text in zip(REFUSED, texts, strict=True):
            assert (text or "").startswith(message), (options, text)


def closed():
    """What is left of a model at the end of a ``with``, and the loss before it and of a model made afterwards."""
    torch.set_num_threads(1)
    sw.init()
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    batch = batch_of(16)
    losses, groups, left = [], [], []
    for _ in range(2):
        sw.set_seed(1)
        options = {"mesh": "dp=2,tp=2", "search": "propagation", "batch": "global"}
        with sw.parallelize(make(), loss_fn, batch, "auto", **options) as parallel:
            loss, _ = parallel(batch)
            loss.backward()
            losses.append(loss.item())
            made = set(parallel._communicator._communicator._groups.values()) - {dist.group.WORLD}
            assert all(dist.get_process_group_ranks(group) for group in made)
            groups.append(made)
        norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)  # DTensors keep the groups that they share
        losses.append(full(norm).item())
        left.append(len(dist.distributed_c10d._world.pg_map))
        for use in (lambda: parallel(batch), lambda: parallel.predict(batch), parallel.full_state_dict):
            with pytest.raises(UsageError, match="was closed, so that its ranks talk no more; call close"):
                use()
        assert len(parallel.state_dict()) == len(list(parallel.parameters()))
        parallel.close()  # again
    assert groups[0] == groups[1]
    return losses, len(groups[0]), left


def test_models_and_their_dtensors_share_groups_which_outlive_the_end_of_a_with():
    for losses, groups, left in run_ranks(4, closed):
        assert losses[:2] == losses[2:]
        assert left == [1 + groups, 1 + groups]


def with_batch_norm(statistics):
    """Loss, running statistics and a gradient of one batch of 8 rows; the plain model's on each half of it."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS["resnet"]
    model, batch = make(), batch_of(8)
    plain = copy.deepcopy(model)
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global", batch_norm=statistics)
    loss, _ = parallel(batch)
    loss.backward()
    found = {"loss": loss.detach(), "gradient": model.stem.weight.grad, "mean": model.bn.running_mean}
    losses, means, gradients = [], [], []
    for part in ([t[:4] for t in batch], [t[4:] for t in batch]):
        one = copy.deepcopy(plain)
        half, _ = loss_fn(one, part)
        losses.append(half)
        means.append(one.bn.running_mean)
        half.backward()
        gradients.append(one.stem.weight.grad)
    halves = {"loss": sum(losses).detach() / 2, "gradient": sum(gradients) / 2, "mean": sum(means) / 2}
    return {n: t.clone() for n, t in found.items()}, halves


def with_either_batch_norm():
    return [with_batch_norm(statistics) for statistics in ("per-replica", "global")]


def test_batch_statistics_per_replica_are_those_of_each_part():
    for (ours, halves), (whole, _) in run_ranks(2, with_either_batch_norm):
        for name, tensor in halves.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-11, atol=1e-12)
        assert abs(float(whole["loss"] - halves["loss"])) > 1e-6
