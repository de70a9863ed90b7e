"""Notes which tensors were made with one number in every entry, where they have no storage that could be looked at.

A batch that is built on torch's meta device has a mask of ones, as ``torch.ones_like(ids)`` makes it, of which nothing
else is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.common.torch_private import version
from shardwright.compiler.capture.ir import Filled

_NUMBERS: Mapping[Callable[..., Any], int] = {
    torch.ones: 1, torch.ones_like: 1, Tensor.new_ones: 1,
    torch.zeros: 0, torch.zeros_like: 0, Tensor.new_zeros: 0,
}  # fmt: skip


class FilledTensors(TorchFunctionMode):
    """Notes tensors of whole numbers or truths that are made within, until they are written to."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Tensor, int, int]] = {}  # by identity, which the tensor keeps to itself

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        number = _NUMBERS.get(function)
        if number is not None and isinstance(made, Tensor) and not made.is_floating_point():
            self._made[id(made)] = made, version(made), number
        return made

    def among(self, tensors: Sequence[Tensor]) -> frozenset[Filled]:
        """Return which of these tensors have one number in every entry."""
        found = ((place, self._made.get(id(tensor))) for place, tensor in enumerate(tensors))
        return frozenset((place, note[2]) for place, note in found if note is not None and version(note[0]) == note[1])
