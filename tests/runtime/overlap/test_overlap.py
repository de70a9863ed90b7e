"""Gradients are reduced while the backward goes on, in one order on all ranks, and an error in between is told."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
import whole
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import ProcessCommunicator
from shardwright.compiler.mesh.simulate import SimulatedCommunicator, simulate
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.distributed.backends.table import GLOO
from shardwright.errors import ShardwrightError
from shardwright.runtime.programs.buckets import BucketOrder, GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from whole import losses_of, plan_of, run, same


def network(layers=3):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).double()
    return model, torch.randn(8, 8, dtype=torch.float64)


def loss_fn(model, x):
    return model(x).square().mean()


class Products(TorchDispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def test_all_buckets_begin_within_the_backward_and_are_waited_for_after_it(monkeypatch):
    model, x = network()
    plan = plan_of(model, loss_fn, x, Mesh.of(d=2), "data")
    expected = run(plan_of(model, loss_fn, x, Mesh(()), "single"), model, x)
    events = {}
    start = SimulatedCommunicator.start_all_reduce

    def told(self, tensor, axes):
        mine = events[self.rank]
        mine.append("begin")
        finish = start(self, tensor, axes)
        return lambda: (mine.append("end"), finish())

    def watching(mesh, fn):
        def one(comm):
            with Products(events.setdefault(comm.rank, [])):
                return fn(comm)

        return simulate(mesh, one)

    monkeypatch.setattr(SimulatedCommunicator, "start_all_reduce", told)
    monkeypatch.setattr(whole, "simulate", watching)
    monkeypatch.setattr(
        whole, "lower", lambda plan, rank, overlap: lower(plan, rank, bucket_bytes=8, overlap=overlap)
    )  # one for each parameter
    same(run(plan, model, x), expected, 1e-12)
    for mine in events.values():
        found = [event for event in mine if event != "product"]
        assert found == ["begin"] * 6 + ["end"] * 6
        after = mine[mine.index("begin") :]
        assert after.count("product") >= 3, "the backward went on"
        assert "product" not in mine[mine.index("end") :]


def test_a_single_bucket_with_which_the_backward_ends_is_waited_for_at_once():
    model, x = network()
    plan = plan_of(model, loss_fn, x, Mesh.of(d=2), "data")
    kinds = [[i.kind for i in lower(plan, 0, *sizes).instructions] for sizes in ((), (8,))]
    assert [(found.count("bucket"), found.count("later")) for found in kinds] == [(1, 0), (6, 1)]
    same(run(plan, model, x), run(plan_of(model, loss_fn, x, Mesh(()), "single"), model, x), 1e-12)


def test_buckets_begin_in_the_order_of_the_program_whichever_is_ready_first():
    begun = []
    turns = BucketOrder(4)
    turns.ready(1, lambda: begun.append(1))
    turns.ready(3, lambda: begun.append(3))
    assert begun == [3]
    turns.ready(2, lambda: begun.append(2))
    assert begun == [3, 2, 1]
    some = BucketOrder(4)  # of which the backward reaches two
    some.ready(0, lambda: begun.append("a"))
    some.ready(2, lambda: begun.append("b"))
    some.rest()
    assert begun[3:] == ["b", "a"]


def test_gradients_asked_for_in_part_and_twice_are_reduced():
    """By `torch.autograd.grad`, and through a graph that is kept."""
    model, x = network(2)
    plan = plan_of(model, loss_fn, x, Mesh.of(d=2), "data")
    values = plan.capture.of_kind("parameter")
    gradients = torch.autograd.grad(loss_fn(model, x), list(model.parameters()))
    expected = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))

    def one(comm):
        program = lower(plan, comm.rank, bucket_bytes=8)
        execution = Execution(program, plan.capture, comm, torch.device("cpu"), GradientReduction())
        named = dict(model.named_parameters())
        parameters = [named[value.label].detach().clone().requires_grad_() for value in values]
        loss, _, _ = execution(StepArguments(parameters, [], [x.chunk(2)[comm.rank]], [], 0, 0))
        (part,) = torch.autograd.grad(loss, parameters[:1], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return part, [parameter.grad for parameter in parameters]

    for part, gradients in simulate(plan.mesh, one):
        torch.testing.assert_close(part, expected[values[0].label])
        for value, gradient in zip(values, gradients, strict=True):
            torch.testing.assert_close(gradient, 2 * expected[value.label])


def broken():
    torch.set_num_threads(1)
    rank = sw.init().rank
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4)))  # each weight alone in its bucket
    x = torch.randn(8, 1500)
    with sw.parallelize(model, loss_fn, x, "data", batch="global") as parallel:
        parallel(x).backward()
        reduce, begun = GradientReduction.reduce, []

        def failing(*args):
            begun.append(args)
            if len(begun) == 3:
                raise ValueError("of my own")
            return reduce(*args)

        if rank:
            GradientReduction.reduce = failing
        try:
            parallel(x).backward()
        except (ShardwrightError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_in_the_backward_of_one_rank_is_told_to_all():
    first, second = run_ranks(2, broken)
    assert first.startswith("WorldError: rank 1 failed in call 2 of the model: its backward ended with an error"), first
    assert second == "ValueError: of my own"


def reductions(hosts):
    """How many all-reduces the gradients of a step take, on ranks that stand on these hosts."""
    world = sw.init("gloo")
    object.__setattr__(world, "hosts", hosts)
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(8)))  # 8 MB
    x, begun, reduce = torch.randn(8, 500), [], GradientReduction.reduce
    GradientReduction.reduce = lambda *args: begun.append(args) or reduce(*args)
    with sw.parallelize(model, loss_fn, x, "data", batch="global") as parallel:
        parallel(x).backward()
    return len(begun)


@pytest.mark.parametrize(("hosts", "expected"), [(("one", "one"), 1), (("one", "other"), 2)])
def test_over_a_network_gradients_begin_to_travel_while_the_backward_computes(hosts, expected):
    assert run_ranks(2, reductions, hosts) == [expected] * 2


def begun_on_gloo():
    """Two steps with sharded parameters, of which some are resharded after the forward, and gradients of two batches.

    With how many collectives were begun, and what plain PyTorch gives.
    """
    object.__setattr__(GLOO, "overlaps", True)
    begun = Counter()
    for name in ("start_all_gather", "start_reduce_scatter"):
        start = getattr(ProcessCommunicator, name)

        def counting(self, tensor, axes, name=name, start=start):
            begun[name] += 1
            return start(self, tensor, axes)

        setattr(ProcessCommunicator, name, counting)
    sw.init("gloo")
    model, x = network(4)
    plain = copy.deepcopy(model)
    plan = fully_sharded(RuledGraph.of(captured_step(model, loss_fn, x, {})), PlanRequest(Mesh.of(d=2)))
    weights = [value.name for value in plan.capture.of_kind("parameter") if len(value.shape) == 2]
    plan = replace(plan, again=frozenset(weights[1:3]))
    parallel = sw.parallelize(model, loss_fn, x, plan=plan, batch="global")
    losses = losses_of(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-3), x)
    found = losses, {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    expected = losses_of(partial(loss_fn, plain), torch.optim.AdamW(plain.parameters(), lr=1e-3), x), plain.state_dict()
    for each in (parallel, partial(loss_fn, plain)):
        for part in (x, 2 * x):
            each(part).backward()
    pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
    return found, expected, [(ours.grad.full_tensor(), theirs.grad) for ours, theirs in pairs], begun


def test_two_ranks_of_gloo_give_what_one_device_gives_with_collectives_beside_computing():
    for (losses, state), (expected, parameters), gradients, begun in run_ranks(2, begun_on_gloo):
        assert losses == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(state, dict(parameters))
        for ours, theirs in gradients:
            torch.testing.assert_close(ours, theirs)
        assert begun["start_all_gather"] >= 5 * 3
        assert begun["start_reduce_scatter"] >= 5 * 2
