"""Run a plan on simulated ranks, compare with the whole graph on one device, and measure what ranks keep and send."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from device import DEVICE, placed
from shardwright.compiler.capture.capture import flatten_batch
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.hardware import Hardware, for_device
from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import gathered_again, repeated_costs
from shardwright.runtime.compiled.compiler import Compiler
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, Outputs, StepArguments


def plan_of(
    model: torch.nn.Module, loss_fn: Any, batch: Any, mesh: Mesh, mode: str, pins: Any = None, **options: Any
) -> Plan:
    return make_plan(captured_step(model, loss_fn, batch, pins or {}), PlanRequest(mesh, mode, **options))


def true_cost(plan: Plan, objective: Objective) -> float:
    """What everything in a plan costs, from the plan alone."""
    total = sum(objective.operator(plan.graph, n, plan.strategies[n.name], plan.mesh) for n in plan.capture.nodes)
    for transfer in plan.transfers:
        total += objective.transfer(plan.brought(transfer), transfer.steps, plan.mesh)
    for value in plan.capture.of_kind("parameter"):
        total += objective.leaf(value, plan.leaves[value.name], plan.mesh)
    return total + sum(repeated_costs(plan, objective).values()) + gathered_again(plan, objective)


def tensors_of(captured: Capture, model: torch.nn.Module, kind: str) -> list[Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return [named[value.label].detach() for value in captured.of_kind(kind)]


def run(
    plan: Plan,
    model: torch.nn.Module,
    batch: Any,
    seed: int = 0,
    compiler: Compiler | None = None,
    bucket_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Loss, gradients, auxiliary outputs and buffers, whole, from simulated ranks under ``plan``.

    All ranks have to make the same collective calls in the same order.
    """
    calls: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    captured, mesh = plan.capture, plan.devices
    parameters = tensors_of(captured, model, "parameter")
    buffers = tensors_of(captured, model, "buffer")
    constants = [captured.constants[value.name] for value in captured.of_kind("constant")]
    inputs = flatten_batch(batch)

    def one(comm: Any) -> list[tuple[str, Layout, Tensor]]:
        def part(kind: str, whole: list[Tensor]) -> list[Tensor]:
            values = captured.of_kind(kind)
            layouts = [plan.stored[value.name] for value in values]
            cut = [
                placed(t[layout.local_slice(t.shape, mesh, comm.rank)].clone())
                for t, layout in zip(whole, layouts, strict=True)
            ]
            if kind == "parameter":
                for tensor, value in zip(cut, values, strict=True):
                    tensor.requires_grad_(value.needs_gradient)
            return cut

        program = lower(plan, comm.rank, *([] if bucket_bytes is None else [bucket_bytes] * 2), overlap=True)
        local = part("parameter", parameters)
        execution = Execution(program, plan.capture, comm, DEVICE, GradientReduction(), compiler)
        given = StepArguments(local, part("buffer", buffers), part("input", inputs), placed(constants), seed, step=0)
        loss, aux, new = execution(given)
        assert loss is not None
        loss.backward()
        calls[comm.rank] = [(collective.kind, collective.axes) for collective in comm.collectives]
        found = [("loss", Layout(()), loss.detach())]
        for value, tensor in zip(captured.of_kind("parameter"), local, strict=True):
            if tensor.grad is not None:
                found.append((f"gradient of {value.label}", plan.stored[value.name], tensor.grad.to_dense()))
        found += [
            (f"aux {n}", plan.on_devices(plan.outputs[n]), t.detach()) for n, t in zip(captured.aux, aux, strict=True)
        ]
        found += [
            (f"buffer {captured.values[b].label}", plan.on_devices(plan.outputs[v]), t)
            for (b, v), t in zip(captured.mutations.items(), new, strict=True)
        ]
        return [(name, layout, tensor.cpu()) for name, layout, tensor in found]

    ranks = [{name: (layout, tensor) for name, layout, tensor in found} for found in simulate(mesh, one)]
    for rank, made in calls.items():
        assert made == calls[0] or plan.stages is not None, f"rank {rank} makes other calls than rank 0"
        assert ranks[rank].keys() == ranks[0].keys(), f"rank {rank} has other gradients than rank 0"
    return {name: whole([found[name] for found in ranks], mesh) for name in ranks[0]}


