"""The optimizers that a configuration names, and which parameters their weight decay spares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.ocr.options.sections import Optimizer

Groups = Sequence[dict[str, Any]]
NORMS_AND_BIASES = ("beta", "gamma", "bias")


class Lion(torch.optim.Optimizer):
    """Steps of one size for all entries.

    Chen et al., *Symbolic Discovery of Optimization Algorithms*, 2023, arXiv:2302.06675, algorithm 2; the weight decay
    is no part of the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; ``closure`` as torch's optimizers take it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: Tensor = state["exp_avg"]
        towards, kept = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        direction = mean.mul(towards).add_(gradient, alpha=1 - towards).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        mean.mul_(kept).add_(gradient, alpha=1 - kept)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer: ``make(options, groups, lr)``, the ``states`` that plans count, and the keys that it ``takes``."""

    make: Callable[[Optimizer, Groups, float], torch.optim.Optimizer]
    states: str | type[torch.optim.Optimizer]
    takes: tuple[str, ...]


def _sgd(options: Optimizer, groups: Groups, lr: float) -> torch.optim.Optimizer:
    nesterov = (options.nesterov or options.opt == "nesterov") and options.momentum > 0
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, nesterov=nesterov)


def _with_betas(kind: type[Any], second: float) -> Callable[[Optimizer, Groups, float], torch.optim.Optimizer]:
    def make(options: Optimizer, groups: Groups, lr: float) -> torch.optim.Optimizer:
        betas = (0.9 if options.beta1 is None else options.beta1, second if options.beta2 is None else options.beta2)
        made: torch.optim.Optimizer = kind(groups, lr=lr, betas=betas)
        return made

    return make


_BETAS = ("beta1", "beta2")
_KINDS = {
    "sgd": OptimizerKind(_sgd, "sgd", ("momentum", "nesterov")),
    "momentum": OptimizerKind(_sgd, "sgd", ("momentum", "nesterov")),
    "nesterov": OptimizerKind(_sgd, "sgd", ("momentum", "nesterov")),
    "adam": OptimizerKind(_with_betas(torch.optim.Adam, 0.999), "adam", _BETAS),
    "adamw": OptimizerKind(_with_betas(torch.optim.AdamW, 0.999), "adamw", _BETAS),
    "lion": OptimizerKind(_with_betas(Lion, 0.99), Lion, _BETAS),
}


def kind_of(name: str) -> OptimizerKind:
    """Return the kind of optimizer of this name, in upper or lower case."""
    return _KINDS[name.lower()]


def make_optimizer(options: Optimizer, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of a model that the options describe."""
    return kind_of(options.opt).make(options, _groups(options, model), lr)


def _groups(options: Optimizer, model: nn.Module) -> Groups:
    names = spared_names(options)
    decaying, spared = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in mindspore_names(model):
        if parameter.requires_grad:
            (spared if any(part in name for part in names) else decaying).append(parameter)
    both = ((decaying, options.weight_decay), (spared, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in both if members]


def spared_names(options: Optimizer) -> tuple[str, ...]:
    """Return what stands in the names of parameters that are spared the weight decay."""
    if options.grouping_strategy is None and options.no_weight_decay_params:
        return options.no_weight_decay_params
    return NORMS_AND_BIASES if options.grouping_strategy or options.filter_bias_and_bn else ()


def mindspore_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their names, in which a normalisation's weight is gamma and its bias beta."""
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    renamed = {f"{path}.weight": f"{path}.gamma" for path in norms} | {f"{path}.bias": f"{path}.beta" for path in norms}
    for name, parameter in model.named_parameters():
        yield renamed.get(name, name), parameter
