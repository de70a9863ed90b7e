"""From a map of probabilities to boxes or polygons around texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.libraries.geometry import Points
from shardwright.ocr.options.parts import DetectionPostprocess


@dataclass(frozen=True)
class Detection:
    """Four corners clockwise, or those of a polygon, in pixels of the image, and the mean probability within."""

    points: Points
    score: float


def detect(probability: Points, shape: Sequence[float], how: DetectionPostprocess) -> list[Detection]:
    """Return the texts in a map [h, w] of an image, as rectangles or polygons.

    ``shape`` is (height, width, how much the height was scaled, how much the width): texts are those of the image as it
    was before, and end at its borders.
    """
    cv2 = library("cv2")
    contours, _ = cv2.findContours(
        (probability >= how.binary_thresh).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE
    )
    outline = _polygon if how.box_type == "poly" else _rectangle
    found = []
    for contour in contours[: how.max_candidates]:
        points = outline(contour, how)
        if points is None:
            continue
        score = mean_within(probability, points)
        if score < how.box_thresh:
            continue
        grown = _expanded(points, how)
        if grown is not None:
            found.append(Detection(_in_image(grown, shape), score))
    return found


def _rectangle(contour: Points, how: DetectionPostprocess) -> Points | None:
    points, side = geometry.rectangle_around(contour)
    return points if side >= how.min_size else None


def _polygon(contour: Points, how: DetectionPostprocess) -> Points | None:
    """The contour with fewer corners, four at least, which are off by no more than a two-hundredth of its length."""
    cv2 = library("cv2")
    points: Points = cv2.approxPolyDP(contour, 0.005 * cv2.arcLength(contour, True), True).reshape(-1, 2)
    return points.astype(np.float64) if len(points) >= 4 else None


def mean_within(probability: Points, points: Points) -> float:
    """The mean of a map over the pixels of a polygon; 0 where it has none inside of the map."""
    cv2 = library("cv2")
    height, width = probability.shape
    low = np.floor(points.min(axis=0)).astype(int).clip(0, (width - 1, height - 1))
    high = np.ceil(points.max(axis=0)).astype(int).clip(0, (width - 1, height - 1))
    mask = np.zeros((high[1] - low[1] + 1, high[0] - low[0] + 1), np.uint8)
    cv2.fillPoly(mask, [np.rint(points - low).astype(np.int32).reshape(-1, 1, 2)], 1)
    window = probability[low[1] : high[1] + 1, low[0] : high[0] + 1]
    return float(window[mask > 0].mean()) if mask.any() else 0.0


def _expanded(points: Points, how: DetectionPostprocess) -> Points | None:
    """Return the grown polygon, or the rectangle around it; None where it is too small or in pieces.

    It grows by area * ratio / perimeter, as it was shrunk in training.
    """
    around = geometry.perimeter(points)
    if not around:
        return None
    grown = geometry.offset(points, geometry.area(points) * how.expand_ratio / around)
    if len(grown) != 1:
        return None
    box, side = geometry.rectangle_around(grown[0])
    if side < how.min_size:
        return None
    # Round corners were grown of sharp ones, a corner for each fraction of a pixel.
    return geometry.simplified(grown[0], 0.5) if how.box_type == "poly" else box


def _in_image(box: Points, shape: Sequence[float]) -> Points:
    height, width, down, across = shape
    return (box / (across, down)).clip(0, (width, height))
