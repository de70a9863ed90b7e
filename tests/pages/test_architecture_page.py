"""The page about architecture names every wing, in their order, and values that they define."""

import ast
import re

from pages import DOCS
from shardwright.common import package

TABLE = re.findall(r"^\| `([\w/]+)` \| (.*?) \| (.*?) ?\|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)


def is_frozen(room, value):
    """Whether a room defines this class, at any depth, as a frozen one."""
    defining = [source for source in package.sources(room).values() if f"\nclass {value}".encode() in source]
    return any(
        isinstance(node, ast.ClassDef)
        and node.name == value
        and any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        for source in defining
        for node in ast.parse(source).body
    )


def test_every_folder_has_its_sentence():
    assert tuple(room for room, _, _ in TABLE if "/" not in room) == package.WINGS
    inner = {p.parent.relative_to(package.FOLDER).as_posix() for p in package.FOLDER.glob("*/*/**/__init__.py")}
    assert inner - {"training/zoo/models"} == {room for room, _, _ in TABLE if "/" in room}
    assert all(sentence.endswith(".") for _, sentence, _ in TABLE)


def test_the_values_are_frozen_and_of_their_rooms():
    for room, _, values in TABLE:
        for value in re.findall(r"`(\w+)`", values):
            assert is_frozen(room, value), f"{room} defines no frozen {value}"


def test_every_answer_names_files_and_what_they_define():
    answers = re.findall(r"^\| .*\? \| (.*) \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert len(answers) > 15
    for answer in answers:
        folder, defined, names = package.FOLDER, set[str](), set[str]()
        for named in re.findall(r"`([\w/.]+)`", answer):
            if "/" not in named and not named.endswith(".py"):
                names.update(named.split("."))
                continue
            places = [root / named for root in (package.FOLDER, folder, folder.parent) if (root / named).exists()]
            assert places, f"{named} is not there: {answer}"
            if places[0].suffix == ".py":
                folder = places[0].parent
                nodes = ast.walk(ast.parse(places[0].read_bytes()))
                defined |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert names <= defined, f"{names - defined} are defined elsewhere: {answer}"
