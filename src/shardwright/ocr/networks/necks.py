"""Necks: they join the levels of a detector's backbone into one map of features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.ocr.networks.layers import Squeeze


class Necks(nn.Module):
    """Four tensors at strides 4 to 32 -> [n, outputs, h / 4, w / 4], the coarsest level first.

    A feature pyramid (Lin et al., 2016, arXiv:1612.03144): each level becomes one of ``width`` channels by its
    ``lateral`` layer, the coarser are added to the finer, and each gives a part of the result by its ``smooth`` layer.
    """

    def __init__(self, lateral: Sequence[nn.Module], smooth: Sequence[nn.Module], outputs: int) -> None:
        super().__init__()
        self.lateral, self.smooth = nn.ModuleList(lateral), nn.ModuleList(smooth)
        self.outputs = outputs

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        levels = [lateral(feature) for lateral, feature in zip(self.lateral, features, strict=True)]
        for fine in range(len(levels) - 2, -1, -1):
            levels[fine] = levels[fine] + _enlarged(levels[fine + 1], levels[fine])
        parts = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        return self.join([_enlarged(part, parts[0]) for part in reversed(parts)])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)


def _enlarged(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-2:] == like.shape[-2:] else F.interpolate(x, size=like.shape[-2:], mode="nearest")


class LevelPyramid(Necks):
    """The pyramid of DBNet, of plain convolutions; ``fusion`` weighs the parts before they are joined."""

    def __init__(
        self, channels: Sequence[int], width: int = 256, bias: bool = False, fusion: ScaleFusion | None = None
    ) -> None:
        part = width // len(channels)
        super().__init__(
            [nn.Conv2d(inputs, width, 1, bias=bias) for inputs in channels],
            [nn.Conv2d(width, part, 3, padding=1, bias=bias) for _ in channels],
            part * len(channels),
        )
        self.fusion = fusion

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        joined = super().join(parts)
        return joined if self.fusion is None else self.fusion(joined, parts)


class ScaleFusion(nn.Module):
    """Adaptive scale fusion.

    Liao et al., *Real-Time Scene Text Detection with Differentiable Binarization and Adaptive Scale Fusion*, 2022,
    arXiv:2202.10304.

    Each of the parts, of a quarter of ``width`` channels, is multiplied at each place by a weight in [0, 1], which
    follows from all of them by attention over places and, with ``channel_attention``, over channels.
    """

    PARTS = 4

    def __init__(self, width: int, channel_attention: bool = True) -> None:
        super().__init__()
        inner = width // self.PARTS
        self.reduce = nn.Conv2d(width, inner, 3, padding=1)
        self.channels = (
            nn.Sequential(
                nn.Conv2d(inner, inner // 4, 1, bias=False), nn.ReLU(),
                nn.Conv2d(inner // 4, inner, 1, bias=False), nn.Sigmoid(),
            )
            if channel_attention
            else None
        )  # fmt: skip
        self.places = nn.Sequential(
            nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(1, 1, 1, bias=False), nn.Sigmoid()
        )
        self.scales = nn.Sequential(nn.Conv2d(inner, self.PARTS, 1, bias=False), nn.Sigmoid())

    def forward(self, joined: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return [n, width, h, w] of the ``parts`` and of what they are in one tensor."""
        x = self.reduce(joined)
        if self.channels is not None:
            x = x + self.channels(x.mean((2, 3), keepdim=True))
        x = x + self.places(x.mean(1, keepdim=True))
        weights = self.scales(x)
        return torch.cat([weights[:, at : at + 1] * part for at, part in enumerate(parts)], dim=1)


class WeighedConv(nn.Module):
    """A convolution whose channels are weighed by their means, beside themselves with ``shortcut``."""

    def __init__(self, inputs: int, outputs: int, kernel: int, shortcut: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.squeeze = Squeeze(outputs, outputs // 4)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        weighed: Tensor = self.squeeze(x)
        return x + weighed if self.shortcut else weighed


class WeighedPyramid(Necks):
    """The residual pyramid with squeeze and excitation of PP-OCRv3: Li et al., 2022, arXiv:2206.03001, section 2.2."""

    def __init__(self, channels: Sequence[int], width: int = 96, shortcut: bool = True) -> None:
        part = width // len(channels)
        super().__init__(
            [WeighedConv(inputs, width, 1, shortcut) for inputs in channels],
            [WeighedConv(width, part, 3, shortcut) for _ in channels],
            part * len(channels),
        )
