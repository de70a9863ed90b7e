"""The shm backend: collectives of CPU tensors among the ranks of one host, in memory that they share.

Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Any

from shardwright.distributed.backends.table import SHM
from shardwright.launch.hosts.environment import LaunchEnvironment


def prepare(environment: LaunchEnvironment) -> None:
    """Make the backend known to torch."""
    register()


def register() -> None:
    """Make the backend known to torch, if it is not yet.

    Torch calls it in the middle of its own import, which an error would end for every program of the environment.
    """
    import torch.distributed as dist

    if dist.is_available() and SHM.registered not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHM.registered, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """Return what torch calls for the world and for every group made later, on the group's members alone."""
    from shardwright.distributed.backends.shm_meeting import create

    return create(options)
