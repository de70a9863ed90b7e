"""The values of tensors that follow from constants and shapes alone, which a capture may tell Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.common import torch_private, trees
from shardwright.compiler.capture.tracing.state.origins import CHANGES, draws_numbers

# What these make depends on the shape of what they are given, and not on its numbers.
_OF_SHAPES = frozenset({
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor", "size", "shape",
})  # fmt: skip
_UNKNOWN = ("empty", "as_strided", "from_")  # what memory holds


@dataclass(frozen=True)
class _Recipe:
    """The call of a function that made a tensor, and how often this and what it was given had been changed by then."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: torch.Tensor
    versions: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """Calls a function that returns several tensors, and returns one of them."""

    function: Any
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return list(self.function(*args, **kwargs))[self.number]

    @property
    def __name__(self) -> str:
        return _name(self.function)


class Constants:
    """Watches one capture: notes how tensors are made, and works them out when Python asks for their values."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}  # by the ids of what was made, which a recipe holds

    def after(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what a function of torch has returned, where nothing in it follows from the batch or the model."""
        if isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self.after(_Part(function, i), name, args, kwargs, part)
        if not isinstance(result, torch.Tensor) or not torch_private.has_no_value(result):
            return
        given = _tensors((args, kwargs))
        if name in _OF_SHAPES:
            given = []
        in_place = bool(CHANGES.fullmatch(name)) or kwargs.get("out") is not None
        if in_place or name.startswith(_UNKNOWN) or draws_numbers(name) or not all(map(self._is_known, given)):
            self._recipes.pop(id(result), None)
            return
        versions = tuple(map(torch_private.version, (result, *given)))
        self._recipes[id(result)] = _Recipe(function, args, kwargs, result, versions)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with its numbers, on the CPU; None where these follow from something else."""
        if not self._is_known(tensor):
            return None
        with torch_private.with_values():
            return self._worked_out(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if torch_private.constant_of(tensor) is not None:
            return True
        recipe = self._recipes.get(id(tensor))
        if recipe is None or recipe.made is not tensor:
            return False
        given = [] if _name(recipe.function) in _OF_SHAPES else _tensors((recipe.args, recipe.kwargs))
        return tuple(map(torch_private.version, (tensor, *given))) == recipe.versions

    def _worked_out(self, tensor: torch.Tensor) -> torch.Tensor:
        constant = torch_private.constant_of(tensor)
        if constant is not None:
            return constant.detach().cpu()
        recipe = self._recipes[id(tensor)]
        of_shape = _name(recipe.function) in _OF_SHAPES

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return _of_shape(leaf) if of_shape else self._worked_out(leaf)
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return int(leaf) if isinstance(leaf, torch.SymInt) else leaf

        kwargs = {name: "cpu" if name == "device" else value for name, value in recipe.kwargs.items()}
        args, kwargs = trees.tree_map(real, (tuple(recipe.args), kwargs))
        made: torch.Tensor = recipe.function(*args, **kwargs)
        return made.detach()


def _of_shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand([int(size) for size in tensor.shape])


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
