"""The pages for a browser: links lead within them, and every command has its part."""

import doctest
import importlib.util
import json
import subprocess
import sys

import pytest
import yaml

from pages import DOCS
from shardwright.cli import cli

ROOT = DOCS.parent


@pytest.fixture(scope="module")
def site():
    told = importlib.util.spec_from_file_location("site_of_pages", ROOT / "scripts" / "site.py")
    module = importlib.util.module_from_spec(told)
    told.loader.exec_module(module)
    return module


def test_links_to_what_is_no_page_are_words(site):
    results = doctest.testmod(site)
    assert results.attempted
    assert not results.failed


def test_every_command_is_on_the_page_with_its_help(site):
    text = site.command_page()
    for name in cli.list_commands(None):
        assert f"## shardwright {name}\n" in text
        assert cli.get_command(None, name).help.splitlines()[0].split()[0] in text
    assert "## shardwright ranktable make" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_asks_nobody_for_anything(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'shardwright[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("nav:")[2])
    named = json.dumps(nav)
    assert named.count(".md") > 30
    for page in (tmp_path / "site").rglob("*.html"):
        for asks in ('src="http', '<link rel="stylesheet" href="http', '<link href="http'):
            assert asks not in page.read_text(), f"{page} asks another server"
