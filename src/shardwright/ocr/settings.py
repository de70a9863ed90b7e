"""From a configuration file of text detection or recognition to checked `Settings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardwright.errors import UsageError
from shardwright.ocr.asked.options import Settings
from shardwright.ocr.asked.parts import BACKBONES, HEADS, LOSSES, METRICS, NECKS, POSTPROCESSES
from shardwright.ocr.tasks import DATASETS, TASKS
from shardwright.zoo.config import sections
from shardwright.zoo.reading import Problems, read

# Keys of MindOCR's that say how its data sets feed its networks, which here follows from the task, or how layers begin.
WITHOUT_EFFECT = (
    "train.dataset_sink_mode", "eval.dataset_sink_mode", "train.pred_cast_fp32", "train.loader.max_rowsize",
    "eval.loader.max_rowsize", "train.dataset.output_columns", "eval.dataset.output_columns",
    "train.dataset.net_input_column_index", "eval.dataset.net_input_column_index",
    "train.dataset.label_column_index", "eval.dataset.label_column_index", "train.dataset.shuffle",
    "eval.dataset.shuffle", "model.head.weight_init", "model.head.bias_init", "metric.print_flag",
)  # fmt: skip


def is_text_configuration(name: str) -> bool:
    """Whether ``name`` is a file that trains text detection or recognition; a file that cannot be read is none."""
    path = Path(name)
    if not path.is_file():
        return False
    try:
        model = sections(path).get("model")
    except UsageError:
        return False
    return isinstance(model, dict) and "backbone" in model


def load_settings(name: str, overrides: Sequence[str] = ()) -> Settings:
    """The configuration ``name`` with ``overrides`` such as ``train.loader.batch_size=4``.

    Raises:
        UsageError: with a line for every unknown key, wrong type, value out of its range and part of another task.
    """
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"there is no configuration file {name}; configs/ has det/dbnet/*.yaml and rec/crnn/*.yaml")
    problems: Problems = _anchor_problems(overrides)
    settings: Any = read(Settings, sections(path, overrides), "", problems)
    problems = problems or _problems(settings)
    if problems:
        raise UsageError("\n".join([f"{name}:", *(f"  {problem}" for problem in problems)]))
    found: Settings = settings
    return found


def ineffective(name: str, overrides: Sequence[str] = ()) -> list[str]:
    """The keys of the file that have no effect, so that a run can say so."""
    raw = sections(Path(name), overrides)
    return [key for key in WITHOUT_EFFECT if _has(raw, key.split("."))]


def to_yaml(settings: Settings) -> str:
    """The whole configuration, defaults included, as a file that `load_settings` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(settings)))


def _has(raw: Any, keys: Sequence[str]) -> bool:
    if not keys:
        return raw is not None
    return isinstance(raw, dict) and keys[0] in raw and _has(raw[keys[0]], keys[1:])


def _anchor_problems(overrides: Sequence[str]) -> Problems:
    return [
        f"-o {override}: the section common holds anchors, whose values are copied where the file is read; set the "
        "keys that use it, as -o train.loader.batch_size=8"
        for override in overrides
        if override.startswith("common.")
    ]


def _problems(settings: Settings) -> Problems:
    task = settings.model.type
    parts = (
        (BACKBONES, settings.model.backbone), (NECKS, settings.model.neck), (HEADS, settings.model.head),
        (POSTPROCESSES, settings.postprocess), (METRICS, settings.metric), (LOSSES, settings.loss),
    )  # fmt: skip
    problems = [
        f"{table.section}.name: {options.name} is for {table.row(options).task}, model.type says {task}; use "
        + " or ".join(name for name, row in table.rows.items() if row.task == task)
        for table, options in parts
        if table.row(options).task != task
    ]
    return problems or [*_loader_problems(settings), *_system_problems(settings), *TASKS[task].problems(settings)]


def _loader_problems(settings: Settings) -> Problems:
    problems = []
    for name, loader in (("train", settings.train.loader), ("eval", settings.eval.loader)):
        if (loader.batch_size is None) == (loader.global_batch_size is None):
            got = "neither" if loader.batch_size is None else "both"
            problems.append(f"{name}.loader: expected batch_size (of each rank) or global_batch_size, got {got}")
        if loader.drop_remainder and name == "eval":
            problems.append("eval.loader.drop_remainder: true would leave images out of the evaluation; use false")
    return problems


def _system_problems(settings: Settings) -> Problems:
    problems = []
    if not settings.system.drop_overflow_update:
        problems.append("system.drop_overflow_update: false is not offered: a step that overflows is always left out")
    if settings.model.transform is not None:
        problems.append(f"model.transform: expected null, got {settings.model.transform!r}")
    if settings.scheduler.min_lr >= settings.scheduler.lr:
        problems.append(f"scheduler.min_lr: expected less than lr, {settings.scheduler.lr}")
    return [*problems, *_dataset_problems(settings)]


def _dataset_problems(settings: Settings) -> Problems:
    task = settings.model.type
    fitting = " or ".join(name for name, (of, _) in DATASETS.items() if of == task)
    return [
        f"{part}.dataset.type: {kind} has no samples of {task}; use {fitting}"
        for part, kind in (("train", settings.train.dataset.type), ("eval", settings.eval.dataset.type))
        if DATASETS[kind][0] != task
    ]
