"""MobileNetV3 as a backbone: Howard et al., *Searching for MobileNetV3*, 2019, arXiv:1905.02244, table 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.ocr.networks.layers import Pyramid, Squeeze, conv_norm


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
_LAST = 960
_STEM_LAYERS, _LAST_LAYERS = 3, 3  # a convolution, its normalisation and its activation are three layers of out_stages
OUT_STAGES = (5, 8, 14, 20)


def divisible(channels: float) -> int:
    """Return the multiple of eight that is next, and not more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def quarter_squeeze(channels: int) -> nn.Module:
    """Return a `Squeeze` that has a quarter of the channels inside."""
    return Squeeze(channels, channels // 4)


@dataclass(frozen=True)
class BlockStyle:
    """The settings of a network's blocks.

    With ``always_expand`` the first one, too, has a convolution that expands what needs no expansion. ``squeeze`` makes
    what weighs channels in the blocks that do so, None where none does. ``eps`` is added to variances.
    """

    always_expand: bool = True
    squeeze: Callable[[int], nn.Module] | None = quarter_squeeze
    eps: float = 1e-5


class Inverted(nn.Module):
    """Expand, filter each channel alone, and project again, beside the identity where the shape stays."""

    def __init__(self, inputs: int, row: _Row, scaled: Callable[[float], int], style: BlockStyle) -> None:
        super().__init__()
        inner, outputs = scaled(row.expanded), scaled(row.outputs)
        expands, eps = style.always_expand or inner != inputs, style.eps
        self.layers = nn.Sequential(
            conv_norm(inputs, inner, 1, activation=row.activation, eps=eps) if expands else nn.Identity(),
            conv_norm(inner, inner, row.kernel, row.stride, groups=inner, activation=row.activation, eps=eps),
            style.squeeze(inner) if row.squeezed and style.squeeze else nn.Identity(),
            conv_norm(inner, outputs, 1, activation=None, eps=eps),
        )
        self.adds = row.stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def _stage_ends(out_stages: Sequence[int]) -> list[int]:
    """Return how many of the blocks, the last convolution being one more, come before the end of each stage."""
    blocks = len(_LARGE)
    last = _STEM_LAYERS + blocks + _LAST_LAYERS - 1
    ends = [blocks + 1 if at == last else at - _STEM_LAYERS + 1 for at in out_stages]
    strides = [2]
    for row in _LARGE:
        strides.append(strides[-1] * row.stride)
    inside = all(at == last or _STEM_LAYERS <= at < _STEM_LAYERS + blocks for at in out_stages)
    if not inside or [strides[min(end, blocks)] for end in ends] != [4, 8, 16, 32]:
        raise UsageError(
            "model.backbone.out_stages: expected four layers at strides 4, 8, 16 and 32, of which those are 4 or 5, "
            f"6 to 8, 9 to 14, and 15 to 17 or {last}; got {list(out_stages)}"
        )
    return ends


def mobilenet_pyramid(
    alpha: float = 0.5, style: BlockStyle | None = None, out_stages: Sequence[int] = OUT_STAGES
) -> Pyramid:
    """Return the large network without its head, whose stages are at strides 4, 8, 16 and 32.

    ``alpha`` scales all widths; 0.5 has 16, 24, 56 and 480 channels. Stages end with the layers ``out_stages``: 0 to 2
    come first, 3 to 17 are blocks, and 20 is the last layer.

    Raises:
        UsageError: where stages do not end at these strides.
    """

    def scaled(channels: float) -> int:
        return divisible(alpha * channels)

    style = style or BlockStyle()
    inputs, outputs = scaled(16), [*(scaled(row.outputs) for row in _LARGE), scaled(_LAST)]
    stem = conv_norm(3, inputs, 3, 2, activation=nn.Hardswish, eps=style.eps)
    blocks: list[nn.Module] = [
        Inverted(before, row, scaled, style) for before, row in zip([inputs, *outputs], _LARGE, strict=False)
    ]
    blocks.append(conv_norm(outputs[-2], outputs[-1], 1, activation=nn.Hardswish, eps=style.eps))
    ends = _stage_ends(out_stages)
    stages = [nn.Sequential(*blocks[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    return Pyramid(stem, nn.ModuleList(stages), [outputs[end - 1] for end in ends])
