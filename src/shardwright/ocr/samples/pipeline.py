"""The steps that a configuration lists as its ``transform_pipeline``, by the names that users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import DataError, UsageError
from shardwright.ocr.samples import detection, images, recognition, targets
from shardwright.ocr.samples.sample import Step, Task
from shardwright.training.zoo.reading import Problems, near, read


@dataclass(frozen=True)
class Kind:
    """A step: ``make`` is its class, whose fields are its keys.

    ``tasks`` are those that it is for; ``training`` says that it makes what only the loss is given, so that it is left
    out where nothing is trained.
    """

    make: type[Any]
    tasks: tuple[Task, ...] = ("det", "rec")
    training: bool = False


STEPS: Mapping[str, Kind] = {
    "DecodeImage": Kind(images.DecodeImage),
    "NormalizeImage": Kind(images.NormalizeImage),
    "Normalize": Kind(images.Normalize),
    "ToCHWImage": Kind(images.ToCHWImage),
    "HWC2CHW": Kind(images.ToCHWImage),
    "RandomColorAdjust": Kind(images.RandomColorAdjust),
    "DetLabelEncode": Kind(detection.DetLabelEncode, ("det",)),
    "RandomHorizontalFlip": Kind(detection.RandomHorizontalFlip, ("det",)),
    "RandomRotate": Kind(detection.RandomRotate, ("det",)),
    "RandomScale": Kind(detection.RandomScale, ("det",)),
    "RandomCropWithBBox": Kind(detection.RandomCropWithBBox, ("det",)),
    "ValidatePolygons": Kind(detection.ValidatePolygons, ("det",)),
    "DetResize": Kind(detection.DetResize, ("det",)),
    "ShrinkBinaryMap": Kind(targets.ShrinkBinaryMap, ("det",), training=True),
    "BorderMap": Kind(targets.BorderMap, ("det",), training=True),
    "RecCTCLabelEncode": Kind(recognition.RecCTCLabelEncode, ("rec",), training=True),
    "Rotate90IfVertical": Kind(recognition.Rotate90IfVertical, ("rec",)),
    "RecResizeImg": Kind(recognition.RecResizeImg, ("rec",)),
    "RecResizeNormForInfer": Kind(recognition.RecResizeNormForInfer, ("rec",)),
}


def read_steps(listed: Sequence[Any], task: Task, path: str, training: bool) -> list[Step]:
    """The steps of a pipeline; ``path`` is where it stands in the configuration.

    Raises:
        UsageError: with a line for each step and key that is unknown, and each value of another type.
    """
    problems: Problems = []
    steps: list[Step] = []
    for at, one in enumerate(listed):
        step = _read(one, task, f"{path}[{at}]", problems, training)
        steps += [] if step is None else [step]
    if problems:
        raise UsageError("\n".join(problems))
    return steps


def _read(one: Any, task: Task, path: str, problems: Problems, training: bool) -> Step | None:
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
        found: Step | None = read(STEPS[name].make, keys or {}, f"{path}.{name}", problems)
    except (DataError, UsageError) as error:  # of values that do not fit each other, or name files that are not there
        problems.append(f"{path}.{name}: {error}")
        return None
    return found
