"""Everything that a configuration names: one row for each data set, model, loss, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.training.zoo import choices, datasets
from shardwright.training.zoo.models import gpt, perceptron, resnet
from shardwright.training.zoo.rows import (
    ChoiceTable,
    Data,
    DataOptions,
    DataRow,
    LossFunction,
    LossOptions,
    LossRow,
    ModelOptions,
    ModelRow,
    OptimizerOptions,
    OptimizerRow,
    RunLength,
    ScheduleOptions,
    ScheduleRow,
)

DATA = ChoiceTable(
    "data",
    {
        "mnist": DataRow(datasets.MnistData, datasets.make_mnist, "classes"),
        "cifar10": DataRow(datasets.Cifar10Data, datasets.make_cifar10, "classes"),
        "random": DataRow(datasets.RandomData, datasets.make_random, "classes"),
        "characters": DataRow(datasets.CharacterData, datasets.make_characters, "classes"),
        "table": DataRow(datasets.TableData, datasets.make_table, "numbers"),
    },
    key="type",
)

MODELS = ChoiceTable(
    "model",
    {
        "perceptron": ModelRow(
            perceptron.PerceptronOptions,
            perceptron.make_perceptron,
            loss="cross_entropy",
            classes="num_classes",
            problems=perceptron.perceptron_problems,
        ),
        "resnet18": ModelRow(
            resnet.ResNetOptions,
            resnet.make_resnet18,
            loss="cross_entropy",
            classes="num_classes",
            problems=resnet.resnet_problems,
        ),
        "resnet50": ModelRow(
            resnet.ResNetOptions,
            resnet.make_resnet50,
            loss="cross_entropy",
            classes="num_classes",
            problems=resnet.resnet_problems,
        ),
        "gpt": ModelRow(
            gpt.GPTOptions,
            gpt.make_gpt,
            loss="cross_entropy",
            classes="vocabulary",
            takes_ids=True,
            problems=gpt.gpt_problems,
        ),
        "two_matmuls": ModelRow(
            perceptron.TwoMatmulsOptions,
            perceptron.make_two_matmuls,
            loss="mse",
            problems=perceptron.two_matmuls_problems,
        ),
    },
)

LOSSES = ChoiceTable(
    "loss",
    {
        "cross_entropy": LossRow(choices.CrossEntropy, choices.make_cross_entropy, "classes"),
        "mse": LossRow(choices.MeanSquaredError, choices.make_mean_squared_error, "numbers"),
    },
)

OPTIMIZERS = ChoiceTable(
    "optimizer",
    {
        "sgd": OptimizerRow(choices.Sgd, choices.make_sgd, choices.sgd_problems),
        "adamw": OptimizerRow(choices.AdamW, choices.make_adamw, choices.adamw_problems),
    },
)

SCHEDULES = ChoiceTable(
    "scheduler",
    {
        "constant": ScheduleRow(choices.Constant, choices.make_constant),
        "cosine": ScheduleRow(choices.Cosine, choices.make_cosine),
        "step": ScheduleRow(choices.StepDecay, choices.make_steps),
        "polynomial": ScheduleRow(choices.Polynomial, choices.make_polynomial),
    },
)


def make_data(options: DataOptions) -> Data:
    """Read or draw the data.

    Raises:
        DataError, UsageError: where files are missing, corrupt or too short.
    """
    return DATA.row(options).make(options)


def make_model(options: ModelOptions, data: Data) -> nn.Module:
    """Return the model that the options describe, for the data."""
    return MODELS.row(options).make(options, data)


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Exclude the parameters that match from training; returns the patterns that match none."""
    unmatched = []
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        unmatched += [] if matches else [pattern]
        for parameter in matches:
            parameter.requires_grad_(False)
    return unmatched


def make_loss(options: LossOptions, dtype: torch.dtype) -> LossFunction:
    """``loss_fn(model, batch)``; floating samples become ``dtype``. In evaluation it returns the metrics too."""
    return LOSSES.row(options).make(options, dtype)


def make_optimizer(options: OptimizerOptions, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The optimizer of the parameters that are trained, in two groups where the weight decay spares some."""
    return OPTIMIZERS.row(options).make(options, choices.groups_of(options, parameters), lr)


def make_schedule(options: ScheduleOptions, optimizer: Optimizer, steps: int, steps_per_epoch: int) -> LambdaLR:
    """Return the schedule of the learning rate that the options describe."""
    length = RunLength(steps, steps_per_epoch, warmup_steps(options, steps_per_epoch))
    return SCHEDULES.row(options).make(options, optimizer, length)


def warmup_steps(options: ScheduleOptions, steps_per_epoch: int) -> int:
    """Return the steps of the warmup, which the options give in steps or in epochs."""
    return options.warmup_steps or round(options.warmup_epochs * steps_per_epoch)
