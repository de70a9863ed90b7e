"""Parameters that a configuration excludes from training."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Exclude the parameters that match from training; returns the patterns that match none."""
    unmatched = []
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        unmatched += [] if matches else [pattern]
        for parameter in matches:
            parameter.requires_grad_(False)
    return unmatched
