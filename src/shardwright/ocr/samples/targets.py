"""The maps that a detector learns: texts that are shrunk, and the borders around them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.samples.sample import IGNORED, Array, Sample


@dataclass(frozen=True)
class ShrinkBinaryMap:
    """The map of shrunk texts, and the mask of texts that count.

    ``binary_map`` is 1 inside of each text that is shrunk by area * (1 - ratio²) / perimeter. ``mask`` is 0 on texts
    that do not count: those that nobody can read, and those less than ``min_text_size`` pixels high or wide.
    """

    min_text_size: float = 8
    shrink_ratio: float = 0.4

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        texts, valid = np.zeros(sample.size, np.float32), np.ones(sample.size, np.float32)
        for at, box in enumerate(sample.boxes):
            shrunk = [] if box.ignored or self._small(box.points) else self._shrunk(box.points)
            if shrunk:
                fill(texts, shrunk, 1)
            else:
                fill(valid, [box.points], 0)
                sample.boxes[at] = replace(box, text=IGNORED[0])
        sample.columns |= {"binary_map": texts, "mask": valid}

    def _small(self, points: Array) -> bool:
        return len(points) < 3 or float(np.ptp(points, axis=0).min()) < self.min_text_size

    def _shrunk(self, points: Array) -> list[Array]:
        return geometry.offset(points, -geometry.shrink_distance(points, self.shrink_ratio))


@dataclass(frozen=True)
class BorderMap:
    """The map of the borders of texts, and its mask.

    ``thresh_map`` falls from ``thresh_max`` on the border of each text to ``thresh_min`` at the distance by which it
    was shrunk, and farther off. ``thresh_mask`` is 1 on texts and up to this distance around them.
    """

    shrink_ratio: float = 0.4
    thresh_min: float = 0.3
    thresh_max: float = 0.7

    def __call__(self, sample: Sample, random: np.random.Generator) -> None:
        border, near = np.zeros(sample.size, np.float32), np.zeros(sample.size, np.float32)
        for box in sample.boxes:
            if not box.ignored:
                self._draw(box.points, border, near)
        border = border * (self.thresh_max - self.thresh_min) + self.thresh_min
        sample.columns |= {"thresh_map": border, "thresh_mask": near}

    def _draw(self, points: Array, border: Array, near: Array) -> None:
        distance = geometry.shrink_distance(points, self.shrink_ratio)
        dilated = geometry.offset(points, distance) if distance else []
        if not dilated:
            return
        fill(near, dilated, 1)
        (left, top), (right, bottom) = (end(np.concatenate(dilated), axis=0) for end in (np.min, np.max))
        rows = slice(max(0, int(top)), min(border.shape[0], int(bottom) + 1))
        columns = slice(max(0, int(left)), min(border.shape[1], int(right) + 1))
        if rows.start < rows.stop and columns.start < columns.stop:
            away = distances(points, rows, columns) / distance
            window = border[rows, columns]
            np.maximum(window, (1 - away).clip(0, 1), out=window)


def distances(points: Array, rows: slice, columns: slice) -> Array:
    """Return how far each pixel of a window is from the border of a polygon, float32 (rows, columns)."""
    y, x = np.mgrid[rows, columns].astype(np.float32)
    nearest = np.full(x.shape, np.inf, dtype=np.float32)
    for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, axis=0), strict=True):
        dx, dy = bx - ax, by - ay
        length = dx * dx + dy * dy
        along = ((x - ax) * dx + (y - ay) * dy) / length if length else np.zeros_like(x)
        along = along.clip(0, 1)
        np.minimum(nearest, np.hypot(x - ax - along * dx, y - ay - along * dy), out=nearest)
    return nearest


def fill(canvas: Array, polygons: list[Array], value: float) -> None:
    """Set the pixels inside of each polygon; what lies outside of the canvas is left out."""
    for polygon in polygons:
        if len(polygon) >= 3:
            limit = 4 * max(canvas.shape) + 1000  # opencv counts in 16 bits beside the point
            whole = np.rint(polygon.clip(-limit, limit)).astype(np.int32)
            library("cv2").fillPoly(canvas, [whole.reshape(-1, 1, 2)], value)
