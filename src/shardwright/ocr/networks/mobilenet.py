"""MobileNetV3 as a backbone: Howard et al., *Searching for MobileNetV3*, 2019, arXiv:1905.02244, table 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from shardwright.ocr.networks.layers import Pyramid, conv_norm


class _Row(NamedTuple):
    """One block of the paper's table."""

    kernel: int
    expanded: int
    outputs: int
    squeezed: bool
    activation: type[nn.Module]
    stride: int


_R, _H = nn.ReLU, nn.Hardswish
_LARGE = (
    _Row(3, 16, 16, False, _R, 1),
    _Row(3, 64, 24, False, _R, 2), _Row(3, 72, 24, False, _R, 1),
    _Row(5, 72, 40, True, _R, 2), _Row(5, 120, 40, True, _R, 1), _Row(5, 120, 40, True, _R, 1),
    _Row(3, 240, 80, False, _H, 2), _Row(3, 200, 80, False, _H, 1), _Row(3, 184, 80, False, _H, 1),
    _Row(3, 184, 80, False, _H, 1), _Row(3, 480, 112, True, _H, 1), _Row(3, 672, 112, True, _H, 1),
    _Row(5, 672, 160, True, _H, 2), _Row(5, 960, 160, True, _H, 1), _Row(5, 960, 160, True, _H, 1),
)  # fmt: skip
_STAGES = ((0, 3), (3, 6), (6, 12), (12, 15))  # which blocks end at strides 4, 8, 16 and 32
_LAST = 960


def _divisible(channels: float) -> int:
    """The multiple of eight that is next, and not more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


class Squeeze(nn.Module):
    """Weighs the channels by their means over the image: [n, channels, h, w] in the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)
        self.relu, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        weighed: Tensor = x * self.gate(self.expand(self.relu(self.reduce(mean))))
        return weighed


class Inverted(nn.Module):
    """Expand, filter each channel alone, and project again, beside the identity where the shape stays."""

    def __init__(self, inputs: int, row: _Row, scaled: Callable[[float], int]) -> None:
        super().__init__()
        inner, outputs = scaled(row.expanded), scaled(row.outputs)
        self.layers = nn.Sequential(
            conv_norm(inputs, inner, 1, activation=row.activation),
            conv_norm(inner, inner, row.kernel, row.stride, groups=inner, activation=row.activation),
            Squeeze(inner) if row.squeezed else nn.Identity(),
            conv_norm(inner, outputs, 1, activation=None),
        )
        self.adds = row.stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def mobilenet_pyramid(alpha: float = 0.5) -> Pyramid:
    """The large network without its head, whose stages are at strides 4, 8, 16 and 32.

    ``alpha`` scales all widths; 0.5 has 16, 24, 56 and 480 channels.
    """

    def scaled(channels: float) -> int:
        return _divisible(alpha * channels)

    inputs = scaled(16)
    stem = conv_norm(3, inputs, 3, 2, activation=nn.Hardswish)
    stages, channels = [], []
    for first, end in _STAGES:
        blocks: list[nn.Module] = []
        for row in _LARGE[first:end]:
            blocks.append(Inverted(inputs, row, scaled))
            inputs = scaled(row.outputs)
        if end == len(_LARGE):
            blocks.append(conv_norm(inputs, scaled(_LAST), 1, activation=nn.Hardswish))
            inputs = scaled(_LAST)
        stages.append(nn.Sequential(*blocks))
        channels.append(inputs)
    return Pyramid(stem, nn.ModuleList(stages), channels)
