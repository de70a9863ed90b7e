"""Networks of products and ReLUs alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.training.zoo.rows import Data, ModelOptions, at_least


class Perceptron(nn.Module):
    """Linear layers with ReLUs between them: samples of ``inputs`` numbers in any shape -> logits [rows, classes].

    >>> Perceptron(784, [512, 512], 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, inputs: int = 784, hidden: Sequence[int] = (512, 512), classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for here, there in itertools.pairwise([inputs, *hidden]):
            layers += [nn.Linear(here, there), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else inputs, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return logits


class TwoMatmuls(nn.Module):
    """The quick start: [rows, inputs] -> [rows, outputs] by two matrix products with a ReLU between them.

    ``matmul`` computes the first product; a pinned one says how it is to be split:
    ``TwoMatmuls(matmul=sw.shard(torch.matmul, ((2, 4), (4, 1))))``.
    """

    def __init__(
        self,
        inputs: int = 32,
        outputs: int = 16,
        deviation: float = 0.02,
        matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    ) -> None:
        super().__init__()
        self.w = nn.Parameter(deviation * torch.randn(inputs, outputs))
        self.w2 = nn.Parameter(deviation * torch.randn(outputs, outputs))
        self.matmul = matmul

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.relu(self.matmul(x, self.w)), self.w2)


@dataclass(frozen=True, kw_only=True)
class PerceptronOptions(ModelOptions):
    """The options of a perceptron; its inputs, and without ``num_classes`` its outputs, follow from the data."""

    hidden: tuple[int, ...] = at_least(1, (512, 512))
    num_classes: int | None = at_least(1, None)


def make_perceptron(options: PerceptronOptions, data: Data) -> Perceptron:
    """Return the perceptron that the options describe, for the samples and targets of the data."""
    outputs = options.num_classes or data.classes or data.target_shape.numel()
    return Perceptron(data.sample_shape.numel(), options.hidden, outputs)


def perceptron_problems(options: PerceptronOptions, data: Data) -> list[str]:
    """Refuses more or fewer outputs than a target has numbers; samples of any shape are flattened."""
    numbers = data.target_shape.numel()
    if not data.classes and options.num_classes not in (None, numbers):
        return [f"model.num_classes: expected the {numbers} numbers of a target, got {options.num_classes}"]
    return []


@dataclass(frozen=True, kw_only=True)
class TwoMatmulsOptions(ModelOptions):
    """The options of the quick start's two products; inputs and outputs follow from the data."""


def make_two_matmuls(options: TwoMatmulsOptions, data: Data) -> TwoMatmuls:
    """Return a `TwoMatmuls` for the sizes of the samples and targets of the data."""
    return TwoMatmuls(data.sample_shape.numel(), data.target_shape.numel())


def two_matmuls_problems(options: TwoMatmulsOptions, data: Data) -> list[str]:
    """Refuses classes, and samples with more than one dim."""
    shape = list(data.sample_shape)
    if not data.classes and len(shape) == 1:
        return []
    have = "classes" if data.classes else f"samples of shape {shape}"
    return [f"model.name: two_matmuls learns rows of numbers from rows of numbers, the data have {have}"]
