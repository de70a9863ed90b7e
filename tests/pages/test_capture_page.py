"""The pages about captures are true: examples are captured, or are refused with the words that stand under them."""

import contextlib
import linecache
import os
import re
import sys
import types
import warnings
from pathlib import Path

import pytest

from pages import DOCS
from ranks import run_ranks

SUMMARY, REFERENCE = "capture.md", "training/capture_reference.md"
FILE = "net.py"


def examples_of(page):
    """Return the examples of a page, each with the error that stands under it, "" where it works."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)


def execute(text, names):
    linecache.clearcache()
    Path(FILE).write_text(text)
    exec(compile(text, FILE, "exec"), names)


def outcome(start, example):
    """What an example is refused with, "" where it works; ``start`` is what all of them continue."""
    *before, call = start.strip().split("\n")
    page = sys.modules["page"] = types.ModuleType("page")  # where classes of the page are found by their names
    names = vars(page)
    execute("\n".join(before), names)
    try:
        execute(example, names)
        if "parallel" not in names:
            exec(call, names)
    except Exception as error:
        return str(error)
    finally:
        with contextlib.suppress(KeyError, AttributeError):
            names["parallel"].close()
    return ""


def outcomes(folder, examples):
    own = Path(folder) / os.environ["RANK"]  # ranks that share a file would quote each other's lines
    own.mkdir()
    os.chdir(own)
    warnings.simplefilter("ignore")  # that a model runs by DistributedDataParallel
    return [outcome(examples[0], example) for example in examples]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "at_least"), [(SUMMARY, 3), (REFERENCE, 40)])
def test_every_example_does_what_stands_under_it(page, at_least, tmp_path):
    examples = examples_of(page)
    seen, _ = run_ranks(2, outcomes, str(tmp_path), [example for example, _ in examples], timeout=110)
    assert len(seen) >= at_least
    for (example, text), got in zip(examples, seen, strict=True):
        assert got.startswith(text.strip()) if text else got == "", f"{example}\n{got}"


def test_the_errors_of_the_summary_stand_in_the_reference():
    [table] = re.findall(r"^\| you write \|.*?\n\n", (DOCS / SUMMARY).read_text(), re.MULTILINE | re.DOTALL)
    errors = re.findall(r"^\|[^|]*\| `([^|]*)` \|[^|]*\|$", table, re.MULTILINE)
    assert len(errors) == len(table.strip().splitlines()) - 2 > 15
    printed = [text for _, text in examples_of(REFERENCE) if text]
    assert [error for error in errors if not any(error in text for text in printed)] == []
