"""From a configuration file of text detection or recognition to checked `Settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardwright.errors import DataError, UsageError
from shardwright.ocr.optimizers import kind_of, spared_names
from shardwright.ocr.options.parts import BACKBONES, HEADS, LOSSES, METRICS, NECKS, POSTPROCESSES
from shardwright.ocr.options.sections import Settings
from shardwright.ocr.tasks import DATASETS, TASKS
from shardwright.training.zoo.config import sections
from shardwright.training.zoo.reading import Problems, UnreadError, read
from shardwright.training.zoo.rows import ChoiceTable

Check = Callable[[Any], Problems]

# Keys of MindOCR's that say how its data sets feed its networks, which here follows from the task, or how layers begin.
WITHOUT_EFFECT = (
    "train.dataset_sink_mode", "eval.dataset_sink_mode", "train.pred_cast_fp32", "train.loader.max_rowsize",
    "eval.loader.max_rowsize", "train.dataset.output_columns", "eval.dataset.output_columns",
    "train.dataset.net_input_column_index", "eval.dataset.net_input_column_index",
    "train.dataset.label_column_index", "eval.dataset.label_column_index", "train.dataset.shuffle",
    "eval.dataset.shuffle", "train.dataset.use_minddata", "eval.dataset.use_minddata", "model.head.weight_init",
    "model.head.bias_init", "metric.print_flag", "metric.character_dict_path", "loss.batch_size", "loss.max_label_len",
    "predict",
)  # fmt: skip
_OF_STEPS = {"DecodeImage": ("keep_ori",), "RecResizeImg": ("infer_mode", "character_dict_path")}
_OF_OPTIMIZERS = ("momentum", "nesterov", "beta1", "beta2")
_WITH_DECAY_EPOCHS = ("cosine_decay", "warmup_cosine_decay", "step_decay")
_CHOSEN: tuple[tuple[str, ChoiceTable[Any], Callable[[Any], Any]], ...] = (
    ("model.backbone", BACKBONES, lambda settings: settings.model.backbone),
    ("model.neck", NECKS, lambda settings: settings.model.neck),
    ("model.head", HEADS, lambda settings: settings.model.head),
    ("postprocess", POSTPROCESSES, lambda settings: settings.postprocess),
    ("metric", METRICS, lambda settings: settings.metric),
    ("loss", LOSSES, lambda settings: settings.loss),
)


def is_text_configuration(name: str) -> bool:
    """Return whether ``name`` is a file that trains text detection or recognition; False if it cannot be read."""
    path = Path(name)
    if not path.is_file():
        return False
    try:
        model = sections(path).get("model")
    except UsageError:
        return False
    return isinstance(model, dict) and "backbone" in model


def load_settings(name: str, overrides: Sequence[str] = ()) -> Settings:
    """Return the configuration ``name`` with ``overrides`` such as ``train.loader.batch_size=4``.

    Raises:
        UsageError: with a line for every unknown key, wrong type, value out of its range and part of another task.
    """
    settings, problems = examine(name, overrides)
    refuse(name, problems)
    found: Settings = settings
    return found


def examine(name: str, overrides: Sequence[str] = ()) -> tuple[Any, Problems]:
    """Return the configuration and a line for each thing that is wrong; then what is left of it is a `Partial`.

    Raises:
        UsageError: where there is no such file, or it holds no sections.
    """
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"there is no configuration file {name}; configs/ has det/dbnet/*.yaml and rec/crnn/*.yaml")
    problems = _anchor_problems(overrides)
    settings: Any = read(Settings, _with_defaults(sections(path, overrides)), "", problems)
    return settings, list(dict.fromkeys([*problems, *found_by(_CHECKS, settings)]))


def refuse(name: str, problems: Sequence[str]) -> None:
    """Raise a `UsageError` with a line for each problem, where there are any."""
    if problems:
        raise UsageError("\n".join([f"{name}:", *(f"  {problem}" for problem in problems)]))


def found_by(checks: Iterable[Check], settings: Any) -> Problems:
    """Return what checks find, each of them left out that needs a key which could not be read."""
    problems: Problems = []
    for check in checks:
        try:
            problems += check(settings)
        except UnreadError:
            continue
        except (DataError, UsageError) as error:
            problems += str(error).splitlines()
    return problems


def ineffective(name: str, overrides: Sequence[str] = ()) -> list[str]:
    """Return the keys of a file that has no problems which have no effect, so that a run can say so."""
    raw, settings = sections(Path(name), overrides), load_settings(name, overrides)
    takes = kind_of(settings.optimizer.opt).takes
    keys = [*WITHOUT_EFFECT, *(f"optimizer.{key}" for key in _OF_OPTIMIZERS if key not in takes)]
    if spared_names(settings.optimizer) != settings.optimizer.no_weight_decay_params:
        keys.append("optimizer.no_weight_decay_params")
    elif settings.optimizer.no_weight_decay_params:
        keys.append("optimizer.filter_bias_and_bn")
    if settings.scheduler.scheduler not in _WITH_DECAY_EPOCHS:
        keys.append("scheduler.decay_epochs")
    if settings.system.amp_level == "O0" or settings.system.amp_dtype != "fp16":
        keys += ["loss_scaler", "system.drop_overflow_update"]
    return [key for key in keys if _has(raw, key.split("."))] + _ineffective_in_steps(settings)


def _ineffective_in_steps(settings: Settings) -> list[str]:
    parts = (settings.train, settings.eval)
    steps = [step for part in parts if part for step in part.dataset.transform_pipeline if isinstance(step, dict)]
    found = [
        f"{name}.{key}"
        for step in steps
        for name, keys in step.items()
        for key in _OF_STEPS.get(name, ())
        if (keys or {}).get(key) is not None
    ]
    return list(dict.fromkeys(found))


def to_yaml(settings: Settings) -> str:
    """Return the whole configuration, defaults included, as a file that `load_settings` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(settings)))


