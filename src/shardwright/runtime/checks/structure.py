"""Checks that a model has the modules and parameters for which its programs, or torch's hooks, were made."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from shardwright.common import torch_private
from shardwright.errors import UsageError


class Structure:
    """The modules and parameters of a model as they are now, to notice where a script puts others in their place.

    Costs a look at each member of each module, about 20 us for a thousand of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._members: list[tuple[dict[str, Any], str, Any, str]] = []
        self._modules = dict(model.named_modules())
        self._kinds = [*map(type, self._modules.values())]
        self._counts: list[tuple[dict[str, Any], int, str]] = []
        for path, module in model.named_modules():
            for members in torch_private.members(module):
                self._counts.append((members, len(members), path))
                self._members += [(members, name, m, f"{path}.{name}".lstrip(".")) for name, m in members.items()]
        self._where, self._names = [each[0] for each in self._members], [each[1] for each in self._members]
        self._objects = [each[2] for each in self._members]
        self._counted, self._lengths = [each[0] for each in self._counts], [each[1] for each in self._counts]

    def before(self, tensors: Sequence[Tensor] = ()) -> None:
        """Look at all members at once.

        Raises:
            UsageError: where one was replaced, added or removed, of which the programs would know nothing.
        """
        same = all(map(is_, map(dict.get, self._where, self._names), self._objects))
        if not same or [*map(len, self._counted)] != self._lengths:
            self._refuse()
        if [*map(type, self._modules.values())] != self._kinds:
            self._refuse_kinds()

    def _refuse_kinds(self) -> None:
        for (path, module), kind in zip(self._modules.items(), self._kinds, strict=True):
            if type(module) is not kind:
                raise UsageError(
                    f"{path or 'the model'} was a {kind.__name__} and was made a {type(module).__name__} after "
                    "sw.parallelize, which knows the model as it was before; change the model first and then "
                    "parallelize it (again)"
                )

    def _refuse(self) -> None:
        for members, name, member, path in self._members:
            if members.get(name) is not member:
                raise UsageError(
                    f"{path} of the model was {'replaced' if name in members else 'removed'} after sw.parallelize, "
                    "which knows the one before; change the numbers of parameters in place (with torch.no_grad(): "
                    "parameter.copy_(...)), or change the model first and then parallelize it (again)"
                )
        for members, count, path in self._counts:
            if len(members) != count:
                raise UsageError(
                    f"{path or 'the model'} was given {list(members)[count]} after sw.parallelize, which knows the "
                    "model as it was before; change the model first and then parallelize it (again)"
                )
