"""The number formats that a training step may compute in; parameters and gradients keep their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch

from shardwright.errors import UsageError

Precision = Literal["float32", "bf16", "fp16"]
Function = Callable[..., Any]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def precision_problem(precision: str | None, reduce_dtype: object) -> str | None:
    """Return what is wrong with these arguments of `parallelize`, None where nothing is."""
    if precision not in (None, *get_args(Precision)):
        return f"precision={precision!r} is unknown; choose one of {', '.join(map(repr, get_args(Precision)))}"
    if reduce_dtype not in (None, *_REDUCED):
        return f"reduce_dtype={reduce_dtype!r} is unknown; choose one of {', '.join(map(str, _REDUCED))}"
    return None


def within(precision: Precision | None, device: torch.device, function: Function) -> Function:
    """Return a function that computes in ``precision``, whatever is around its call; None is what is around it."""
    if precision is None:
        return function

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, _AUTOCAST.get(precision), enabled=precision != "float32"):
            return function(*args, **kwargs)

    return called


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
