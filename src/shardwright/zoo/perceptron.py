"""Networks of products and ReLUs alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


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
