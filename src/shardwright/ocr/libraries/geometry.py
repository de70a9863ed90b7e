"""Polygons, (n, 2) arrays of x and y: sizes, offsets and overlaps, as shapely and pyclipper have them.

No polygon is too odd: those that are empty, that cross themselves or that lie outside of everything have answers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.ocr.libraries.extra import library

Points = npt.NDArray[Any]
_FINENESS = 1024.0  # pyclipper counts in whole numbers: so many to a pixel


def shape_of(points: Points) -> Any:
    """The polygon as one of shapely, made valid where it crosses itself; an empty one of fewer than three points."""
    shapely = library("shapely")
    if len(points) < 3:
        return shapely.Polygon()
    polygon = shapely.Polygon(points)
    # Lines that are left of what has no extent are dropped: GEOS cannot intersect them with polygons.
    return polygon if polygon.is_valid else shapely.make_valid(polygon, method="structure", keep_collapsed=False)


def area(points: Points) -> float:
    """Return the area of a polygon."""
    return float(shape_of(points).area)


def is_simple(points: Points) -> bool:
    """Return whether points make a polygon that has an area and does not cross itself."""
    shapely = library("shapely")
    if len(points) < 3:
        return False
    polygon = shapely.Polygon(points)
    return bool(polygon.is_valid) and polygon.area > 0


def perimeter(points: Points) -> float:
    """Return the length of the border of a polygon, 0 without points."""
    return float(np.linalg.norm(points - np.roll(points, 1, axis=0), axis=1).sum()) if len(points) else 0.0


def shrink_distance(points: Points, ratio: float) -> float:
    """By how much a polygon is shrunk so that its area becomes about ``ratio`` squared of what it is.

    >>> shrink_distance(np.array([[0, 0], [10, 0], [10, 10], [0, 10]]), 0.4)
    2.1
    """
    around = perimeter(points)
    return area(points) * (1 - ratio**2) / around if around else 0.0


def offset(points: Points, distance: float) -> list[Points]:
    """The polygons of which all points are ``distance`` farther out; negative distances shrink, to none at last."""
    pyclipper = library("pyclipper")
    if len(points) < 3 or not np.isfinite(points).all():
        return []
    path = [tuple(map(int, point)) for point in np.rint(points * _FINENESS)]
    offsetting = pyclipper.PyclipperOffset()
    try:
        offsetting.AddPath(path, pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    except pyclipper.ClipperException:  # of no extent
        return []
    found = offsetting.Execute(distance * _FINENESS)
    return [np.asarray(polygon, dtype=np.float64) / _FINENESS for polygon in found]


def simplified(points: Points, away: float) -> Points:
    """Return the polygon with fewer corners, whose border is no more than ``away`` pixels off."""
    simple = library("shapely").Polygon(points).simplify(away)
    return np.asarray(simple.exterior.coords, dtype=np.float64)[:-1]


def overlaps(a: Sequence[Points], b: Sequence[Points]) -> tuple[Points, Points, Points]:
    """(areas of the intersections [len(a), len(b)], areas of ``a``, areas of ``b``)."""
    shapely = library("shapely")
    left, right = (np.array([shape_of(points) for points in polygons], dtype=object) for polygons in (a, b))
    if not len(left) or not len(right):
        return np.zeros((len(left), len(right))), _areas(left), _areas(right)
    both = shapely.area(shapely.intersection(left[:, None], right[None, :]))
    return both, _areas(left), _areas(right)


def _areas(shapes: Points) -> Points:
    areas: Points = library("shapely").area(shapes) if len(shapes) else np.zeros(0)
    return areas


def rectangle_around(points: Points) -> tuple[Points, float]:
    """Return the corners of the smallest rectangle around the points, and its shorter side.

    The corners go clockwise from the upper left one.
    """
    cv2 = library("cv2")
    rectangle = cv2.minAreaRect(np.asarray(points, dtype=np.float32).reshape(-1, 1, 2))
    return in_order(cv2.boxPoints(rectangle)), float(min(rectangle[1]))


def in_order(points: Points) -> Points:
    """Four corners clockwise, as images have them, from the one on which x + y is least."""
    points = np.asarray(points, dtype=np.float64)
    middle = points.mean(axis=0)
    turned = points[np.argsort(np.arctan2(points[:, 1] - middle[1], points[:, 0] - middle[0]), kind="stable")]
    return np.roll(turned, -int(turned.sum(axis=1).argmin()), axis=0)
