"""The page about errors names every class, in their order, and only messages that there are."""

import ast
import errno
import inspect
import os
import re
from functools import cache

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


@cache
def literals(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [literal(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def is_there(pieces: list[str], sources: list[str]) -> bool:
    """Whether one string has all of these; looked for where all of their words are, since parsing takes long.

    First where most of the pieces stand as they are, on one line.
    """
    words = {word for piece in pieces for word in re.findall(r"\w+", piece)}
    likely = [source for source in sources if all(word in source for word in words)]
    likely.sort(key=lambda source: sum(piece not in source for piece in pieces))
    return any(all(piece in text for piece in pieces) for source in likely for text in literals(source))


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
    sources = [path.read_text() for path in package.FOLDER.rglob("*.py")]
    of_the_system = [os.strerror(number) for number in errno.errorcode]
    rows = re.findall(r"^\| (`.*?`(?: or `.*?`)*) \|", PAGE, re.MULTILINE)
    assert len(rows) > 80
    unknown = []
    for message in (message for row in rows for message in re.findall(r"`(.*?)`", row)):
        pieces = [piece for piece in message.split("…") if len(piece) >= SHORTEST]
        assert pieces, f"{message} says too little to look for"
        if not is_there(pieces, sources) and not any(all(p in text for p in pieces) for text in of_the_system):
            unknown.append(pieces)
    assert unknown == [], "no message of the package has these"


def run_example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})


def test_the_example_runs():
    run_ranks(1, run_example)
