"""The order of samples, and which part of it each rank has. The order never depends on the number of ranks.

An order must be the same on every host, today and after an upgrade, or a resumed run repeats some samples and skips
others. NumPy and torch promise that neither for their ``permutation`` nor for ``randperm``, but NumPy does promise the
raw stream of a bit generator. So an order is defined by that stream alone: see `permutation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwright.compiler.mesh.layout import chunk

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
KEY_LIMIT = 2**64  # the seed and the epoch are one 64-bit word each of Philox's key


def _stream(seed: int, epoch: int, stream: int = 0) -> np.random.Philox:
    # The topmost word of the counter separates the streams; no stream is long enough to run into the next.
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter)


def permutation(size: int, seed: int, epoch: int = 0) -> npt.NDArray[np.int64]:
    """The order of ``size`` samples in one epoch.

    It is the stable argsort of the first ``size`` raw 64-bit outputs of Philox-4x64-10 under the key (seed, epoch).

    >>> permutation(8, seed=0, epoch=0)
    array([0, 2, 1, 5, 4, 3, 6, 7])
    """
    return np.argsort(_stream(seed, epoch).random_raw(size), kind="stable").astype(np.int64, copy=False)


def worker_seed(seed: int, epoch: int, rank: int) -> int:
    """A seed for the loading processes of one rank in one epoch, different from those of every other rank."""
    return int(_stream(seed, epoch, stream=rank + 1).random_raw()) % 2**63


def sample_seeds(seed: int, epoch: int, indices: Sequence[int]) -> list[int]:
    """A seed for what is random in each of these samples in one epoch, whichever rank reads them."""
    key = np.uint64(_stream(seed, epoch, stream=2**63).random_raw())
    found = mixed(np.array(indices, dtype=np.uint64) * GOLDEN + key)
    seeds: list[int] = (found & np.uint64(2**63 - 1)).tolist()
    return seeds


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix numbers by SplitMix64's finaliser, which makes neighbours unlike.

    Steele, Lea, Flood, *Fast Splittable Pseudorandom Number Generators*, 2014. Arrays of whole numbers wrap around.

    What samples draw follows from it, so that it never changes; `runtime.checks.changed_buffers` mixes on devices.
    """
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, stop)`` of part ``index`` when ``size`` rows are cut as ``torch.chunk`` and DTensor cut them.

    All parts are ceil(size / parts) long until the rows run out; the last ones may be shorter, or empty.

    >>> [chunk_range(10, 4, part) for part in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> [chunk_range(5, 4, part) for part in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return chunk(0, size, parts, index)


def even_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, stop)`` of part ``index`` when ``size`` samples are cut into parts that differ by at most one.

    For shards of a file, where no tensor's layout has to be met and balance counts; batches use `chunk_range`.

    >>> [even_range(10, 4, part) for part in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    small, larger = divmod(size, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)
