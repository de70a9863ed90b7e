"""All-gathers of parameters run beside computing, and so do the reduce-scatters of their gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import whole
from shardwright.common.pulse import site
from shardwright.common.torch_private import backward_number
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.check import check
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.collectives import LateSum, all_gather, reduced_late
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import SimulatedCommunicator, simulate
from shardwright.compiler.plan.baselines import data_parallel, fully_sharded
from shardwright.compiler.plan.pricing.cost import IN_FLIGHT
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import casting_shards
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import LoweringError, WorldError
from shardwright.runtime.compiled.compiler import in_stretches
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from shardwright.runtime.programs.sites import labels
from whole import measured_peak, plain, run, same


class Blocks(nn.Module):
    """Layers with a large weight, which is resharded after the forward, small ones, and one that two layers read."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(layers)
        )
        self.shared = nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = self.shared(x + layer(x)).tanh()
        return x


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def in_half(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch[0])
    return F.mse_loss(found.float(), batch[1])


@cache
def network(width=64, layers=2, rows=8, dtype=torch.float64):
    torch.manual_seed(0)
    model = Blocks(width, layers).to(dtype)
    return model, (torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype))


@cache
def graph_of(model, batch, of=loss_fn):
    """The graph of a network, which all plans of it share: by the objects that `network` gives."""
    return RuledGraph.of(captured_step(model, of, batch, {}))


def sharded(model, batch, ranks, of=loss_fn, **options):
    return replace(fully_sharded(graph_of(model, batch, of), PlanRequest(Mesh.of(d=ranks))), **options)


def partly_sharded(model, batch, of=loss_fn):
    """Rows of the batch are split over both axes of the mesh, and parameters over the second one."""
    graph = graph_of(model, batch, of)
    plan, mesh = data_parallel(graph, PlanRequest(Mesh.of(d=4))), Mesh.of(a=2, b=2)

    def over(layout):
        dims = (replace(dim, axes=mesh.names if dim.axes else ()) for dim in layout.dims)
        return replace(layout, dims=tuple(dims), partial=mesh.names if layout.partial else ())

    strategies = {
        name: replace(
            strategy,
            axes=tuple(mesh.names if axes else () for axes in strategy.axes),
            partial=mesh.names if strategy.partial else (),
        )
        for name, strategy in plan.strategies.items()
    }
    leaves = {name: over(layout) for name, layout in plan.leaves.items()}
    stored = {v.name: Layout.split(len(v.shape), {0: ("b",)}) for v in plan.capture.of_kind("parameter")}
    return replace(
        plan,
        mesh=mesh,
        named=mesh,
        strategies=casting_shards(graph, mesh, strategies, stored),
        leaves=leaves | stored,
        outputs={name: over(layout) for name, layout in plan.outputs.items()},
        again=frozenset(
            value.name for value in plan.capture.values.values() if value.of_parameter and value.bytes > 1 << 13
        ),
    )


@pytest.mark.parametrize(("of", "tolerance"), [(loss_fn, 1e-12), (in_half, 0.0)])
def test_gradients_that_go_on_into_buckets_are_waited_for_late(of, tolerance, monkeypatch):
    model, batch = network(dtype=torch.float64 if of is loss_fn else torch.float32)
    plan = replace(partly_sharded(model, batch, of), memory=1 << 30)
    program = lower(plan, 0, 1 << 15, 1 << 10, overlap=True)
    buckets = {name for one in program.instructions if one.kind == "bucket" for name in one.outputs}
    assert sum(one.kind == "late" and set(one.reads) <= buckets for one in program.instructions) >= 2
    assert kinds(program).count("begin") >= 2
    assert program.prefetches
    found = run(plan, model, batch, bucket_bytes=1 << 15)
    if of is loss_fn:
        expected = plain(model, of, batch)
    else:
        monkeypatch.setattr(whole, "lower", lambda plan, rank, *sizes, overlap: lower(plan, rank, *sizes))
        expected = run(plan, model, batch, bucket_bytes=1 << 15)
    same(found, expected, tolerance)


def kinds(program):
    return [instruction.kind for instruction in program.instructions]


