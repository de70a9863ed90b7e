"""Images of noise with labels drawn apart from them, to try a program without any data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.data.images import LabelledImages
from shardwright.data.transforms import Transform
from shardwright.errors import UsageError


class RandomDataWarning(UserWarning):
    """A warning that the data have nothing in them that could be learned."""


class RandomImages(LabelledImages):
    """``count`` pairs of an image of independent pixels, float32 of ``shape`` in [0, 1], and a label below ``classes``.

    The same ``seed`` gives the same images. Warns (`RandomDataWarning`) that nothing can be learnt from them. Raises
    `UsageError` for sizes that do not fit.
    """

    def __init__(
        self,
        count: int = 5000,
        shape: Sequence[int] = (3, 32, 32),
        classes: int = 2,
        seed: int = 0,
        transform: Transform | Callable[..., Any] | None = None,
    ) -> None:
        if count < 1 or not 1 <= classes <= 256 or len(shape) != 3 or min(shape) < 1:
            raise UsageError(
                "expected count of at least 1, 1 to 256 classes and a shape of three sizes (channels, height, width), "
                f"got count={count}, classes={classes}, shape={tuple(shape)}"
            )
        # Raw words of the bit generator, which NumPy promises to keep; its samplers it does not.
        words = np.random.Philox(key=seed).random_raw(count * (-(-int(np.prod(shape)) // 8) + 1)).reshape(count, -1)
        pixels = np.ascontiguousarray(words[:, 1:]).astype("<u8", copy=False).view(np.uint8)
        images = pixels[:, : int(np.prod(shape))].reshape(count, *shape)
        super().__init__(images, (words[:, 0] % classes).astype(np.uint8), transform=transform)
        warnings.warn(
            f"the images are random and so are their labels: accuracy on others than these will be about "
            f"{'one half' if classes == 2 else f'1/{classes}'}, whatever is trained",
            RandomDataWarning,
            stacklevel=2,
        )
