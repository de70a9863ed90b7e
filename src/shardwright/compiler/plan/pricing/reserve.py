"""The part of a GPU's memory that no plan counts, and which a plan of memory="auto" leaves free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.common.words import in_bytes
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.errors import UsageError

AUTO: Literal["auto"] = "auto"
_OUTSIDE_BYTES = 1_500_000_000  # where nobody has measured it
_WORKSPACE_BYTES = 256 * 2**20
_FRAGMENTS = 0.03


@dataclass(frozen=True)
class Reserve:
    """What is kept free of the ``memory_bytes`` that a rank has of a device, by what takes it.

    ``outside_bytes`` is beside torch's allocator: CUDA's context, the buffers of NCCL, the code of libraries.
    ``workspace_bytes`` are those of cuBLAS, cuDNN and attention, and ``fragment_bytes`` what the allocator holds
    between the tensors that it has placed.
    """

    memory_bytes: int
    outside_bytes: int
    workspace_bytes: int
    fragment_bytes: int

    @property
    def limit_bytes(self) -> int:
        """Return what is left for a plan."""
        return self.memory_bytes - self.outside_bytes - self.workspace_bytes - self.fragment_bytes

    def __str__(self) -> str:
        return (
            f"of the {in_bytes(self.memory_bytes)} of a device a plan may hold {in_bytes(self.limit_bytes)}; kept free "
            f"are {in_bytes(self.outside_bytes)} for CUDA's context, the buffers of NCCL and libraries, "
            f"{in_bytes(self.workspace_bytes)} for workspaces and {in_bytes(self.fragment_bytes)} for fragmentation"
        )


def reserve_of(hardware: Hardware, memory_bytes: int = 0, sharing: int = 1) -> Reserve:
    """Return what is kept free of a device, ``sharing`` of whose ranks have it together.

    Args:
        memory_bytes: of the device, where it is there to be asked; else those of the profile.

    Raises:
        UsageError: where the memory is not known, or all of it would be kept free.
    """
    whole = memory_bytes or hardware.memory_bytes
    if not whole:
        raise UsageError(
            f"memory='auto' is the memory of a GPU but for a reserve, and the hardware profile {hardware.name} names "
            "no memory of a device; type how many bytes each device may hold, as memory='80GiB' (--memory 80GiB)"
        )
    found = Reserve(
        whole // sharing, hardware.outside_bytes or _OUTSIDE_BYTES, _WORKSPACE_BYTES, int(whole / sharing * _FRAGMENTS)
    )
    if found.limit_bytes <= 0:
        raise UsageError(
            f"memory='auto' leaves nothing for a plan: {sharing} ranks share {in_bytes(whole)}, and each keeps "
            f"{in_bytes(found.memory_bytes - found.limit_bytes)} free; type memory='...' or let fewer ranks share it"
        )
    return found
