"""A GPU that is not there: tensors of the device cuda without values, and programs that run on them.

Of such tensors torch works out shapes, dtypes and devices. It refuses operators on tensors of two devices, and cannot
tell a value: what would be wrong on a GPU, or would wait for it, fails. Without a GPU autograd runs no backward on the
device cuda; where it is needed, another device that is not there stands for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.common.torch_private import empty_like_on, fake_mode
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.mesh.carried import summed_as
from shardwright.compiler.mesh.collectives import Axes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.backends.table import NCCL
from shardwright.errors import LoweringError
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from steady import Waits, waits_in_a_step

GPU = torch.device("cuda", 0)
LIKE_A_GPU = torch.device("xla", 0)


def _let_autograd_know(device: torch.device) -> None:
    """Let autograd ask a device for its stream, as it does for each tensor with a gradient: that of meta answers.

    A torch that was built without a device ends the process instead.
    """
    numbers, kinds = torch._C._autograd.DeviceType, 22
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    known = (ctypes.c_void_p * kinds).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    at = int(getattr(numbers, device.type.upper()))
    known[at] = known[at] or known[int(numbers.Meta)]


_let_autograd_know(GPU)
_let_autograd_know(LIKE_A_GPU)


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Inside, ``torch.autocast("cuda")`` is on, although there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
        patch.setattr("torch.backends.cudnn.is_acceptable", lambda *_: False)
        yield


def on_gpu(model: nn.Module) -> nn.Module:
    """The model, with its parameters and buffers on the GPU that is not there."""
    mode, made = fake_mode(), dict[int, Tensor]()
    for module in model.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            empty = empty_like_on(tensor, GPU, mode)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            setattr(module, name, made.setdefault(id(tensor), empty))
    return model


class OnGpus:
    """The `Communicator` of one rank on a GPU among others that are not there; takes what NCCL takes.

    The others bring what this rank brings, and zeros to what is summed.

    Raises:
        LoweringError: for a tensor of another device, and for a sum that NCCL cannot take.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device = LIKE_A_GPU) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.taken = 0

    def prepare(self, axes_sets: Iterable[Axes]) -> None: ...

    def close(self) -> None: ...

    def _take(self, tensors: list[Tensor], *, sums: bool) -> None:
        self.taken += 1
        for tensor in tensors:
            if tensor.device != self.device:
                raise LoweringError(f"a tensor on {tensor.device} is to be moved by the GPUs of {self.device}")
            if not tensor.is_contiguous():
                raise LoweringError("a tensor that is not contiguous is to be moved")
            sum_dtype = summed_as(tensor.dtype, NCCL) if sums else None
            made = tensor if sum_dtype is None else sum_dtype.cast(tensor)
            if sums and str(made.dtype).removeprefix("torch.") not in NCCL.dtypes:
                raise LoweringError(f"NCCL cannot sum {tensor.dtype}")

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        self._take([tensor], sums=True)
        return tensor

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        self._take([tensor], sums=True)
        return lambda: None

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        self._take([tensor], sums=False)
        return torch.stack([tensor for _ in self.mesh.group(self.rank, axes)])

    def start_all_gather(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        gathered = self.all_gather(tensor, axes)
        return lambda: gathered

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        self._take([rows], sums=True)
        return rows[self.mesh.group(self.rank, axes).index(self.rank)].clone()

    def start_reduce_scatter(self, rows: Tensor, axes: Axes) -> Callable[[], Tensor]:
        scattered = self.reduce_scatter(rows, axes)
        return lambda: scattered

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        self._take(tensors, sums=False)
        return [tensor.clone() for tensor in tensors]

    def start_shift(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        self._take([tensor], sums=False)
        return lambda: tensor.clone()


class _NeverThere:
    """In place of a number that comes from the GPU."""

    is_there = False

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device == LIKE_A_GPU


def step_on_gpu(plan: Plan, rank: int) -> tuple[dict[str, Any], Waits]:
    """The values of a rank's forward on a GPU that is not there, by their variables, after a backward from its loss;
    and what in the step would have waited for the GPU."""
    mesh, captured = plan.mesh, plan.capture
    mode = fake_mode()

    def made(kind: str) -> list[Tensor]:
        return [
            torch.empty(
                plan.leaves[v.name].local_shape(v.shape, mesh, rank), dtype=v.dtype, device=LIKE_A_GPU
            ).requires_grad_(kind == "parameter" and v.needs_gradient)
            for v in captured.of_kind(kind)
        ]  # fmt: skip

    with pytest.MonkeyPatch.context() as patch, mode, torch.autograd.set_multithreading_enabled(False):
        patch.setattr("shardwright.compiler.lower.operators.guard.PendingNumbers", _NeverThere)
        patch.setattr("shardwright.runtime.programs.execute.Guard", lambda on: Guard(on=True))
        arguments = StepArguments(*(made(kind) for kind in ("parameter", "buffer", "input", "constant")), 0, 0)
        execution = Execution(
            lower(plan, rank, overlap=True), captured, OnGpus(mesh, rank), LIKE_A_GPU, GradientReduction()
        )
        with waits_in_a_step() as waits:
            values = execution.variables(arguments)
            values[execution.program.outputs[captured.loss]].backward()
    return values, waits