@pytest.mark.parametrize(("ranks", "width", "rows", "recomputed"), [(3, 64, 7, ("layers.*",)), (4, 61, 3, ())])
def test_sharded_parameters_give_what_one_device_gives(ranks, width, rows, recomputed):
    """Parts are uneven, a rank may have no rows at all, and blocks are computed again."""
    model, batch = network(width, rows=rows)
    plan = sharded(model, batch, ranks)
    names = [
        name
        for name, _ in model.named_modules()
        if any(name == r.replace("*", str(i)) for r in recomputed for i in range(2))
    ]
    plan = replace(plan, recomputed=frozenset(names))
    program = lower(plan, 0, overlap=True)
    assert kinds(program).count("begin") >= 2
    assert kinds(program).count("late") >= 2
    same(run(plan, model, batch), plain(model, loss_fn, batch), 1e-12)


def test_it_gives_what_it_gives_without_to_the_last_bit():
    """In half precision, too, where casts of shards are gathered, and gradients summed in another dtype."""
    model, batch = network(dtype=torch.float32)
    plan = sharded(model, batch, 2, in_half)
    found = run(plan, model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "lower", lambda plan, rank, overlap: lower(plan, rank))
        same(found, run(plan, model, batch), 0.0)


class Products(TorchDispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def test_products_run_between_the_begin_and_the_end(monkeypatch):
    """No more gradients are under way than twice those of a layer."""
    events, sizes = [], []
    for kind in ("all_gather", "reduce_scatter"):
        start = getattr(SimulatedCommunicator, f"start_{kind}")

        def told(self, tensor, axes, start=start, kind=kind):
            wait, mine = start(self, tensor, axes), events if self.rank == 0 else []
            number = sum(event[0] == f"begin {kind}" for event in mine if event != "product")
            mine.append((f"begin {kind}", number))
            sizes.extend([tensor.nbytes] if kind == "reduce_scatter" and self.rank == 0 else [])
            return lambda: (mine.append((f"end {kind}", number)), wait())[1]

        monkeypatch.setattr(SimulatedCommunicator, f"start_{kind}", told)

    def watching(mesh, fn):
        def one(comm):
            with Products(events if comm.rank == 0 else []):
                return fn(comm)

        return simulate(mesh, one)

    monkeypatch.setattr(whole, "simulate", watching)
    model, batch = network()
    run(sharded(model, batch, 2), model, batch)
    for kind in ("all_gather", "reduce_scatter"):
        begun = [event for event in events if event[0] == f"begin {kind}"]
        assert len(begun) >= 4
        beside = 0
        for event in begun:
            between = events[events.index(event) : events.index((f"end {kind}", event[1]))]
            beside += "product" in between
        assert beside >= len(begun) - 2, f"only {beside} of {len(begun)} of {kind} run beside a product"
    under_way, most_bytes = [], 0
    for what, *number in (event for event in events if event != "product"):
        if what == "begin reduce_scatter":
            under_way += number
        elif what == "end reduce_scatter":
            under_way.remove(*number)
        most_bytes = max(most_bytes, sum(sizes[i] for i in under_way))
    layer_bytes = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    assert max(sizes) < most_bytes <= IN_FLIGHT * layer_bytes


def test_the_backward_gathers_the_weights_of_the_next_section_ahead(monkeypatch):
    """Also where it does not come to that section: what was begun then ends with the backward."""
    model, batch = network(layers=4)
    plan = sharded(model, batch, 2)
    begun, ended, start = [], [], SimulatedCommunicator.start_all_gather

    def told(self, tensor, axes):
        wait, inside = start(self, tensor, axes), backward_number() >= 0
        begun.append(inside)
        return lambda: (ended.append(inside), wait())[1]

    monkeypatch.setattr(SimulatedCommunicator, "start_all_gather", told)
    assert lower(plan, 0, overlap=True).prefetches
    same(run(plan, model, batch), plain(model, loss_fn, batch), 1e-12)
    regathers = sum(one.regathers for one in lower(plan, 0).instructions)
    assert begun.count(True) == ended.count(True) == 2 * (regathers - 1)  # but the first of each rank's backward

    begun.clear(), ended.clear()
    last = "layers.3.3.weight"
    found = executed(plan, model, batch, lambda loss, parameters: torch.autograd.grad(loss, [parameters[last]])[0])
    torch.testing.assert_close(torch.cat(found), plain(model, loss_fn, batch)[f"gradient of {last}"])
    assert begun.count(True) == ended.count(True) > 0


def executed(plan, model, batch, then):
    """What comes of ``then(loss, parameters)`` on each rank, with the names of the parameters."""
    values = plan.capture.of_kind("parameter")

    def one(comm):
        program = lower(plan, comm.rank, overlap=True)
        execution = Execution(program, plan.capture, comm, torch.device("cpu"), GradientReduction())
        named, parameters = dict(model.named_parameters()), []
        for value in values:
            part = plan.leaves[value.name].local_slice(value.shape, plan.mesh, comm.rank)
            parameters.append(named[value.label].detach()[part].clone().requires_grad_())
        inputs = [
            tensor[plan.leaves[value.name].local_slice(tensor.shape, plan.mesh, comm.rank)]
            for value, tensor in zip(plan.capture.of_kind("input"), batch, strict=True)
        ]
        loss, _, _ = execution(StepArguments(parameters, [], inputs, [], 0, 0))
        return then(loss, dict(zip((value.label for value in values), parameters, strict=True)))

    return simulate(plan.mesh, one)


def test_gradients_asked_for_in_part_twice_and_under_hooks():
    model, batch = network()
    plan, expected = sharded(model, batch, 2), plain(model, loss_fn, batch)
    seen = "layers.1.1.weight"

    def then(loss, parameters):
        hooked = []
        parameters[seen].register_hook(lambda gradient: hooked.append(gradient.clone()))
        (part,) = torch.autograd.grad(loss, [parameters[seen]], retain_graph=True)
        loss.backward(retain_graph=True)
        with torch.autograd.detect_anomaly():
            loss.backward()
        return part, hooked, {name: parameter.grad for name, parameter in parameters.items()}

    with pytest.warns(UserWarning, match="Anomaly"):
        ranks = executed(plan, model, batch, then)
    for number in range(len(ranks[0][2])):
        name = list(ranks[0][2])[number]
        torch.testing.assert_close(
            torch.cat([gradients[name] for _, _, gradients in ranks]), 2 * expected[f"gradient of {name}"]
        )
    torch.testing.assert_close(torch.cat([part for part, _, _ in ranks]), expected[f"gradient of {seen}"])
    for _, hooked, _ in ranks:
        assert not any(gradient.isnan().any() for gradient in hooked)
        assert len(hooked) == 3


@pytest.mark.parametrize("mode", [torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.slow)])
def test_a_forward_without_gradients_gives_the_loss(mode):
    model, batch = network()
    plan = sharded(model, batch, 2)
    with mode():
        losses = executed(plan, model, batch, lambda loss, parameters: loss)
    for loss in losses:
        torch.testing.assert_close(loss, loss_fn(model, batch).detach())
        assert not loss.requires_grad