def whole(parts: list[tuple[Layout, Tensor]], mesh: Mesh) -> Tensor:
    """Put parts together by their layout, and demand that replicas are equal to the last bit of what they overlap."""
    layout = parts[0][0]
    shape = [0] * parts[0][1].ndim
    for dim in range(len(shape)):
        ranges = {}
        for rank, (_, tensor) in enumerate(parts):
            ranges[tuple(mesh.coordinates(rank)[a] for a in layout.dims[dim].axes)] = tensor.shape[dim]
        shape[dim] = sum(ranges.values())
    result = parts[0][1].new_zeros(shape)
    filled = torch.zeros(shape, dtype=torch.bool)
    for rank, (_, tensor) in enumerate(parts):
        at = layout.local_slice(shape, mesh, rank)
        if bool(filled[at].all()) and tensor.numel():
            torch.testing.assert_close(
                result[at], tensor, rtol=1e-12, atol=1e-12, msg=f"rank {rank} differs from its replica"
            )
        result[at] = tensor
        filled[at] = True
    return result


# How a model is split where nothing else is asked for: what is searched for, by mode.
PLANS: Mapping[str, Mapping[str, Any]] = {
    "data": {"mode": "data"},
    "auto": {"mode": "auto"},
    "propagation": {"mode": "auto", "search": "propagation"},
}


def splitting_hardware() -> Hardware:
    """Return a profile by which mode "auto" splits all that it can: slow devices on a fast network."""
    cpu, free = for_device("cpu"), Curve((Segment(0, 1e-9, 1e15),))
    return replace(
        cpu,
        flops=tuple((dtype, 1e3) for dtype, _ in cpu.flops),
        memory_bandwidth=1e4,
        launch_s=1e-9,
        links=tuple(replace(link, curve=free, points=()) for link in cpu.links),
    )


def plain(model: torch.nn.Module, loss_fn: Any, batch: Any) -> dict[str, Tensor]:
    """Loss, gradients and buffers of one step of plain PyTorch, by the names that `run` gives them."""
    model = copy.deepcopy(model)
    result = loss_fn(model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {n}": p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": b for n, b in model.named_buffers()}


def like_plain(
    model: torch.nn.Module, loss_fn: Any, batch: Any, sizes: Sequence[int] = (2,), tolerance: float = 1e-10
) -> list[Plan]:
    """Hold the model against plain PyTorch on this many ranks, with its batch split and with all split; the plans."""
    expected = plain(model, loss_fn, batch)
    captured = captured_step(model, loss_fn, batch, {})
    hows = [PLANS[how] for how in ("data", "propagation")]
    plans = [make_plan(captured, PlanRequest(Mesh.of(d=n), **how)) for n in sizes for how in hows]
    for plan in plans:
        found = {name: tensor for name, tensor in run(plan, model, batch).items() if not name.startswith("aux")}
        missing = [name for name in expected if name.startswith("buffer") and name not in found]
        same(found, {name: tensor for name, tensor in expected.items() if name not in missing}, tolerance)
    return plans


def losses_of(loss_of: Any, optimizer: torch.optim.Optimizer, batch: Any) -> list[float]:
    """The losses of three steps of training on one batch, of which ``loss_of(batch)`` gives each."""
    losses = []
    for _ in range(3):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    """The design's measure: the largest deviation against the largest entry of the tensor, or of its kind."""
    assert ours.keys() == reference.keys()
    largest: dict[str, float] = {}
    for name, tensor in reference.items():
        kind = name.split(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(tensor.abs().max()) if tensor.numel() else 0.0)
    for name, tensor in reference.items():
        assert ours[name].shape == tensor.shape, name
        if tensor.numel():
            exact = torch.complex128 if tensor.is_complex() else torch.float64
            deviation = float((ours[name].to(exact) - tensor.to(exact)).abs().max())
            assert deviation <= tolerance * max(largest[name.split(" ")[0]], 1e-30), f"{name} deviates by {deviation}"


