"""The models that a user plans and verifies from the command line: ``FILE.py:build``, which makes one.

The module imports no torch itself, so that the command that only starts the ranks need not wait for it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwright.errors import ShardwrightError, UsageError
from shardwright.launch.host.program import check_script

if TYPE_CHECKING:
    from torch import nn

RETURNS = "(model, loss_fn, batch), with a list of batches where there are several, and pins as a fourth where wanted"


@dataclass(frozen=True)
class BuiltModel:
    """The values of ``build()``. ``batches`` are global batches, at least one."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    batches: tuple[Any, ...]
    pins: Mapping[str, Any]


@dataclass(frozen=True)
class BuildFunction:
    """A function of a Python file, not loaded yet."""

    path: Path
    name: str

    @staticmethod
    def parse(text: str) -> BuildFunction:
        """Read ``FILE.py:build``.

        Raises:
            UsageError: where the text has another form, or there is no such file; names what there is.
        """
        file, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            script = name if not colon else file
            check_script(script, os.environ)
            raise UsageError(
                f"{text} names no function; type {script}:build, build being a function without arguments that returns "
                f"{RETURNS}; functions there: {', '.join(_functions(Path(script))) or 'none'}"
            )
        check_script(file, os.environ)
        if Path(file).is_dir():
            raise UsageError(f"{file} is a directory; expected a Python file, as in FILE.py:build")
        return BuildFunction(Path(file), name)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def load(self) -> Callable[[], BuiltModel]:
        """Load the file, and return the function with its result checked.

        Raises:
            UsageError: where the file cannot be loaded or has no such function. The returned function raises it where
                ``build()`` raises or returns something else.
        """
        function = _function(_load(self.path), self.path, self.name)

        def build() -> BuiltModel:
            try:
                result = function()
            except ShardwrightError:
                raise
            except Exception as error:
                raise UsageError(f"{self} raised {_describe(error, self.path)}") from error
            return _checked(result, str(self))

        return build

    def neighbour(self, name: str) -> Callable[..., Any]:
        """Another function of the file that `load` has loaded.

        Raises:
            UsageError: where there is none.
        """
        return _function(sys.modules[_module_name(self.path)], self.path, name)


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(name, names, n=3) or _functions(path)
        raise UsageError(f"{path} has no function {name}; it has {', '.join(near) or 'none'}")
    return function


def _module_name(path: Path) -> str:
    return f"shardwright_build_{path.stem}"


def _functions(path: Path) -> list[str]:
    """The names of the functions that a file defines, without running it; none where it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _load(path: Path) -> ModuleType:
    """The file as a module, which finds its neighbours as a script does."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; expected one, as in FILE.py:build")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their classes up there
    sys.path.insert(0, str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be loaded: {_describe(error, path)}") from error
    return module


def _describe(error: Exception, path: Path) -> str:
    """The error, with the last line of the user's file that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.absolute())]
    where = f", at {path}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _checked(result: object, source: str) -> BuiltModel:
    from torch import nn

    if not isinstance(result, tuple) or len(result) not in (3, 4):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UsageError(f"{source} must return {RETURNS}; it returned {what}")
    model, loss_fn, batches, pins = (*result, None)[:4]
    for name, value, fits, expected in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("loss function", loss_fn, callable(loss_fn), "a function of (model, batch)"),
        ("pins", pins, pins is None or isinstance(pins, Mapping), "a mapping from module path to strategies"),
    ):
        if not fits:
            raise UsageError(f"{source} must return {RETURNS}; its {name} is {type(value).__name__}, not {expected}")
    return BuiltModel(model, loss_fn, as_batches(batches), pins or {})


def as_batches(batches: Any) -> tuple[Any, ...]:
    """Global batches from a list (or a loader, or any other iterator) of them, or from a single one.

    A tensor, a tuple or a mapping is one batch, a list is several.

    Raises:
        UsageError: where there is none.
    """
    from torch import Tensor

    single = isinstance(batches, (Tensor, tuple, Mapping)) or not hasattr(batches, "__iter__")
    listed = (batches,) if single else tuple(batches)
    if not listed:
        raise UsageError("there is no batch; expected one global batch, or a list of them")
    return listed
