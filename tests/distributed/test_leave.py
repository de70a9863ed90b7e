"""A rank ends with the exit code of its script, whatever its process group is doing at that moment."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

# Somebody holds the group, and the worker threads of gloo still have tensors to drop when the script ends.
SCRIPT = """
import sys, torch, torch.distributed as dist
import shardwright as sw
world = sw.init(timeout=60)
held = dist.group.WORLD
under_way = [dist.all_reduce(torch.ones(1_000_000), async_op=True) for _ in range(40)]
del under_way
sys.exit(7 if world.rank == 1 else 0)
"""


@pytest.mark.slow
def test_the_exit_code_of_the_script_stays(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [BIN / "shardwright", "launch", "-n", "2", "--tee", "none", "--grace", "20", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 7
    assert "rank 1 failed first: exit code 7" in done.stderr
