"""A rank of a world that is not there: its process group believes that others are, and only pretends to reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed import fake_pg

assert fake_pg  # it registers the backend "fake", which is told to move data as NCCL does


@contextmanager
def pretended(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """Inside, this process is one of so many ranks."""
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=size)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()
