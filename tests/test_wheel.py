"""The wheel that is built has everything; installed into a new environment it begins a project and trains it.

Nothing is downloaded: the environment has the packages of the one that runs this.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGES = Path(torch.__file__).parents[1]
pytestmark = pytest.mark.timeout(400)


def run(*command, folder, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    missing = [name for name in ("hatchling", "pip") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install hatchling pip")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), folder=ROOT)
    [built] = folder.glob("*.whl")
    return built


def test_it_has_every_file_of_the_package_and_the_command(wheel):
    packed = zipfile.ZipFile(wheel)
    package = ROOT / "src"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert len(files) > 300
    assert files <= set(packed.namelist())
    [entries] = [name for name in packed.namelist() if name.endswith("entry_points.txt")]
    named = packed.read(entries).decode()
    assert "shardwright = shardwright.cli:main" in named
    assert "[torch.backends]\nshardwright = shardwright:_register_backends" in named


def installed(python, wheel, folder):
    """A new environment of this interpreter, with the wheel in it: where its programs are."""
    run(python, "-m", "venv", "--without-pip", str(folder), folder=folder.parent)
    new = folder / "bin" / "python"
    purelib = run(new, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", folder=folder).strip()
    run(
        sys.executable, "-m", "pip", "--python", str(new), "install", "-q", "--no-deps", "--no-index", "--no-cache-dir",
        "--disable-pip-version-check", str(wheel), folder=folder,
    )  # fmt: skip
    (Path(purelib) / "others.pth").write_text(f"{PACKAGES}\n")  # after what is installed, so that ours goes first
    found = run(new, "-c", "import shardwright; print(shardwright.__file__)", folder=folder).strip()
    assert Path(found).is_relative_to(purelib)
    return folder / "bin"


@pytest.mark.slow
def test_installed_from_the_wheel_it_begins_a_project_and_trains_it(wheel, tmp_path):
    programs = installed(sys.executable, wheel, tmp_path / "new")
    ours = str(programs / "shardwright")
    assert "Train a PyTorch model on many devices" in run(ours, "--help", folder=tmp_path)
    run(ours, "init", "spirals", folder=tmp_path)
    shown = run(ours, "launch", "-n", "2", "train.py", "epochs=1", folder=tmp_path / "spirals", OMP_NUM_THREADS="1")
    assert "val | epoch: 1 | loss: " in shown
    assert "h100" in run(programs / "python", "-c", SHIPPED, folder=tmp_path)


SHIPPED = """
from importlib.resources import files
print([path.name for path in files("shardwright").rglob("*") if path.suffix in (".json", ".yaml", ".html")])
"""


def python_3_12():
    """An interpreter of that version, None where there is none; pyenv may have one that is not on the PATH."""
    pyenv = shutil.which("pyenv")
    prefix = subprocess.run([pyenv, "prefix", "3.12"], capture_output=True, text=True).stdout.strip() if pyenv else ""
    for found in (shutil.which("python3.12"), f"{prefix}/bin/python3.12" if prefix else None):
        if found and not subprocess.run([found, "-c", "import venv"], capture_output=True).returncode:
            return found
    return None


@pytest.mark.slow
def test_on_python_3_12_its_commands_start(wheel, tmp_path):
    if (other := python_3_12()) is None:
        pytest.skip("there is no python3.12 here")
    ours = str(installed(other, wheel, tmp_path / "new") / "shardwright")
    assert "Train a PyTorch model on many devices" in run(ours, "--help", folder=tmp_path)
    assert "[rank 1] here" in run(ours, "launch", "-n", "2", "--tee", "all", "--", "echo", "here", folder=tmp_path)
