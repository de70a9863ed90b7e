"""What is sent of this package to other hosts, where it may be installed, too."""

import subprocess
import sys
import zipfile
from importlib.metadata import entry_points

import pytest

from shardwright.launch.carriers.packed import sources

SUPERVISOR = """
import sys
sys.path.insert(0, sys.argv[1])
import shardwright.launch.supervisor.main
del sys.path[0]
"""
ENTRY = """
from importlib.metadata import entry_points
[entry] = entry_points(group="torch.backends", name="shardwright")
print(entry.load().__code__.co_filename.startswith(sys.argv[1]))
"""
TORCH = """
import torch.distributed
print(shardwright.__file__.startswith(sys.argv[1]) and "shm" in torch.distributed.Backend.backend_list)
"""


@pytest.mark.parametrize("found", [ENTRY, pytest.param(TORCH, marks=pytest.mark.slow)], ids=["entry point", "torch"])
def test_torch_finds_there_what_the_entry_point_of_an_installed_package_names(tmp_path, found):
    """It calls that of the package that was sent, which the supervisor has imported before."""
    assert [entry.value for entry in entry_points(group="torch.backends", name="shardwright")]
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as sent:
        for name, data in sources().items():
            sent.writestr(name, data)
    command = [sys.executable, "-c", SUPERVISOR + found, str(tmp_path / "sent.zip")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
