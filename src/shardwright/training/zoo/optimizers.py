"""The optimizers that a configuration names, and which parameters their weight decay acts on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.training.zoo.ranges import between, more_than
from shardwright.training.zoo.rows import Decay, OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class Sgd(OptimizerOptions):
    """The options of `torch.optim.SGD`."""

    momentum: float = between(0, 1, 0.0)
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerOptions):
    """The options of `torch.optim.AdamW`."""

    lr: float = more_than(0, 1e-3)
    betas: tuple[float, ...] = between(0, 1, (0.9, 0.999))
    eps: float = more_than(0, 1e-8)


Groups = Iterable[dict[str, Any]]

# Which parameters the weight decay acts on; the others are trained without.
DECAYS: Mapping[Decay, Callable[[nn.Parameter], bool]] = {
    "all": lambda parameter: True,
    "matrices": lambda parameter: parameter.ndim >= 2,
}


def groups_of(options: OptimizerOptions, parameters: Iterable[nn.Parameter]) -> Groups:
    """The parameters that are trained, in two groups where the weight decay spares some of them."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decays = DECAYS[options.decay]
    decaying, spared = ([p for p in trained if decays(p) is wanted] for wanted in (True, False))
    return [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decaying, options.weight_decay), (spared, 0.0))
        if members
    ]


def make_sgd(options: Sgd, groups: Groups, lr: float) -> Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, nesterov=options.nesterov)


def sgd_problems(options: Sgd) -> list[str]:
    """Refuses Nesterov's step, which looks ahead along the momentum, without a momentum."""
    if options.nesterov and not options.momentum:
        return ["optimizer.nesterov: true needs a momentum; type -o optimizer.momentum=0.9"]
    return []


def make_adamw(options: AdamW, groups: Groups, lr: float) -> Optimizer:
    """Adam with a weight decay that is not part of the gradient."""
    first, second = options.betas
    return torch.optim.AdamW(groups, lr=lr, betas=(first, second), eps=options.eps)


def adamw_problems(options: AdamW) -> list[str]:
    """Refuses other than two betas: one for the mean of gradients, one for the mean of their squares."""
    return [] if len(options.betas) == 2 else [f"optimizer.betas: expected two numbers, got {len(options.betas)}"]
