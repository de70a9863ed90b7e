"""Checks a configuration beyond its keys, before the ranks connect: one line for each problem."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwright.compiler.mesh.mesh import SEARCHED_STAGES, Mesh
from shardwright.errors import UsageError
from shardwright.launch.hosts.environment import read_environment
from shardwright.training.records import record_problems
from shardwright.training.zoo.options import Config
from shardwright.training.zoo.rows import Data
from shardwright.training.zoo.tables import DATA, LOSSES, MODELS, OPTIMIZERS, freeze, make_model, warmup_steps


def option_problems(config: Config, ranks: int) -> list[str]:
    """Problems of options that contradict each other, or the ``ranks`` that are to run."""
    recorded = [f"log.to: {problem}" for problem in record_problems(config.log.to)]
    traced = [f"trace.steps: expected numbers from 1 on, got {step}" for step in config.trace.steps if step < 1]
    return _batch_problems(config) + _optimizer_problems(config) + _parallel_problems(config, ranks) + recorded + traced


def data_problems(config: Config, data: Data, ranks: int) -> list[str]:
    """Problems of options that do not fit the data."""
    return (_loss_problems(config) or _model_problems(config, data)) + _length_problems(config, data, ranks)


def _batch_problems(config: Config) -> list[str]:
    data, problems = config.data, []
    if (data.batch_size is None) == (data.batch_size_per_rank is None):
        got = "neither" if data.batch_size is None else "both"
        problems.append(f"data.batch_size or data.batch_size_per_rank: expected one of them, got {got}")
    if config.optimizer.scale_lr == "linear" and not (config.optimizer.base_batch or data.batch_size_per_rank):
        problems.append("optimizer.base_batch is missing: scale_lr linear divides the samples of a step by it")
    return problems


def _optimizer_problems(config: Config) -> list[str]:
    problems = OPTIMIZERS.row(config.optimizer).problems(config.optimizer)
    if config.scheduler.warmup_steps and config.scheduler.warmup_epochs:
        problems = [*problems, "scheduler.warmup_steps or scheduler.warmup_epochs: expected one of them, got both"]
    return problems


def _parallel_problems(config: Config, ranks: int) -> list[str]:
    options, environment, problems = config.parallel, read_environment(os.environ), []
    if options.plan is not None and not Path(options.plan).is_file():
        problems.append(f"parallel.plan: there is no file {options.plan}; `shardwright plan --save` writes one")
    if options.mesh is not None and options.mesh != SEARCHED_STAGES:
        try:
            mesh = Mesh.parse(options.mesh)
            if mesh.size != ranks:
                problems.append(f"parallel.mesh: {options.mesh} is for {mesh.size} ranks, got {ranks}")
        except UsageError as error:
            problems.append(f"parallel.mesh: {error}")
    if environment.size > 1 and not config.system.distribute:
        problems.append(
            f"system.distribute: false trains alone, but {environment.launcher} started {environment.size} processes; "
            "type -o system.distribute=true, or start one"
        )
    return problems


def _loss_problems(config: Config) -> list[str]:
    targets = DATA.row(config.data).targets
    if LOSSES.row(config.loss).targets == targets:
        return []
    fitting = " or ".join(name for name, loss in LOSSES.rows.items() if loss.targets == targets)
    return [f"loss.name: the {config.data.type} data have {targets} as their targets; use {fitting}"]


def _model_problems(config: Config, data: Data) -> list[str]:
    problems = _sample_problems(config, data) + _class_problems(config, data)
    if problems:
        return problems
    with torch.device("meta"):
        unmatched = freeze(make_model(config.model, data), config.model.frozen)
    return [f"model.frozen: no parameter of {config.model.name} is called {pattern}" for pattern in unmatched]


def _sample_problems(config: Config, data: Data) -> list[str]:
    row = MODELS.row(config.model)
    if row.takes_ids or data.sample_dtype.is_floating_point:
        return row.problems(config.model, data)
    fitting = " or ".join(name for name, model in MODELS.rows.items() if model.takes_ids)
    return [f"model.name: {config.model.name} takes numbers, the data have ids; use {fitting}"]


def _class_problems(config: Config, data: Data) -> list[str]:
    key = MODELS.row(config.model).classes
    classes = getattr(config.model, key) if key else None
    if classes is None or classes >= data.classes:
        return []
    return [f"model.{key}: expected at least the {data.classes} of the data, got {classes}"]


def _length_problems(config: Config, data: Data, ranks: int) -> list[str]:
    """Problems of a run without a batch, or one that ends before its rate has risen."""
    options, samples = config.data, len(data.train)
    batch = options.batch_size or (options.batch_size_per_rank or 0) * ranks
    if not batch:
        return []  # said already
    if options.drop_last and batch > samples:
        return [f"data.drop_last: true leaves no batch: the global batch is {batch}, the data have {samples} samples"]
    batches = samples // batch if options.drop_last else -(-samples // batch)
    per_epoch = -(-batches // config.train.accumulate)
    steps, warmup = config.train.epochs * per_epoch, warmup_steps(config.scheduler, per_epoch)
    if steps > warmup:
        return []
    key = "warmup_steps" if config.scheduler.warmup_steps else "warmup_epochs"
    return [
        f"scheduler.{key}: expected less than the run, which has {steps} steps in {config.train.epochs} epochs, "
        f"got {warmup} steps of warm-up; train longer or lower it"
    ]
