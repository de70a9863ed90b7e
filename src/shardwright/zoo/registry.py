"""What a configuration names: its model, its loss, its optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.training.schedules import constant_schedule, cosine_schedule, polynomial_schedule, step_schedule
from shardwright.zoo.datasets import Data
from shardwright.zoo.gpt import GPT
from shardwright.zoo.options import (
    AdamW,
    Config,
    Constant,
    Cosine,
    CrossEntropy,
    GptModel,
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    PerceptronModel,
    Polynomial,
    ResNetModel,
    SchedulerOptions,
    TwoMatmulsModel,
)
from shardwright.zoo.perceptron import Perceptron, TwoMatmuls
from shardwright.zoo.resnet import resnet18, resnet50

_RESNETS = {"resnet18": resnet18, "resnet50": resnet50}


def make_model(options: ModelOptions, data: Data) -> nn.Module:
    """The model, its inputs and outputs as many as the data have where the options leave them open."""
    if isinstance(options, PerceptronModel):
        outputs = options.num_classes or data.classes or data.target_shape.numel()
        return Perceptron(data.sample_shape.numel(), options.hidden, outputs)
    if isinstance(options, ResNetModel):
        make = _RESNETS[options.name]
        return make(options.num_classes or data.classes, options.stem, options.width, options.zero_init)
    if isinstance(options, GptModel):
        return GPT(
            options.vocabulary or data.classes,
            options.width,
            options.heads,
            options.layers,
            data.sample_shape[0],
            options.positions,
            options.tied,
            options.dropout,
        )
    return TwoMatmuls(data.sample_shape.numel(), data.target_shape.numel())


def model_problems(options: ModelOptions, data: Data) -> list[str]:
    """Why the model cannot take the samples or tell their classes, one line each."""
    shape, numbers = list(data.sample_shape), data.target_shape.numel()
    classes = "num_classes", getattr(options, "num_classes", None)
    problems = []
    if isinstance(options, GptModel):
        classes = "vocabulary", options.vocabulary
        if data.sample_dtype.is_floating_point or len(shape) != 1:
            problems.append(f"model.name: gpt takes rows of ids, the data have {data.sample_dtype} of shape {shape}")
        per_head, rest = divmod(options.width, options.heads)
        if rest or (options.positions == "rotary" and per_head % 2):
            even = "an even multiple" if options.positions == "rotary" else "a multiple"
            problems.append(f"model.width: expected {even} of model.heads={options.heads}, got {options.width}")
    elif not data.sample_dtype.is_floating_point:
        problems.append(f"model.name: {options.name} takes numbers, the data have ids; use gpt")
    elif isinstance(options, ResNetModel) and (len(shape) != 3 or shape[0] != 3):
        problems.append(f"model.name: {options.name} takes images of shape [3, height, width], the data have {shape}")
    elif isinstance(options, TwoMatmulsModel) and (data.classes or len(shape) != 1):
        have = "classes" if data.classes else f"samples of shape {shape}"
        problems.append(f"model.name: two_matmuls learns rows of numbers from rows of numbers, the data have {have}")
    if isinstance(options, PerceptronModel) and not data.classes and options.num_classes not in (None, numbers):
        problems.append(f"model.num_classes: expected the {numbers} numbers of a target, got {options.num_classes}")
    if classes[1] is not None and data.classes and classes[1] < data.classes:
        problems.append(f"model.{classes[0]}: expected at least the {data.classes} of the data, got {classes[1]}")
    return problems


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Exclude the parameters that match from training; returns the patterns that match none."""
    unmatched = []
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        unmatched += [] if matches else [pattern]
        for parameter in matches:
            parameter.requires_grad_(False)
    return unmatched


def make_loss(options: LossOptions, dtype: torch.dtype) -> Callable[[nn.Module, Any], Any]:
    """``loss_fn(model, batch)``; floating samples become ``dtype``. In evaluation it gives the metrics too."""

    def cross_entropy(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        logits = model(x.to(dtype) if x.is_floating_point() else x)
        if logits.ndim > 2:
            logits, y = logits.flatten(0, -2), y.flatten()
        smoothing = options.label_smoothing if isinstance(options, CrossEntropy) and model.training else 0.0
        loss = F.cross_entropy(logits, y, label_smoothing=smoothing)
        return loss if model.training else (loss, {"accuracy": (logits.argmax(-1) == y).double().mean()})

    def mean_squared_error(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x.to(dtype)), y.to(dtype))

    return cross_entropy if isinstance(options, CrossEntropy) else mean_squared_error


def scaled_rate(config: Config, samples_per_step: int) -> tuple[float, str | None]:
    """The learning rate, and where the configuration scales it, how."""
    options = config.optimizer
    base = options.base_batch or config.data.batch_size_per_rank
    if options.scale_lr == "none" or base is None:
        return options.lr, None
    rate = options.lr * samples_per_step / base
    return rate, f"learning rate: {options.lr:g} x {samples_per_step} / {base} = {rate:g} (optimizer.scale_lr: linear)"


def make_optimizer(options: OptimizerOptions, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The optimizer of the parameters that are trained, in two groups where the weight decay spares some."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    spared = [p for p in trained if p.ndim < 2] if options.decay == "matrices" else []
    decaying = [p for p in trained if options.decay == "all" or p.ndim >= 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decaying, options.weight_decay), (spared, 0.0))
        if members
    ]
    if isinstance(options, AdamW):
        first, second = options.betas
        return torch.optim.AdamW(groups, lr=lr, betas=(first, second), eps=options.eps)
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, nesterov=options.nesterov)


def warmup_steps(options: SchedulerOptions, steps_per_epoch: int) -> int:
    """The optimizer steps over which the rate rises."""
    return options.warmup_steps or round(options.warmup_epochs * steps_per_epoch)


def make_schedule(options: SchedulerOptions, optimizer: Optimizer, steps: int, steps_per_epoch: int) -> LambdaLR:
    """The schedule of a run of ``steps`` optimizer steps."""
    warmup = warmup_steps(options, steps_per_epoch)
    if isinstance(options, Constant):
        return constant_schedule(optimizer, warmup_steps=warmup)
    if isinstance(options, Cosine):
        return cosine_schedule(optimizer, steps=steps, warmup_steps=warmup, floor=options.floor)
    if isinstance(options, Polynomial):
        return polynomial_schedule(
            optimizer, steps=steps, power=options.power, warmup_steps=warmup, floor=options.floor
        )
    every = max(1, round(options.every_epochs * steps_per_epoch))
    return step_schedule(optimizer, every_steps=every, factor=options.factor, warmup_steps=warmup)
