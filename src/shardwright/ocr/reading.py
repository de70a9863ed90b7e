"""Applies trained networks: evaluates them on labelled images, and reads the texts of images without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.checkpoint.api import load
from shardwright.distributed.precision import autocast
from shardwright.distributed.world import World, init
from shardwright.errors import DataError, UsageError
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.libraries.geometry import rectangle_around
from shardwright.ocr.options.sections import Settings
from shardwright.ocr.results import BEST
from shardwright.ocr.samples.images import decode, encoded
from shardwright.ocr.samples.labels import icdar_line
from shardwright.ocr.samples.pipeline import read_steps
from shardwright.ocr.samples.sample import Array, Sample, Task, TextBox, generator
from shardwright.ocr.scoring.boxes import Detection, detect
from shardwright.ocr.settings import load_settings
from shardwright.ocr.tasks import TASKS, dictionary_of, text_images
from shardwright.ocr.validation import Validator


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, which each rank asks about its own images: ``predict`` is what a `Validator` calls."""

    settings: Settings
    model: nn.Module
    device: torch.device

    def predict(self, batch: Sequence[Tensor], *, gather: bool = True) -> Any:
        """Return what the network says of a batch whose first tensor are images."""
        row = TASKS[self.settings.model.type]
        with torch.no_grad(), autocast(self.settings.inference_precision, self.device):
            return row.predict(self.model, [tensor.to(self.device) for tensor in batch])


def network(config: str | None, weights: str | None, task: Task) -> Network | None:
    """The network of a configuration with the weights at a path, by default ``eval.ckpt_load_path``; None without one.

    Raises:
        UsageError, CheckpointError: where the file is of another task, or the weights are missing or do not fit.
    """
    if config is None:
        return None
    settings = load_settings(config)
    if settings.model.type != task:
        raise UsageError(f"{config} is a configuration of {settings.model.type}, expected one of {task}")
    return _loaded(settings, weights or settings.evaluating.ckpt_load_path, init(rank=0, world_size=1))


def _loaded(settings: Settings, weights: str | None, world: World) -> Network:
    if not weights or not Path(weights).exists():
        own = Path(settings.train.ckpt_save_dir) / BEST
        hint = f"type -o eval.ckpt_load_path={own}" if own.exists() else "give the path of best.pth or a checkpoint"
        raise UsageError(f"eval.ckpt_load_path: there are no weights {weights}; {hint}")
    row = TASKS[settings.model.type]
    model = row.model(settings).to(getattr(torch, settings.system.dtype))
    load(weights, model)
    return Network(settings, model.eval().to(world.device), world.device)


def evaluate(config: str, overrides: Sequence[str] = ()) -> str:
    """Return the scores of the weights of ``eval.ckpt_load_path``, in a line; all ranks of a job take part.

    Raises:
        UsageError, DataError, CheckpointError: where configuration, images or weights do not fit.
    """
    settings = load_settings(config, overrides)
    world = init(settings.system.backend) if settings.system.distribute else init(rank=0, world_size=1)
    images = text_images(settings.evaluating.dataset, settings.model.type, "eval.dataset", training=False)
    found = Validator(settings, images, world)(_loaded(settings, settings.evaluating.ckpt_load_path, world))
    return " | ".join([f"{found.samples} images", *(f"{name}: {value:.4f}" for name, value in found.metrics.items())])


@dataclass(frozen=True)
class Read:
    """A text in an image: where it stands, what it says ("" where nobody was asked), and how sure that is.

    ``points`` are four corners, or those of a polygon where ``postprocess.box_type`` is poly.
    """

    points: Array
    text: str
    score: float


