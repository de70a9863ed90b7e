"""What a configuration's model is made of, and what goes with it: one row for each name that users know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from shardwright.ocr.networks.crnn import VGG7, ResNet34
from shardwright.ocr.networks.dbnet import resnet18_pyramid, resnet50_pyramid
from shardwright.ocr.networks.mobilenet import mobilenet_pyramid
from shardwright.ocr.samples.sample import Task
from shardwright.zoo.ranges import at_least, between, more_than
from shardwright.zoo.rows import Table


@dataclass(frozen=True, kw_only=True)
class Named:
    """A choice by the name that users know."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Backbone(Named):
    """``pretrained`` can only be false, as no weights come along."""

    pretrained: Literal[False] = False


@dataclass(frozen=True, kw_only=True)
class Staged(Backbone):
    """``width`` is that of the first stage."""

    width: int = at_least(4, 64)


@dataclass(frozen=True, kw_only=True)
class DetectionResNet(Staged):
    """With ``zero_init`` each block begins as its shortcut, which keeps rounding small (docs/training/zoo.md)."""

    zero_init: bool = False


@dataclass(frozen=True, kw_only=True)
class MobileNet(Backbone):
    """``alpha`` scales all widths of the large network."""

    architecture: Literal["large"] = "large"
    alpha: float = more_than(0, 0.5)


@dataclass(frozen=True, kw_only=True)
class Fpn(Named):
    """A pyramid of so many channels in all."""

    out_channels: int = at_least(4, 256)
    bias: bool = False
    use_asf: Literal[False] = False


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
    """How boxes come from a map of probabilities (`scoring.boxes`)."""

    box_type: Literal["quad"] = "quad"
    binary_thresh: float = between(0, 1, 0.3)
    box_thresh: float = between(0, 1, 0.6)
    max_candidates: int = at_least(1, 1000)
    expand_ratio: float = more_than(0, 1.5)
    min_size: float = at_least(0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Decoding(Named):
    """Which characters stand for the ids: a file with one on each line, or 0-9a-z where there is none."""

    character_dict_path: str | None = None
    use_space_char: bool = False


@dataclass(frozen=True, kw_only=True)
class DetectionMetric(Named):
    """Precision, recall and their harmonic mean (f-score), by the rule of ICDAR 2015."""

    main_indicator: Literal["hmean", "f-score", "precision", "recall"] = "hmean"
    iou: float = between(0, 1, 0.5)


@dataclass(frozen=True, kw_only=True)
class RecognitionMetric(Named):
    """The share of exact matches, and one less the mean normalised edit distance."""

    main_indicator: Literal["acc", "norm_edit_distance"] = "acc"
    character_dict_path: str | None = None
    ignore_space: bool = True
    print_flag: bool = False


@dataclass(frozen=True, kw_only=True)
class DBLoss(Named):
    """What the parts of a detector's loss count."""

    eps: float = more_than(0, 1e-6)
    l1_scale: float = at_least(0, 10.0)
    bce_scale: float = at_least(0, 5.0)
    bce_replace: Literal["bceloss"] = "bceloss"


@dataclass(frozen=True, kw_only=True)
class CTCLoss(Named):
    """Lengths follow from network and data; ``pred_seq_len`` is checked where it is given."""

    pred_seq_len: int | None = at_least(1, None)
    max_label_len: int | None = at_least(1, None)
    batch_size: int | None = at_least(1, None)


@dataclass(frozen=True)
class Part:
    """A choice for one of the sections, for one task; ``make(options)`` is a backbone where it is one."""

    options: type[Any]
    task: Task
    make: Callable[[Any], nn.Module] | None = None


BACKBONES = Table(
    "model.backbone",
    {
        "det_resnet18": Part(
            DetectionResNet, "det", lambda options: resnet18_pyramid(options.width, options.zero_init)
        ),
        "det_resnet50": Part(
            DetectionResNet, "det", lambda options: resnet50_pyramid(options.width, options.zero_init)
        ),
        "det_mobilenet_v3": Part(MobileNet, "det", lambda options: mobilenet_pyramid(options.alpha)),
        "rec_vgg7": Part(Staged, "rec", lambda options: VGG7(options.width)),
        "rec_resnet34": Part(Staged, "rec", lambda options: ResNet34(options.width)),
    },
)
NECKS = Table("model.neck", {"DBFPN": Part(Fpn, "det"), "RNNEncoder": Part(Rnn, "rec")})
HEADS = Table("model.head", {"DBHead": Part(DetectionHead, "det"), "CTCHead": Part(CTCHead, "rec")})
POSTPROCESSES = Table(
    "postprocess",
    {"DBPostprocess": Part(DetectionPostprocess, "det"), "RecCTCLabelDecode": Part(Decoding, "rec")},
)
METRICS = Table("metric", {"DetMetric": Part(DetectionMetric, "det"), "RecMetric": Part(RecognitionMetric, "rec")})
LOSSES = Table("loss", {"DBLoss": Part(DBLoss, "det"), "CTCLoss": Part(CTCLoss, "rec")})
