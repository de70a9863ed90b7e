"""Copies of the user's model in one dtype, which a verification trains beside each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common.trees import tree_map
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.plan.plan import Plan
from shardwright.errors import ShardwrightError
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.verification.plain import PlainModel

_CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {"float64": nn.Module.double, "float32": nn.Module.float}


class Copies:
    """Makes copies of a model that run in different ways, all on the same batches in the same dtype.

    ``closing`` closes them in the end. New tensors have the dtype, too, until the caller changes that.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], dtype: str, closing: ExitStack
    ) -> None:
        self.model, self.loss_fn, self.dtype, self._closing = model, loss_fn, dtype, closing
        self.torch_dtype: torch.dtype = getattr(torch, dtype)
        torch.set_default_dtype(self.torch_dtype)
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device, self.torch_dtype if leaf.is_floating_point() else leaf.dtype)

        self._batches = [tree_map(cast, batch) for batch in batches]

    def batches_for(self, steps: int) -> list[Any]:
        """The batches in turn, one for each step."""
        return list(islice(cycle(self._batches), steps))

    def split(self, plan: Plan) -> ParallelModel:
        try:
            return self._parallelized(mode="auto", plan=plan)
        except ShardwrightError as error:
            others = f"To leave {self.dtype} out, name the others: dtypes=('float32',)"
            raise type(error)(f"in {self.dtype}: {error}\n{others}") from error

    def one_device(self) -> ParallelModel:
        return self._parallelized(mode="single")

    def plain(self) -> ParallelModel:
        return PlainModel(self._copied(), self.loss_fn)

    def _parallelized(self, **options: Any) -> ParallelModel:
        made = parallelize(self._copied(), self.loss_fn, self._batches[0], batch="global", checks="full", **options)
        return self._closing.enter_context(made)

    def _copied(self) -> nn.Module:
        return _CASTS[self.dtype](copy.deepcopy(self.model))