Moved = Counter[tuple[str, tuple[str, ...]]]


class Packed:
    """What autograd keeps of a tensor: gone when it keeps it no more."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # a result with its history would keep itself


class Measured:
    """What one rank held after its forward."""

    def of(self, execution: Execution, arguments: StepArguments) -> Outputs:
        packed: weakref.WeakSet[Packed] = weakref.WeakSet()

        def pack(tensor: Tensor) -> Packed:
            packed.add(kept := Packed(tensor))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            outputs = execution(arguments)
        kinds = arguments.parameters, arguments.buffers, arguments.inputs, arguments.constants
        leaves = {leaf.untyped_storage().data_ptr() for kind in kinds for leaf in kind}
        storages = {s.data_ptr(): s.nbytes() for s in (kept.tensor.untyped_storage() for kept in packed)}
        self.saved = sum(size for at, size in storages.items() if at not in leaves)
        self.parameters = [p for p in arguments.parameters if p.requires_grad]
        self.parameter_bytes = sum(p.nbytes for p in arguments.parameters)
        return outputs


@contextmanager
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Measured]]:
    """By rank, what `whole.run` does inside."""
    found: dict[int, Measured] = {}
    original = Execution

    def measured(program: Any, *args: Any) -> Any:
        execution = original(program, *args)
        found[program.rank] = Measured()
        return lambda arguments: found[program.rank].of(execution, arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "Execution", measured)
        yield found


def planned(plan: Plan) -> Moved:
    """What a plan says is communicated, as bytes by kind and axes."""
    found: Moved = Counter()
    for priced in plan.collectives():
        found[priced.collective.kind, priced.collective.axes] += priced.collective.bytes
    return found


def communicated(plan: Plan, model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> Moved:
    """What rank 0 communicates in a forward and a backward, as bytes by kind and axes."""
    found: Moved = Counter()
    original = simulate

    def counting(mesh: Mesh, fn: Any) -> Any:
        def one(comm: Any) -> Any:
            result = fn(comm)
            if comm.rank == 0:
                for collective in comm.collectives:
                    found[collective.kind, collective.axes] += collective.bytes
            return result

        return original(mesh, one)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "simulate", counting)
        run(plan, model, batch)
    return found


class Watching(TorchDispatchMode):
    """Sees every tensor that an operator makes, and the most bytes that were alive at once."""

    def __init__(self, ignored: Collection[weakref.ref[UntypedStorage]] = ()) -> None:
        super().__init__()
        self.ignored, self.peak = ignored, 0
        self.alive: dict[weakref.ref[UntypedStorage], int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                continue  # a DTensor has no memory but that of its part
            memory = tensor.untyped_storage()
            if weakref.ref(memory) not in self.ignored:
                self.alive[weakref.ref(memory)] = memory.nbytes()
        self.alive = {known: size for known, size in self.alive.items() if known() is not None}
        self.peak = max(self.peak, sum(self.alive.values()))
        return results


def measured_peak(plan: Plan, model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> int:
    """The most bytes alive on a rank, with its parts of the leaves, and without the whole ones."""
    return measured_peaks(plan, model, batch, monkeypatch)[rank]


def measured_peaks(plan: Plan, model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """`measured_peak` of every rank."""
    peaks, ignored = {}, {weakref.ref(x.untyped_storage()) for x in (*model.parameters(), *model.buffers(), *batch)}

    original = simulate

    def watching(mesh: Mesh, fn: Any) -> Any:
        def one(comm: Any) -> Any:
            with Watching(ignored) as watch:
                result = fn(comm)
            peaks[comm.rank] = watch.peak
            return result

        return original(mesh, one)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "simulate", watching)
        run(plan, model, batch)
    return peaks
