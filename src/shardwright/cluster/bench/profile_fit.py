"""From measured times to a curve: few segments, each a latency and a bandwidth, that never fall.

A size that was disturbed is put right first: each time becomes the median of itself and its two neighbours, which
changes nothing where times rise. What still falls is averaged, in logarithms. Knots are then added where the curve is
furthest off, until it is within ``tolerance`` of every point; between knots the time is linear in the bytes, which is a
latency and a bandwidth. The times at the knots are the least squares of the relative errors over all points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.ndimage import median_filter
from scipy.optimize import isotonic_regression

from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.errors import UsageError

Array = npt.NDArray[np.float64]
_FASTEST = 1e15  # bytes per second of a segment in which the bytes cost nothing


def fit(points: Sequence[tuple[int, float]], tolerance: float = 0.08) -> Curve:
    """Return the curve through (bytes, seconds). Raises `UsageError` for less than two sizes, or times not above 0."""
    ordered = sorted(points)
    sizes = np.array([size for size, _ in ordered], dtype=np.float64)
    times = np.array([seconds for _, seconds in ordered])
    if len(set(sizes)) < len(sizes) or len(sizes) < 2 or not (times > 0).all() or not np.isfinite(times).all():
        raise UsageError(f"a curve needs two sizes or more, each once, with times above 0; got {ordered}")
    undisturbed = median_filter(times, 3, mode="nearest")
    smooth: Array = np.exp(isotonic_regression(np.log(undisturbed)).x)  # the nearest by squares of logarithms
    knots = [0, len(sizes) - 1]
    while True:
        at_knots = _least_squares(sizes, smooth, knots)
        error = np.abs(np.interp(sizes, sizes[knots], at_knots) / smooth - 1)
        error[knots] = 0.0
        # The last segment goes on beyond the sizes: one disturbed size near their end would bend it far off.
        error[sizes > sizes[-1] / 2] = 0.0
        worst = int(error.argmax())
        if error[worst] <= tolerance:
            return _curve(sizes[knots], at_knots)
        knots = sorted({*knots, worst})


def _least_squares(sizes: Array, times: Array, knots: list[int]) -> Array:
    """Return the times at the knots that leave the least squares of relative errors; they never fall."""
    hats = np.stack([np.interp(sizes, sizes[knots], row) for row in np.eye(len(knots))], axis=1)
    times_at_knots, *_ = np.linalg.lstsq(hats / times[:, None], np.ones(len(times)), rcond=None)
    rising: Array = np.maximum.accumulate(np.maximum(times_at_knots, times[0] / 2))
    return rising


def _curve(sizes: Array, times: Array) -> Curve:
    segments: list[Segment] = []
    times = times + (sizes - sizes[0]) / _FASTEST
    for left, right, at_left, at_right in zip(sizes, sizes[1:], times, times[1:], strict=False):
        bandwidth = float((right - left) / (at_right - at_left))
        latency_s = float(at_left - left / bandwidth)
        if not segments and latency_s <= 0:  # so few points at the start that the line would begin below nothing
            latency_s, bandwidth = float(at_left), _FASTEST
        segments.append(Segment(int(left) if segments else 0, latency_s, bandwidth))
    return Curve(tuple(segments))
