"""The layer that all backbones are made of, and what those of detectors have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

Size = int | tuple[int, int]


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: Size = 1,
    *,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Return a convolution, a batch normalisation, and an activation where one is asked for.

    The size stays but for the stride: [n, inputs, h, w] -> [n, outputs, h / stride, w / stride].
    """
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers = [convolution, nn.BatchNorm2d(outputs, eps), *([activation()] if activation else [])]
    return nn.Sequential(*layers)


class Squeeze(nn.Module):
    """Weighs the channels by their means over the image: [n, channels, h, w] in the same shape.

    Hu et al., *Squeeze-and-Excitation Networks*, 2017, arXiv:1709.01507.
    """

    def __init__(self, channels: int, inner: int, gate: type[nn.Module] = nn.Hardsigmoid) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)
        self.relu, self.gate = nn.ReLU(), gate()

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        weighed: Tensor = x * self.gate(self.expand(self.relu(self.reduce(mean))))
        return weighed


class Pyramid(nn.Module):
    """A stem and stages, one after the other: [n, 3, h, w] -> what each stage gives, of so many ``channels``."""

    def __init__(self, stem: nn.Module, stages: nn.Module, channels: Sequence[int]) -> None:
        super().__init__()
        self.stem, self.stages, self.channels = stem, stages, list(channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        found = []
        for stage in self.stages.children():
            x = stage(x)
            found.append(x)
        return found
