"""Functions of torch that cannot be traced as they are, and what is traced in their place.

Each gives the same numbers by operators whose shapes follow from shapes alone. Two are operators of ours, of which
`graph.operators` has the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.common import torch_private

Lengths = Tensor | Sequence[int]


def ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The CTC loss of each sample: ``log_probs`` (t, n, c), ``targets`` (n, s), lengths (n)."""
    return F.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, reduction="none", zero_infinity=zero_infinity
    )


def grouped_mm(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows ``x`` (s, k), sorted by group, each times the matrix of its group, of ``matrices`` (g, k, n).

    Group i ends before row ``ends[i]``; rows after the last group give zeros.
    """
    # Torch's kernel reads 16 bytes at a time, and has no float64.
    if x.itemsize < 8 and all(size * x.itemsize % 16 == 0 for size in matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=ends.to(torch.int32))
    begins = [0, *ends.tolist()]
    products = [x[a:b] @ matrix for a, b, matrix in zip(begins, begins[1:], matrices, strict=False)]
    return torch.cat([*products, x.new_zeros(len(x) - begins[-1], matrices.shape[2])])


_ctc_losses = torch.library.custom_op("shardwright::ctc_losses", ctc_losses, mutates_args=())
_ctc_losses.register_fake(lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
_grouped_mm = torch.library.custom_op("shardwright::grouped_mm", grouped_mm, mutates_args=())
_grouped_mm.register_fake(lambda x, matrices, ends: x.new_empty(x.shape[0], matrices.shape[2]))


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths, blank: int = 0,
    reduction: Literal["none", "mean", "sum", 0, 1, 2] = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`F.ctc_loss`, whose statistics have a size that depends on the longest target."""
    batched = log_probs.ndim == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    lengths = [torch.as_tensor(n, device=log_probs.device).reshape(-1) for n in (input_lengths, target_lengths)]
    if targets.ndim == 1:
        targets = _padded(targets, lengths[1])
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()
    losses: Tensor = _ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction in ("mean", 1):
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """`F.gaussian_nll_loss`, which looks whether a variance is negative, and raises small ones without a gradient."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.ndim != input.ndim or [b for a, b in zip(input.shape, var.shape, strict=True) if a != b] not in ([], [1]):
        raise ValueError("var is of incorrect size")
    # An addend of zero has the gradient of the variance itself, which torch keeps where it raises it.
    var = torch.where(var < eps, var - var.detach() + eps, var)
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """Return targets that stand one after the other as rows of one width; behind its length a row has anything."""
    count = len(targets)
    if not count:
        return targets.new_zeros(len(lengths), 1)
    begins = lengths.cumsum(0) - lengths
    places = begins.unsqueeze(1) + torch.arange(count, device=targets.device)
    return targets[places.clamp(max=count - 1)]


def _grouped_product(
    x: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """`F.grouped_mm`, which tells shapes for bfloat16 alone."""
    if offs is None or bias is not None or out_dtype is not None or (x.ndim, matrices.ndim) != (2, 3):
        as_it_is: Tensor = F.grouped_mm(x, matrices, offs=offs, bias=bias, out_dtype=out_dtype)
        return as_it_is
    product: Tensor = _grouped_mm(x, matrices, offs)
    return product


def _cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """`torch.cov`, which looks at its divisor."""
    variables = x.view(1, -1) if x.ndim < 2 else x
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    count: Any = variables.shape[1] if weights is None else weights.sum()
    weighted = variables if weights is None else variables * weights
    centred = variables - (weighted.sum(1) / count).unsqueeze(1)
    divisor = count - correction
    if aweights is not None and correction:
        divisor = count - correction * (weights * aweights).sum() / count  # type: ignore[operator]
    divisor = divisor.clamp(min=0) if isinstance(divisor, Tensor) else max(divisor, 0)
    other = (centred if weights is None else centred * weights).t()
    products: Tensor = centred @ (other.conj() if x.is_complex() else other) / divisor
    return products.squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    """`torch.corrcoef`, by `_cov`."""
    if x.is_complex():
        return torch.corrcoef(x)
    found = _cov(x)
    if not found.ndim:
        return found / found
    deviations = found.diagonal().sqrt()
    found = found / deviations.unsqueeze(1) / deviations
    return found.clamp(-1, 1)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute `F.dropout`, and return the operand itself where nothing is dropped.

    The exporter makes a copy there, which does not see what is then changed in place.
    """
    drops = bool(training and p)
    return F.dropout(input, p, training, inplace) if drops or not 0 <= p <= 1 else input


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """`F.instance_norm`, whose operator does not say that it changes running statistics, by what it is made of."""
    if running_mean is None or running_var is None or not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    images, channels = input.shape[:2]
    mean, variance = running_mean.repeat(images), running_var.repeat(images)
    weight, bias = (None if one is None else one.repeat(images) for one in (weight, bias))
    joined = input.reshape(1, images * channels, *input.shape[2:])
    result = F.batch_norm(joined, mean, variance, weight, bias, True, momentum, eps)
    running_mean.copy_(mean.view(images, channels).mean(0))
    running_var.copy_(variance.view(images, channels).mean(0))
    return result.view(input.shape)


def averaging_batch_norm(module: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """A batch norm without a momentum in training: its running statistics are means of those of all batches so far."""
    count: Any = module.num_batches_tracked
    averages: tuple[Any, ...] = module.running_mean, module.running_var
    count.add_(1)
    share = count.double().reciprocal()  # in float64, as the number that torch reads
    mean, variance = (torch.zeros_like(average) for average in averages)
    result = F.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
    for average, of_batch in zip(averages, (mean, variance), strict=True):
        average.copy_(average * (1 - share) + of_batch * share)
    return result


def _random_(x: Tensor, *bounds: int | None) -> Tensor:
    """``x.random_(low, high)``, of which torch writes code that is no Python, by another operator."""
    if len(bounds) < 2:
        return x.random_(*bounds)
    low, high = bounds
    if high is None:
        largest = int(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max
        high = min(largest, torch.iinfo(torch.int64).max - 1) + 1
    return x.copy_(torch.randint_like(x, low, high))  # type: ignore[arg-type]


def _fill_diagonal_(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """``x.fill_diagonal_(number)``, which torch writes by ``as_strided``, which no write into a view may follow."""
    if wrap or x.ndim < 2 or (x.ndim > 2 and len(set(x.shape)) > 1):
        return x.fill_diagonal_(fill_value, wrap)
    if x.ndim == 2:
        x.diagonal().fill_(fill_value)
    else:
        x[(torch.arange(x.shape[0], device=x.device),) * x.ndim] = fill_value
    return x


def _data(x: Tensor, *_: Any) -> Tensor:
    """``x.data``, which the exporter does not survive; where `detach` differs, by a change in place, it is refused."""
    return x.detach()


def _item(x: Tensor, index: Any) -> Tensor:
    """``x[i]``, ``x[:, i]``, ``x[i, j]``, which read numbers where ``i`` and ``j`` are tensors of one each."""
    entries = index if isinstance(index, tuple) else (index,)
    at = [place for place, entry in enumerate(entries) if _is_number(entry)]
    others = [entry for place, entry in enumerate(entries) if place not in at]
    side_by_side = at == list(range(at[0], at[0] + len(at))) if at else False
    if not side_by_side or not all(entry is None or isinstance(entry, slice) for entry in others):
        return x[index]
    return x[tuple(entry.reshape(1) if place in at else entry for place, entry in enumerate(entries))].squeeze(at[0])


def _is_number(entry: Any) -> bool:
    whole = isinstance(entry, Tensor) and not entry.ndim and not entry.is_floating_point()
    return whole and entry.dtype != torch.bool


_IN_PLACE_OF: Mapping[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
    torch_private.grouped_mm: _grouped_product,
    torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _item,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.Tensor.random_: _random_,
    torch.Tensor.fill_diagonal_: _fill_diagonal_,
    F.instance_norm: _instance_norm,
    F.dropout: _dropout,
    torch.unsafe_chunk: torch.chunk,  # which says that it gives views
    torch.Tensor.unsafe_chunk: torch.chunk,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
}


def in_place_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is traced in place of a function of torch: mostly itself."""
    try:
        return _IN_PLACE_OF.get(function, function)
    except TypeError:  # not hashable
        return function
