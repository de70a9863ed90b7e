"""`verify`: one device and a plan side by side, on the user's own model, with real processes.

The measure: a deviation is max|a - b| over the entries of a tensor, divided by the largest entry of its kind (loss,
gradients, buffers, parameters) in the reference model. The tolerances are `TOLERANCES`. float32 parameters have their
own, since AdamW divides a gradient by its own size: where it is zero in exact arithmetic, the step is noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common.trees import tree_map
from shardwright.compiler.capture.ir import Node
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.lower.local import localise
from shardwright.compiler.lower.site import Site
from shardwright.compiler.mesh.mesh import SEARCHED_STAGES, Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import Inputs, PlanRequest
from shardwright.compiler.plan.searches import MindSporeMode, Mode, SearchName, mode_called
from shardwright.data.loading.batch import Batch
from shardwright.distributed.agreement import agree, from_all_ranks, from_rank_zero
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.distributed.world import current_world
from shardwright.errors import UsageError
from shardwright.runtime.placing.members import agree_on_weights
from shardwright.runtime.programs.inputs import mesh_for
from shardwright.runtime.programs.planner import hardware_of
from shardwright.runtime.verification.build import as_batches
from shardwright.runtime.verification.compare import (
    GRADIENT_FLOOR,
    ONE_DEVICE,
    TOLERANCES,
    Deviation,
    Verification,
    counted,
)
from shardwright.runtime.verification.copies import Copies
from shardwright.runtime.verification.loop import Loop, loops_compared, name_of
from shardwright.runtime.verification.steps import SideBySide


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Any,
    plan: Plan | str | None = None,
    *,
    steps: int = 3,
    mode: Mode | MindSporeMode = "auto",
    mesh: Mesh | str | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    search: SearchName | None = None,
    pins: Mapping[str, Any] | None = None,
    inputs: Inputs = "split",
    dtypes: Sequence[str] | None = None,
    lr: float = 1e-3,
    loop: Loop | None = None,
) -> Verification:
    """Train on all ranks as a plan says, and beside it on one device; compare everything after each AdamW step.

    Every rank calls this with the same arguments; weights and batches are rank 0's. The references are the model
    through the same rules on one device and, where nothing in it is random, plain PyTorch. In a world of one rank it is
    plain PyTorch that matters. The user's model stays as it is: copies are trained, in training mode.

    A rank holds the model three times (whole for each reference), with gradients and optimizer states: a model that
    does not fit so must be verified at a smaller size.

    Args:
        batches: one global batch (a tensor, tuple or mapping), or a list of them, which are taken in turn.
        plan: a plan or the path of a saved one; by default it is made as `parallelize` would, from ``mode``, ``mesh``,
            ``microbatches``, ``schedule``, ``search``, ``pins`` and ``inputs``. It is made for the dtype of the model
            and then used in all.
        dtypes: of "float64" and "float32", by default both; parameters, buffers and batches are cast.
        loop: a training loop of your own in place of the AdamW steps, so that what changes between steps is compared,
            too: ``loop(parallel, batches)`` gets what `parallelize` returns (and once plain PyTorch behind the same
            face) with ``steps`` batches, trains, and yields the loss after each step. It runs three times, from the
            same random numbers; tensors and plain values beside the model that it or ``loss_fn`` changes are put
            back before each. In float64 alone, and a rank keeps what every step has left.

    Raises:
        UsageError: where an argument does not fit, or ranks disagree.
        CaptureError, StrategyError, PlanError: as `parallelize` does.
    """
    world = current_world()
    if dtypes is None:
        dtypes = tuple(TOLERANCES) if loop is None else ("float64",)
    arguments = {"mode": mode, "mesh": str(mesh), "steps": steps, "lr": lr, "dtypes": tuple(dtypes)}
    arguments |= {"microbatches": str(microbatches), "schedule": str(schedule)}
    agree("verify", {"the arguments": arguments}, _problem(steps, lr, dtypes, loop))
    given = _global_batches(batches)
    _refuse_meta(model)
    model = copy.deepcopy(model).to(world.device)
    if not model.training:
        model.train()
    agree_on_weights(model)
    chosen = mesh_for(mesh, world.size)

    def make() -> Plan:
        captured = captured_step(model, loss_fn, given[0], pins or {})
        graph = RuledGraph.of(captured)
        if isinstance(plan, str):
            return Plan.load(plan, graph)
        if plan is not None:
            return Plan.from_json(plan.to_json(), graph)
        request = PlanRequest(
            chosen,
            mode_called(mode),
            search,
            inputs,
            hardware_of(world),
            microbatches=microbatches,
            schedule=schedule,
            search_stages=mesh == SEARCHED_STAGES,
        )
        return make_plan(captured, request)

    used = from_rank_zero(ranks_by_collectives("making the plan"), make)
    random = random_operators(used)
    found: list[Deviation] = []
    with _exact_arithmetic():
        for dtype in dtypes:
            with ExitStack() as closing:
                copies = Copies(model, loss_fn, given, dtype, closing)
                if loop is None:
                    mine = SideBySide(copies, used, lr, world.rank, plain=not random).run(steps)
                else:
                    mine = loops_compared(loop, copies, used, steps, world.rank, plain=not random)
                found += _worst_of_all_ranks(mine)
    how = f"{counted(steps, 'step')} of AdamW at {lr:g}" if loop is None else f"the loop {name_of(loop)}"
    return Verification(used, how, tuple(found), tuple(_notes(used, random, found)))


def _problem(steps: int, lr: float, dtypes: Sequence[str], loop: Loop | None) -> str | None:
    if steps < 1:
        return f"steps={steps} compares nothing; type a whole number from 1 on"
    if not lr > 0:
        return f"lr={lr} changes nothing; type a learning rate above 0"
    unknown = [dtype for dtype in dtypes if dtype not in TOLERANCES]
    if unknown or not dtypes:
        return f"dtypes={tuple(dtypes)!r} must name some of {', '.join(TOLERANCES)}"
    if loop is not None and "float32" in dtypes:
        return "a loop is compared in float64 alone, since float32 rounding grows from step to step; leave dtypes out"
    return None


def _global_batches(batches: Any) -> tuple[Any, ...]:
    """Rank 0's batches, on every rank: what is compared must have come from the same numbers."""

    def made() -> tuple[Any, ...]:
        found = as_batches(batches)
        for batch in found:
            if isinstance(batch, Batch) and (batch.start, batch.stop) != (0, batch.global_size):
                raise UsageError(f"verify needs global batches, got {batch!r}; pass the whole batch, not a rank's part")
        return tuple(tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, b) for b in found)

    return from_rank_zero(ranks_by_collectives("reading the batches"), made)


