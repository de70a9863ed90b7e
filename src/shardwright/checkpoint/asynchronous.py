"""Saving while training goes on.

`AsyncSaver.save` copies what this rank writes into memory that it keeps for the purpose, and returns; a thread does
the rest, as `save` would. So the loop waits for a copy at the speed of memory and not for the disk. The copy costs
memory: on each rank as many bytes as it writes, which is its share of the state.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.pieces import State
from shardwright.checkpoint.ranks import TIMEOUT_S, OneRank, ProcessRanks, Ranks
from shardwright.checkpoint.save import Part, attempt, prepare, write
from shardwright.checkpoint.store import Store
from shardwright.errors import CheckpointError

ALIGNMENT_BYTES = 64
NICENESS = 10
"""The thread that writes gives way to those that compute, where the system knows priorities of threads (Linux)."""


def own_ranks(timeout_s: float = TIMEOUT_S) -> Ranks:
    """All ranks, talking in a group of their own; this process alone where there is no group. All call it together.

    Messages of a save then never meet those of training, which go on at the same time.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    return ProcessRanks(dist.new_group(backend="gloo"), timeout_s)


class AsyncSaver:
    """Saves checkpoints into ``store`` beside the training loop, one at a time. All ranks make it and call it together.

    ``check`` belongs into every step: it raises what went wrong with the save under way. ``close``, or the end of a
    ``with``, waits for that save; so does the end of the process, which writes a late error to stderr.

    ``ranks`` must be nobody else's, see `own_ranks`.
    """

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self.store = store
        self.ranks = ranks
        self._arena = _Arena()
        self._save: _Thread | None = None
        atexit.register(self._at_exit)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, state: State) -> None:
        """Take the memory for the copy of such a state now, so that the first save is as quick as the others."""
        self._arena.fit(prepare(state, self.ranks).parts)

    def save(self, name: str, state: State, info: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Begin to save ``state`` as it is now; the arguments are those of `save.save`.

        Where the save before is still under way, this waits for it.

        Raises:
            CheckpointError: what went wrong with the save before; what goes wrong with this one, `check`, `wait` or the
                next `save` raise.
        """
        self.wait()
        failure, prepared = attempt(lambda: prepare(state, self.ranks))
        if prepared is not None:
            failure, parts = attempt(lambda: self._arena.copy(prepared.parts))
            prepared = None if failure else replace(prepared, parts=parts)
        about, beside = dict(info), dict(files)
        self._save = _Thread(
            lambda: write(self.store, name, prepared, about, beside, self.ranks, failure), f"saving {name}"
        )
        self._save.start()

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._save is not None and self._save.is_alive()

    def check(self) -> None:
        """Raise what went wrong with the save that ended since the last call; never waits."""
        if not self.saving:
            self.wait()

    def wait(self) -> Manifest | None:
        """Wait for the save under way; its manifest on rank 0, None on the others and where nothing was under way.

        Raises:
            CheckpointError: what went wrong with it.
        """
        if self._save is None:
            return None
        self._save.join()
        ended, self._save = self._save, None
        if ended.failure is not None:
            raise ended.failure
        return ended.manifest

    def close(self) -> None:
        """Wait for the save under way, and give back the memory; raises as `wait`."""
        atexit.unregister(self._at_exit)
        try:
            self.wait()
        finally:
            self._arena = _Arena()

    def _at_exit(self) -> None:
        try:
            self.close()
        except CheckpointError as error:
            print(f"a checkpoint was under way when this process ended: {error}", file=sys.stderr)


class _Thread(threading.Thread):
    """Runs ``work`` to its end, which the end of the process waits for."""

    def __init__(self, work: Any, name: str) -> None:
        super().__init__(name=name, daemon=False)
        self.work = work
        self.failure: BaseException | None = None
        self.manifest: Manifest | None = None

    def run(self) -> None:
        if sys.platform == "linux":
            own = threading.get_native_id()
            nice = min(os.getpriority(os.PRIO_PROCESS, own) + NICENESS, 19)
            with contextlib.suppress(OSError):  # where it is not allowed, it does without
                os.setpriority(os.PRIO_PROCESS, own, nice)
        try:
            self.manifest = self.work()
        except BaseException as failure:
            self.failure = failure


class _Arena:
    """Memory of the host for a copy of some tensors, kept from one save to the next."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def fit(self, parts: Mapping[Part, Tensor]) -> list[int]:
        """Make room; where each of the tensors begins."""
        starts, size = [], 0
        for tensor in parts.values():
            starts.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size > self.memory.numel():
            self.memory = torch.empty(0, dtype=torch.uint8)  # give back the old before asking for the new
            pinned = any(tensor.is_cuda for tensor in parts.values())
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self.memory.zero_()  # the system finds the pages now and not in the middle of the first copy
        return starts

    def copy(self, parts: Mapping[Part, Tensor]) -> dict[Part, Tensor]:
        """The tensors, row-major, in the memory of this arena."""
        copies = {}
        for start, (part, tensor) in zip(self.fit(parts), parts.items(), strict=True):
            size = tensor.numel() * tensor.element_size()
            copies[part] = self.memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            copies[part].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in parts.values()):
            torch.cuda.synchronize()
        return copies
