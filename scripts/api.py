#!/usr/bin/env python3
"""Write docs/api.md, the reference of every public name, from signatures and docstrings.

.venv/bin/python scripts/api.py
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shardwright as sw

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
OPENING = """# Reference

Every public name, as `import shardwright as sw` gives it. The page is made by `scripts/api.py` from the docstrings,
which `help(sw.parallelize)` shows, too. How the names work together is told in the [README](../README.md).
"""
PARTS = {  # title -> the places of the package whose names stand there; what two have stands in the first
    "The ranks": ("distributed", "training.notebook"),
    "A split training step": ("runtime", "compiler"),
    "Data": ("data",),
    "The trainer": ("training",),
    "Checkpoints": ("checkpoint",),
    "Errors": ("errors",),
}
LONGEST = 110  # of a signature in one line


def page() -> str:
    """The whole page."""
    lines = [OPENING]
    left = dict(sw._PUBLIC)
    for title, places in PARTS.items():
        lines += [f"## {title}", ""]
        for name in [name for name, module in left.items() if is_in(module, places)]:
            lines += entry(f"sw.{name}", getattr(sw, name))
            del left[name]
    assert not left, f"no part of the page has the places of {left}"
    return "\n".join(lines).rstrip() + "\n"


def is_in(module: str, places: tuple[str, ...]) -> bool:
    """Return whether a module is one of these places of the package, or below one."""
    return any(f"{module}.".startswith(f"shardwright.{place}.") for place in places)


def entry(name: str, value: Any) -> Iterator[str]:
    """A public name: a function with what it returns, a class with its methods, or a module with its names."""
    if inspect.ismodule(value):
        for inner in value.__all__:
            yield from entry(f"{name}.{inner}", getattr(value, inner))
        return
    yield from (f"### {name}", "")
    if inspect.isclass(value):
        yield from members(name, value)
        return
    yield from described(name, value)
    for kind in returned(value):
        yield from (f"### {kind.__name__}, what {name} returns", "")
        yield from members(kind.__name__, kind, constructed=False)


def members(name: str, kind: type, *, constructed: bool = True) -> Iterator[str]:
    """A class: how it is made, what it is, and its public methods that have a docstring, inherited ones last."""
    yield from described(name, kind) if constructed else prose(inspect.getdoc(kind) or "")
    for attribute, member in [each for part in parts(kind) for each in vars(part).items()]:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if attribute.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(member, property):
            yield from (f"`.{attribute}`: {' '.join(inspect.getdoc(function).split())}", "")  # type: ignore[union-attr]
        else:
            yield from described(f".{attribute}", function)


def parts(kind: type) -> list[type]:
    """The class, and those of ours that it continues and that have no entry of their own."""
    public = [getattr(sw, name) for name in sw.__all__]
    return [k for k in kind.__mro__ if k is kind or (k.__module__.startswith("shardwright.") and k not in public)]


def described(name: str, value: Any) -> Iterator[str]:
    """The signature and the docstring."""
    if not (inspect.isclass(value) and issubclass(value, BaseException)):
        yield from ("```", signature(name, value), "```", "")
    yield from prose(inspect.getdoc(value) or "")


def signature(name: str, value: Callable[..., Any]) -> str:
    """The call with its arguments, their types and defaults; one argument to a line where they are many."""
    found = inspect.signature(value)
    shown, star = [], False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {written(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{prefix}{parameter.name}{kind}{default}")
    result = "" if found.return_annotation in (found.empty, None, "None") else f" -> {written(found.return_annotation)}"
    line = f"{name}({', '.join(shown)}){result}"
    return line if len(line) <= LONGEST else "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){result}"])


def written(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def returned(function: Callable[..., Any]) -> list[type]:
    """The classes of ours that a function returns and that have no public name."""
    kind = typing.get_type_hints(function).get("return")
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    public = [getattr(sw, name) for name in sw.__all__]
    return [k for k in kinds if inspect.isclass(k) and k.__module__.startswith("shardwright.") and k not in public]


def prose(text: str) -> Iterator[str]:
    """A docstring as Markdown: sections of arguments as lists, examples as code."""
    for paragraph in re.split(r"\n\n+", text):
        title, _, rest = paragraph.partition("\n")
        if re.fullmatch(r"[A-Z]\w+:", title) and rest.startswith("    "):
            yield f"**{title}**"
            yield from ["", *items(inspect.cleandoc(rest)).split("\n"), ""]
        elif paragraph.lstrip().startswith(">>>"):
            yield from ["```python", *inspect.cleandoc(paragraph).split("\n"), "```", ""]
        elif paragraph.startswith("    "):
            yield from ["```", *inspect.cleandoc(paragraph).split("\n"), "```", ""]
        else:
            yield from [*paragraph.split("\n"), ""]


def items(section: str) -> str:
    """``name: what it is`` as entries of a list."""
    joined = re.sub(r"\n\s+", " ", section)
    return "\n".join(re.sub(r"^([\w*, .\[\]]+): ", r"- `\1`: ", line) for line in joined.split("\n"))


if __name__ == "__main__":
    PAGE.write_text(page())