@dataclass(frozen=True, eq=False)
class Pages:
    """Finds texts by one network and reads them by another; either may be missing."""

    detector: Network | None
    recogniser: Network | None

    def __post_init__(self) -> None:
        if self.detector is None and self.recogniser is None:
            raise UsageError("there is nothing to do: give --det-config, --rec-config, or both")

    def read(self, content: bytes, name: str) -> list[Read]:
        image = decode(np.frombuffer(content, np.uint8), name)
        if self.detector is None:
            height, width = image.shape[:2]
            found = [Detection(np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64), 1.0)]
        else:
            found = find_texts(self.detector, content, name)
        if self.recogniser is None:
            return [Read(one.points, "", one.score) for one in found]
        said = read_words(self.recogniser, [cut_out(image, one.points) for one in found])
        return [Read(one.points, text, score) for one, (text, score) in zip(found, said, strict=True)]

    def write(self, image: Path, out: Path) -> list[Path]:
        """Write the image with its texts drawn, and a file with their corners and words; both paths.

        Raises:
            DataError: where there is no such image.
        """
        if not image.is_file():
            raise DataError(f"there is no image {image}")
        content = image.read_bytes()
        found = self.read(content, str(image))
        out.mkdir(parents=True, exist_ok=True)
        drawn, lines = out / f"{image.stem}.png", out / f"{image.stem}.txt"
        drawn.write_bytes(encoded(draw(decode(np.frombuffer(content, np.uint8), str(image)), found)))
        lines.write_text("".join(icdar_line(TextBox(one.points, one.text)) + "\n" for one in found), encoding="utf-8")
        return [drawn, lines]


def _prepared(network: Network, content: bytes, name: str) -> Sample:
    settings = network.settings
    listed = settings.evaluating.dataset.transform_pipeline
    sample = Sample(name, np.frombuffer(content, np.uint8), [])
    for step in read_steps(listed, settings.model.type, "eval.dataset.transform_pipeline", training=False):
        step(sample, generator(0, 0, 0))
    return sample


def find_texts(network: Network, content: bytes, name: str) -> list[Detection]:
    """Return the texts that a network detects in an image, given as the contents of its file."""
    sample = _prepared(network, content, name)
    maps = network.predict([torch.from_numpy(sample.image)[None]])
    return detect(maps[0].float().cpu().numpy(), [*sample.shape, *sample.ratio], network.settings.postprocess)


def read_words(network: Network, words: Sequence[Array]) -> list[tuple[str, float]]:
    """Return the texts of images of single words, and the mean likelihood of their steps."""
    if not words:
        return []
    samples = [_prepared(network, encoded(word), f"word {at}") for at, word in enumerate(words)]
    ids, likely = network.predict([torch.from_numpy(np.stack([sample.image for sample in samples]))])
    dictionary = dictionary_of(network.settings)
    return [(dictionary.decode(row), score) for row, score in zip(ids.tolist(), likely.mean(1).tolist(), strict=True)]


def cut_out(image: Array, points: Array) -> Array:
    """Return the part of an image between four corners, or in the rectangle around more, straightened.

    Upright words are laid down.
    """
    cv2 = library("cv2")
    points = points if len(points) == 4 else rectangle_around(points)[0]
    sides = np.linalg.norm(points - np.roll(points, -1, axis=0), axis=1)
    width, height = (max(1, round(float(max(sides[at], sides[at + 2])))) for at in (0, 1))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    move = cv2.getPerspectiveTransform(points.astype(np.float32), target)
    part: Array = cv2.warpPerspective(image, move, (width, height), borderMode=cv2.BORDER_REPLICATE)
    return np.ascontiguousarray(np.rot90(part)) if height > 1.5 * width else part


def draw(image: Array, texts: Sequence[Read]) -> Array:
    """The image with a line around each text, and its word above."""
    cv2 = library("cv2")
    whole = image.copy()
    for one in texts:
        cv2.polylines(whole, [np.rint(one.points).astype(np.int32).reshape(-1, 1, 2)], True, (0, 160, 0), 2)
    pictures, draws, fonts = library("PIL.Image"), library("PIL.ImageDraw"), library("PIL.ImageFont")
    picture = pictures.fromarray(np.ascontiguousarray(whole[:, :, ::-1]))
    pen, font = draws.Draw(picture), fonts.load_default(18)
    for one in texts:
        x, y = one.points.min(axis=0)
        at = max(0, x), max(0, y - 22)
        pen.text(at, one.text, fill=(200, 0, 0), font=font, stroke_width=2, stroke_fill=(255, 255, 255))
    return np.ascontiguousarray(np.asarray(picture)[:, :, ::-1])
