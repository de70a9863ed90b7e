"""`shardwright train`: a run as a configuration describes it, checked before any process group is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.errors import DataError, UsageError
from shardwright.launch.environment import read_environment
from shardwright.launch.options import LaunchOptions, read_options
from shardwright.mesh.mesh import Mesh
from shardwright.run.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    LossMonitor,
    ModelCheckpoint,
    NanGuard,
    ProgressBar,
    write_whole,
)
from shardwright.run.captured import Parallel
from shardwright.run.loader import Loader, loader
from shardwright.run.parallel import parallelize
from shardwright.run.precision import autocast
from shardwright.run.seed import set_seed
from shardwright.run.trainer import Trainer
from shardwright.run.world import World, init
from shardwright.zoo.config import load_config, to_yaml
from shardwright.zoo.datasets import Data, make_data
from shardwright.zoo.options import Config, CrossEntropy, Train
from shardwright.zoo.registry import (
    freeze,
    make_loss,
    make_model,
    make_optimizer,
    make_schedule,
    model_problems,
    scaled_rate,
)


@dataclass(frozen=True)
class Experiment:
    """A configuration whose data were found and fit its model."""

    config: Config
    data: Data


def prepare(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Everything that can be known before processes meet.

    Raises:
        UsageError: with a line for each thing that is wrong or does not fit another.
        DataError: where the files of the data are missing or corrupt.
    """
    config = load_config(name, overrides)
    problems = _batch_problems(config) + _parallel_problems(config)
    data = None
    try:
        data = make_data(config.data)
    except (DataError, UsageError) as error:
        problems.append(f"data: {error}")
    if data is not None:
        problems += _loss_problems(config, data) or _model_problems(config, data)
    if problems:
        raise UsageError("\n".join([f"{name}:", *(f"  {problem}" for problem in problems)]))
    assert data is not None
    return Experiment(config, data)


def _batch_problems(config: Config) -> list[str]:
    data, problems = config.data, []
    if (data.batch_size is None) == (data.batch_size_per_rank is None):
        got = "neither" if data.batch_size is None else "both"
        problems.append(f"data.batch_size or data.batch_size_per_rank: expected one of them, got {got}")
    if config.optimizer.scale_lr == "linear" and not (config.optimizer.base_batch or data.batch_size_per_rank):
        problems.append("optimizer.base_batch is missing: scale_lr linear divides the samples of a step by it")
    return problems


def _parallel_problems(config: Config) -> list[str]:
    options, told, problems = config.parallel, read_environment(os.environ), []
    if options.plan is not None and not Path(options.plan).is_file():
        problems.append(f"parallel.plan: there is no file {options.plan}; `shardwright plan --save` writes one")
    if options.mesh is not None:
        try:
            Mesh.parse(options.mesh)
        except UsageError as error:
            problems.append(f"parallel.mesh: {error}")
    if told.size > 1 and not config.system.distribute:
        problems.append(
            f"system.distribute: false trains alone, but {told.launcher} started {told.size} processes; "
            "type -o system.distribute=true, or start one"
        )
    return problems


def _loss_problems(config: Config, data: Data) -> list[str]:
    if isinstance(config.loss, CrossEntropy) == bool(data.classes):
        return []
    kind, other = ("classes", "cross_entropy") if data.classes else ("numbers", "mse")
    return [f"loss.name: the {config.data.type} data have {kind} as their targets; use {other}"]


def _model_problems(config: Config, data: Data) -> list[str]:
    problems = model_problems(config.model, data)
    if problems:
        return problems
    with torch.device("meta"):
        unmatched = freeze(make_model(config.model, data), config.model.frozen)
    return [f"model.frozen: no parameter of {config.model.name} is called {pattern}" for pattern in unmatched]


