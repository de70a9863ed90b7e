"""A collective that was asked for, whichever backend in Python carries it out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Steps = Iterable[object]
"""A collective that begins when it is iterated over, and has ended when that has ended."""
Task = Callable[[], Steps]


class Collectives(Protocol):
    """Collectives on CPU tensors, which write into the tensors of their caller."""

    rank: int
    size: int

    def reduction(self, reduce_op: Any, tensor: Tensor) -> Any:
        """Return how such a tensor is reduced; raises `UsageError` where that has no meaning."""

    def barrier(self) -> Steps: ...

    def all_reduce(self, tensor: Tensor, reduction: Any) -> Steps: ...

    def reduce(self, tensor: Tensor, root: int, reduction: Any) -> Steps:
        """Into ``tensor`` of the root; that of another rank keeps its values."""

    def broadcast(self, tensor: Tensor, root: int) -> Steps: ...

    def all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        """``output`` has the elements of ``tensor`` from every rank, in the order of the ranks."""

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        """The tensors of all ranks, which may differ in size."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Any) -> Steps:
        """``tensor`` has one part for every rank; this rank's, reduced over the ranks, goes to ``output``."""

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: Any) -> Steps:
        """One tensor for every rank; they may differ in size."""

    def exchange(self, kind: str, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor], root: int = 0) -> Steps:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it: all-to-all, gather and scatter."""


_ending = threading.Lock()  # where one thread asks for a future and another one ends the work


class CollectiveWork(dist.Work):
    """A collective that was asked for; its future's value is the list of the tensors that it wrote."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self._error: BaseException | None = None
        self._done = False
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, with that error or well."""
        with _ending:
            self._error, self._done, future = error, True, self._future
        if future is not None:
            self.tell(future)

    def tell(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Let who has a future know that it has ended."""
        self.complete(future)

    def complete(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Give it what has come of the collective; what is to be called back is called here."""
        if self._error is None:
            future.set_result(self.outputs)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]  # declared as a result

    @property
    def ended(self) -> bool:
        """Return whether it has ended, well or not; nothing is done for it."""
        return self._done

    def ended_well(self) -> bool:
        """True; raises what the collective raised."""
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with _ending:
            made = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            done = self._done
        if made and done:
            self.complete(self._future)
        return self._future
