"""Changes in place that autograd does not see, refused: a graph, which has values alone, would lose a gradient by them.

Where gradients are off, or by way of ``x.detach()`` and ``x.data``, a tensor gets new values and keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright import torch_private
from shardwright.errors import CaptureError


class InPlace:
    """Watches one capture."""

    def __init__(self) -> None:
        # Of tensors with a gradient that others without one look into; held, so that no other takes its place.
        self._storages: dict[int, Any] = {}

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
        """The tensors that a function may change, and how often they were changed so far."""
        found = [arg for arg in (*args[:1], kwargs.get("out")) if isinstance(arg, torch.Tensor)]
        return [(tensor, torch_private.version(tensor)) for tensor in found if torch_private.is_fake(tensor)]

    def after(self, before: Sequence[tuple[torch.Tensor, int]], result: Any, where: str) -> None:
        """Refuse what a function did, and note what it returns.

        Raises:
            CaptureError: where it changed a tensor that goes on to have a gradient that does not know of it.
        """
        for tensor, version in before:
            changed = torch_private.version(tensor) != version
            if changed and self._loses_gradient(tensor):
                raise CaptureError(
                    f"a tensor that has a gradient is changed in place behind the back of autograd, at {where}\n"
                    "Make a new one, which has the new values and the old gradient: x = x + (new - x).detach()."
                )
            if _has_gradient(tensor) and _looks_into(result, tensor):
                self._storages[_storage(tensor)] = tensor.untyped_storage()

    def _loses_gradient(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad:
            return not tensor.is_leaf and not torch.is_grad_enabled()
        return _storage(tensor) in self._storages


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Parameters may not be changed at all, which is refused elsewhere."""
    return tensor.requires_grad and not tensor.is_leaf


def _looks_into(result: Any, tensor: torch.Tensor) -> bool:
    """Whether a result has no gradient and lies in the memory of ``tensor``."""
    if not isinstance(result, torch.Tensor) or result.requires_grad or not torch_private.is_fake(result):
        return False
    return _storage(result) == _storage(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor)


def refuse_setting_data(function: Any, where: str) -> None:
    """Refuse ``x.data = y``, which an exported program does not have."""
    if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        raise CaptureError(
            f"x.data of a tensor is set while the model is captured, at {where}: the graph would forget it\n"
            "Write into a buffer by buffer.copy_(y) under torch.no_grad(); name any other new tensor anew: x = y."
        )


def refuse_detaching(name: str, args: Sequence[Any], where: str) -> None:
    """Refuse ``x.detach_()``, which an exported program forgets, where ``x`` has a gradient."""
    if name == "detach_" and args[0].requires_grad:
        raise CaptureError(
            f"detach_() of a tensor that has a gradient is called while the model is captured, at {where}\n"
            "The graph would forget it; name the detached tensor anew: x = x.detach()."
        )
