"""Threads that use the same current GPU as the thread that starts them.

The current GPU belongs to a thread, and a new one has GPU 0: whatever it does with CUDA there makes a context, half a
GiB of that GPU for each rank of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch


def same_gpu() -> Callable[[], None]:
    """Return what takes another thread to the current GPU of this one; it does nothing in a process without CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _stay
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _stay() -> None: ...


class Thread(threading.Thread):
    """A thread that calls ``target()`` on the GPU of the one that makes it."""

    def __init__(self, target: Callable[[], object], name: str | None = None, *, daemon: bool) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._to_gpu = same_gpu()

    def run(self) -> None:
        self._to_gpu()
        super().run()


def thread_pool(workers: int, name: str = "") -> ThreadPoolExecutor:
    """Return a pool whose threads are on the GPU of the one that makes it."""
    return ThreadPoolExecutor(workers, name, initializer=same_gpu())
