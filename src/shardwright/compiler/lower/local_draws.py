"""The local form of random operators, which are given the key of their numbers and where their part starts."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.lower.call import Call, random_key
from shardwright.compiler.lower.operators.draws import refuse_range
from shardwright.compiler.lower.site import ANY_DEVICE, Localiser, Site
from shardwright.compiler.rules.notation import Operand
from shardwright.errors import ShardwrightError, UsageError


def _drawn(site: Site) -> tuple[Any, ...]:
    """The key, the global shape and the offsets of an operator that draws its first result."""
    return random_key(site.number), list(site.result_shape()), site.result_offsets()


def _dtype(site: Site) -> torch.dtype:
    return site.values[site.node.results[0]].dtype


def _made(site: Site) -> tuple[tuple[str, Any], ...]:
    """The dtype and the device of a result that has no operand to be like."""
    return ("dtype", _dtype(site)), ("device", ANY_DEVICE)


def dropout(site: Site) -> Call:
    """Return the call of dropout, unchanged where nothing is dropped."""
    p = site["p"]
    if not p or site["train"] is False:
        return site.same()
    return Call(f"draws.{site.name}", (Operand(0), p, *_drawn(site), site.local_result_shape()))


def recurrent(site: Site) -> Call:
    """Return the call of a recurrent layer, unchanged where it drops nothing between its layers."""
    if not (site["dropout"] and site["train"] and site["num_layers"] > 1):
        return site.same()
    return Call("draws.recurrent", (site.name, *site.arguments.values(), *_drawn(site)))


def bernoulli(site: Site) -> Call:
    """Return the call of bernoulli, with ``p`` or the probabilities in its operand."""
    return Call("draws.bernoulli", (Operand(0), site.arguments.get("p", Operand(0)), *_drawn(site)))


def made(kernel: str) -> Localiser:
    """Numbers of the distribution of ``kernel``, for the part of the result that is here."""

    def draw(site: Site) -> Call:
        return Call(f"draws.{kernel}", (*_drawn(site), site.local_result_shape()), _made(site))

    return draw


def in_place_of(kernel: str, *parameters: str) -> Localiser:
    """Numbers of the distribution of ``kernel`` with the arguments ``parameters``, in place of those of an operand."""
    return lambda site: Call(f"draws.{kernel}", (Operand(0), *(site[name] for name in parameters), *_drawn(site)))


def normal(site: Site) -> Call:
    """Return the call of normal, with a mean and a standard deviation that are tensors or numbers."""
    return Call("draws.normal", (site["mean"], site["std"], *_drawn(site), site.local_result_shape()), _made(site))


def rrelu(site: Site) -> Call:
    """Return the call of rrelu, unchanged outside of training."""
    if not site["training"]:
        return site.same()
    bounds = site["lower"], site["upper"]
    return Call("draws.rrelu", (Operand(0), *bounds, *_drawn(site), len(site.node.results) > 1))


def randint(site: Site) -> Call:
    """randint, randint_like: from low, or 0, to below high."""
    low, high = site.arguments.get("low", 0), site["high"]
    if isinstance(high, Operand):
        return Call("draws.randint_below", (Operand(0), high, _dtype(site), *_drawn(site)))
    key, *place = _drawn(site)
    _refuse_range(site, low, high)
    return Call("draws.randint", (key, low, high, *place, site.local_result_shape()), _made(site))


def random(site: Site) -> Call:
    """random: from low to below high, or all that a dtype has from 0 on."""
    low, high = site.arguments.get("from", 0), site.arguments.get("to")
    if high is None:
        high = _largest(_dtype(site)) + 1
    _refuse_range(site, low, high)
    return Call("draws.random", (Operand(0), low, high, *_drawn(site)))


def _largest(dtype: torch.dtype) -> int:
    """The largest whole number up to which a dtype has all of them."""
    if dtype == torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _refuse_range(site: Site, low: int, high: int) -> None:
    try:
        refuse_range(low, high, _dtype(site))
    except ShardwrightError as error:
        raise UsageError(f"{error}, at {site.node.source}") from None


def randperm(site: Site) -> Call:
    """Return the call of randperm, which every rank makes in full."""
    n = site["n"]
    _refuse_range(site, 0, max(n, 1))
    return Call("draws.randperm", (random_key(site.number), n), _made(site))


def multinomial(site: Site) -> Call:
    """Return the call of multinomial, by positions in its result, or in its weights if there is no replacement."""
    if site["replacement"]:
        place = (*_drawn(site), site.local_result_shape())
    else:
        starts = [part.start for part in site.operand_slice(0)]
        place = (random_key(site.number), list(site.operand_shape(0)), starts, site.local_operand_shape(0))
    return Call("draws.multinomial", (Operand(0), site["num_samples"], site["replacement"], *place))


# Lines of the column `local.LOCALISERS`.
LINES: tuple[tuple[str, Localiser], ...] = (
    ("native_dropout dropout", dropout),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", recurrent),
    ("rand.default rand_like", made("rand")),
    ("randn.default randn_like", made("randn")),
    ("randint.default randint.low randint_like", randint),
    ("randperm", randperm),
    ("random", random),
    ("bernoulli", bernoulli),
    ("uniform", in_place_of("uniform", "from", "to")),
    ("normal", normal),
    ("normal_functional", in_place_of("normal_like", "mean", "std")),
    ("exponential", in_place_of("exponential", "lambd")),
    ("cauchy", in_place_of("cauchy", "median", "sigma")),
    ("log_normal", in_place_of("log_normal", "mean", "std")),
    ("geometric", in_place_of("geometric", "p")),
    ("poisson", in_place_of("poisson")),
    ("multinomial", multinomial),
    ("rrelu rrelu_with_noise_functional", rrelu),
)
