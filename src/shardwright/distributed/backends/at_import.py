"""Lets torch know our backend as soon as both packages are imported, for scripts that use nothing else of ours.

The standard library alone is imported: ``import shardwright`` waits for nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TORCH = "torch.distributed"


def register() -> None:
    """Now if torch is there, else when it is imported."""
    if _TORCH in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    importlib.import_module("shardwright.distributed.backends.shm").register()


class _Watch(MetaPathFinder):
    """Finds torch's module as others do, once, and adds to what happens when it is run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if hasattr(module, "Backend"):  # torch may be built without it
                    _register()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
