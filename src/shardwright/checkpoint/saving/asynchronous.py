"""Asynchronous saves: training goes on while the checkpoint is written.

`AsyncSaver.save` returns when what may change at any time is copied. What only the step of an optimizer changes a
thread copies while the next forward and backward compute, and the step waits for it. Then the thread writes, as `save`
would. So the loop waits neither for the disk nor, where a forward and backward take longer than a copy in memory, for
the copy. The copy costs memory: on each rank as many bytes as it writes, which is its share of the state.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.pieces import State
from shardwright.checkpoint.saving.image import Copy, Image
from shardwright.checkpoint.saving.save import TO_SAVE, prepare, write
from shardwright.checkpoint.storage.store import Store
from shardwright.common.threads import Thread
from shardwright.distributed.agreement import attempt
from shardwright.distributed.control import group_for_messages
from shardwright.distributed.ranks import TIMEOUT_S, OneRank, ProcessRanks, Ranks, alone
from shardwright.errors import CheckpointError

NICENESS = 10
"""The thread that writes gives way to those that compute, where the system knows priorities of threads (Linux)."""

# The copies under way in this process: whoever is about to change weights waits for all of them.
_copies: set[threading.Event] = set()


def wait_copied() -> None:
    """Wait until all that is being saved in this process is copied, so that it may be changed.

    The steps of torch's optimizers do so themselves. Nothing happens where nothing is being copied, and nothing is
    raised.
    """
    for copied in tuple(_copies):
        copied.wait()


def own_ranks(timeout_s: float = TIMEOUT_S) -> Ranks:
    """All ranks, talking in a group of their own; this process alone where there is no group. All call it together.

    Messages of a save then never meet those of training, which go on at the same time.
    """
    if alone():
        return OneRank(TO_SAVE)
    return ProcessRanks(TO_SAVE, group_for_messages(), timeout_s)


class AsyncSaver:
    """Saves checkpoints into ``store`` beside the training loop, one at a time. All ranks make it and call it together.

    ``check`` belongs into every step: it raises what went wrong with the save under way. ``close`` waits for that save;
    so does the end of the process, which writes a late error to stderr.

    ``ranks`` must be nobody else's, see `own_ranks`.
    """

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self.store = store
        self.ranks = ranks
        self._image = Image()
        self._save: _Thread | None = None
        self._hook: Any = None
        atexit.register(self._at_exit)

    def save(
        self,
        name: str,
        state: State,
        info: Mapping[str, Any],
        files: Mapping[str, bytes],
        steady: Collection[tuple[str, ...]] = (),
    ) -> None:
        """Begin to save ``state`` as it is now; the arguments are those of `save.save`.

        ``steady`` are the paths of those tensors that nothing changes before the next step of a torch optimizer, which
        waits until they are copied. Anything else that changes them calls `wait_copied` before; the save fails where
        the tensors' own counters show that one was changed too early (writes through ``Tensor.data`` they do not
        count). Without ``steady`` all is copied before this returns.

        Where the save before is still under way, this waits for it.

        Raises:
            CheckpointError: what went wrong with the save before; what goes wrong with this one, `check`, `wait` or the
                next `save` raise.
        """
        self.wait()
        failure, prepared = attempt(lambda: prepare(state, self.ranks))
        copy: Copy | None = None
        if prepared is not None:
            names = {".".join(path) for path in steady}
            failure, copy = attempt(lambda: self._image.begin(prepared, names))
            prepared = replace(prepared, parts={}) if copy is not None else None
        share = None if copy is None else copy.write
        writing = partial(write, self.store, name, prepared, dict(info), dict(files), self.ranks, share=share)
        thread = _Thread(name, copy, failure, writing)
        if steady:
            self._hook = register_optimizer_step_pre_hook(lambda *_: wait_copied())
            _copies.add(thread.copied)
        else:
            thread.finish_copy()
        self._save = thread
        try:
            thread.start()
        except RuntimeError:
            thread.run()  # the system has no room for another thread

    @property
    def saving(self) -> bool:
        return self._save is not None and self._save.is_alive()

    def check(self) -> None:
        """Raise what went wrong with the save that ended since the last call; never waits."""
        if not self.saving:
            self.wait()

    def wait(self) -> Manifest | None:
        """Wait for the save under way; its manifest on rank 0, None on the others and where nothing was under way.

        Raises `CheckpointError`, what went wrong with it.
        """
        if self._save is None:
            return None
        if self._save.ident is not None:
            self._save.join()
        ended, self._save = self._save, None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if ended.failure is not None:
            raise ended.failure
        return ended.manifest

    def close(self) -> None:
        """Wait for the save under way, and give back the memory; raises as `wait`."""
        atexit.unregister(self._at_exit)
        try:
            self.wait()
        finally:
            self._image = Image()

    def _at_exit(self) -> None:
        try:
            self.close()
        except CheckpointError as error:
            print(f"a checkpoint was under way when this process ended: {error}", file=sys.stderr)


class _Thread(Thread):
    """Copies what is left to be copied, and writes; the end of the process waits for it.

    ``writing`` writes all of it, or where it is told of a failure, tells the other ranks.
    """

    def __init__(
        self, name: str, copy: Copy | None, failure: str | None, writing: Callable[[str | None], Manifest | None]
    ) -> None:
        super().__init__(self._work, f"saving {name}", daemon=False)
        self.copy = copy
        self.writing = writing
        self.copied = threading.Event()
        self.copy_failure = failure
        self.failure: BaseException | None = None
        self.manifest: Manifest | None = None

    def finish_copy(self) -> None:
        try:
            if self.copy is not None and not self.copied.is_set():
                failure, _ = attempt(self.copy.finish)
                self.copy_failure = self.copy_failure or failure
        finally:
            self.copied.set()
            _copies.discard(self.copied)

    def _work(self) -> None:
        try:
            self.finish_copy()  # at the loop's own priority: its next step may wait for this
            _give_way()
            self.manifest = self.writing(self.copy_failure)
        except BaseException as failure:
            self.failure = failure


def _give_way() -> None:
    if sys.platform == "linux":
        own = threading.get_native_id()
        nice = min(os.getpriority(os.PRIO_PROCESS, own) + NICENESS, 19)
        with contextlib.suppress(OSError):  # where it is not allowed, it does without
            os.setpriority(os.PRIO_PROCESS, own, nice)
