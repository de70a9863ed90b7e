"""shardwright init writes a project that trains at once, and completion what shells take."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launching import COMMAND
from shardwright.cli import cli


def run(folder, *words, **environment):
    return subprocess.run(
        [COMMAND, *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_the_starter_project_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, ["init", "spirals"])
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-1] == "Train it on two ranks: cd spirals && shardwright launch -n 2 train.py"
    files = {path.name: path.read_text() for path in (tmp_path / "spirals").iterdir()}
    assert set(files) == {"README.md", "model.py", "train.py", "train.yaml"}
    assert len(files["README.md"].splitlines()) == 5
    again = CliRunner().invoke(cli, ["init", "spirals"])
    assert (again.exit_code != 0, again.stdout) == (True, "")
    assert "spirals has README.md, model.py, train.py, train.yaml already, and nothing was written" in (
        f"{again.stderr}{again.exception}"
    )


def test_a_starter_project_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    read = Path.read_text

    def reading(path):
        if path.name.startswith("train.yaml"):
            raise OSError(28, "No space left on device")
        return read(path)

    monkeypatch.setattr(Path, "read_text", reading)
    failed = CliRunner().invoke(cli, ["init", str(tmp_path / "my spirals")])
    assert "cannot be written to" in f"{failed.output}{failed.exception}"
    assert not list((tmp_path / "my spirals").iterdir())
    monkeypatch.undo()
    made = CliRunner().invoke(cli, ["init", str(tmp_path / "my spirals")])
    assert f"cd '{tmp_path}/my spirals' && shardwright launch" in made.output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_starter_project_trains_at_once_on_any_number_of_ranks(tmp_path):
    run(tmp_path, "init", "spirals")
    folder = tmp_path / "spirals"
    shown = [run(folder, *words, "epochs=3", f"output=of{len(words)}") for words in (
        ("launch", "-n", "2", "train.py"), ("launch", "train.py"),
    )]  # fmt: skip
    assert all(one.returncode == 0 for one in shown), shown[0].stderr
    losses = [[float(loss) for loss in re.findall(r"loss is ([\d.]+)", one.stdout)] for one in shown]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][-1] < losses[0][0] / 3
    refused = run(folder, "launch", "-n", "1", "train.py", "epohcs=3")
    assert "epohcs" in refused.stderr
    assert refused.returncode == 1
    went_on = run(folder, "launch", "-n", "3", "train.py", "epochs=4", "resume=true", "output=of4")
    assert "epoch: 4 step: 60" in went_on.stdout, went_on.stderr
    assert "epoch: 3 step" not in went_on.stdout
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        rules = ["--line-length", "120", "--select", "E,F,B,UP,RUF"]
        assert not subprocess.run([ruff, "check", "--isolated", *rules, folder], cwd=folder).returncode
