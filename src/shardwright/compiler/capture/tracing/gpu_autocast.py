"""Autocast of GPUs in a capture on a machine that has none, as for a plan that is made on a laptop.

Without a GPU torch turns ``torch.autocast("cuda")`` off, with a warning, and a step would be planned in float32. A step
cannot be traced as of a GPU there either: autograd ends the process for tensors of a device that torch was built
without. So it is traced as of a CPU, with autocast of CPUs to the same dtype in place of that of GPUs. Both cast what
matrices are multiplied of; a few other operators that GPUs compute in float32, CPUs compute as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.common import torch_private

NOTE = (
    "captured on a CPU, since there is no GPU here: torch.autocast casts as on CPUs, which computes a few operators in "
    "other dtypes than a GPU does; a saved plan may have to be made again there"
)


@contextmanager
def autocast_without_gpu() -> Iterator[Callable[[], bool]]:
    """Let ``torch.autocast("cuda", ...)`` be that of CPUs; what is given says whether any was made."""
    made: list[str] = []

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type != "cuda":
            before["__init__"](self, device_type, *args, **kwargs)
            return
        made.append(device_type)
        if not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        before["__init__"](self, "cpu", *args, **kwargs)

    with torch_private.patched("autocast", __init__=init) as before:
        yield lambda: bool(made)
