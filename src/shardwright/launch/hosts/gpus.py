"""The GPUs of this host, without loading CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping


def count_gpus(environment: Mapping[str, str]) -> int:
    """The GPUs that ranks will see, by CUDA_VISIBLE_DEVICES or the driver's list, without loading CUDA."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
