"""Memory of the host that a save is copied to, also from GPUs while they work on.

Torch's own memory for that is as large as the next power of two, up to twice what a state needs, on every rank of the
host. So it is taken from the system, and the driver is told to pin it.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def room_of(size: int, pinned: bool) -> Tensor:
    """That many bytes, zero, beginning at a page; ``pinned`` for copies from GPUs that nobody waits for."""
    pages = _Pages(-1, size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.zero_()  # the system finds the pages now and not in the middle of the first copy
    if pinned:
        pages.pin(memory.data_ptr())
    return memory


class _Pages(mmap.mmap):
    """Memory that the driver is told of before anything is copied to it, and once more before the system takes it."""

    _pinned_at = 0

    def pin(self, address: int) -> None:
        """Pin all of it; where that cannot be, copies are right and waited for, which is told."""
        error = int(_driver().cudaHostRegister(address, len(self), 0))
        if error:
            _forget_error()
            warnings.warn(
                f"{len(self) / 1e6:.0f} MB of memory for saves cannot be pinned (CUDA error {error}): each save "
                "holds the loop up until it is copied; more locked memory may help (ulimit -l)",
                stacklevel=2,
            )
        else:
            self._pinned_at = address

    def __del__(self) -> None:
        if self._pinned_at:
            with suppress(Exception):  # at the end of the process there may be no driver any more
                _driver().cudaHostUnregister(self._pinned_at)


def _forget_error() -> None:
    """Clear the last error of the driver, for which torch would blame the next kernel."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


def _runtime() -> Any:
    """CUDA's runtime as torch has loaded it, which has functions that `torch.cuda.cudart` leaves out; None without."""
    try:
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
