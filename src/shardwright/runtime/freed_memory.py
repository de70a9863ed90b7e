"""Memory that a step frees on a CPU stays with the process, for the next step.

glibc gives what is free at the end of its heap back to the kernel, and each step would have it mapped and cleared anew,
page by page: of a ResNet-18 that took an eighth of a step.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h: free bytes at the end of the heap that are kept, and the size from which memory is mapped on its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 2**30, 2**25  # as large as glibc allows
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory, unless the user has configured it by environment variables."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _USERS):
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
