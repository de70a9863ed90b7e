"""What the page tells to add can be added: in a copy of the package, to the files that it names and to no other."""

import re
import shutil
from pathlib import Path

import pytest

from pages import DOCS, run_blocks
from shardwright.common import package

ROOT = DOCS.parent
PAGE = (DOCS / "extending.md").read_text()
CHANGE = re.compile(
    r"^```python\n# (\S+), (new file|(?:before|after|in place of): [^\n]*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL
)


def statement(lines, beginning):
    """The lines of the first statement, or item of a table, that begins like this: from where to where."""
    found = [i for i, line in enumerate(lines) if line.strip().startswith(beginning)]
    assert found, f"no line begins with {beginning}"
    start = stop = found[0]
    depth = 0
    while True:
        depth += sum(lines[stop].count(c) for c in "([{") - sum(lines[stop].count(c) for c in ")]}")
        stop += 1
        if depth <= 0:
            return start, stop


def change(source, file, where, text):
    """Make one change in the folder ``source`` that has the package."""
    path = source / Path(file).relative_to("src")
    verb, _, beginning = where.partition(": ")
    if verb == "new file":
        assert not path.exists()
        path.write_text(text)
        return
    lines = path.read_text().splitlines(keepends=True)
    start, stop = statement(lines, beginning)
    if verb == "before" and not text[0].isspace():
        text += "\n\n"
    kept = {"before": lines[start:stop], "after": lines[start:stop], "in place of": []}[verb]
    new = [text, *kept] if verb == "before" else [*kept, text]
    path.write_text("".join([*lines[:start], *new, *lines[stop:]]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_page_adds_is_there(tmp_path, monkeypatch):
    source, reader = tmp_path / "src", tmp_path / "reader"
    shutil.copytree(package.FOLDER, source / "shardwright", ignore=shutil.ignore_patterns("__pycache__"))
    reader.mkdir()
    for file, where, text in CHANGE.findall(PAGE):
        change(source, file, where, text)
    (tmp_path / "extending.md").write_text(CHANGE.sub("", PAGE))
    monkeypatch.setenv("PYTHONPATH", str(source))
    assert run_blocks(tmp_path / "extending.md", reader).count("bash") == 6


def test_the_page_names_the_files_that_each_part_touches():
    for part in PAGE.split("\n## ")[1:]:
        named = re.findall(r"`((?:src|tests)/[^`]+)`", part.split("**Files:**")[1].split("\n\n")[0])
        touched = {file for file, _, _ in CHANGE.findall(part)}
        assert touched
        assert touched <= set(named), f"{part.splitlines()[0]}: {touched - set(named)}"


def test_the_files_that_the_page_names_exist():
    new = {file for file, where, _ in CHANGE.findall(PAGE) if where == "new file"}
    named = set(re.findall(r"`((?:src|tests)/[^`]+)`", PAGE))
    assert [name for name in sorted(named - new) if not (ROOT / name).exists()] == []
