"""Collates samples to batches in host memory, whatever `torch.set_default_device` says."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate


def collate(samples: list[Any]) -> Any:
    """Return what torch's ``default_collate`` makes of samples; numbers and arrays become tensors of the CPU."""
    with torch.device("cpu"):
        return default_collate(samples)
