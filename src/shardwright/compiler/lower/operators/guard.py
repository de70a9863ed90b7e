"""The guard of a program on a GPU: wrong indices are reported when the GPU has come to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.distributed.pending_numbers import PendingNumbers


class Guard:
    """The numbers out of range that operators of a program were given on a GPU.

    To ask at once would wait for all that the GPU has to do, and an assertion there would end the process. So a step
    goes on with such numbers, and it is known at a later one.
    """

    def __init__(self, on: bool = False) -> None:
        self.on = on
        """True where operators let no index lead out of memory, and note those that would."""
        self._coming: list[tuple[int, PendingNumbers]] = []

    def note(self, operator: int, numbers: Tensor, wrong: Tensor) -> None:
        """Have one of the ``numbers`` that are ``wrong`` looked for, which operator ``operator`` of the graph got."""
        if numbers.numel():
            found = numbers.masked_fill(~wrong, torch.iinfo(numbers.dtype).min).amax()
            self._coming.append((operator, PendingNumbers(found)))

    def known(self) -> Iterator[tuple[int, int]]:
        """The operators that are known by now to have got a wrong number, and the number."""
        while self._coming and self._coming[0][1].is_there:
            operator, found = self._coming.pop(0)
            number = int(found.value())
            if number != torch.iinfo(found.dtype).min:
                yield operator, number
