"""The sections of a configuration file, as types: every key with its type, its range and what it is when left out.

The sections that come in several kinds are chosen from the tables of `tables.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.compiler.plan.searches import Mode, SearchName
from shardwright.distributed.gradients import Reduction
from shardwright.distributed.precision import Precision
from shardwright.training.zoo.rows import (
    DataOptions,
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    ScheduleOptions,
    at_least,
    between,
    more_than,
)
from shardwright.training.zoo.tables import DATA, LOSSES, MODELS, OPTIMIZERS, SCHEDULES


@dataclass(frozen=True, kw_only=True)
class System:
    """The processes: those that a launcher started, or this one alone where ``distribute`` is false."""

    distribute: bool = True
    seed: int = at_least(0, 0)
    deterministic: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The arguments of `sw.parallelize`; ``pins`` maps patterns of module paths to strategies."""

    mode: Mode = "data"
    search: SearchName | None = None
    mesh: str | None = None
    plan: str | None = None
    pins: dict[str, Any] = field(default_factory=dict)
    gradients: Reduction = "mean"
    batch_norm: Literal["global", "per-replica"] = "global"
    hardware: str | None = None
    memory: str | None = None
    save_graphs: str | None = None
    compile: bool | Literal["auto"] = False


@dataclass(frozen=True, kw_only=True)
class Train:
    """The length of a run and what it leaves.

    ``steps`` ends the run early, counted in optimizer steps, and leaves the schedule that of all epochs.

    A null switches a thing off. Checkpoints are in ``output_dir``/checkpoints: the newest ``checkpoint_latest_k``, and
    the best ``checkpoint_top_k`` by ``checkpoint_metric`` (of the loss less is better, of any other more). ``resume``
    auto goes on from the newest one there or begins anew, a path from that one.
    """

    epochs: int = at_least(1, 10)
    steps: int | None = at_least(1, None)
    accumulate: int = at_least(1, 1)
    clip_norm: float | None = more_than(0, None)
    precision: Precision = "float32"
    ema_decay: float | None = between(0, 1, None)
    log_every: int = at_least(1, 10)
    output_dir: str = "train_output"
    checkpoint: Literal["none", "synchronous", "asynchronous"] = "synchronous"
    checkpoint_every_epochs: int | None = at_least(1, 1)
    checkpoint_every_steps: int | None = at_least(1, None)
    checkpoint_every_minutes: float | None = more_than(0, None)
    checkpoint_latest_k: int | None = at_least(1, 3)
    checkpoint_top_k: int | None = at_least(1, None)
    checkpoint_metric: str = "loss"
    resume: str | None = None
    early_stopping_patience: int | None = at_least(1, None)
    early_stopping_metric: str = "loss"
    nan_guard: bool = True
    progress_bar: bool = True


@dataclass(frozen=True, kw_only=True)
class Eval:
    """The evaluation on the test data after every epoch; ``batch_size`` counts the global batch."""

    enabled: bool = True
    batch_size: int = at_least(1, 500)


@dataclass(frozen=True, kw_only=True)
class Log:
    """The targets that record the numbers of a run, every ``train.log_every`` steps, beside its lines.

    ``to`` lists some of csv, jsonl, tensorboard, wandb and mlflow; files are in ``train.output_dir``.
    """

    to: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The optimizer steps that torch's profiler traces on all ranks, counted from 1.

    ``train.output_dir``/trace.json is for ui.perfetto.dev.
    """

    steps: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration; where its file names no loss, the model's row does.

    A field with a table has the options of one of its rows.
    """

    data: DataOptions = field(metadata={"table": DATA})
    model: ModelOptions = field(metadata={"table": MODELS})
    system: System = field(default_factory=System)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    loss: LossOptions = field(metadata={"table": LOSSES})
    optimizer: OptimizerOptions = field(
        default_factory=lambda: OPTIMIZERS.options("sgd"), metadata={"table": OPTIMIZERS}
    )
    scheduler: ScheduleOptions = field(
        default_factory=lambda: SCHEDULES.options("constant"), metadata={"table": SCHEDULES}
    )
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
    trace: TraceOptions = field(default_factory=TraceOptions)
