"""Lines of text that people and tools read from the logs."""

from __future__ import annotations

import numpy as np


def loss_line(epoch: int, step: int, loss: float) -> str:
    """The line of one step, epochs and steps counted from 1, the loss with the shortest digits that give its float32.

    >>> loss_line(1, 50, 2.2963896)
    'epoch: 1 step: 50, loss is 2.2963896'
    """
    return f"epoch: {epoch} step: {step}, loss is {np.float32(loss)!s}"
