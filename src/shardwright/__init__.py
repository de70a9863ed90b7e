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
    "CIFAR10": "shardwright.data.cifar",
    "Callback": "shardwright.run.callbacks",
    "CharacterText": "shardwright.data.text",
    "EMA": "shardwright.run.callbacks",
    "EarlyStopping": "shardwright.run.callbacks",
    "LossMonitor": "shardwright.run.callbacks",
    "MNIST": "shardwright.data.mnist",
    "ModelCheckpoint": "shardwright.run.checkpointing",
    "NanGuard": "shardwright.run.callbacks",
    "ProgressBar": "shardwright.run.callbacks",
    "RandomImages": "shardwright.data.random_images",
    "Trainer": "shardwright.run.trainer",
    "World": "shardwright.run.world",
    "checkpoint": "shardwright.checkpoint",
    "constant_schedule": "shardwright.run.schedules",
    "cosine_schedule": "shardwright.run.schedules",
    "create_group": "shardwright.run.groups",
    "destroy_group": "shardwright.run.groups",
    "get_group_rank_from_world_rank": "shardwright.run.groups",
    "get_group_size": "shardwright.run.groups",
    "get_local_rank": "shardwright.run.groups",
    "get_local_size": "shardwright.run.groups",
    "get_rank": "shardwright.run.groups",
    "get_world_rank_from_group_rank": "shardwright.run.groups",
    "init": "shardwright.run.world",
    "loader": "shardwright.run.loader",
    "parallelize": "shardwright.run.parallel",
    "polynomial_schedule": "shardwright.run.schedules",
    "reduce_gradients": "shardwright.run.gradients",
    "set_seed": "shardwright.run.seed",
    "shard": "shardwright.graph.pins",
    "step_schedule": "shardwright.run.schedules",
    "verify": "shardwright.run.verify",
}

# those that are modules themselves: sw.checkpoint.save
_ROOMS = {"checkpoint"}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'shardwright' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}"
        )
    module = importlib.import_module(_PUBLIC[name])
    value = module if name in _ROOMS else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
