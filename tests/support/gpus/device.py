"""On which device tests run their graphs and programs: SHARDWRIGHT_TEST_DEVICE, the CPU where it is not set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardwright.common.trees import tree_map

VARIABLE = "SHARDWRIGHT_TEST_DEVICE"


def chosen(text: str) -> torch.device:
    """The device of that name.

    Raises:
        pytest.UsageError: where there is none.
    """
    try:
        device = torch.device(text or "cpu")
    except RuntimeError as error:
        raise pytest.UsageError(f"{VARIABLE}={text} is no device ({error}); choose cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"{VARIABLE}={text}, but torch {torch.__version__} sees no GPU; leave it out for the CPU"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


DEVICE = chosen(os.environ.get(VARIABLE, ""))


def on_device(environ: Mapping[str, str] = os.environ) -> None:
    """From now on `sw.init()` of this process computes on the device that is asked for, unless told otherwise.

    As many ranks as a test wants share the GPUs that there are, by gloo.
    """
    if not environ.get(VARIABLE):
        return
    import shardwright.distributed.world as room

    plain = room.init

    def init(backend: str | None = None, **options: Any) -> Any:
        there = {} if backend is not None or "device" in options else {"device": environ[VARIABLE]}
        return plain(backend or ("gloo" if there else None), **there, **options)

    room.init = init


def placed(tree: Any, device: torch.device = DEVICE) -> Any:
    """The same tensors, modules and trees of them on the device."""
    if isinstance(tree, torch.nn.Module):
        return tree.to(device)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)
