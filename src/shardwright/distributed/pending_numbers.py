"""Numbers of a GPU, copied to the host without waiting: the copy is read when somebody asks for them."""

from __future__ import annotations

import torch
from torch import Tensor


class PendingNumbers:
    """The numbers of a small tensor; creating this enqueues their copy, and only reading them waits for the device.

    On a CPU there is nothing to wait for.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def dtype(self) -> torch.dtype:
        """Return what kind of numbers they are."""
        return self._host.dtype

    @property
    def is_there(self) -> bool:
        """Return whether the numbers have come."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def values(self) -> list[float]:
        """Return the numbers of a tensor of one dim, which are waited for."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers

    def value(self) -> float:
        """The only number, which is waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()
