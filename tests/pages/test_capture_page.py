"""The page about captures is true: its examples are captured, or are refused with the words that stand under them."""

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

PAGE = (DOCS / "capture.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", PAGE, re.MULTILINE | re.DOTALL)
FILE = "net.py"


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
def test_every_example_does_what_stands_under_it(tmp_path):
    seen, _ = run_ranks(2, outcomes, str(tmp_path), [example for example, _ in EXAMPLES], timeout=110)
    assert len(seen) > 30
    for (example, text), got in zip(EXAMPLES, seen, strict=True):
        assert got.startswith(text.strip()) if text else got == "", f"{example}\n{got}"
