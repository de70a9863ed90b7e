"""The README tells the truth: its blocks run, in order, in one folder, and print what it says they print."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text()
LIMIT_S = 200
pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line where it starts."""

    language: str
    text: str
    line: int


def blocks():
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2], README[: found.start()].count("\n") + 1)


BLOCKS = list(blocks())
[DIGITS] = [block for block in BLOCKS if block.language == "bash" and "data digits" in block.text]


def file_of(block):
    """The name of the file that a block is, None where it is none."""
    name = re.match(r"# (\w+\.py)\n", block.text)
    return name and name[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would try things."""
    reader = tmp_path_factory.mktemp("reader")
    for block in BLOCKS:
        if file_of(block):
            (reader / file_of(block)).write_text(block.text)
    done = run(DIGITS.text, reader)
    assert done.returncode == 0, done.stdout
    return reader


def run(command, folder):
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def comparable(output):
    """Return the output without the far digits, which differ between runs."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", output).strip()


def run_bash(block, folder):
    if block == DIGITS:
        return  # the folder was made with it
    targets = re.findall(r"^make ([\w-]+)$", block.text, re.MULTILINE)
    if targets:  # what they do is long, and scripts and continuous integration run it
        assert block.text == "".join(f"make {target}\n" for target in targets)
        subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return
    done = run(block.text, folder)
    assert done.returncode == 0, done.stdout


def run_python(block, folder):
    """A block that begins with a file's name is that file, which a later block runs; another runs at once."""
    name = file_of(block)
    compile(block.text, f"README.md:{block.line}", "exec")
    if name:
        later = "".join(b.text for b in BLOCKS if b.line > block.line and b.language != "python")
        assert name in later, f"no later block runs {name}"
        return
    (folder / "block.py").write_text(block.text)
    done = run("python block.py", folder)
    assert done.returncode == 0, done.stdout


def run_console(block, folder):
    """The output stands under each ``$ command``."""
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        output = comparable(run(command, folder).stdout)
        assert output == comparable(expected), f"README.md:{block.line}: `{command}` prints\n{output}"


RUNNERS = {"bash": run_bash, "python": run_python, "console": run_console}


def slow(block):
    """Mark a block whose like other tests run, those of resuming, of plans and of other launchers, as slow."""
    tested_elsewhere = ("train.resume=auto", "large.py:build", "$ python train.py", "torchrun --standalone")
    return pytest.mark.slow if any(words in block.text for words in tested_elsewhere) else ()


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=slow(block)) for block in BLOCKS],
    ids=lambda block: f"line {block.line}, {block.language}",
)
def test_block(block, folder):
    assert block.language in RUNNERS, f"README.md:{block.line}: nobody checks a block in {block.language!r}"
    RUNNERS[block.language](block, folder)


def test_what_it_points_to_exists():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_targets_that_the_text_names_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([\w-]+)`", (ROOT / page).read_text()))
    assert targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
