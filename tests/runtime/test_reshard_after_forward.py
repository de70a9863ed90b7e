"""Parameters that are stored split and gathered where they are used: whole only while an operator needs them."""

from dataclasses import replace
from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import PlanError, UsageError
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from shardwright.runtime.programs.resharded import ReshardAfterForward
from whole import communicated, plan_of, planned, run, same

WIDTH, ROWS = 48, 96


def network():
    """More is computed between the layers than they have parameters, so that moving the batch costs more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return model, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def gathering(mesh, again):
    """Rows of the batch over all ranks, and every weight stored in parts: what others call fully sharded."""
    model, batch = network()
    plan = plan_of(model, loss_fn, batch, mesh, "data")
    split = {
        value.name: type(plan.leaves[value.name]).split(2, {0: plan.mesh.names})
        for value in plan.capture.of_kind("parameter")
        if len(value.shape) == 2
    }
    return (
        replace(plan, leaves={**plan.leaves, **split}, again=frozenset(split) if again else frozenset()),
        model,
        batch,
    )


def test_what_is_gathered_again_is_what_was_kept_and_is_planned(monkeypatch):
    mesh = Mesh.of(d=3)
    kept, model, batch = gathering(mesh, again=False)
    again, _, _ = gathering(mesh, again=True)
    same(run(again, model, batch), run(kept, model, batch), 0.0)
    assert again.held.activations < kept.held.activations
    gathers = sum(size for (kind, _), size in planned(again).items() if kind == "all_gather")
    first, second = (p.bytes for p in again.capture.of_kind("parameter") if len(p.shape) == 2)
    assert gathers == first + 2 * second  # the input of the first layer has no gradient, for which it would be needed
    assert communicated(again, model, batch, monkeypatch) == planned(again)
    assert type(again).from_json(again.to_json(), again.graph) == again


def in_groups(mesh):
    """Weights of which neighbours are gathered together; the last one is larger, so that there is room for them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4)), nn.Linear(96, 1200, bias=False))
    batch = torch.randn(4, 96), torch.randn(4, 1200)
    plan = fully_sharded(RuledGraph.of(captured_step(model, loss_fn, batch, {})), PlanRequest(mesh))
    assert sum(i.kind == "joined" and i.regathers for i in lower(plan, 0).instructions) == 1
    return plan, model, batch


def stepped(plan, model, batch, monkeypatch, between, backwards=1):
    """A forward and a backward of each simulated rank, ``between`` which something is done with its parameters."""
    gathered, noted = [], ReshardAfterForward._note

    def note(self, wholes, collective):
        gathered.extend(ref(whole.untyped_storage()) for whole in wholes)
        noted(self, wholes, collective)

    monkeypatch.setattr(ReshardAfterForward, "_note", note)

    def one(comm):
        program = lower(plan, comm.rank, overlap=True)
        execution = Execution(program, plan.capture, comm, torch.device("cpu"), GradientReduction())
        named = dict(model.named_parameters())
        parts = {}
        for kind, tensors in (("parameter", named), ("input", {"0": batch[0], "1": batch[1]})):
            parts[kind] = []
            for value in plan.capture.of_kind(kind):
                tensor = tensors[value.label].detach()
                part = tensor[plan.leaves[value.name].local_slice(tensor.shape, plan.mesh, comm.rank)].clone()
                parts[kind].append(part.requires_grad_(kind == "parameter"))
        loss = execution(StepArguments(parts["parameter"], [], parts["input"], [], 0, 0))[0]
        between(parts["parameter"])
        assert gathered
        alive = sum(memory() is not None for memory in gathered)
        for number in reversed(range(backwards)):
            loss.backward(retain_graph=number > 0)
        return alive, [parameter.grad for parameter in parts["parameter"]]

    return simulate(plan.mesh, one)


@pytest.mark.parametrize("made", [partial(gathering, again=True), in_groups])
def test_nothing_that_was_gathered_lives_from_the_forward_to_the_backward(made, monkeypatch):
    plan, model, batch = made(Mesh.of(d=2))
    ranks = stepped(plan, model, batch, monkeypatch, lambda parameters: None)
    assert [alive for alive, _ in ranks] == [0, 0]


def test_a_second_backward_gathers_what_is_gathered_together_once_more(monkeypatch):
    plan, model, batch = in_groups(Mesh.of(d=2))
    ones, twos = (stepped(plan, model, batch, monkeypatch, lambda parameters: None, times) for times in (1, 2))
    for (_, one), (_, two) in zip(ones, twos, strict=True):
        for gradient, added in zip(one, two, strict=True):
            torch.testing.assert_close(added, 2 * gradient, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("made", [partial(gathering, again=True), in_groups])
def test_parameters_that_change_before_the_backward_are_refused(made, monkeypatch):
    plan, model, batch = made(Mesh.of(d=2))

    def change(parameters):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1)

    with pytest.raises(
        UsageError, match=r"was changed (in place|between).*call backward\(\) before optimizer.step\(\)"
    ):
        stepped(plan, model, batch, monkeypatch, change)


def with_larger_batches(memory):
    """What becomes of a batch as large, and of one that no plan has room for."""
    sw.init()
    model, batch = network()
    parallel = sw.parallelize(model, loss_fn, batch, memory=memory, batch="global")
    parallel(batch).backward()
    first = parallel.plan.held.total
    refusals = []
    for times in (1, 40):
        larger = tuple(torch.cat([part] * times) for part in batch)
        try:
            parallel(larger).backward()
        except PlanError as error:
            refusals.append((times, str(error)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError) as refused:
        parallel(larger)
    return first, refusals, str(refused.value)


@pytest.mark.slow
def test_a_later_batch_that_exceeds_the_budget_is_refused_with_its_bytes():
    for first, refusals, within_autocast in run_ranks(2, with_larger_batches, 300_000):
        assert first <= 300_000
        [(times, text)] = refusals
        assert times == 40
        came = f"batch[0]: [{40 * ROWS}, {WIDTH}], batch[1]: [{40 * ROWS}, {WIDTH}]"
        assert f"a batch with {came} came: no plan was found under" in text
        assert "a device holds 300.0 kB or less" in text
        planned = "under autocast bfloat16, while the model was planned under no autocast: no plan was found"
        assert f"a batch with {came} came, {planned}" in within_autocast
        assert "or more, more devices, a smaller batch, or an optimizer that keeps less" in text
