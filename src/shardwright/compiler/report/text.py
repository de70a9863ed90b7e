"""Lines of text that people and tools read from the logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def loss_line(epoch: int, step: int, loss: float) -> str:
    """The line of one step, epochs and steps counted from 1, the loss with the shortest digits that give its float32.

    >>> loss_line(1, 50, 2.2963896)
    'epoch: 1 step: 50, loss is 2.2963896'
    """
    return f"epoch: {epoch} step: {step}, loss is {np.float32(loss)!s}"


def validation_line(epoch: int, loss: float, metrics: Mapping[str, float]) -> str:
    """The line of one validation, with four decimals; a loss that is nan was not computed.

    >>> validation_line(3, 0.12341, {"accuracy": 0.9876})
    'val | epoch: 3 | loss: 0.1234 | accuracy: 0.9876'
    """
    values = metrics if math.isnan(loss) else {"loss": loss, **metrics}
    return " | ".join(["val", f"epoch: {epoch}", *(f"{name}: {value:.4f}" for name, value in values.items())])


def start_line(micro_batches: Sequence[int], ranks: int, rates: Sequence[float], precision: str) -> str:
    """Return the first line of a run: the samples of each batch of the first step, and the rates.

    >>> start_line([32, 32], 2, [0.1, 0.1], "bf16")
    'global batch: 64 samples (2 x 32) on 2 ranks, learning rate: 0.1, precision: bf16'
    """
    parts = f" ({len(micro_batches)} x {micro_batches[0]})" if len(micro_batches) > 1 else ""
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    distinct = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
    batch = f"global batch: {sum(micro_batches)} samples{parts} on {where}"
    return f"{batch}, learning rate: {distinct}, precision: {precision}"


def size_text(count: float) -> str:
    """Bytes as people read them, in powers of ten.

    >>> size_text(25_170_000), size_text(1_234), size_text(7)
    ('25.17 MB', '1.23 kB', '7 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
