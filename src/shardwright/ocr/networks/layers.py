"""The layer that all backbones are made of."""

from __future__ import annotations

from torch import nn

Size = int | tuple[int, int]


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: Size = 1,
    *,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, a batch normalisation, and an activation where one is
    asked for: [n, inputs, h, w] -> [n, outputs, h / stride, w / stride]."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers = [convolution, nn.BatchNorm2d(outputs), *([activation()] if activation else [])]
    return nn.Sequential(*layers)
