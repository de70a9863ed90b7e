"""Residual networks: He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, 2015, arXiv:1512.03385.

One thing differs from the paper, as in most implementations since: a bottleneck block that halves the image does so in
its 3 x 3 convolution, not in the 1 x 1 before it, which would never look at three pixels of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from shardwright.training.zoo.rows import Data, ModelOptions, at_least

Stem = Literal["cifar", "imagenet"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: [n, inputs, h, w] -> [n, width, h / stride, w / stride]."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inputs, width, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.last_norm(self.conv2(y))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut, with four times as many channels outside as inside.

    [n, inputs, h, w] -> [n, 4 * width, h / stride, w / stride].
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.last_norm(self.conv3(y))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity where the shapes agree, else a 1 x 1 convolution (the paper's option B)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Images [n, 3, h, w] -> logits [n, num_classes]; made by `resnet18` and `resnet50`.

    Args:
        block: the kind of its blocks.
        depths: the number of blocks in each stage; each stage after the first halves the image and doubles the width.
        stem: "imagenet" divides the side of the image by four before the first stage (7 x 7 convolution of stride 2,
            max pooling), "cifar" leaves it (3 x 3 convolution), for images of 32 x 32.
        width: the channels of the first stage.
        zero_init: begin with every block as its shortcut alone: the weight of its last normalisation is zero
            (Goyal et al., *Accurate, Large Minibatch SGD*, 2017, arXiv:1706.02677).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int = 10,
        stem: Stem = "cifar",
        width: int = 64,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.stem = _stem(stem, width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            blocks = []
            for at in range(depth):
                blocks.append(block(inputs, width << stage, stride=2 if stage and at == 0 else 1))
                inputs = block.expansion * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, num_classes)
        self._initialise(zero_init)

    def _initialise(self, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init and isinstance(module, (BasicBlock, Bottleneck)):
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


def _stem(kind: Stem, width: int) -> nn.Module:
    if kind == "cifar":
        return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    if kind == "imagenet":
        convolution = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    raise ValueError(f"expected a stem among {', '.join(get_args(Stem))}, got {kind!r}")


def resnet18(num_classes: int = 10, stem: Stem = "cifar", width: int = 64, zero_init: bool = False) -> ResNet:
    """The 18-layer network of the paper's table 1; for the arguments see `ResNet`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, stem, width, zero_init)


def resnet50(num_classes: int = 10, stem: Stem = "cifar", width: int = 64, zero_init: bool = False) -> ResNet:
    """The 50-layer network of the paper's table 1; for the arguments see `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, stem, width, zero_init)


@dataclass(frozen=True, kw_only=True)
class ResNetOptions(ModelOptions):
    """The options of a ResNet; for their meaning see `ResNet`. ``num_classes`` null takes those of the data."""

    stem: Stem = "cifar"
    num_classes: int | None = at_least(1, None)
    width: int = at_least(1, 64)
    zero_init: bool = False


def make_resnet18(options: ResNetOptions, data: Data) -> ResNet:
    """Return a ResNet-18 for the classes of the data, or for as many as the options say."""
    return resnet18(options.num_classes or data.classes, options.stem, options.width, options.zero_init)


def make_resnet50(options: ResNetOptions, data: Data) -> ResNet:
    """Return a ResNet-50 for the classes of the data, or for as many as the options say."""
    return resnet50(options.num_classes or data.classes, options.stem, options.width, options.zero_init)


def resnet_problems(options: ResNetOptions, data: Data) -> list[str]:
    """Refuses all but images of three channels."""
    shape = list(data.sample_shape)
    if len(shape) == 3 and shape[0] == 3:
        return []
    return [f"model.name: {options.name} takes images of shape [3, height, width], the data have {shape}"]
