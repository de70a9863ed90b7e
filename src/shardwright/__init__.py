"""Train a PyTorch model on many devices as if it were on one.

The public names are loaded on first use, so that ``shardwright launch`` can start processes
without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC: dict[str, str] = {
    "MNIST": "shardwright.data.mnist",
    "loader": "shardwright.run.loader",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'shardwright' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}"
        )
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
