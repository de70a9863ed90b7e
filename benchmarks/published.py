"""The cost model beside published training speeds: what it predicts for a step, over what was measured.

    python benchmarks/published.py [--only 7.5B]

Every row is a run that somebody has published, with the model, the GPUs and the parallelism that they had; the source
is named beside its figures (`published_runs`). The model is captured on the meta device as they wrote it
(`published_models`), planned as they split it, and priced with the shipped profile of its GPU. Layers are alike, so
that models of one and of two layers tell what any number of them costs.

Added to what a plan costs is what our programs do in another way or not at all: what is computed again in the
backward, parameters that are gathered again there, gradients that several micro-batches share, and an optimizer's
passes through memory. ``adds up`` is predicted over published where nothing happens at once. In ``hidden`` the traffic
of parameters and gradients goes on beside computation as far as it fits, as FSDP overlaps them, and the share of it
that the profile says is hidden: that is what a plan is said to take.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from dataclasses import astuple, dataclass, replace

import torch
from published_models import LLAMA, Model, loss_fn
from published_runs import RUNS, Run, board

import shardwright as sw
from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds, operator_collectives
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.schedule import StageSeconds, schedule, simulate
from shardwright.compiler.plan.request import PlanRequest

WITHIN = 0.25
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")  # how tensor parallelism splits weights

# --- the plans, as they were split


def _pins(run: Run) -> dict[str, object]:
    """Columns, then rows of the weights; what is between them is whole in a group, or split over the sequence."""
    rows, tp, cut = run.replicas, run.tp, run.tp if run.split_sequence else 1
    llama = run.kernels in LLAMA
    names = (f"*.{name}" for name in COLUMNS if llama or name != "gate")
    found: dict[str, object] = dict.fromkeys(names, ((rows, 1, 1), (tp, 1)))
    found |= dict.fromkeys((f"*.{name}" for name in ROWS), ((rows, 1, tp), (1, tp)))
    norm = ((rows, cut, 1), None) if llama else ((rows, cut, 1), None, None)
    return found | dict.fromkeys(("*.norm1", "*.norm2"), norm)


def _stored(run: Run, captured: Capture, names: tuple[str, ...]) -> dict[str, Layout]:
    """Return how parameters are stored: as products and the vocabulary are split, and over ``names`` by their rows."""
    found = {}
    for value in captured.of_kind("parameter"):
        module, kind = value.label.rsplit(".", 2)[-2:]
        columns = module in COLUMNS or (module, kind) in (("tokens", "weight"), ("head", "weight"))
        axes: dict[int, tuple[str, ...]] = {}
        if run.tp > 1 and (columns or (module in ROWS and kind == "weight")):
            axes[0 if columns else 1] = ("tp",)
        rows = (*axes.get(0, ()), *names)
        if value.shape[0] % run.mesh.extent(rows) == 0:
            axes[0] = rows
        found[value.name] = Layout.split(len(value.shape), axes)
    return found


def plan_of(run: Run, layers: int) -> Plan:
    """Return the plan of their run for a model of so many layers, in 16 bits."""
    cut = (run.replicas, run.tp if run.split_sequence else 1, 1)
    add = sw.shard(torch.add, (cut, cut)) if run.tp > 1 else torch.add
    with torch.device("meta"):
        model = Model(run.shape, layers, run.kernels, add)
        model.to(torch.float16 if run.hardware == "v100" else torch.bfloat16)
        ids = torch.zeros(run.replicas * run.rows, run.shape.length, dtype=torch.long)
    pins = _pins(run) if run.tp > 1 else {}
    captured = captured_step(model, loss_fn, ids, pins, reduce_dtype=torch.float32 if run.exact_sums else None)
    hardware = board(run.hardware)
    if run.tp > 1:
        inputs, storage = {captured.of_kind("input")[0].label: (run.replicas, 1)}, _stored(run, captured, ())
        request = PlanRequest(run.mesh, "semi-auto", "exact", inputs, hardware, storage, axes=run.mesh)
    else:
        request = PlanRequest(run.mesh, "data", hardware=hardware, axes=run.mesh)
    plan = make_plan(captured, request)
    return (
        replace(plan, leaves={**plan.leaves, **_stored(run, captured, ("dp",))})
        if run.sharded == "parameters"
        else plan
    )


# --- what they cost


@dataclass(frozen=True)
class Cost:
    """Seconds of a micro-batch, and numbers: sums over operators and transfers, which are linear in the layers."""

    computes: float = 0.0  # forward and backward, and what is computed again
    sent: float = 0.0  # collectives of activations
    gathered: float = 0.0  # of split parameters
    scattered: float = 0.0
    gradients: float = 0.0  # collectives of the gradients of parameters that every replica has
    copied: float = 0.0  # bytes
    held: float = 0.0  # parameters of one GPU

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, by: float) -> Cost:
        return Cost(*(a * by for a in astuple(self)))


def share_again(run: Run, node: Node) -> float:
    """Return how often the backward does again what a node did, and sends what that sent: 0, 1 or between them."""
    path = node.scope.split(".")
    if "layers" not in path:
        return 0.0
    module = path[-1]
    # torchtitan's policy saves attention, and of the products q, gate, v and down, each a second one. Where the result
    # of out is sent, that is saved too.
    saved = ("core", "q", "v", "gate", "down", *(("out",) if run.tp > 1 else ()))
    shares = {
        "nothing": 0.0,
        "attention": module == "core",
        "layers": 1.0,
        "layers but their end": module != "down",
        "every second layer": 0.5 * (module != "down"),
        "every second product": module not in saved,
    }
    return float(shares[run.again])


def cost_of(run: Run, plan: Plan, seconds: Seconds) -> Cost:
    """Return what a micro-batch costs under a plan, the step of the optimizer left out."""
    held = sum(plan.bytes_of(value) / value.dtype.itemsize for value in plan.capture.of_kind("parameter"))
    found = Cost(held=held) + _of_parameters(run, plan, seconds)
    for node in plan.capture.nodes:
        given = plan.graph, node, plan.strategies[node.name], plan.mesh
        inside = sum(seconds.collective(collective, plan.mesh) for collective in operator_collectives(*given))
        forward = seconds.computing(*given) * (1 + share_again(run, node))
        found += Cost(computes=forward + seconds.backward(*given), sent=inside)
    for transfer in plan.transfers:
        if plan.capture.values[transfer.value].kind != "parameter":
            found += _of_activations(run, plan, transfer, seconds)
    return found


def _both_ways(plan: Plan, transfer: Transfer, step: Step) -> tuple[Collective | None, Collective | None]:
    forward, backward = plan.capture.values[transfer.value].collectives(step, plan.mesh)
    return forward, backward if transfer.gradient else None


def _of_activations(run: Run, plan: Plan, transfer: Transfer, seconds: Seconds) -> Cost:
    producer = plan.graph.producers.get(transfer.value)
    again = share_again(run, producer[0]) if producer else 0.0
    found = Cost()
    for step in transfer.steps:
        for collective, times in zip(_both_ways(plan, transfer, step), (1 + again, 1), strict=True):
            if collective:
                # What is gathered or scattered along another dim than the first is copied, where that has several rows.
                copied = 2 * collective.bytes if run.copies and step.dim and run.rows > 1 else 0
                found += Cost(sent=seconds.collective(collective, plan.mesh), copied=copied) * times
    return found


def _of_parameters(run: Run, plan: Plan, seconds: Seconds) -> Cost:
    """Return what the collectives of parameters cost: one of each kind for each layer, and one for the rest."""
    together = Counter[tuple[str, Collective]]()
    for transfer in plan.transfers:
        value = plan.capture.values[transfer.value]
        if value.kind != "parameter":
            continue
        layer = value.label.split(".")[1] if value.label.startswith("layers.") else ""
        for step in transfer.steps:
            for collective in filter(None, _both_ways(plan, transfer, step)):
                together[layer, replace(collective, bytes=0)] += collective.bytes
    return sum((_together(run, plan, replace(c, bytes=size), seconds) for (_, c), size in together.items()), Cost())


def _together(run: Run, plan: Plan, collective: Collective, seconds: Seconds) -> Cost:
    took = seconds.collective(collective, plan.mesh)
    if collective.kind == "all_gather":
        return Cost(gathered=took, copied=2 * 2 * collective.bytes if run.copies else 0)
    if collective.kind == "reduce_scatter":  # gradients in 16 bits are put together in float32
        return Cost(scattered=took, copied=1.5 * collective.bytes if run.copies else 0)
    if run.sharded == "optimizer":  # gradients in float32, and parameters in 16 bits
        parts = (
            replace(collective, kind="reduce_scatter"),
            replace(collective, kind="all_gather", bytes=collective.bytes // 2),
        )
        took = sum(seconds.collective(part, plan.mesh) for part in parts)
    return Cost(gradients=took)


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step: computing, collectives of activations, those of parameters and gradients, and the update.

    ``hides`` is the share of the shorter that is hidden where parameters travel beside computing.
    """

    computes: float
    activations: float
    parameters: float
    optimizer: float
    hides: float

    @property
    def adds_up(self) -> float:
        return self.computes + self.activations + self.parameters + self.optimizer

    @property
    def hidden(self) -> float:
        return self.adds_up - self.hides * min(self.computes, self.parameters)


def predicted(run: Run) -> Predicted:
    """Return what the cost model says of a run; with stages, of their slowest one, which has the vocabulary."""
    hardware = board(run.hardware)
    one, two = (cost_of(run, plan_of(run, layers), Seconds(hardware)) for layers in (1, 2))
    layer = two + one * -1
    total = one + layer * (run.shape.layers / run.stages - 1)
    times: float = run.micro_batches
    if run.stages > 1:
        times = in_stages(run, total, layer * (run.shape.layers / run.stages), hardware)
    updated = total.held / (run.replicas if run.sharded == "optimizer" else 1)
    return Predicted(
        times * (total.computes + total.copied / hardware.memory_bandwidth),
        times * total.sent,
        # FSDP gathers for the forward and for the backward.
        times * (2 * total.gathered + total.scattered) + total.gradients,
        run.updated_bytes * updated / hardware.memory_bandwidth,
        hardware.hides_gradients,
    )


def in_stages(run: Run, last: Cost, other: Cost, hardware: Hardware) -> float:
    """Return how often the last stage's micro-batch goes into the time line of 1F1B, whose others wait for each other.

    Its parts of a micro-batch are as long as products say: one forward, the backward three, with what is done again.
    """
    pair = Mesh((Axis("pp", 2), *run.mesh.axes))
    size = run.rows * run.shape.length * run.shape.width * 2 // run.tp  # each GPU of a stage sends a part
    message_s = Seconds(hardware).collective(Collective("all_gather", ("pp",), 2 * size), pair)
    takes = [each.computes + each.sent + each.copied / hardware.memory_bandwidth for each in (other, last)]
    stages = [StageSeconds(took / 4, took * 3 / 4, message_s) for took in takes]
    stages = [stages[0]] * (run.stages - 1) + [stages[1]]
    return simulate(schedule("1f1b", run.stages, run.micro_batches), stages).seconds / takes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name or of a source")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | mesh | computes, s | activations, s | parameters, s | published, s | adds up | hidden | source |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    off = {}
    for run in (run for run in RUNS if given.only in run.name or given.only in run.source):
        found = predicted(run)
        ratios = found.adds_up / run.published_s, found.hidden / run.published_s
        off[run] = ratios[1] - 1
        mesh = f"pp={run.stages} {run.mesh}" if run.stages > 1 else run.mesh
        print(
            f"| {run.name} | {mesh} | {found.computes:.2f} | {found.activations:.2f} | {found.parameters:.2f} "
            f"| {run.published_s:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {run.source} |",
            flush=True,
        )
    far = {run: by for run, by in off.items() if abs(by) > WITHIN}
    for run, by in far.items():
        print(f"\n{run.name} on {run.mesh} is off by {by:+.0%}: {run.why or 'nobody has found out why'}.")
    worst = max(map(abs, off.values()), default=0.0)
    print(f"\n{len(off) - len(far)} of {len(off)} within {WITHIN:.0%}, the worst off by {worst:.0%}")


if __name__ == "__main__":
    main()
