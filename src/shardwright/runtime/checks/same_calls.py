"""Checks that ranks have begun the same collectives in a step.

On gloo and in shared memory a rank that leaves one out is found by those that wait for it. NCCL's calls return when the
GPU has been asked: what one rank leaves out pairs with what another calls next, as wrong numbers or as a hang.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.common.pulse import Pulse, StepCalls
from shardwright.compiler.mesh.processes import all_gather_single
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep, Turns
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError

_UNKNOWN = (-1, -1, -1)  # of a step with an error, or with models of other stages


class SameCalls:
    """Compares which collectives ranks have begun in the step before this one, of all models of the process.

    Those that were in the same pipeline stage then have begun the same. Costs nothing in most calls; in those of
    `Turns` a collective of 24 bytes in the memory of the host.
    """

    def __init__(self, lockstep: Lockstep, pulse: Pulse, turns: Turns, *, together: bool) -> None:
        self._lockstep, self._pulse, self._turns = lockstep, pulse, turns
        self._compares = together and not alone()

    def before(self) -> None:
        """Compare, where that is due; all ranks call it together.

        Raises:
            UsageError: on every rank, where two began other collectives.
        """
        if not self._compares or not self._turns.due:
            return
        calls = self._pulse.calls
        mine = torch.tensor(_UNKNOWN if calls is None else (calls.stage, calls.count, calls.checksum), device="cpu")
        everyone = mine.new_empty(3 * dist.get_world_size())
        self._lockstep.run(all_gather_single, everyone, mine, group=control_group())
        told = [tuple(each) for each in everyone.view(-1, 3).tolist()]
        first: dict[int, int] = {}  # of each stage, the first rank whose calls are known
        for rank, each in enumerate(told):
            if each != _UNKNOWN:
                one = first.setdefault(each[0], rank)
                if each != told[one]:
                    raise UsageError(_refusal(one, rank, from_all_ranks(calls)))


def _refusal(first: int, second: int, everyone: list[StepCalls | None]) -> str:
    a, b = everyone[first], everyone[second]
    assert a is not None
    assert b is not None
    both = range(max(calls.count - len(calls.operations) for calls in (a, b)), min(a.count, b.count))
    at = next((number for number in both if _kind(a, number) != _kind(b, number)), both.stop)
    return (
        f"ranks did not begin the same collectives in the step before this one: rank {first} began {a.count} and rank "
        f"{second} {b.count}, and the first that differ are {a.words(at)} on rank {first} and {b.words(at)} on rank "
        f"{second}; every rank must make the same calls of the model, and as many backwards of what they return"
    )


def _kind(calls: StepCalls, number: int) -> str:
    return calls.words(number).partition(" for ")[0]
