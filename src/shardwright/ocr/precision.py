"""The precision in which networks compute, and loss scaling that leaves no step out."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.distributed.precision import Precision
from shardwright.ocr.options.sections import Settings


def precision_of(settings: Settings) -> Precision:
    """Return what forwards compute in while the network is trained."""
    return "float32" if settings.system.amp_level == "O0" else settings.system.amp_dtype


def inference_precision_of(settings: Settings) -> Precision:
    """Return what forwards compute in when the network has been trained."""
    return "float32" if settings.system.amp_level_infer == "O0" else settings.system.amp_dtype


class ApplyingScaler(torch.amp.GradScaler):
    """Makes the optimizer's step also where gradients have overflowed, which torch's scaler leaves out.

    The scale falls and grows as torch's does.
    """

    _unscaled = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once for each step."""
        super().unscale_(optimizer)
        self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the step of ``optimizer``, of gradients that were divided by the scale."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        if not self._unscaled:
            self.unscale_(optimizer)
        self._unscaled = False
        return optimizer.step(*args, **kwargs)
