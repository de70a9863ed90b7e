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
    "Callback": "shardwright.training.hooks",
    "CaptureError": "shardwright.errors",
    "CharacterText": "shardwright.data.text",
    "CheckpointError": "shardwright.errors",
    "DamageError": "shardwright.errors",
    "DataError": "shardwright.errors",
    "EMA": "shardwright.training.callbacks",
    "EagerFallback": "shardwright.runtime.parallel",
    "EarlyStopping": "shardwright.training.callbacks",
    "LaunchError": "shardwright.errors",
    "LossMonitor": "shardwright.training.callbacks",
    "LoweringError": "shardwright.errors",
    "MNIST": "shardwright.data.mnist",
    "Mesh": "shardwright.compiler.mesh.mesh",
    "ModelCheckpoint": "shardwright.training.checkpointing",
    "NanGuard": "shardwright.training.callbacks",
    "ParallelModel": "shardwright.runtime.model",
    "Plan": "shardwright.compiler.plan.plan",
    "PlanError": "shardwright.errors",
    "ProgressBar": "shardwright.training.callbacks",
    "RandomImages": "shardwright.data.images",
    "Recorder": "shardwright.training.recorder",
    "RunView": "shardwright.training.hooks",
    "ShardwrightError": "shardwright.errors",
    "StrategyError": "shardwright.errors",
    "Tracer": "shardwright.training.tracing",
    "Trainer": "shardwright.training.trainer",
    "TrainingError": "shardwright.errors",
    "UsageError": "shardwright.errors",
    "World": "shardwright.distributed.world",
    "WorldError": "shardwright.errors",
    "checkpoint": "shardwright.checkpoint",
    "constant_schedule": "shardwright.training.schedules",
    "cosine_schedule": "shardwright.training.schedules",
    "create_group": "shardwright.distributed.groups",
    "destroy_group": "shardwright.distributed.groups",
    "get_group_rank_from_world_rank": "shardwright.distributed.groups",
    "get_group_size": "shardwright.distributed.groups",
    "get_local_rank": "shardwright.distributed.groups",
    "get_local_size": "shardwright.distributed.groups",
    "get_rank": "shardwright.distributed.groups",
    "get_world_rank_from_group_rank": "shardwright.distributed.groups",
    "init": "shardwright.distributed.world",
    "loader": "shardwright.data.loading.loader",
    "notebook_launch": "shardwright.training.notebook",
    "parallelize": "shardwright.runtime.parallel",
    "polynomial_schedule": "shardwright.training.schedules",
    "reduce_gradients": "shardwright.distributed.gradients",
    "register_rule": "shardwright.compiler.rules.register",
    "set_seed": "shardwright.distributed.seed",
    "shard": "shardwright.compiler.capture.pins",
    "step_schedule": "shardwright.training.schedules",
    "verify": "shardwright.runtime.verification.verify",
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


def _register_backends() -> None:
    """Make the backend shm known to torch, which calls this when it is imported (entry point in pyproject.toml)."""
    importlib.import_module("shardwright.distributed.backends.shm").register()
