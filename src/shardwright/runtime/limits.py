"""The memory that memory="auto" gives to plans on the GPUs of this world."""

from __future__ import annotations

import sys

import torch

from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.reserve import AUTO, reserve_of
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.world import World


def memory_problem(memory: int | str | None, device: torch.device) -> str | None:
    """Return why a memory limit cannot be enforced on a device; None if it can."""
    if memory == AUTO and device.type == "cpu":
        return (
            "memory='auto' is the memory of a GPU but for a reserve, and these ranks compute on CPUs, which share that "
            "of their host; type how many bytes each rank may hold, as memory='8GiB'"
        )
    return None


def automatic_limit(world: World, hardware: Hardware) -> int:
    """Return how many bytes a plan may hold on the smallest GPU of all ranks, and print it on rank 0; all call it.

    Raises:
        UsageError: where nothing is left.
    """
    total = torch.cuda.get_device_properties(world.device).total_memory
    mine = (world.host, world.device.index, total)
    everyone = from_all_ranks(mine)
    sharing = {each: everyone.count(each) for each in everyone}
    smallest = min(everyone, key=lambda each: each[2] / sharing[each])
    found = reserve_of(hardware, smallest[2], sharing[smallest])
    if world.rank == 0:
        print(f"shardwright: memory='auto': {found}", file=sys.stderr, flush=True)
    return found.limit_bytes
