"""Text recognition by CRNN.

Shi, Bai, Yao, *An End-to-End Trainable Neural Network for Image-based Sequence Recognition*, 2015, arXiv:1507.05717.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwright.ocr.networks.layers import conv_norm

HEIGHT = 32


class VGG7(nn.Module):
    """Seven convolutions: [n, 3, 32, w] -> [n, 8 * width, 1, w / 4 - 1]; three of them are normalised."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.channels = 8 * width
        w = width
        self.layers = nn.Sequential(
            *_layer(3, w), nn.MaxPool2d(2),
            *_layer(w, 2 * w), nn.MaxPool2d(2),
            *_layer(2 * w, 4 * w, norm=True), *_layer(4 * w, 4 * w), nn.MaxPool2d((2, 1)),
            *_layer(4 * w, 8 * w, norm=True), *_layer(8 * w, 8 * w), nn.MaxPool2d((2, 1)),
            *_layer(8 * w, 8 * w, kernel=2, padding=0, norm=True),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        columns: Tensor = self.layers(images)
        return columns


def _layer(inputs: int, outputs: int, kernel: int = 3, padding: int = 1, norm: bool = False) -> list[nn.Module]:
    norms: list[nn.Module] = [nn.BatchNorm2d(outputs)] if norm else []
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), *norms, nn.ReLU()]


class WordBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which averages where the block lowers the height.

    [n, inputs, h, w] -> [n, outputs, h / stride[0], w].
    """

    def __init__(self, inputs: int, outputs: int, stride: tuple[int, int], first: bool) -> None:
        super().__init__()
        self.conv1 = conv_norm(inputs, outputs, 3, stride)
        self.conv2 = conv_norm(outputs, outputs, 3, activation=None)
        self.shortcut: nn.Module = nn.Identity()
        if first:
            pools: list[nn.Module] = [] if stride == (1, 1) else [nn.AvgPool2d(stride)]
            self.shortcut = nn.Sequential(*pools, conv_norm(inputs, outputs, 1, activation=None))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.conv2(self.conv1(x)) + self.shortcut(x))
        return out


class ResNet34(nn.Module):
    """A residual network that after its first pooling lowers the height alone: [n, 3, 32, w] -> [n, 8 width, 1, w / 4].

    He et al., *Bag of Tricks for Image Classification*, 2018, arXiv:1812.01187, has the three convolutions of the stem
    and the averages in shortcuts.
    """

    DEPTHS = (3, 4, 6, 3)

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        half = width // 2
        self.channels = width << 3
        self.stem = nn.Sequential(
            conv_norm(3, half), conv_norm(half, half), conv_norm(half, width), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(self.DEPTHS):
            for at in range(depth):
                stride = (2, 1) if stage and at == 0 else (1, 1)
                blocks.append(WordBlock(inputs, width << stage, stride, first=at == 0))
                inputs = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        columns: Tensor = self.pool(self.blocks(self.stem(images)))
        return columns


class CRNN(nn.Module):
    """Words [n, 3, 32, w] -> logits [n, steps, classes], the last class of which is CTC's blank.

    Args:
        backbone: gives the columns of the image as a sequence.
        classes: the characters and the blank.
        hidden: the width of each direction of the two LSTM layers.
    """

    def __init__(self, backbone: nn.Module, classes: int = 37, hidden: int = 256) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = classes
        channels: int = backbone.channels  # type: ignore[assignment]
        self.encoder = nn.LSTM(channels, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        columns = self.backbone(images).squeeze(2).transpose(1, 2)
        states, _ = self.encoder(columns)
        logits: Tensor = self.head(states)
        return logits
