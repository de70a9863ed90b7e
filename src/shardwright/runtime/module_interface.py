"""The `torch.nn.Module` methods of a parallel model: parameters, modes and state dicts."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from shardwright.compiler.mesh.changed import refuse_lost_changes
from shardwright.distributed.agreement import together
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.errors import UsageError
from shardwright.runtime.placing.members import agree_on_weights
from shardwright.runtime.programs.splitting import as_stored, is_split


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; afterwards each of its modules is in the mode in which it was."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training


class ModuleInterface(ABC):
    """The methods of `torch.nn.Module` that a training script calls, answered by the user's model."""

    module: nn.Module
    """The user's model."""

    # What it consists of

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters as this rank stores them: all plain tensors, or all DTensors."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as this rank stores them, with their names in the model."""
        return self.module.named_parameters()

    def buffers(self) -> Iterator[Tensor]:
        """The buffers, whole on every rank."""
        return self.module.buffers()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers, whole on every rank, with their names in the model."""
        return self.module.named_buffers()

    def modules(self) -> Iterator[nn.Module]:
        """The modules of the model, itself the first."""
        return self.module.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the model with their paths in it."""
        yield from self.module.named_modules()

    def children(self) -> Iterator[nn.Module]:
        """The modules that stand in the model directly."""
        return self.module.children()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that stand in the model directly, with their names."""
        return self.module.named_children()

    # How it trains

    @property
    def training(self) -> bool:
        """Return whether the model is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, as `torch.nn.Module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode, as `torch.nn.Module.eval` does."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train all parameters from here on, or none; those of a part of the model by that part's own method."""
        self.module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, and what `accumulate` keeps of them."""
        self.module.zero_grad(set_to_none)

    # What it holds

    def state_dict(self) -> dict[str, Any]:
        """The state of the model under its own names, parameters as they are stored."""
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Take a state, as `torch.nn.Module.load_state_dict` does; every rank takes the same.

        Tensors may be whole, of which each rank then takes its part, or stored as `state_dict` of any model gives them.
        """
        from shardwright.checkpoint.saving.asynchronous import wait_copied  # 0.3 s and 5 MiB that few need

        refuse_lost_changes()
        wait_copied()
        return self.module.load_state_dict(as_stored(self.module, state), strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing where the model is on that device and of that dtype, which `sw.parallelize` settles.

        Raises:
            UsageError: where a tensor would be moved or cast.
        """
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            probe = torch.empty((1, 1, 1, 1), dtype=tensor.dtype, device=tensor.device)
            moved = probe.to(*args, **kwargs)
            if moved.device != probe.device or (moved.dtype != probe.dtype and probe.is_floating_point()):
                raise UsageError(
                    f"{name} is {_kind(probe)}, and {type(self).__name__}.to(...) would make it {_kind(moved)}, while "
                    "programs were made for it as it is; call model.to(...) before sw.parallelize, which moves models "
                    "to the device of sw.init()"
                )
        return self

    def apply(self, function: Callable[[nn.Module], Any]) -> Self:
        """Call ``function`` for every module, as `torch.nn.Module.apply` does, and give all ranks rank 0's numbers.

        All ranks call it together.

        Raises:
            UsageError: where this rank holds parts of parameters, which ``function`` would take for whole ones.
        """
        if is_split(self.module):
            raise UsageError(
                f"apply() would show {_name(function)} this rank's parts of parameters in place of the whole ones; "
                "call model.apply(...) before sw.parallelize, or parallel.module.apply(...) where it touches no "
                "parameters"
            )
        together(ranks_by_collectives("applying a function to the model"), lambda: self.module.apply(function))
        agree_on_weights(self.module)
        return self

    # What it is not

    if not TYPE_CHECKING:  # a type checker is to find names that are not there

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"what sw.parallelize returns has no {name!r}{self._instead(name)}")

    def _instead(self, name: str) -> str:
        module = self.__dict__.get("module")
        if name.startswith("__") or module is None:
            return ""
        if hasattr(nn.Module, name):
            return f"; call model.{name} before sw.parallelize, or parallel.module.{name} where it changes no parameter"
        if hasattr(module, name):
            return f"; the model has, as parallel.module.{name}"
        return "; the model that it runs is parallel.module"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "what sw.parallelize returns cannot be copied or pickled, since it talks to the other ranks; copy the "
            "model that it runs, copy.deepcopy(parallel.module) or AveragedModel(parallel.module), or save "
            "parallel.full_state_dict()"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)}"