def random_operators(plan: Plan) -> tuple[Node, ...]:
    """The operators that draw random numbers in this graph; dropout with probability 0 draws none."""
    found = []
    for number, node in enumerate(plan.capture.nodes):
        rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
        call = localise(Site(node, rule, strategy, plan.mesh, 0, plan.capture.values, number))
        if call.draws:
            found.append(node)
    return tuple(found)


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """Without TF32, whose 10 bits would hide every defect, and with the dtype of new tensors restored afterwards."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


def _worst_of_all_ranks(mine: list[Deviation]) -> list[Deviation]:
    """Of every kind and reference the largest deviation on any rank; all ranks have compared the same in one order."""
    return [max(ranks, key=lambda d: d.largest / d.tolerance) for ranks in zip(*from_all_ranks(mine), strict=True)]


def _notes(plan: Plan, random: Sequence[Node], found: Sequence[Deviation]) -> Iterator[str]:
    if plan.devices.size > 1 and not plan.moved_bytes():
        yield "this plan splits nothing, since that is fastest: every rank computes everything"
    if random:
        first = random[0]
        yield (
            f"plain PyTorch is no reference here, since {len(random)} operators draw random numbers, the first of them "
            f"{first.op} at {first.source}"
        )
    for d in found:
        if d.skipped and d.reference == ONE_DEVICE:
            yield (
                f"{d.dtype}: {d.skipped} of {d.entries} entries of parameters are not compared: their gradient was in "
                f"some step below {GRADIENT_FLOOR:g} of the largest, where AdamW's step is noise"
            )


def _refuse_meta(model: nn.Module) -> None:
    """Raise `UsageError` where a parameter or buffer has no storage, and so no numbers to be verified with."""
    empty = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters and buffers are on the meta device ({', '.join(empty[:3])}, ...) and have no "
            "numbers that could be verified; call model.to_empty(device=...) and initialise them first"
        )
