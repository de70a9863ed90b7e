"""The page about GPUs names the steps that there are, of a script that runs them one by one."""

import importlib.util
import re
import subprocess
import sys

import pytest

from pages import DOCS

PAGE = (DOCS / "gpu.md").read_text()
SCRIPT = DOCS.parent / "benchmarks" / "gpu_first.py"


@pytest.fixture(scope="module")
def first():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("gpu_first", SCRIPT)
    module = sys.modules["gpu_first"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_stands_on_the_page(first):
    [listed] = re.findall(r"^## What cannot be tried without a GPU\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    named = {
        name.strip() for row in re.findall(r"^\|[^|]*\|([^|]*)\|$", listed, re.MULTILINE) for name in row.split(",")
    }
    steps = {step.name.split(",")[0] for step in first.STEPS} - {"machine"}
    assert {f"speed {name}" if name.startswith("of") else name for name in named} >= steps
    assert len({step.name for step in first.STEPS}) == len(first.STEPS)


def test_a_step_that_cannot_begin_fails_or_takes_too_long_is_told_and_the_next_one_begins(first, monkeypatch, tmp_path):
    programs = {
        "fine": "import json, pathlib; pathlib.Path(answer).write_text(json.dumps({'ms': 3}))",
        "breaks": "raise SystemExit('it is broken | here')",
        "hangs": "import time; time.sleep(60)",
    }
    command = lambda step, device, quick, answer: [sys.executable, "-c", f"answer={answer!r}\n{programs[step.name]}"]  # noqa: E731
    steps = [first.Step(name, "", 60) for name in ("fine", "breaks")]
    steps += [first.Step("hangs", "", 1), first.Step("on a GPU", "", 5, "GPU")]
    monkeypatch.setattr(first, "command", command)
    monkeypatch.setattr(first, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--device", "cpu", "--json", str(tmp_path / "found.json")])
    said = []
    monkeypatch.setattr("builtins.print", lambda text, **_: said.append(text))
    with pytest.raises(SystemExit, match="1"):
        first.main()
    rows = [re.sub(r"\| [\d.]+ \|", "| s |", row, count=1) for row in said[-1].strip().splitlines()[2:]]
    assert rows == [
        "| fine | passed | s | ms 3 |",
        "| breaks | failed | s | it is broken / here |",
        "| hangs | too slow | s |  |",
        "| on a GPU | needs a GPU | s |  |",
    ]
    assert '"ended": "passed"' in (tmp_path / "found.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_steps_pass_on_a_cpu_as_far_as_they_make_sense(tmp_path):
    words = ["--device", "cpu", "--quick", "--limits", "5", "--minutes", "14", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "| needs a GPU |" in done.stdout
    assert "| failed |" not in done.stdout
