"""The two tasks, detection and recognition, one table row each; no other code distinguishes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DataError, ShardwrightError, UsageError
from shardwright.ocr.networks.crnn import CRNN
from shardwright.ocr.networks.dbnet import DBNet
from shardwright.ocr.networks.losses import DetectionLoss, LossFunction, detection_loss, first_steps_loss
from shardwright.ocr.options.parts import BACKBONES, NECKS
from shardwright.ocr.options.sections import Dataset, Settings
from shardwright.ocr.samples.dataset import (
    Limit,
    Sources,
    TextImages,
    detection_images,
    synthetic_images,
    word_database,
    word_images,
)
from shardwright.ocr.samples.dictionary import Dictionary
from shardwright.ocr.samples.pipeline import read_steps
from shardwright.ocr.samples.recognition import LongestWord
from shardwright.ocr.samples.sample import Task
from shardwright.ocr.scoring.boxes import detect
from shardwright.ocr.scoring.counts import Counts, DetectionCounts, RecognitionCounts, count_detections, count_word
from shardwright.training.zoo.reading import UnreadError


@dataclass(frozen=True)
class TaskRow:
    """A task.

    Attributes:
        model: makes the network.
        loss: makes ``loss_fn(model, batch)``.
        columns: what a sample for training is made of.
        predict: what the network is asked for in evaluation: ``predict_fn(model, batch)``.
        evaluated: what a sample for evaluation is made of.
        count: counts what was predicted for the samples of a batch: ``(settings, images, batch, outputs)``.
        checks: each says in which the parts contradict each other, one line each.
        defaults: the choices of sections that a configuration may leave out.
    """

    model: Callable[[Settings], nn.Module]
    loss: Callable[[Settings], LossFunction]
    columns: tuple[str, ...]
    predict: LossFunction
    evaluated: tuple[str, ...]
    none: Counts
    count: Callable[[Settings, TextImages, Sequence[Tensor], Any], Counts]
    checks: tuple[Callable[[Settings], list[str]], ...]
    defaults: Mapping[str, str]


def _backbone(settings: Settings) -> nn.Module:
    options = settings.model.backbone
    make = BACKBONES.row(options).make
    assert make is not None
    return make(options)


def _detector(settings: Settings) -> DBNet:
    backbone, neck = _backbone(settings), settings.model.neck
    make = NECKS.row(neck).make
    assert make is not None
    joined: Any = make(neck, backbone.channels)
    return DBNet(backbone, bias=settings.model.head.bias, neck=joined)


def _detection_loss(settings: Settings) -> LossFunction:
    loss = settings.loss
    overlap = loss.bce_replace == "diceloss"
    return detection_loss(
        DetectionLoss(settings.model.head.k, loss.l1_scale, loss.bce_scale, loss.eps, overlap=overlap)
    )


def probabilities(model: nn.Module, batch: Any) -> Tensor:
    """Return the output of a model for the images of a batch, in the dtype of its parameters."""
    result: Tensor = model(batch[0].to(next(model.parameters()).dtype))
    return result


def _count_boxes(settings: Settings, images: TextImages, batch: Sequence[Tensor], maps: Any) -> Counts:
    total = DetectionCounts()
    for index, shape, one in zip(batch[1].tolist(), batch[2].tolist(), maps.float().cpu().numpy(), strict=True):
        found = [detection.points for detection in detect(one, shape, settings.postprocess)]
        total += count_detections(found, images.source(index).boxes, settings.metric.iou)
    return total


def _channel_problems(settings: Settings) -> list[str]:
    channels = settings.model.neck.out_channels
    return [] if channels % 16 == 0 else [f"model.neck.out_channels: expected a multiple of 16, got {channels}"]


def _stage_problems(settings: Settings) -> list[str]:
    with torch.device("meta"):
        _backbone(settings)  # which raises what is wrong
    return []


def _recogniser(settings: Settings) -> CRNN:
    return CRNN(_backbone(settings), settings.model.head.out_channels, settings.model.neck.hidden_size)


def best_path(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The likeliest id at each step of each word, and how likely these are."""
    logits = model(batch[0].to(next(model.parameters()).dtype))
    likely, ids = logits.float().softmax(-1).max(-1)
    return ids, likely


def dictionary_of(settings: Settings) -> Dictionary:
    """Return the dictionary of characters that the settings name."""
    how = settings.postprocess
    return Dictionary.of(how.character_dict_path, how.use_space_char)


def _count_words(settings: Settings, images: TextImages, batch: Sequence[Tensor], outputs: Any) -> Counts:
    dictionary, total = dictionary_of(settings), RecognitionCounts()
    for index, ids in zip(batch[1].tolist(), outputs[0].tolist(), strict=True):
        said = dictionary.decode(ids)
        metric = settings.metric
        total += count_word(said, images.source(index).text, dictionary, metric.ignore_space, metric.lower)
    return total


def _character_problems(settings: Settings) -> list[str]:
    try:
        dictionary_of(settings)
    except (DataError, UsageError) as error:
        return [f"postprocess: {error}"]
    return []


def _readable(path: str | None, use_space_char: bool) -> Dictionary:
    """The dictionary; where it cannot be read, a line says so already."""
    try:
        return Dictionary.of(path, use_space_char)
    except (DataError, UsageError) as error:
        raise UnreadError(path) from error


