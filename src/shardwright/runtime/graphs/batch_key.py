"""The key of a batch, found in microseconds, by which the program of a step is looked up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.tracing.trace import capture_device
from shardwright.data.loading.batch import Batch
from shardwright.runtime.graphs.captures import Captures

_REQUIRES_GRAD = attrgetter("requires_grad")
_MOST = 1024  # batches that are remembered
_KEYS = frozenset({str, int})  # of mappings: no two that are equal differ


class Look(NamedTuple):
    """The tensors of a batch, in the order of the inputs of its capture, and all else that its graph can depend on."""

    tensors: list[Tensor]
    form: Hashable


class _UnusualError(Exception):
    """The batch holds something that has to be looked at more closely."""


def look_at(batch: Any) -> Look | None:
    """None for batches of unusual kinds, which `Captures.key` and `tensors_of` know."""
    tensors: list[Tensor] = []
    try:
        return Look(tensors, _FORMS[type(batch)](batch, tensors))
    except _UnusualError:
        return None


def _of_tensor(part: Tensor, tensors: list[Tensor]) -> Hashable:
    if part.is_meta:
        raise _UnusualError
    tensors.append(part)
    return part.dtype, part.shape


def _of_entries(part: Any, tensors: list[Tensor]) -> Hashable:
    return list if type(part) is list else tuple, *[_FORMS[type(entry)](entry, tensors) for entry in part]


def _of_mapping(part: Mapping[Hashable, Any], tensors: list[Tensor]) -> Hashable:
    if not _KEYS.issuperset(map(type, part)):  # of which some are equal and yet not the same
        raise _UnusualError
    return dict, *[(name, _FORMS[type(entry)](entry, tensors)) for name, entry in part.items()]


def _of_value(part: Any, tensors: list[Tensor]) -> Hashable:
    return type(part), repr(part)


_Write = Callable[[Any, list[Tensor]], Hashable]


class _Forms(dict[type, _Write]):
    """The way to write each type of a part of a batch."""

    def __missing__(self, kind: type) -> _Write:
        raise _UnusualError


_FORMS = _Forms()
_FORMS |= {Tensor: _of_tensor, dict: _of_mapping}
_FORMS |= dict.fromkeys((tuple, list, Batch), _of_entries)
_FORMS |= dict.fromkeys((bool, int, float, str, type(None)), _of_value)


class Keys:
    """`Captures.key` of the steps of a model, whose parameters are the ones that it keeps.

    Cached by all that the key itself is made of: the kind of step, what tells apart the dtypes, shapes, structure and
    other values of a batch (a `Look`), autocast, the default dtype, and which parameters have gradients.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._device = capture_device(captures.module, captures.device).type
        self._parameters = list(captures.module.parameters())
        self._known: dict[Hashable, str] = {}

    def of(self, kind: StepKind, batch: Any, look: Look | None) -> str:
        """The key of a step on a batch that looks so."""
        if look is None:
            return self._captures.key(kind, batch)
        autocast = torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device)
        trained = tuple(map(_REQUIRES_GRAD, self._parameters))
        seen = kind, look.form, autocast, torch.get_default_dtype(), trained
        key = self._known.get(seen)
        if key is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            key = self._known[seen] = self._captures.key(kind, batch)
        return key
