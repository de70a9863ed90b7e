"""AdamW steps of a model on one device and as a plan says, side by side, compared after each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.compiler.mesh.dtensor import part_like
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.programs.splitting import local_part
from shardwright.runtime.verification.compare import (
    GRADIENT_FLOOR,
    ONE_DEVICE,
    PLAIN,
    Comparison,
    Deviation,
    State,
    Tensors,
    gradients_of,
    largest_of,
    parameters_of,
)
from shardwright.runtime.verification.copies import Copies


class _Trainer:
    """AdamW steps on a model, and what they leave."""

    def __init__(self, parallel: ParallelModel, lr: float) -> None:
        self._parallel = parallel
        self._module = parallel.module
        self._optimizer = torch.optim.AdamW(parallel.parameters(), lr=lr)

    def train(self, batch: Any) -> State:
        result = self._parallel(batch)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        self._optimizer.zero_grad()
        loss.backward()
        gradients = gradients_of(self._module)
        self._optimizer.step()
        buffers = dict(self._module.named_buffers())
        return State({"loss": loss.detach()}, gradients, buffers, parameters_of(self._module))

    def take(self, parameters: Tensors, chosen: Tensors) -> None:
        """Take the chosen entries of these whole parameters in place of one's own."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if name in chosen:
                    theirs, where = _like(parameter, parameters[name]), _like(parameter, chosen[name])
                    local_part(parameter).copy_(theirs.where(where, local_part(parameter)))


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of a parameter."""
    return part_like(whole, parameter) if isinstance(parameter, DTensor) else whole


class SideBySide:
    """The plan and its references in one dtype, by AdamW steps on the same batches."""

    def __init__(self, copies: Copies, plan: Plan, lr: float, rank: int, *, plain: bool) -> None:
        self.copies = copies
        self.split = _Trainer(copies.split(plan), lr)
        self.references = {ONE_DEVICE: _Trainer(copies.one_device(), lr)}
        if plain:
            self.references[PLAIN] = _Trainer(copies.plain(), lr)
        self.comparisons = {name: Comparison(copies.dtype, name, lr, rank) for name in self.references}
        self.noise = _Noise(copies.model)

    def run(self, steps: int) -> list[Deviation]:
        """The largest deviation of each kind from each reference over these steps."""
        for step, batch in enumerate(self.copies.batches_for(steps), start=1):
            got = self.split.train(batch)
            expected = {name: reference.train(batch) for name, reference in self.references.items()}
            if self.copies.dtype == "float32":
                self.noise.note(expected[ONE_DEVICE].gradients)
            for name, comparison in self.comparisons.items():
                comparison.add(step, got, expected[name], self.noise.where)
            for other in (self.split, self.references.get(PLAIN)):
                if other is not None:
                    other.take(expected[ONE_DEVICE].parameters, self.noise.where)
        worst = [worst for comparison in self.comparisons.values() for worst in comparison.worst.values()]
        return [deviation for deviation in worst if deviation.entries]


class _Noise:
    """The entries of float32 parameters whose AdamW step was noise once: their gradient is zero but for rounding.

    They are not compared, and all models take those of one device after each step: else a bias before a batch
    normalisation, say, would walk at random, and move the running mean with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.where: dict[str, Tensor] = {}

    def note(self, gradients: Tensors) -> None:
        floor = GRADIENT_FLOOR * largest_of(gradients)
        for name in self._trained:
            weak = gradients[name].abs() <= floor
            self.where[name] = self.where[name] | weak if name in self.where else weak
