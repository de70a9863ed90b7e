"""A local program, compiled and bound to this rank."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.graph import operators
from shardwright.lower import kernels
from shardwright.lower.program import LocalProgram
from shardwright.lower.randomness import mixed
from shardwright.mesh import collectives
from shardwright.mesh.collectives import Communicator
from shardwright.run.buckets import GradientReduction

Outputs = tuple[Tensor | None, list[Tensor], list[Tensor]]

_STEPS = ("all_gather", "local_slice", "reduce_scatter", "all_to_all", "all_reduce", "enter")
# What the source of a program may name.
_NAMES = {
    "torch": torch,
    "aten": torch.ops.aten,
    "kernels": kernels,
    "ops": operators,
    **{name: getattr(collectives, name) for name in _STEPS},
}


class Execution:
    """Runs a local program: loss, auxiliary outputs and new buffers from this rank's parts.

    Tracebacks show the lines of the program, since they are what runs.
    """

    def __init__(
        self, program: LocalProgram, comm: Communicator, device: torch.device, reduction: GradientReduction
    ) -> None:
        self.program = program
        self._comm = comm
        self._device = device
        self._reduction = reduction
        name = f"<program of rank {program.rank} {id(self):x}>"
        linecache.cache[name] = (len(program.source), None, program.source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = dict(_NAMES)
        exec(compile(program.source, name, "exec"), namespace)
        self._step: Callable[..., Outputs] = namespace["step"]

    def __call__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Tensor],
        constants: Sequence[Tensor],
        *,
        seed: int,
        step: int,
    ) -> Outputs:
        """Run the forward. ``seed`` and ``step`` fix the random numbers, together with global positions."""
        return self._step(
            parameters,
            buffers,
            inputs,
            constants,
            self._comm,
            lambda number: mixed(mixed(mixed(seed) ^ step) ^ number),
            self._device,
            self._reduction,
        )