def test_what_a_failed_forward_has_begun_is_no_backward_that_failed():
    lockstep = Lockstep(dist.HashStore(), 0, 1)

    def failing():
        with lockstep.call():
            lockstep.same("a batch", lambda: "passes a batch")
            lockstep.begun(object())
            raise KeyError("of an operator")

    with pytest.raises(KeyError):
        failing()
    with lockstep.call():
        lockstep.same("a batch", lambda: "passes a batch")
        assert lockstep._what == "a batch"
    lockstep.begun(object())
    with lockstep.call():
        lockstep.same("a batch", lambda: "passes a batch")
        assert lockstep._what == "a batch after an error in its last backward"


def test_a_gradient_that_is_not_waited_for_is_found(monkeypatch):
    model, batch = network()
    monkeypatch.setattr(LateSum, "wait", lambda self, gradients: gradients)
    with pytest.raises(WorldError, match=r"reduce_scatter over fsdp of .* was begun, and not waited for"):
        executed(sharded(model, batch, 2), model, batch, lambda loss, parameters: loss.backward())


def test_what_is_gathered_over_one_axis_after_another_is_summed_over_both():
    """The gradient that the second gather sums is not the one that is waited for late."""

    def one(comm):
        leaf = torch.zeros(2, requires_grad=True)
        (late,) = reduced_late(leaf)
        half = all_gather(late, comm, dim=0, axes=("a",), size=4, adjoint="reduce_scatter")
        whole = all_gather(half, comm, dim=0, axes=("b",), size=8, adjoint="reduce_scatter")
        (whole * torch.arange(8.0) * (comm.rank + 1)).sum().backward()
        return leaf.grad

    found = simulate(Mesh.of(a=2, b=2), one)
    assert torch.equal(torch.cat([found[rank] for rank in (0, 2, 1, 3)]), 10 * torch.arange(8.0))


