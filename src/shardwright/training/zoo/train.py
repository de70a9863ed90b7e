"""`shardwright train`: runs a configuration, which is checked before the process group is created."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.common.whole_file import write_whole
from shardwright.data.loading.loader import Loader, loader
from shardwright.distributed.precision import autocast
from shardwright.distributed.seed import set_seed
from shardwright.distributed.world import World, init
from shardwright.errors import DataError, UsageError
from shardwright.launch.hosts.environment import read_environment
from shardwright.launch.options.launch_options import LaunchOptions, read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.runtime.parallel import parallelize
from shardwright.training.callbacks import EMA, EarlyStopping, LossMonitor, NanGuard, ProgressBar
from shardwright.training.checkpointing import ModelCheckpoint
from shardwright.training.hooks import Callback
from shardwright.training.recorder import Recorder
from shardwright.training.same_settings import refuse_unlike_settings
from shardwright.training.tracing import Tracer
from shardwright.training.trainer import Trainer
from shardwright.training.zoo.checks import data_problems, option_problems
from shardwright.training.zoo.config import load_config, to_yaml
from shardwright.training.zoo.options import Config
from shardwright.training.zoo.rows import Data
from shardwright.training.zoo.tables import freeze, make_data, make_loss, make_model, make_optimizer, make_schedule


@dataclass(frozen=True)
class Experiment:
    """A configuration and its data, which fit its model."""

    config: Config
    data: Data


def prepare(name: str, overrides: Sequence[str] = (), ranks: int | None = None) -> Experiment:
    """Everything that can be known before processes meet.

    Args:
        ranks: how many are to run; None where this process is one of them.

    Raises:
        UsageError: with a line for each thing that is wrong or does not fit another.
        DataError: where the files of the data are missing or corrupt.
    """
    config = load_config(name, overrides)
    if ranks is None:
        ranks = read_environment(os.environ).size if config.system.distribute else 1
    problems, data = option_problems(config, ranks), None
    try:
        data = make_data(config.data)
    except (DataError, UsageError) as error:
        problems.append(f"data: {error}")
    if data is not None:
        problems += data_problems(config, data, ranks)
    if problems:
        raise UsageError("\n".join([f"{name}:", *(f"  {problem}" for problem in problems)]))
    assert data is not None
    return Experiment(config, data)


def train(name: str, overrides: Sequence[str] = ()) -> Trainer:
    """Run the configuration ``name`` with ``overrides``; on every rank that a launcher started, or alone."""
    experiment = prepare(name, overrides)
    config = experiment.config
    world = init(config.system.backend) if config.system.distribute else init(rank=0, world_size=1)
    refuse_unlike_settings(config, apart=("data.root", "data.path"))
    set_seed(config.system.seed, config.system.deterministic)
    output = Path(config.train.output_dir)
    if world.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "config.yaml", lambda path: path.write_text(to_yaml(config)))
        print(f"configuration: {output / 'config.yaml'}", flush=True)
    parallel = _parallelize(experiment, world)
    plan = parallel.plan
    batches = _train_loader(experiment, world, plan)
    data = experiment.data
    test = loader(data.test, config.eval.batch_size, evaluate=True, collate_fn=data.collate, world=world, plan=plan)
    per_epoch = -(-len(batches) // config.train.accumulate)
    lr, how = _scaled_rate(config, batches.batch_size * config.train.accumulate)
    if how and world.rank == 0:
        print(how, flush=True)
    optimizer = make_optimizer(config.optimizer, parallel.parameters(), lr)
    trainer = Trainer(
        parallel,
        optimizer,
        _callbacks(config, per_epoch, output),
        scheduler=make_schedule(config.scheduler, optimizer, config.train.epochs * per_epoch, per_epoch),
        clip_norm=config.train.clip_norm,
        accumulate=config.train.accumulate,
        precision=config.train.precision,
    )
    if config.train.resume is not None:
        trainer.resume(config.train.resume)
    validate = test if config.eval.enabled else None
    trainer.fit(batches, config.train.epochs, validate=validate, steps=config.train.steps)
    return trainer


def job(name: str, overrides: Sequence[str], ranks: str) -> LaunchOptions:
    """The job that trains on ``ranks`` processes of this host."""
    settings = [word for override in overrides for word in ("-o", override)]
    arguments = ("shardwright", "train", "--config", name, *settings)
    return read_options(LaunchRequest(kind="module", arguments=arguments, ranks=ranks))


def _scaled_rate(config: Config, samples_per_step: int) -> tuple[float, str | None]:
    options = config.optimizer
    base = options.base_batch or config.data.batch_size_per_rank
    if options.scale_lr == "none" or base is None:
        return options.lr, None
    rate = options.lr * samples_per_step / base
    return rate, f"learning rate: {options.lr:g} x {samples_per_step} / {base} = {rate:g} (optimizer.scale_lr: linear)"


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
            hardware=options.hardware,
            memory=options.memory,
            optimizer=make_optimizer(config.optimizer, [torch.nn.Parameter(torch.empty(1, device="cpu"))], 1.0),
            save_graphs=options.save_graphs,
            compile=options.compile,
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
        collate_fn=experiment.data.collate,
        world=world,
        plan=plan,
        check_data=plan is None,
    )


def _callbacks(config: Config, steps_per_epoch: int, output: Path) -> list[Callback]:
    """The callbacks in the order in which they are to act: what averages before what stops."""
    options = config.train
    callbacks: list[Callback] = [LossMonitor(options.log_every)]
    if config.log.to:
        callbacks.append(Recorder(output, config.log.to, options.log_every, asdict(config)))
    if config.trace.steps:
        callbacks.append(Tracer(output, config.trace.steps))
    if options.progress_bar:
        callbacks.append(ProgressBar(steps_per_epoch))
    if options.nan_guard:
        callbacks.append(NanGuard())
    if options.ema_decay is not None:
        callbacks.append(EMA(options.ema_decay))
    if options.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(options.early_stopping_patience, options.early_stopping_metric))
    if options.checkpoint != "none":
        callbacks.append(_checkpoints(config, output))
    return callbacks


def _checkpoints(config: Config, output: Path) -> ModelCheckpoint:
    options = config.train
    metric, k = options.checkpoint_metric, options.checkpoint_top_k
    return ModelCheckpoint(
        output / "checkpoints",
        every_epochs=options.checkpoint_every_epochs,
        every_steps=options.checkpoint_every_steps,
        every_minutes=options.checkpoint_every_minutes,
        latest_k=options.checkpoint_latest_k,
        top_k=None if k is None else (metric, k, "min" if metric == "loss" else "max"),
        asynchronous=options.checkpoint == "asynchronous",
        config=to_yaml(config),
    )
