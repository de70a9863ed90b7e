"""The parts of a configuration's model and what goes with them: one row for each name that users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from shardwright.ocr.networks.crnn import VGG7, ResNet34
from shardwright.ocr.networks.dbnet import resnet18_pyramid, resnet50_pyramid
from shardwright.ocr.networks.layers import Squeeze
from shardwright.ocr.networks.mobilenet import OUT_STAGES, BlockStyle, divisible, mobilenet_pyramid, quarter_squeeze
from shardwright.ocr.networks.necks import LevelPyramid, ScaleFusion, WeighedPyramid
from shardwright.ocr.networks.published import MOBILENET, RESNET18, RESNET50, Published
from shardwright.ocr.samples.sample import Task
from shardwright.training.zoo.rows import ChoiceTable, at_least, between, more_than


@dataclass(frozen=True, kw_only=True)
class Named:
    """A choice by the name that users know."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Backbone(Named):
    """``pretrained`` true begins with torchvision's weights of the network, text with those of a file or address."""

    pretrained: bool | str = False


@dataclass(frozen=True, kw_only=True)
class Staged(Backbone):
    """``width`` is that of the first stage."""

    width: int = at_least(4, 64)


@dataclass(frozen=True, kw_only=True)
class DetectionResNet(Staged):
    """With ``zero_init`` each block begins as its shortcut, which keeps rounding small (docs/training/zoo.md)."""

    zero_init: bool = False


@dataclass(frozen=True, kw_only=True)
class Bottlenecks:
    """The blocks of a MobileNetV3, see `networks.mobilenet.BlockStyle`."""

    se_version: Literal["SqueezeExcite", "SqueezeExciteV2"] = "SqueezeExcite"
    always_expand: bool = False


@dataclass(frozen=True, kw_only=True)
class MobileNet(Backbone):
    """``alpha`` scales all widths of the large network.

    ``out_stages`` are the layers whose results a neck takes, of strides 4, 8, 16 and 32: 0 to 2 are the convolution,
    the normalisation and the activation that come first, 3 to 17 the blocks, and 18 to 20 the three that come last.
    """

    architecture: Literal["large"] = "large"
    alpha: float = more_than(0, 0.5)
    out_stages: tuple[int, ...] = OUT_STAGES
    bottleneck_params: Bottlenecks = field(default_factory=Bottlenecks)


@dataclass(frozen=True, kw_only=True)
class EnhancedMobileNet(Backbone):
    """A MobileNetV3 whose blocks always expand; with ``disable_se`` none weighs its channels."""

    architecture: Literal["large"] = "large"
    alpha: float = more_than(0, 0.5)
    disable_se: bool = False


@dataclass(frozen=True, kw_only=True)
class Neck(Named):
    """A pyramid of so many channels in all."""

    out_channels: int = at_least(4, 256)


@dataclass(frozen=True, kw_only=True)
class Fpn(Neck):
    """With ``use_asf`` levels are weighed against each other before they are joined, as DBNet++ does."""

    bias: bool = False
    use_asf: bool = False
    channel_attention: bool = True


@dataclass(frozen=True, kw_only=True)
class Rsefpn(Neck):
    """A pyramid whose layers weigh their channels, beside the identity with ``shortcut``."""

    shortcut: bool = True


@dataclass(frozen=True, kw_only=True)
class Rnn(Named):
    """Two LSTM layers, each direction of this width."""

    hidden_size: int = at_least(1, 256)


@dataclass(frozen=True, kw_only=True)
class DetectionHead(Named):
    """Differentiable binarisation with a slope of ``k``."""

    k: float = more_than(0, 50.0)
    bias: bool = False
    adaptive: Literal[True] = True
    serial: Literal[False] = False


@dataclass(frozen=True, kw_only=True)
class CTCHead(Named):
    """Logits of the dictionary's characters and the blank; ``out_channels`` is their number."""

    out_channels: int = at_least(2, 37)
    weight_init: Literal["crnn_customised"] | None = None
    bias_init: Literal["crnn_customised"] | None = None


