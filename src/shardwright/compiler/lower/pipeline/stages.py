"""The program of a rank of a plan with pipeline stages, from the programs of all microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.lower.pipeline.in_turns import InTurns
from shardwright.compiler.lower.pipeline.microbatches import Unrolled
from shardwright.compiler.lower.pipeline.programs import OfStage
from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Stages
from shardwright.compiler.plan.pipeline.linear import why_not_in_turns
from shardwright.compiler.plan.plan import Plan
from shardwright.errors import LoweringError, PlanError


def microbatches_of(plan: Plan, rank: int) -> list[int]:
    """Return the places of a rank on the mesh of a plan with stages, one for each microbatch."""
    assert plan.stages is not None
    at = plan.devices.coordinates(rank)
    inside = {name: place for name, place in at.items() if name != PIPELINE}
    if MICROBATCHES not in plan.mesh.sizes:
        return [plan.mesh.rank_at(inside)]
    return [plan.mesh.rank_at({**inside, MICROBATCHES: number}) for number in range(plan.stages.microbatches)]


def in_stages(programs: Sequence[LocalProgram], plan: Plan, rank: int) -> LocalProgram:
    """Return the program of a rank, of a plan with stages.

    Args:
        programs: those of all microbatches, for the places that `microbatches_of` gives, as the plan has them.

    Raises:
        LoweringError: where these differ in more than sizes and positions (a defect, to be reported).
    """
    first = programs[0]
    for other in programs[1:]:
        if [(i.kind, i.outputs, i.reads) for i in other.instructions] != [
            (i.kind, i.outputs, i.reads) for i in first.instructions
        ]:
            raise LoweringError("the programs of microbatches differ in more than sizes and positions")
    assert plan.stages is not None
    kind = InTurns if plan.stages.schedule != "gpipe" and _may_take_turns(plan, plan.stages) else OfStage
    return kind(plan, rank, Unrolled(plan, programs)).program()


def _may_take_turns(plan: Plan, stages: Stages) -> bool:
    """Return whether forwards and backwards can take turns, for a batch that may have other sizes than the plan's.

    Raises:
        PlanError: where they cannot, and groups of ranks have several stages, for which there is no other way.
    """
    problem = why_not_in_turns(plan, stages.of)
    if problem and stages.each > 1:
        raise PlanError(
            f"stages are interleaved, and for a batch of {plan.capture.rows} rows {problem}; give batches whose rows "
            f"{stages.microbatches} microbatches divide, or type schedule='1f1b'"
        )
    return problem is None
