"""Replaces random operators by their expected values, so that losses of different batch splits can be compared.

A step on a part of a batch draws other numbers for its samples than a step on the whole, also with one seed. Inside
`expected_draws` each draw gives its expectation, or another number that is the same for each entry: dropout gives what
it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.common import signatures, torch_private

_RATES = ("dropout_p", "dropout", "p")  # what operators call the share of what they drop
_NUMBER = 0.5  # for distributions that nothing is said of


@contextmanager
def expected_draws() -> Iterator[None]:
    """Let each operator that draws from a generator of torch give the same for all entries of what it fills."""
    with torch_private.OperatorMode(_called):
        yield


def _called(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return operator(*args, **kwargs)
    name = operator.__name__.partition(".")[0].removesuffix("_").removesuffix("_like")
    given = signatures.arguments_of(operator, args, kwargs)
    if name in _FILLED:
        result = operator(*args, **kwargs)
        with torch.no_grad():
            return result.copy_(_FILLED[name](given, result))
    if name in ("native_dropout", "rrelu_with_noise"):
        flag = "train" if name == "native_dropout" else "training"
        return operator(**{**given, flag: False})
    rates = {rate: 0.0 for rate in _RATES if isinstance(given.get(rate), float)}
    return operator(**{**given, **rates})


def _share(given: Mapping[str, Any], result: Tensor) -> Any:
    """The probability of a one, or a one where the result has room for nothing between."""
    if not result.is_floating_point():
        return torch.ones_like(result)
    p = given.get("p", given.get("self"))
    return p if isinstance(p, Tensor) else torch.full_like(result, float(p))


def _between(low: str, high: str, lowest: float, highest: float) -> Callable[[Mapping[str, Any], Tensor], Any]:
    def middle(given: Mapping[str, Any], result: Tensor) -> Any:
        ends = given.get(low, lowest), given.get(high, highest)
        start, end = (lowest if ends[0] is None else ends[0]), (highest if ends[1] is None else ends[1])
        return torch.full_like(result, (start + end) // 2 if isinstance(end, int) else (start + end) / 2)

    return middle


def _normal(given: Mapping[str, Any], result: Tensor) -> Any:
    """Half a deviation above the mean: nothing, as of a standard normal, is what programs divide by."""
    return torch.zeros_like(result) + given.get("mean", 0.0) + _NUMBER * given.get("std", 1.0)


def _likeliest(given: Mapping[str, Any], result: Tensor) -> Any:
    weights, count = given["self"], result.shape[-1]
    if given.get("replacement"):
        return weights.argmax(-1, keepdim=True).expand_as(result)
    return weights.topk(count, -1).indices


# Operators that fill a tensor, by their names without an underscore.
_FILLED: Mapping[str, Callable[[Mapping[str, Any], Tensor], Any]] = {
    "bernoulli": _share,
    "uniform": _between("from", "to", 0.0, 1.0),
    "rand": lambda given, result: torch.full_like(result, _NUMBER),
    "randn": _normal,
    "normal": _normal,
    "normal_functional": _normal,
    "randint": _between("low", "high", 0, 1),
    "random": _between("from", "to", 0, 2),
    "randperm": lambda given, result: torch.arange(len(result), dtype=result.dtype, device=result.device),
    "multinomial": _likeliest,
    "poisson": lambda given, result: given["self"].round(),
    "binomial": lambda given, result: (given["count"] * given["prob"]).round(),
    "exponential": lambda given, result: torch.full_like(result, 1 / given.get("lambd", 1.0)),
    "cauchy": lambda given, result: torch.full_like(result, given.get("median", 0.0) + _NUMBER),
    "log_normal": lambda given, result: torch.full_like(result, _NUMBER),
    "geometric": lambda given, result: torch.ones_like(result),
}
