"""The examples in docstrings give what they say, in every module that has one."""

import doctest
import importlib

import pytest

from shardwright.common import package

MODULES = [
    ".".join(("shardwright", *path.relative_to(package.FOLDER).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(package.FOLDER.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_say(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed
