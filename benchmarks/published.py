"""The cost model beside published training speeds: what it predicts for a step, over what was measured.

    python benchmarks/published.py [--only 7.5B]

Every row is a run that somebody has published, with the model, the GPUs and the parallelism that they had; the source
is named beside its figures (`published_runs`). The model is captured on the meta device as they wrote it
(`published_models`), planned as they split it, and priced with the shipped profile of its GPU. Layers are alike, so
that models of one and of two layers tell what any number of them costs.

Added to what a plan costs is what our programs do in another way or not at all: what is computed again in the
backward, parameters that are gathered again there, gradients that several micro-batches share, an optimizer's passes
through memory, what goes between the products of experts, and tokens that go once to where several of their experts
are. ``adds up`` is predicted over published where nothing happens at once. In ``hidden`` the traffic of parameters and
gradients goes on beside computation as far as it fits, as FSDP overlaps them, and the share of it that the profile says
is hidden: that is what a plan is said to take.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from published_models import LATENT, LLAMA, Model, loss_fn
from published_runs import PER_HOST, RUNS, Run, board

import shardwright as sw
from shardwright.compiler.capture.ir import Capture, Node, Value
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds, backward_times, work_of
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.links import link_along, per_host_along
from shardwright.compiler.plan.pricing.schedule import StageSeconds, schedule, simulate
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.notation import Strategy

WITHIN = 0.25
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")  # how tensor parallelism splits weights

# --- the plans, as they were split


def _pins(run: Run) -> dict[str, object]:
    """Columns, then rows of the weights; what is between them is whole in a group, or split over the sequence."""
    rows, tp, cut = run.replicas, run.tp, run.tp if run.split_sequence else 1
    if run.shape.experts:
        tokens: tuple[object, ...] = ((rows * cut, 1), None)
        names = (*(f"*.{name}" for name in (LATENT if run.shape.latent else ("q", "k", "v"))), "head")
        found: dict[str, object] = dict.fromkeys(names, ((rows, 1), (tp, 1)))
        found |= {"*.out": ((rows, tp), (1, tp)), "*.experts": (*[(run.mesh.size, 1)] * 3, None, None)}
        return found | dict.fromkeys(("*.norm1", "*.norm2", "norm"), tokens)
    llama = run.kernels in LLAMA
    names = (f"*.{name}" for name in COLUMNS if llama or name != "gate")
    found = dict.fromkeys(names, ((rows, 1, 1), (tp, 1)))
    found |= dict.fromkeys((f"*.{name}" for name in ROWS), ((rows, 1, tp), (1, tp)))
    norm = ((rows, cut, 1), None) if llama else ((rows, cut, 1), None, None)
    return found | dict.fromkeys(("*.norm1", "*.norm2"), norm)


def _stored(run: Run, captured: Capture, names: tuple[str, ...]) -> dict[str, Layout]:
    """Return how parameters are stored: as products and the vocabulary are split, and over ``names`` by their rows."""
    found = {}
    for value in captured.of_kind("parameter"):
        module, kind = value.label.rsplit(".", 2)[-2:]
        if module == "experts":
            others = tuple(name for name in names if name not in run.of_experts)
            found[value.name] = Layout.split(len(value.shape), {0: run.of_experts, len(value.shape) - 1: others})
            continue
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
    cut: tuple[int, ...] = (run.replicas, run.tp if run.split_sequence else 1, 1)
    cut = (cut[0] * cut[1], 1) if run.shape.experts else cut
    add = sw.shard(torch.add, (cut, cut)) if run.tp > 1 else torch.add
    by_hand = run.tp > 1 or run.shape.experts > 0
    with torch.device("meta"):
        model = Model(run.shape, layers, run.kernels, add)
        model.to(torch.float16 if run.hardware == "v100" else torch.bfloat16)
        ids = torch.zeros(run.replicas * run.rows, run.shape.length, dtype=torch.long)
    pins = _pins(run) if by_hand else {}
    captured = captured_step(model, loss_fn, ids, pins, reduce_dtype=torch.float32 if run.exact_sums else None)
    hardware = board(run.hardware)
    if by_hand:
        inputs, storage = {captured.of_kind("input")[0].label: (run.replicas, 1)}, _stored(run, captured, ())
        request = PlanRequest(run.mesh, "semi-auto", "exact", inputs, hardware, storage, axes=run.mesh)
    else:
        request = PlanRequest(run.mesh, "data", hardware=hardware, axes=run.mesh)
    plan = make_plan(captured, request)
    if run.shape.experts:
        plan = replace(plan, strategies={**plan.strategies, **_of_mixtures(run, plan)})
    return (
        replace(plan, leaves={**plan.leaves, **_stored(run, captured, run.over)})
        if run.sharded == "parameters"
        else plan
    )


def _of_mixtures(run: Run, plan: Plan) -> dict[str, Strategy]:
    """Return the strategies of what a pin does not tell apart: over which axes experts and the vocabulary are split.

    A search weighs gradients of one micro-batch, and would rather send tokens between hosts than these.
    """
    found, tp = {}, ("tp",) if run.tp > 1 else ()
    for node in plan.capture.nodes:
        rule = plan.graph.rules[node.name]
        if node.op == "shardwright.experts":
            found[node.name] = rule.strategy({"t": run.mesh.names, "e": run.of_experts})
        elif node.scope == "tokens":
            found[node.name] = rule.strategy({"v": tp, "*0": run.over})
        elif node.scope.endswith("experts") and plan.capture.values[node.operands[0]].of_parameter:
            found[node.name] = rule.strategy({rule.operands[0][0][0]: run.of_experts})
    return found


# --- what they cost


@dataclass(frozen=True)
class Cost:
    """Seconds of a micro-batch, and numbers: sums over operators and transfers, which are linear in the layers."""

    computes: float = 0.0  # forward and backward, and what is computed again
    sent: float = 0.0  # collectives of activations
    exchanged: float = 0.0  # tokens that go to their experts, and results back
    gathered: float = 0.0  # of split parameters
    scattered: float = 0.0
    gradients: float = 0.0  # collectives of the gradients of parameters that every replica has
    copied: float = 0.0  # bytes
    updated: float = 0.0  # parameters whose states one GPU has

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, by: float) -> Cost:
        return Cost(*(a * by for a in astuple(self)))

    def in_turn(self, hardware: Hardware) -> float:
        """Return the seconds of what goes on one after the other in a micro-batch."""
        return self.computes + self.sent + self.exchanged + self.copied / hardware.memory_bandwidth


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
        "norms": module in ("norm1", "norm2"),
        "norms and experts": module in ("norm1", "norm2", "router", "experts"),
    }
    return float(shares[run.again])


def cost_of(run: Run, plan: Plan, seconds: Seconds) -> Cost:
    """Return what a micro-batch costs under a plan, the step of the optimizer left out."""
    found = Cost(updated=sum(_updated(run, plan, value) for value in plan.capture.of_kind("parameter")))
    found += _of_parameters(run, plan, seconds)
    for node in plan.capture.nodes:
        given, times = (plan.graph, node, plan.strategies[node.name], plan.mesh), 1 + share_again(run, node)
        forward, backward = plan.graph.collectives_inside(*given[1:])
        inside = sum(
            seconds.collective(once_for_each_place(run, collective), plan.mesh) * each
            for way, each in ((forward, times), (backward, 1))
            for collective in way
        )
        found += Cost(computes=forward_s(plan, node, seconds) * (times + backward_times(*given[:2])))
        found += Cost(exchanged=inside) if node.op == "shardwright.experts" else Cost(sent=inside)
    for transfer in plan.transfers:
        if not plan.capture.values[transfer.value].of_parameter:
            found += _of_activations(run, plan, transfer, seconds)
    return found


def _updated(run: Run, plan: Plan, value: Value) -> float:
    entries = plan.bytes_of(value) / value.dtype.itemsize
    alike = entries * plan.mesh.size / math.prod(value.shape)  # so many GPUs have the same
    return entries / alike if run.sharded == "optimizer" else entries


def forward_s(plan: Plan, node: Node, seconds: Seconds) -> float:
    """Return what a forward takes; of experts that of the products, and of fused kernels between them by themselves.

    A plan takes what goes between products for hidden behind them. Megatron-Core and Transformer Engine copy rows in
    their order, activate and multiply by one kernel, and weight results at their places and sum them by another.
    """
    if node.op != "shardwright.experts":
        return seconds.computing(plan.graph, node, plan.strategies[node.name], plan.mesh)
    (_, width), (tokens, choices), _, (_, _, inner, _), (_, out, _) = (
        plan.capture.values[name].shape for name in node.operands
    )
    size = tokens * choices * plan.capture.values[node.operands[0]].dtype.itemsize
    work = work_of(plan.graph, node)
    products = replace(work, bytes=work.bytes - size * (2 * width + 5 * inner + 5 * out))  # as `between_experts` counts
    between_s = size * (2 * width + 3 * inner + out) / seconds.hardware.memory_bandwidth
    return seconds._forward_s(products, plan.mesh.size) + between_s / plan.mesh.size


def once_for_each_place(run: Run, collective: Collective) -> Collective:
    """Return what DeepEP sends of an all-to-all of tokens, a token once to each host, or inside one to each GPU.

    Behind the network it goes on over NVLink, at the same time. So many places have one of the experts of a token as
    fall to them where these are neighbours, or are chosen at random. Its kernels reach 43 to 47 GB/s over a NIC of 400
    Gb/s, and 153 to 158 of the 160 GB/s of an H800's NVLink (github.com/deepseek-ai/DeepEP, README.md): the links that
    a profile has.
    """
    if run.dispatch != "DeepEP" or collective.kind != "all_to_all":
        return collective
    places, experts, choices = run.mesh.extent(collective.axes), run.shape.experts, run.shape.choices
    if link_along(run.mesh, collective.axes, PER_HOST) == "between":
        places //= per_host_along(run.mesh, collective.axes, PER_HOST)
    of_each = experts // places
    none_there = math.comb(experts - of_each, choices) / math.comb(experts, choices)
    reached = max(1.0, choices / of_each) if run.neighbours else places * (1 - none_there)
    return replace(collective, bytes=int(collective.bytes * reached / choices))


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
        if not value.of_parameter:
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

    ``hides`` is the share of the shorter that is hidden where parameters travel beside computing, and with them
    ``beside`` of the activations' seconds.
    """

    computes: float
    activations: float
    parameters: float
    optimizer: float
    hides: float
    beside: float = 0.0

    @property
    def adds_up(self) -> float:
        return self.computes + self.activations + self.parameters + self.optimizer

    @property
    def hidden(self) -> float:
        return self.adds_up - self.hides * min(self.computes, self.parameters + self.beside)


def predicted(run: Run, plans: Sequence[Plan] = ()) -> Predicted:
    """Return what the cost model says of a run; with stages, of the last group of GPUs, which has the vocabulary.

    Args:
        plans: those of a model of one and of two layers, where they are known.
    """
    hardware = board(run.hardware)
    one, two = (cost_of(run, plan, Seconds(hardware)) for plan in plans or [plan_of(run, layers) for layers in (1, 2)])
    layer = two + one * -1
    vocabulary = one + layer * -1
    total = vocabulary + layer * run.layers_at_the_end
    times = run.micro_batches * (in_stages(run, vocabulary, layer, hardware) if run.stages > 1 else 1.0)
    return Predicted(
        times * (total.computes + total.copied / hardware.memory_bandwidth),
        times * (total.sent + total.exchanged),
        # FSDP gathers for the forward and for the backward.
        times * (2 * total.gathered + total.scattered) + total.gradients,
        run.updated_bytes * total.updated / hardware.memory_bandwidth,
        hardware.hides_gradients,
        times * total.exchanged if run.exchanges_beside else 0.0,
    )


def in_stages(run: Run, vocabulary: Cost, layer: Cost, hardware: Hardware) -> float:
    """Return the time line of 1F1B over what the last group of GPUs takes for all micro-batches: they wait, too.

    Parts of a micro-batch are as long as products say: one forward, and two in the backward, three with a second
    forward. Messages are sent beside computing.
    """
    pair = Mesh((Axis("pp", 2), *run.mesh.axes))
    size = run.rows * run.shape.length * run.shape.width * 2 // run.tp  # each GPU of a stage sends a part
    message_s = Seconds(hardware).collective(Collective("all_gather", ("pp",), 2 * size), pair)
    stages, forward = run.stages * run.chunks, 1 / 3 if run.again in ("nothing", "norms") else 1 / 4
    costs = [layer * run.layers_of_stage] * stages
    if run.counts_vocabulary:
        costs[0], costs[-1] = costs[0] + layer * -1, costs[-1] + layer * -1
    costs[-1] += vocabulary
    takes = [cost.in_turn(hardware) for cost in costs]
    seconds = [StageSeconds(took * forward, took * (1 - forward), message_s) for took in takes]
    table = schedule("interleaved" if run.chunks > 1 else "1f1b", run.stages, run.micro_batches, stages)
    return simulate(table, seconds).seconds / (run.micro_batches * sum(takes[run.stages - 1 :: run.stages]))


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
