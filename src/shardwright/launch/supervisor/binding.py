"""Which cores a rank of this host has for itself.

Ranks that wander lose their caches, and wake beside each other on one core while another is idle: gloo's collectives
take two to four times as long then (`benchmarks/gloo_threads.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.launch.hosts.gpu_cores import cores_near

_TOPOLOGY = Path("/sys/devices/system/cpu")


def bind(variables: Mapping[str, str], gpus: int) -> None:
    """Bind this process, and what it starts, to its share of the cores, as ``variables`` count the ranks.

    A rank with a GPU has its share of the cores near that. Nothing is bound where nobody knows which cores are near,
    where the cores cannot be shared evenly, or where ranks were told to use more threads than their share.
    """
    rank, ranks = int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"])
    cores = in_order(os.sched_getaffinity(0))
    mine = near_gpu(cores, rank, ranks, os.environ | dict(variables)) if gpus else share(cores, rank, ranks)
    threads = (os.environ | dict(variables)).get("OMP_NUM_THREADS", "")
    if mine and not (threads.isdecimal() and int(threads) > len(mine)):
        with contextlib.suppress(OSError):  # a sandbox that forbids it: the rank runs as it would have
            os.sched_setaffinity(0, mine)


def near_gpu(
    cores: Sequence[int], local_rank: int, ranks: int, environment: Mapping[str, str], root: Path = Path("/")
) -> list[int]:
    """The share of a rank in the cores near its GPU, which it has in common with ranks whose GPUs are near the same."""
    near = [cores_near(rank, environment, root) & set(cores) for rank in range(ranks)]
    if not near[local_rank] or any(a != b and a & b for a in near for b in near):
        return []
    neighbours = [rank for rank in range(ranks) if near[rank] == near[local_rank]]
    mine = [core for core in cores if core in near[local_rank]]
    return share(mine, neighbours.index(local_rank), len(neighbours))


def share(cores: Sequence[int], local_rank: int, ranks: int) -> list[int]:
    """The cores of a rank; none where one rank, or one core, would have more of the others than the next.

    >>> share([0, 1, 2, 3, 4], 1, 2), share([0, 1], 5, 8), share([0, 1], 0, 3)
    ([2, 3], [1], [])
    """
    if ranks <= len(cores):
        count = len(cores) // ranks
        return list(cores[local_rank * count : (local_rank + 1) * count])
    return [cores[local_rank * len(cores) // ranks]] if ranks % len(cores) == 0 else []


def in_order(cores: set[int]) -> list[int]:
    """The cores with neighbours side by side: the threads of one core side by side, and the cores of one package."""
    return sorted(cores, key=lambda core: (_number(core, "physical_package_id"), _number(core, "core_id"), core))


def _number(core: int, name: str) -> int:
    try:
        return int((_TOPOLOGY / f"cpu{core}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0
