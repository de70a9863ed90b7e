"""The page from bare servers to a job is true: typed in order for two hosts, it prints what stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import host_network
from pages import DOCS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_leads_to_a_job_on_two_hosts(tmp_path):
    (network_folder := tmp_path / "network").mkdir()
    readme = (DOCS.parent / "README.md").read_text()
    [program] = re.findall(r"```python\n(# train\.py\n.*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    blocks = re.findall(
        r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", (DOCS / "cluster.md").read_text(), re.M | re.S
    )
    with host_network(2, network_folder, homes=True) as network:
        path = f"{network.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        typed = ["shardwright data digits --format mnist --out digits", *(command for command, _ in blocks)]
        for command, printed in zip(typed, ["", *(text for _, text in blocks)], strict=True):
            done = subprocess.run(
                ["sh", "-ec", command], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True,
                timeout=300, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            fine = (0, 1) if " doctor " in command else (0,)  # a disk may be nearly full here
            assert done.returncode in fine, f"{command}{done.stdout}{done.stderr}"
            assert not printed or done.stdout == printed, f"{command}{done.stdout}{done.stderr}"
    assert len(blocks) == 6
