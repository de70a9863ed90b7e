"""How a graph names the functions of users that bring a backward of their own, subclasses of `torch.autograd.Function`.

The name leads back to the class in any process that has imported what defines it: ``autograd.net:Clip.apply`` is
``Clip.apply`` of the module ``net``. Dots within the module's and the class's own names are slashes there, so that the
names of all operators have three parts.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

import torch

from shardwright.errors import CaptureError

_NAMESPACE, _OVERLOAD = "autograd", "apply"


def name_of(function: type[torch.autograd.Function]) -> str:
    """The name of a function in graphs, and in the table of rules: ``autograd.package/net:Clip.apply``."""
    where = f"{function.__module__}:{function.__qualname__}".replace(".", "/")
    return f"{_NAMESPACE}.{where}.{_OVERLOAD}"


def is_function(op: str) -> bool:
    """Whether an operator of a graph is such a function."""
    return op.startswith(f"{_NAMESPACE}.")


def called(op: str) -> str:
    """A function by the name that its user knows: ``Clip``."""
    return _path(op)[1]


def function_of(op: str) -> type[torch.autograd.Function]:
    """The class that a name stands for in this process.

    Raises:
        CaptureError: where the module is not imported here, or has no such class.
    """
    module, path = _path(op)
    found: Any = reduce(lambda of, name: getattr(of, name, None), path.split("."), sys.modules.get(module))
    if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
        raise CaptureError(
            f"{module} has no torch.autograd.Function of the name {path}, which the captured graph calls\n"
            "Define it at the top level of a module that every rank imports."
        )
    return found


def _path(op: str) -> tuple[str, str]:
    """The module, and the class within it."""
    module, _, path = op.removeprefix(f"{_NAMESPACE}.").removesuffix(f".{_OVERLOAD}").replace("/", ".").partition(":")
    return module, path
