"""Copies of models, whose attributes may be objects that cannot be copied."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardwright.compiler.capture.tracing.outside.entries import attributes, entries_of
from shardwright.compiler.capture.tracing.outside.safe import is_a


def copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a model, which shares with it what cannot be copied, as locks, open files and streams.

    Args:
        memo: what the copy has in place of tensors and others, by their `id`, as `copy.deepcopy` takes it.

    Raises:
        Exception: where the model cannot be copied even so, by the code of a user's class.
    """
    for module in model.modules():
        for _, value in attributes(module):
            if is_a(value, torch.Tensor) and not value.is_leaf:  # torch refuses to copy these
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        shared = dict(memo)
        for module in model.modules():
            for _, value in attributes(module):
                _share_what_fails(value, shared, set())
        return copy.deepcopy(model, shared)


def _share_what_fails(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Let ``memo`` say of what stands in a value, at any depth, and cannot be copied that it is its own copy."""
    if id(value) in memo or id(value) in seen or is_a(value, nn.Module):
        return
    seen.add(id(value))
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        for _, entry in entries_of(value) or ():
            _share_what_fails(entry, memo, seen)
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            memo[id(value)] = value
