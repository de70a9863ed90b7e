"""The steps that a configuration lists as its ``transform_pipeline``, by the names that users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import DataError, UsageError
from shardwright.ocr.samples import detection, images, recognition, targets
from shardwright.ocr.samples.sample import PipelineStep, Task
from shardwright.training.zoo.reading import Problems, near, read


@dataclass(frozen=True)
class StepRow:
    """A step: ``make`` is its class, whose fields are its keys.

    ``tasks`` are those that it is for; ``training`` says that it makes what only the loss is given, so that it is left
    out where nothing is trained.
    """

    make: type[Any]
    tasks: tuple[Task, ...] = ("det", "rec")
    training: bool = False


STEPS: Mapping[str, StepRow] = {
    "DecodeImage": StepRow(images.DecodeImage),
    "NormalizeImage": StepRow(images.NormalizeImage),
    "Normalize": StepRow(images.Normalize),
    "ToCHWImage": StepRow(images.ToCHWImage),
    "HWC2CHW": StepRow(images.ToCHWImage),
    "RandomColorAdjust": StepRow(images.RandomColorAdjust),
    "DetLabelEncode": StepRow(detection.DetLabelEncode, ("det",)),
    "RandomHorizontalFlip": StepRow(detection.RandomHorizontalFlip, ("det",)),
    "RandomRotate": StepRow(detection.RandomRotate, ("det",)),
    "RandomScale": StepRow(detection.RandomScale, ("det",)),
    "RandomCropWithBBox": StepRow(detection.RandomCropWithBBox, ("det",)),
    "ValidatePolygons": StepRow(detection.ValidatePolygons, ("det",)),
    "DetResize": StepRow(detection.DetResize, ("det",)),
    "ShrinkBinaryMap": StepRow(targets.ShrinkBinaryMap, ("det",), training=True),
    "BorderMap": StepRow(targets.BorderMap, ("det",), training=True),
    "RecCTCLabelEncode": StepRow(recognition.RecCTCLabelEncode, ("rec",), training=True),
    "Rotate90IfVertical": StepRow(recognition.Rotate90IfVertical, ("rec",)),
    "RecResizeImg": StepRow(recognition.RecResizeImg, ("rec",)),
    "RecResizeNormForInfer": StepRow(recognition.RecResizeNormForInfer, ("rec",)),
}


def read_steps(listed: Sequence[Any], task: Task, path: str, training: bool) -> list[PipelineStep]:
    """The steps of a pipeline; ``path`` is where it stands in the configuration.

    Raises:
        UsageError: with a line for each step and key that is unknown, and each value of another type.
    """
    problems: Problems = []
    steps: list[PipelineStep] = []
    for at, one in enumerate(listed):
        step = _read(one, task, f"{path}[{at}]", problems, training)
        steps += [] if step is None else [step]
    if problems:
        raise UsageError("\n".join(problems))
    return steps


def _read(one: Any, task: Task, path: str, problems: Problems, training: bool) -> PipelineStep | None:
    if isinstance(one, str):
        one = {one: None}
    if not isinstance(one, Mapping) or len(one) != 1:
        problems.append(
            f"{path}: expected one step with its keys, as RandomRotate: {{degrees: [-10, 10]}}, got {one!r}"
        )
        return None
    [(name, keys)] = one.items()
    names = [name for name, kind in STEPS.items() if task in kind.tasks]
    if name not in names:
        problems.append(f"{path}: {name} is no step of {task}; choose of {', '.join(names)}{near(name, names)}")
        return None
    if STEPS[name].training and not training:
        return None
    try:
        found: PipelineStep | None = read(STEPS[name].make, keys or {}, f"{path}.{name}", problems)
    except (DataError, UsageError) as error:  # of values that do not fit each other, or name files that are not there
        problems.append(f"{path}.{name}: {error}")
        return None
    return found
