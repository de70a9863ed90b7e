"""All ranks must see the same data; they compare a small sample of it once, before the first batch."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.seed import random_numbers_kept
from shardwright.errors import DataError

SAMPLED = 16


@dataclass(frozen=True)
class Fingerprint:
    """The size of a rank's dataset and its checksums by sample index, or why it cannot be read."""

    size: int
    checksums: tuple[tuple[int, str], ...] = ()
    failure: str | None = None


def fingerprint(dataset: Any) -> Fingerprint:
    """The size and the checksums of up to `SAMPLED` samples, evenly spaced from the first to the last."""
    size = len(dataset)
    indices = sorted({int(at) for at in np.linspace(0, size - 1, min(SAMPLED, size))})
    try:
        with random_numbers_kept(seed=0):
            return Fingerprint(size, tuple((index, checksum(dataset[index])) for index in indices))
    except Exception as error:  # all ranks hear of it, so that none waits for this one
        return Fingerprint(size, failure=f"{type(error).__name__}: {error}")


def check_same_data(dataset: Any) -> None:
    """Compare the datasets of all ranks of the default group; every rank must call it.

    Raises `DataError` on every rank, with the ranks that differ from the majority and in what they differ.
    """
    _compare_over_ranks(fingerprint(dataset))


def check_same_stream(samples: Callable[[], Iterator[Any]]) -> None:
    """`check_same_data` for the first samples of a stream; ``samples()`` begins it anew."""
    _compare_over_ranks(stream_fingerprint(samples))


def stream_fingerprint(samples: Callable[[], Iterator[Any]]) -> Fingerprint:
    """The checksums of the first `SAMPLED` samples, and how many of those there are."""
    try:
        with random_numbers_kept(seed=0):
            checksums = tuple(enumerate(map(checksum, itertools.islice(samples(), SAMPLED))))
            return Fingerprint(len(checksums), checksums)
    except Exception as error:  # all ranks hear of it, so that none waits for this one
        return Fingerprint(0, failure=f"{type(error).__name__}: {error}")


def _compare_over_ranks(ours: Fingerprint) -> None:
    differences = compare(from_all_ranks(ours))
    if differences:
        raise DataError(
            "the ranks do not see the same data: "
            + "; ".join(differences)
            + ". Every rank needs the same files and the whole dataset, and no shard of it (num_shards=, a Subset), "
            "since the loader itself gives each rank its part; pass check_data=False where samples are random beyond "
            "torch's, NumPy's and Python's generators"
        )


def compare(prints: list[Fingerprint]) -> list[str]:
    """One sentence per rank that differs from the majority (of the lowest ranks, where none is larger)."""
    majority = Counter(prints).most_common(1)[0][0]
    if majority.failure is not None:  # nothing to compare with: say what failed, everywhere
        return [_difference(rank, seen, seen) for rank, seen in enumerate(prints) if seen.failure is not None]
    return [_difference(rank, seen, majority) for rank, seen in enumerate(prints) if seen != majority]


def _difference(rank: int, seen: Fingerprint, majority: Fingerprint) -> str:
    if seen.failure is not None:
        return f"rank {rank} cannot read its samples ({seen.failure})"
    if seen.size != majority.size:
        return f"rank {rank} has {seen.size} samples where most ranks have {majority.size}"
    index = next(at for (at, a), (_, b) in zip(seen.checksums, majority.checksums, strict=True) if a != b)
    return f"rank {rank} has another sample at index {index} than most ranks"


def checksum(sample: Any) -> str:
    """A hash of all that a sample or a tensor holds, equal on ranks that hold the same."""
    digest = hashlib.sha256()
    for piece in _pieces(sample):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Bytes that tell a sample from any other; lengths and types are among them."""
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield str(len(value)).encode()
        for key in value:
            yield from _pieces(key)
            yield from _pieces(value[key])
    elif isinstance(value, (tuple, list)):
        yield str(len(value)).encode()
        for item in value:
            yield from _pieces(item)
    else:
        yield pickle.dumps(value)