def _has(raw: Any, keys: Sequence[str]) -> bool:
    if not keys:
        return raw is not None
    return isinstance(raw, dict) and keys[0] in raw and _has(raw[keys[0]], keys[1:])


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """The sections, with the choices of the task in the place of those that may be missing."""
    model = raw.get("model")
    row = next((TASKS[task] for task in TASKS if isinstance(model, dict) and model.get("type") == task), None)
    missing = {key: {"name": name} for key, name in row.defaults.items() if key not in raw} if row else {}
    return raw | missing


def _anchor_problems(overrides: Sequence[str]) -> Problems:
    return [
        f"-o {override}: the section common holds anchors, whose values are copied where the file is read; set the "
        "keys that use it, as -o train.loader.batch_size=8"
        for override in overrides
        if override.startswith("common.")
    ]


def _of_task(section: str, table: ChoiceTable[Any], chosen: Callable[[Any], Any]) -> Check:
    def check(settings: Settings) -> Problems:
        task, options = settings.model.type, chosen(settings)
        if table.row(options).task == task:
            return []
        fitting = " or ".join(name for name, row in table.rows.items() if row.task == task)
        return [
            f"{section}.name: {options.name} is for {table.row(options).task}, model.type says {task}; use {fitting}"
        ]

    return check


def _fit(settings: Settings) -> bool:
    """Return whether all parts are for the task; else what they say of each other means nothing."""
    return not found_by((_of_task(*chosen) for chosen in _CHOSEN), settings)


def _task_problems(settings: Settings) -> Problems:
    return found_by(TASKS[settings.model.type].checks, settings) if _fit(settings) else []


def _size_problems(section: str, loader: Callable[[Any], Any]) -> Check:
    def check(settings: Settings) -> Problems:
        options = loader(settings)
        if options is None or (options.batch_size is None) != (options.global_batch_size is None):
            return []
        got = "neither" if options.batch_size is None else "both"
        return [f"{section}: expected batch_size (of each rank) or global_batch_size, got {got}"]

    return check


def _remainder_problems(settings: Settings) -> Problems:
    if settings.eval is None or not settings.eval.loader.drop_remainder:
        return []
    return ["eval.loader.drop_remainder: true would leave images out of the evaluation; use false"]


def _missing_eval(settings: Settings) -> Problems:
    if settings.eval is not None or not settings.system.val_while_train:
        return []
    return ["the section eval is missing, on which a run is validated; type -o system.val_while_train=False for none"]


def _transform_problems(settings: Settings) -> Problems:
    transform = settings.model.transform
    return [] if transform is None else [f"model.transform: expected null, got {transform!r}"]


def _rate_problems(settings: Settings) -> Problems:
    options = settings.scheduler
    return [f"scheduler.min_lr: expected less than lr, {options.lr}"] if options.min_lr >= options.lr else []


def _warmup_problems(settings: Settings) -> Problems:
    options = settings.scheduler
    if options.warmup_epochs < options.num_epochs:
        return []
    return [
        f"scheduler.warmup_epochs: expected less than num_epochs, {options.num_epochs}, got {options.warmup_epochs:g}"
    ]


def _dataset_problems(section: str, dataset: Callable[[Any], Any]) -> Check:
    def check(settings: Settings) -> Problems:
        task, options = settings.model.type, dataset(settings)
        if options is None or DATASETS[options.type][0] == task:
            return []
        fitting = " or ".join(name for name, (of, _) in DATASETS.items() if of == task)
        return [f"{section}.type: {options.type} has no samples of {task}; use {fitting}"]

    return check


_CHECKS: tuple[Check, ...] = (
    *(_of_task(*chosen) for chosen in _CHOSEN),
    _size_problems("train.loader", lambda settings: settings.train.loader),
    _size_problems("eval.loader", lambda settings: settings.eval and settings.eval.loader),
    _remainder_problems, _missing_eval, _transform_problems, _rate_problems, _warmup_problems,
    _dataset_problems("train.dataset", lambda settings: settings.train.dataset),
    _dataset_problems("eval.dataset", lambda settings: settings.eval and settings.eval.dataset),
    _task_problems,
)  # fmt: skip
