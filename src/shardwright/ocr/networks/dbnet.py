"""Text detection by DBNet.

Liao et al., *Real-time Scene Text Detection with Differentiable Binarization*, 2019, arXiv:1911.08947.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.ocr.networks.layers import Pyramid
from shardwright.ocr.networks.necks import LevelPyramid, Necks
from shardwright.training.zoo.models.resnet import BasicBlock, ResNet, resnet18, resnet50

STRIDE = 32
"""Sides of images are multiples of this."""


def _pyramid(network: ResNet) -> Pyramid:
    """A ResNet without its head, whose stages are at strides 4, 8, 16 and 32."""
    blocks = [stage[-1] for stage in network.stages]  # type: ignore[index]
    last = [block.conv2 if isinstance(block, BasicBlock) else block.conv3 for block in blocks]
    return Pyramid(network.stem, network.stages, [convolution.out_channels for convolution in last])


def resnet18_pyramid(width: int = 64, zero_init: bool = False) -> Pyramid:
    """64, 128, 256 and 512 channels; for the arguments see `ResNet`."""
    return _pyramid(resnet18(1, "imagenet", width, zero_init))


def resnet50_pyramid(width: int = 64, zero_init: bool = False) -> Pyramid:
    """256, 512, 1024 and 2048 channels; for the arguments see `ResNet`."""
    return _pyramid(resnet50(1, "imagenet", width, zero_init))


class Maps(nn.Sequential):
    """The logits of one map in the size of the image: [n, inputs, h / 4, w / 4] -> [n, h, w]."""

    def __init__(self, inputs: int, bias: bool = False) -> None:
        inner = inputs // 4
        super().__init__(
            nn.Conv2d(inputs, inner, 3, padding=1, bias=bias), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.ConvTranspose2d(inner, inner, 2, 2), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.ConvTranspose2d(inner, 1, 2, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return logits.squeeze(1)


class DBNet(nn.Module):
    """Images [n, 3, h, w], whose sides are multiples of 32 -> the probability [n, h, w] that a pixel is of a text.

    ``neck`` joins what the backbone gives; by default it is a `LevelPyramid` of ``width`` channels.

    In training the result is a pair: the logits of the probability and of the threshold map, whose difference the loss
    binarises.
    """

    def __init__(self, backbone: nn.Module, width: int = 256, bias: bool = False, neck: Necks | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        channels: list[int] = backbone.channels  # type: ignore[assignment]
        self.neck = neck or LevelPyramid(channels, width, bias)
        self.probability = Maps(self.neck.outputs, bias)
        self.threshold = Maps(self.neck.outputs, bias)
        self._initialise()

    def _initialise(self) -> None:
        for part in (self.neck, self.probability, self.threshold):
            for module in part.modules():
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                    nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.neck(self.backbone(images))
        probability = self.probability(features)
        if self.training:
            return probability, self.threshold(features)
        return torch.sigmoid(probability)
