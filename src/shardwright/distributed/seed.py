"""One seed for every source of random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shardwright.errors import UsageError


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed python, numpy and torch (all devices) alike, the same on every rank.

    Equal seeds give every rank the same initial parameters. ``deterministic=True`` also makes torch use algorithms that
    give the same bits at every run, and raise where there is none. Raises `UsageError` when ``seed`` is not
    within 0 to 2**32 - 1, the range that numpy takes.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must be a whole number from 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler: a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic and torch.backends.cudnn.benchmark
    if deterministic:
        # cuBLAS reads this when its first handle is made, and without it refuses to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class RandomNumbers:
    """The generators of python, numpy and torch on the CPU, as they were when this was made."""

    def __init__(self) -> None:
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def set(self, seed: int) -> None:
        """Seed all of them."""
        torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would touch the GPUs' as well
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def restore(self) -> None:
        """Let them be what they were."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    @property
    def drawn(self) -> bool:
        """Return whether they are others now."""
        before: Any = self._numpy
        now: Any = np.random.get_state()
        same = before[2:] == now[2:] and before[1].tobytes() == now[1].tobytes()
        return not (same and torch.equal(torch.get_rng_state(), self._torch) and random.getstate() == self._python)


@contextmanager
def random_numbers_kept(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Leave the generators of python, numpy and torch, on the CPU and on ``device``, as they were.

    Args:
        seed: what all of them are seeded with at first; None leaves them.
        device: the one that is current, where random numbers are drawn on a GPU as well.
    """
    numbers, on_gpu = RandomNumbers(), device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        try:
            if seed is not None:
                numbers.set(seed)
                if on_gpu:
                    torch.cuda.manual_seed(seed)
            yield
        finally:
            numbers.restore()
