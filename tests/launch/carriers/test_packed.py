"""What is sent of this package to other hosts, where it may be installed, too."""

import subprocess
import sys
import zipfile
from importlib.metadata import entry_points

from shardwright.launch.carriers.packed import sources

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import shardwright.launch.supervisor.main
del sys.path[0]
import torch.distributed
print(shardwright.__file__.startswith(sys.argv[1]), "shm" in torch.distributed.Backend.backend_list)
"""


def test_torch_finds_there_what_the_entry_point_of_an_installed_package_names(tmp_path):
    """It calls that of the package that was sent, which the supervisor has imported before."""
    assert [entry.value for entry in entry_points(group="torch.backends", name="shardwright")]
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as sent:
        for name, data in sources().items():
            sent.writestr(name, data)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "sent.zip")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
