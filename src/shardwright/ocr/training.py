"""Training text detection and recognition as a configuration says, checked before any process group is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shardwright.common.whole_file import write_whole
from shardwright.compiler.plan.searches import Mode
from shardwright.data.loading.loader import Loader, loader
from shardwright.distributed.precision import autocast
from shardwright.distributed.seed import set_seed
from shardwright.distributed.world import World, init
from shardwright.errors import DataError, UsageError
from shardwright.launch.hosts.environment import read_environment
from shardwright.ocr.optimizers import kind_of, make_optimizer
from shardwright.ocr.options.sections import Loading, Scheduler, Settings
from shardwright.ocr.results import BestWeights, ResultTable
from shardwright.ocr.samples.dataset import TextImages, in_words
from shardwright.ocr.settings import examine, found_by, ineffective, refuse, to_yaml
from shardwright.ocr.tasks import TASKS, text_images
from shardwright.ocr.validation import Validator
from shardwright.ocr.weights import backbone_problems, begin, network_problems
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.parallel import parallelize
from shardwright.training.callbacks import EMA, LossMonitor, NanGuard
from shardwright.training.checkpointing import ModelCheckpoint
from shardwright.training.hooks import Callback
from shardwright.training.same_settings import refuse_unlike_settings
from shardwright.training.schedules import constant_schedule, cosine_schedule, polynomial_schedule, step_schedule
from shardwright.training.trainer import Trainer


@dataclass(frozen=True)
class TextExperiment:
    """A configuration and its images, which fit together; ``test`` is None where nothing is evaluated."""

    name: str
    settings: Settings
    train: TextImages
    test: TextImages | None
    without_effect: tuple[str, ...] = ()


def prepare(name: str, overrides: Sequence[str] = (), ranks: int | None = None) -> TextExperiment:
    """Everything that can be known before processes meet, one sample of each data set included.

    Raises:
        UsageError, DataError: with a line for each thing that is wrong or does not fit another.
    """
    settings, problems = examine(name, overrides)
    if not problems:
        _check_launch(settings)
    found: dict[str, TextImages] = {}

    def images(path: str, dataset: Callable[[Any], Any], training: bool) -> Callable[[Any], list[str]]:
        def check(settings: Settings) -> list[str]:
            options = dataset(settings)
            if training or (options is not None and settings.system.val_while_train):
                try:
                    found[path] = text_images(options, settings.model.type, path, training)
                    found[path].gather([0])
                except (DataError, UsageError) as error:
                    lines = str(error).splitlines()
                    return [line if line.startswith(path) else f"{path}: {line}" for line in lines]
            return []

        return check

    checks = (
        images("train.dataset", lambda settings: settings.train.dataset, True),
        images("eval.dataset", lambda settings: settings.eval and settings.eval.dataset, False),
        lambda settings: backbone_problems(settings.model),
        lambda settings: network_problems(settings.model),
    )
    refuse(name, [*problems, *found_by(checks, settings)])
    without = tuple(ineffective(name, overrides))
    return TextExperiment(name, settings, found["train.dataset"], found.get("eval.dataset"), without)


def _check_launch(settings: Settings) -> None:
    environment = read_environment(os.environ)
    if environment.size > 1 and not settings.system.distribute:
        raise UsageError(
            f"system.distribute: False trains alone, but {environment.launcher} started {environment.size} processes; "
            "type -o system.distribute=True, or start one"
        )


def train(name: str, overrides: Sequence[str] = ()) -> Trainer:
    """Train by the configuration ``name`` with ``overrides``; on every rank that a launcher started, or alone."""
    experiment = prepare(name, overrides)
    settings = experiment.settings
    world = init(settings.system.backend) if settings.system.distribute else init(rank=0, world_size=1)
    refuse_unlike_settings(settings, apart=("common", "predict", "train.dataset", "eval.dataset"))
    set_seed(settings.system.seed)
    folder = Path(settings.train.ckpt_save_dir)
    if world.rank == 0:
        _begin(experiment, folder)
    parallel = _parallelize(experiment, world)
    batches = _batches(experiment.train, settings.train.loader, settings, world, parallel.plan)
    steps = -(-len(batches) // settings.train.gradient_accumulation_steps)
    optimizer = make_optimizer(settings.optimizer, parallel.module, settings.scheduler.lr)
    trainer = Trainer(
        parallel,
        optimizer,
        _callbacks(experiment, folder),
        scheduler=make_schedule(settings.scheduler, optimizer, steps),
        clip_norm=settings.train.clip_norm if settings.train.clip_grad else None,
        accumulate=settings.train.gradient_accumulation_steps,
        precision=settings.precision,
    )
    _scale(trainer, settings)
    if settings.model.resume:
        trainer.resume("auto" if settings.model.resume is True else settings.model.resume)
    system = settings.system
    trainer.fit(
        batches,
        settings.scheduler.num_epochs,
        validate=None if experiment.test is None else Validator(settings, experiment.test, world, settings.precision),
        steps=settings.train.steps,
        validate_when=lambda epoch: (
            epoch >= system.val_start_epoch and (epoch - system.val_start_epoch) % system.val_interval == 0
        ),
    )
    if experiment.train.failed:
        print(f"rank {world.rank}: samples that failed and were replaced: {experiment.train.failed}", flush=True)
    return trainer


def _begin(experiment: TextExperiment, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = to_yaml(experiment.settings)
    write_whole(folder / "config.yaml", lambda path: path.write_text(text))
    print(f"configuration: {folder / 'config.yaml'}", flush=True)
    if experiment.without_effect:
        print(f"without effect here: {', '.join(experiment.without_effect)}", flush=True)
    left, used = experiment.train.left_out, len(experiment.train)
    if left:
        whole = used + left.total()
        print(f"left out for their labels: {left.total()} of {whole} samples to train on, {in_words(left)}", flush=True)


def make_model(settings: Settings) -> nn.Module:
    """Return the model that the settings describe."""
    dtype = getattr(torch, settings.system.dtype)
    return TASKS[settings.model.type].model(settings).to(dtype)


def _parallelize(experiment: TextExperiment, world: World) -> ParallelModel:
    settings = experiment.settings
    row = TASKS[settings.model.type]
    model = make_model(settings)
    begin(settings.model, model)
    if world.rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"model: {settings.model.backbone.name}, {count:,} parameters; mode: {mode_of(settings)}", flush=True)
    sample = _batches(experiment.train, settings.train.loader, settings, world, None).sample_batch()
    with autocast(settings.precision, world.device):
        return parallelize(
            model, row.loss(settings), sample, mode_of(settings), predict_fn=row.predict,
            optimizer=kind_of(settings.optimizer.opt).states,
        )  # fmt: skip


def mode_of(settings: Settings) -> Mode:
    """0 and 1, the graph and the eager mode of MindSpore, both split the batch here."""
    mode = settings.system.mode
    return "data" if isinstance(mode, int) else mode


def _batches(images: TextImages, options: Loading, settings: Settings, world: World, plan: Any) -> Loader:
    return loader(
        images,
        options.global_batch_size,
        per_rank_batch_size=options.batch_size,
        seed=settings.system.seed,
        shuffle=options.shuffle,
        drop_last=options.drop_remainder,
        num_workers=options.num_workers,
        world=world,
        plan=plan,
        check_data=plan is None,
    )


def make_schedule(options: Scheduler, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LambdaLR:
    """Return the schedule of the learning rate that the options describe."""
    steps, warmup = options.num_epochs * steps_per_epoch, round(options.warmup_epochs * steps_per_epoch)
    floor = options.min_lr / options.lr
    if options.scheduler in ("warmup_cosine_decay", "cosine_decay"):
        if options.decay_epochs is not None:
            steps = warmup + max(1, round(options.decay_epochs * steps_per_epoch))
        return cosine_schedule(optimizer, steps=steps, warmup_steps=warmup, floor=floor)
    if options.scheduler == "polynomial_decay":
        return polynomial_schedule(optimizer, steps=steps, power=options.decay_rate, warmup_steps=warmup, floor=floor)
    if options.scheduler == "step_decay":
        every = max(1, round((options.decay_epochs or 10) * steps_per_epoch))
        return step_schedule(optimizer, every_steps=every, factor=options.decay_rate, warmup_steps=warmup)
    return constant_schedule(optimizer, warmup_steps=warmup)


class ApplyingScaler(torch.amp.GradScaler):
    """Makes the optimizer's step also where gradients have overflowed, which torch's scaler leaves out.

    The scale falls and grows as torch's does.
    """

    _unscaled = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once for each step."""
        super().unscale_(optimizer)
        self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the step of ``optimizer``, of gradients that were divided by the scale."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if not self._unscaled:
            self.unscale_(optimizer)
        self._unscaled = False
        return optimizer.step(*args, **kwargs)


