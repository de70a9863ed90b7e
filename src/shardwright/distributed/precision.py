"""The number formats that a training step may compute in; parameters and gradients keep their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from shardwright.errors import UsageError

Precision = Literal["float32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str) -> None:
    """Raises `UsageError` for one that is unknown."""
    if precision not in get_args(Precision):
        raise UsageError(f"precision={precision!r} is unknown; choose one of {', '.join(get_args(Precision))}")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Inside, forwards compute in ``precision``: "float32" leaves every operator the dtype of its operands."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])


def gradient_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Scales losses so that small gradients survive fp16; for the other precisions it does nothing.

    Ranks agree on overflows without talking where gradients are replicated, and by torch's reduction over the mesh
    where they are DTensors.
    """
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