def _class_problems(settings: Settings) -> list[str]:
    how = settings.postprocess
    classes = _readable(how.character_dict_path, how.use_space_char).classes
    given = settings.model.head.out_channels
    if given == classes:
        return []
    return [
        f"model.head.out_channels: expected {classes}, the {classes - 1} characters of the dictionary and the blank, "
        f"got {given}"
    ]


def _dictionary_problems(settings: Settings) -> list[str]:
    keys = _keys_of(settings, "RecCTCLabelEncode")
    encoding = _readable(keys.get("character_dict_path"), keys.get("use_space_char", False))
    how = settings.postprocess
    decoding = _readable(how.character_dict_path, how.use_space_char)
    if encoding == decoding:
        return []
    return [
        f"train.dataset.transform_pipeline: RecCTCLabelEncode knows {len(encoding.characters)} characters, and "
        f"postprocess not the same {len(decoding.characters)}; give both the same character_dict_path and "
        "use_space_char"
    ]


def _length_problems(settings: Settings) -> list[str]:
    width = _input_width(settings)
    with torch.device("meta"):
        steps = _backbone(settings)(torch.zeros(1, 3, 32, width, device="meta")).shape[-1]
    said = settings.loss.pred_seq_len
    return [] if said is None or said <= steps else [f"loss.pred_seq_len: the network gives {steps} steps, got {said}"]


def _input_width(settings: Settings) -> int:
    return int(_keys_of(settings, "RecResizeImg").get("image_shape", (32, 100))[-1])


def _keys_of(settings: Settings, step: str) -> Mapping[str, Any]:
    """Return what the pipeline for training says of a step; nothing where it has no such step."""
    listed = settings.train.dataset.transform_pipeline
    return next((one[step] or {} for one in listed if isinstance(one, dict) and step in one), {})


TASKS: Mapping[Task, TaskRow] = {
    "det": TaskRow(
        _detector, _detection_loss, ("image", "binary_map", "mask", "thresh_map", "thresh_mask"),
        probabilities, ("image", "index", "shape"), DetectionCounts(), _count_boxes,
        (_channel_problems, _stage_problems), {"postprocess": "DBPostprocess", "metric": "DetMetric"},
    ),
    "rec": TaskRow(
        _recogniser, lambda settings: first_steps_loss(settings.loss.pred_seq_len),
        ("image", "text_seq", "text_length"), best_path, ("image", "index"), RecognitionCounts(), _count_words,
        (_character_problems, _class_problems, _dictionary_problems, _length_problems),
        {"postprocess": "RecCTCLabelDecode", "metric": "RecMetric"},
    ),
}  # fmt: skip


# Data sets


def _lmdb(root: Path, data: str, label: str | None, share: float) -> Sources:
    return word_database(root / data, share)


def _labelled(
    reader: Callable[[Path, Path, float], Sources], root: Path, data: str, label: str | None, share: float
) -> Sources:
    if not label:
        raise UsageError("label_file is missing: it says what the images show")
    return reader(root / data, root / label, share)


DATASETS: Mapping[str, tuple[Task, Callable[[Path, str, str | None, float], Sources]]] = {
    "DetDataset": ("det", partial(_labelled, detection_images)),
    "SynthTextDataset": ("det", partial(_labelled, synthetic_images)),
    "RecDataset": ("rec", partial(_labelled, word_images)),
    "LMDBDataset": ("rec", _lmdb),
}


def text_images(options: Dataset, task: Task, path: str, training: bool) -> TextImages:
    """Return the samples of a section ``dataset``, which stands at ``path`` in the configuration.

    Raises:
        UsageError, DataError: where keys or files do not fit, with a line for each thing that is wrong.
    """
    found: list[Any] = []
    errors: list[ShardwrightError] = []
    for make in (
        lambda: read_steps(options.transform_pipeline, task, f"{path}.transform_pipeline", training),
        lambda: _length_limit(options, path),
        lambda: _sources(options, path),
    ):
        try:
            found.append(make())
        except (DataError, UsageError) as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else UsageError("\n".join(map(str, errors)))
    steps, limits, sources = found
    columns = TASKS[task].columns if training else TASKS[task].evaluated
    failures = Limit(options.max_failed_samples if training else 0)
    return TextImages(sources, [*limits, *steps], columns, failures, task)


def _length_limit(options: Dataset, path: str) -> list[LongestWord]:
    if not options.filter_max_len:
        return []
    if options.max_text_len is None:
        raise UsageError(f"{path}.filter_max_len: true needs {path}.max_text_len, the longest word that is kept")
    return [LongestWord(options.max_text_len)]


def _sources(options: Dataset, path: str) -> list[Sources]:
    _, read = DATASETS[options.type]
    folders = _each(options.data_dir)
    labels = _each(options.label_file) if options.label_file else [None] * len(folders)
    shares = _each(options.sample_ratio) * (1 if isinstance(options.sample_ratio, tuple) else len(folders))
    if not len(folders) == len(labels) == len(shares):
        raise UsageError(
            f"{path}: expected as many label_file and sample_ratio as data_dir, got {len(labels)}, {len(shares)} and "
            f"{len(folders)}"
        )
    bad = [share for share in shares if not 0 < share <= 1]
    if bad:
        raise UsageError(f"{path}.sample_ratio: expected more than 0 and at most 1, got {bad[0]}")
    root = Path(options.dataset_root)
    return [read(root, *one) for one in zip(folders, labels, shares, strict=True)]


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]