def train(name: str, overrides: Sequence[str] = ()) -> Trainer:
    """Run the configuration ``name`` with ``overrides``; on every rank that a launcher started, or alone."""
    experiment = prepare(name, overrides)
    config = experiment.config
    world = init(config.system.backend) if config.system.distribute else init(rank=0, world_size=1)
    set_seed(config.system.seed, config.system.deterministic)
    output = Path(config.train.output_dir)
    if world.rank == 0:
        write_whole(output / "config.yaml", lambda path: path.write_text(to_yaml(config)))
        print(f"configuration: {output / 'config.yaml'}", flush=True)
    parallel = _parallelize(experiment, world)
    plan = parallel.plan if isinstance(parallel, Parallel) else None
    batches = _train_loader(experiment, world, plan)
    test = loader(experiment.data.test, config.eval.batch_size, evaluate=True, world=world, plan=plan)
    per_epoch = -(-len(batches) // config.train.accumulate)
    lr, how = scaled_rate(config, batches.batch_size * config.train.accumulate)
    if how and world.rank == 0:
        print(how, flush=True)
    optimizer = make_optimizer(config.optimizer, parallel.parameters(), lr)
    trainer = Trainer(
        parallel,
        optimizer,
        _callbacks(config.train, per_epoch, output),
        scheduler=make_schedule(config.scheduler, optimizer, config.train.epochs * per_epoch, per_epoch),
        clip_norm=config.train.clip_norm,
        accumulate=config.train.accumulate,
        precision=config.train.precision,
    )
    validate = test if config.eval.enabled else None
    trainer.fit(batches, config.train.epochs, validate=validate, steps=config.train.steps)
    return trainer


def job(name: str, overrides: Sequence[str], ranks: str) -> LaunchOptions:
    """The job that trains on ``ranks`` processes of this host."""
    settings = [word for override in overrides for word in ("-o", override)]
    return read_options(
        module=True, program=False, arguments=("shardwright", "train", "--config", name, *settings), ranks=ranks,
        preload=True, tee=None, job=None, log_dir="log_output", port=None, devices=None, variables=(), grace_s=10.0,
        detach=False,
    )  # fmt: skip


def _parallelize(experiment: Experiment, world: World) -> Any:
    config, options = experiment.config, experiment.config.parallel
    dtype = getattr(torch, config.system.dtype)
    model = make_model(config.model, experiment.data).to(dtype)
    freeze(model, config.model.frozen)
    if world.rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"model: {config.model.name}, {count:,} parameters; mode: {options.mode}", flush=True)
    sample = _train_loader(experiment, world, None).sample_batch()
    with autocast(config.train.precision, world.device):
        return parallelize(
            model,
            make_loss(config.loss, dtype),
            sample,
            options.mode,
            search=options.search,
            mesh=options.mesh,
            plan=options.plan,
            pins=options.pins,
            gradients=options.gradients,
            batch_norm=options.batch_norm,
            save_graphs=options.save_graphs,
        )


def _train_loader(experiment: Experiment, world: World, plan: Any) -> Loader:
    options = experiment.config.data
    return loader(
        experiment.data.train,
        options.batch_size,
        per_rank_batch_size=options.batch_size_per_rank,
        seed=experiment.config.system.seed,
        drop_last=options.drop_last,
        num_workers=options.workers,
        world=world,
        plan=plan,
        check_data=plan is None,
    )


def _callbacks(options: Train, steps_per_epoch: int, output: Path) -> list[Callback]:
    """In the order in which they are to act: what averages before what stops, and what saves last."""
    found: list[Callback] = [LossMonitor(options.log_every)]
    if options.progress_bar:
        found.append(ProgressBar(steps_per_epoch))
    if options.nan_guard:
        found.append(NanGuard())
    if options.ema_decay is not None:
        found.append(EMA(options.ema_decay))
    if options.early_stopping_patience is not None:
        found.append(EarlyStopping(options.early_stopping_patience, options.early_stopping_metric))
    if options.checkpoint != "none":
        found.append(ModelCheckpoint(output, every_epochs=options.checkpoint_every_epochs, kind=options.checkpoint))
    return found