@dataclass(frozen=True, kw_only=True)
class DetectionPostprocess(Named):
    """Texts from a map of probabilities (`scoring.boxes`): as rectangles (quad) or polygons (poly)."""

    box_type: Literal["quad", "poly"] = "quad"
    binary_thresh: float = between(0, 1, 0.3)
    box_thresh: float = between(0, 1, 0.6)
    max_candidates: int = at_least(1, 1000)
    expand_ratio: float = more_than(0, 1.5)
    min_size: float = at_least(0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Decoding(Named):
    """The characters of the ids: a file with one on each line, or 0-9a-z where there is none."""

    character_dict_path: str | None = None
    use_space_char: bool = False


@dataclass(frozen=True, kw_only=True)
class DetectionMetric(Named):
    """Precision, recall and their harmonic mean (f-score), by the rule of ICDAR 2015."""

    main_indicator: Literal["hmean", "f-score", "precision", "recall"] = "hmean"
    iou: float = between(0, 1, 0.5)


@dataclass(frozen=True, kw_only=True)
class RecognitionMetric(Named):
    """The share of exact matches, and one less the mean normalised edit distance.

    ``lower`` says whether words are compared in lower case; by default they are where the dictionary has no other.
    """

    main_indicator: Literal["acc", "norm_edit_distance"] = "acc"
    character_dict_path: str | None = None
    ignore_space: bool = True
    lower: bool | None = None
    print_flag: bool = False


@dataclass(frozen=True, kw_only=True)
class DBLoss(Named):
    """The weights of a detector's loss; ``bce_replace`` diceloss has an overlap in place of the entropy."""

    eps: float = more_than(0, 1e-6)
    l1_scale: float = at_least(0, 10.0)
    bce_scale: float = at_least(0, 5.0)
    bce_replace: Literal["bceloss", "diceloss"] = "bceloss"


@dataclass(frozen=True, kw_only=True)
class CTCLoss(Named):
    """Lengths follow from network and data; of more steps than ``pred_seq_len`` the first ones alone are compared."""

    pred_seq_len: int | None = at_least(1, None)
    max_label_len: int | None = at_least(1, None)
    batch_size: int | None = at_least(1, None)


@dataclass(frozen=True)
class PartRow:
    """A choice for one of the sections, for one task.

    ``make(options)`` is a backbone where it is one; ``make(options, channels)`` a neck of detectors. ``published`` are
    torchvision's weights of a backbone, None where it has none.
    """

    options: type[Any]
    task: Task
    make: Callable[..., nn.Module] | None = None
    published: Published | None = None


def _mobilenet(options: MobileNet) -> nn.Module:
    blocks = options.bottleneck_params
    eps = MOBILENET.eps if options.pretrained is True else 1e-5
    style = BlockStyle(blocks.always_expand, _SQUEEZES[blocks.se_version], eps)
    return mobilenet_pyramid(options.alpha, style, options.out_stages)


def _enhanced_mobilenet(options: EnhancedMobileNet) -> nn.Module:
    return mobilenet_pyramid(options.alpha, BlockStyle(squeeze=None if options.disable_se else quarter_squeeze))


_SQUEEZES: Mapping[str, Callable[[int], nn.Module]] = {
    "SqueezeExcite": lambda channels: Squeeze(channels, divisible(channels / 4)),
    "SqueezeExciteV2": lambda channels: Squeeze(channels, channels // 4, nn.Sigmoid),
}


BACKBONES = ChoiceTable(
    "model.backbone",
    {
        "det_resnet18": PartRow(
            DetectionResNet, "det", lambda options: resnet18_pyramid(options.width, options.zero_init), RESNET18
        ),
        "det_resnet50": PartRow(
            DetectionResNet, "det", lambda options: resnet50_pyramid(options.width, options.zero_init), RESNET50
        ),
        "det_mobilenet_v3": PartRow(MobileNet, "det", _mobilenet, MOBILENET),
        "det_mobilenet_v3_enhance": PartRow(EnhancedMobileNet, "det", _enhanced_mobilenet),
        "rec_vgg7": PartRow(Staged, "rec", lambda options: VGG7(options.width)),
        "rec_resnet34": PartRow(Staged, "rec", lambda options: ResNet34(options.width)),
    },
)
NECKS = ChoiceTable(
    "model.neck",
    {
        "DBFPN": PartRow(
            Fpn, "det",
            lambda options, channels: LevelPyramid(
                channels, options.out_channels, options.bias,
                ScaleFusion(options.out_channels, options.channel_attention) if options.use_asf else None,
            ),
        ),
        "RSEFPN": PartRow(
            Rsefpn, "det",
            lambda options, channels: WeighedPyramid(channels, options.out_channels, options.shortcut),
        ),
        "RNNEncoder": PartRow(Rnn, "rec"),
    },
)  # fmt: skip
HEADS = ChoiceTable(
    "model.head",
    {
        "DBHead": PartRow(DetectionHead, "det"),
        "DBHeadEnhance": PartRow(DetectionHead, "det"),
        "CTCHead": PartRow(CTCHead, "rec"),
    },
)
POSTPROCESSES = ChoiceTable(
    "postprocess",
    {"DBPostprocess": PartRow(DetectionPostprocess, "det"), "RecCTCLabelDecode": PartRow(Decoding, "rec")},
)
METRICS = ChoiceTable(
    "metric", {"DetMetric": PartRow(DetectionMetric, "det"), "RecMetric": PartRow(RecognitionMetric, "rec")}
)
LOSSES = ChoiceTable("loss", {"DBLoss": PartRow(DBLoss, "det"), "CTCLoss": PartRow(CTCLoss, "rec")})