def _scale(trainer: Trainer, settings: Settings) -> None:
    """Begin the loss scaling as the configuration says; a static scale does not grow."""
    options = settings.loss_scaler
    kind = torch.amp.GradScaler if settings.system.drop_overflow_update else ApplyingScaler
    if trainer.scaler.is_enabled():
        trainer.scaler = kind(
            trainer.world.device.type,
            init_scale=options.loss_scale,
            growth_factor=options.scale_factor,
            backoff_factor=1 / options.scale_factor,
            growth_interval=options.scale_window if options.type == "dynamic" else 2**31,
        )


def _callbacks(experiment: TextExperiment, folder: Path) -> list[Callback]:
    """In the order in which they are to act: what averages before what saves."""
    settings = experiment.settings
    indicator = indicator_of(settings)
    callbacks: list[Callback] = [LossMonitor(settings.system.log_interval), NanGuard()]
    if settings.train.ema:
        callbacks.append(EMA(settings.train.ema_decay))
    if experiment.test is not None:
        callbacks.append(BestWeights(folder, indicator))
    keep = settings.system.ckpt_max_keep
    best = settings.system.ckpt_save_policy == "top_k" and experiment.test is not None
    checkpoints = ModelCheckpoint(
        folder / "checkpoints",
        every_epochs=1,
        every_steps=settings.train.ckpt_every_steps,
        latest_k=1 if best else keep,
        top_k=(indicator, keep, "max") if best else None,
        config=to_yaml(settings),
    )
    return [*callbacks, ResultTable(folder, indicator), checkpoints]


def indicator_of(settings: Settings) -> str:
    """The metric that decides which weights are the best; the harmonic mean has two names."""
    return {"f-score": "hmean"}.get(settings.metric.main_indicator, str(settings.metric.main_indicator))