def changed(program, kind, change):
    """The program with another instruction for the first of a kind; left out where it is None."""
    at = kinds(program).index(kind)
    made = change(program.instructions[at])
    rest = program.instructions[at + 1 :]
    return replace(program, instructions=(*program.instructions[:at], *([] if made is None else [made]), *rest))


def test_a_program_that_waits_wrongly_is_refused():
    model, batch = network()
    plan = sharded(model, batch, 2)
    program = lower(plan, 0, overlap=True)
    check(program, plan)
    for kind in ("begin", "late"):
        with pytest.raises(LoweringError, match="is read before it is written"):
            check(changed(program, kind, lambda one: None), plan)
        name = program.instructions[kinds(program).index(kind)].outputs[0]
        at = next(i for i, one in enumerate(program.instructions) if name in one.reads)
        twice = program.instructions[at + 1].reading(program.instructions[at + 1].reads[0], name)
        instructions = (*program.instructions[: at + 1], twice, *program.instructions[at + 2 :])
        with pytest.raises(LoweringError, match=f"{name} is to be read once, and is read 2 times"):
            check(replace(program, instructions=instructions), plan)


def test_it_keeps_to_the_limit_of_memory_and_leaves_stretches_whole():
    model, batch = network(layers=4)
    plan = sharded(model, batch, 2)
    without = lower(plan, 0)
    least = peak_of(plan, without).bytes
    assert kinds(lower(replace(plan, memory=least), 0, overlap=True)) == kinds(without)
    begun, peaks = [], []
    for memory in range(least, 2 * least, least // 10):
        program = lower(replace(plan, memory=memory), 0, overlap=True)
        peaks.append(peak_of(plan, program).bytes)
        assert peaks[-1] <= memory
        begun.append(kinds(program).count("begin"))
    assert begun[-1] == max(begun) > 4
    assert peaks == sorted(peaks)
    most = lower(replace(plan, memory=1 << 40), 0, overlap=True)
    assert len(in_stretches(most)[1]) == len(in_stretches(without)[1])


@pytest.mark.parametrize("rows", [16, pytest.param(512, marks=pytest.mark.slow)])
def test_the_peak_knows_what_is_under_way(rows, monkeypatch):
    model, batch = network(128, rows=rows)
    plan = sharded(model, batch, 2)
    program = lower(plan, 0, overlap=True)
    assert {"begin", "late"} <= set(kinds(program))
    assert program.prefetches
    predicted = peak_of(plan, program).bytes - plan.held.optimizer
    assert predicted == pytest.approx(measured_peak(plan, model, batch, monkeypatch), rel=0.15)
    without = peak_of(plan, lower(plan, 0)).bytes - plan.held.optimizer
    assert without < predicted


def test_ranks_that_hold_less_begin_no_more_than_others():
    model, batch = network()
    plan = sharded(model, tuple(tensor[:4, None].expand(4, 64, -1) for tensor in batch), 3)  # two rows, two, and none
    least = peak_of(plan, lower(plan, 0)).bytes
    for memory in (None, *range(least, least * 3 // 2, least // 10)):
        limited = replace(plan, memory=memory)
        programs = [lower(limited, rank, overlap=True) for rank in range(3)]
        assert len({(*kinds(program), program.prefetches) for program in programs}) == 1


def test_a_pulse_names_what_is_begun_and_waited_for():
    model, batch = network()
    program = lower(sharded(model, batch, 2), 0, overlap=True)
    for at, one in enumerate(program.instructions):
        forward, backward = labels(program, at)
        if one.kind in ("begin", "late"):
            end = next(i for i, later in enumerate(program.instructions) if set(one.outputs) & set(later.reads))
            words = [label[8:] for label in labels(program, end)]
            assert forward[8:] == (words[0] if one.kind == "begin" else site("", 0)[8:])
            assert one.kind == "begin" or backward[8:] == words[1]
