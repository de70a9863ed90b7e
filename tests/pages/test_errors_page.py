"""The page about errors names every class, in their order, and only messages that there are."""

import ast
import errno
import inspect
import os
import re
from collections.abc import Iterator

from pages import DOCS
from ranks import run_ranks
from shardwright import errors
from shardwright.common import package

PAGE = (DOCS / "errors.md").read_text()
SHORTEST = 6  # of a piece between what differs


def literal(node: ast.AST) -> str:
    """A string with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return "…"


def literals() -> Iterator[str]:
    for path in package.FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                yield literal(node)


def test_every_class_has_its_part():
    classes = [
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind is not errors.ShardwrightError
    ]
    assert re.findall(r"^## (\w+Error)$", PAGE, re.MULTILINE) == classes
    tree = re.sub(r" +also a \w+$", "", PAGE.split("```")[1], flags=re.MULTILINE)
    for name in classes:
        assert f"── {name} " in tree
        [base] = [k.__name__ for k in getattr(errors, name).__mro__ if k in (ValueError, RuntimeError)]
        if getattr(errors, name).__base__ is errors.ShardwrightError:
            assert re.search(rf"── {name} .* also a {base}$", PAGE, re.MULTILINE)


def test_every_message_is_one_that_there_is():
    there = [*literals(), *map(os.strerror, errno.errorcode)]  # of the package, and of the system
    rows = re.findall(r"^\| (`.*?`(?: or `.*?`)*) \|", PAGE, re.MULTILINE)
    assert len(rows) > 80
    unknown = []
    for message in (message for row in rows for message in re.findall(r"`(.*?)`", row)):
        pieces = [piece for piece in message.split("…") if len(piece) >= SHORTEST]
        assert pieces, f"{message} says too little to look for"
        if not any(all(piece in text for piece in pieces) for text in there):
            unknown.append(pieces)
    assert unknown == [], "no message of the package has these"


def run_example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})


def test_the_example_runs():
    run_ranks(1, run_example)
