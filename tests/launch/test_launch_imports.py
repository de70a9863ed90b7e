"""Modules that the launcher imports: what a job does not need would take time before each start."""

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

MOST = 60
LAUNCH = """
import atexit, json, os, sys

pid = os.getpid()
def write():
    if os.getpid() == pid:
        ours = [name for name in sys.modules if name.startswith("shardwright") or name == "torch"]
        print(json.dumps(sorted(ours)), file=sys.stderr)
atexit.register(write)
from shardwright.cli import main
main()
"""


def imported(folder, *words):
    """Return the modules of ours in a process that has run the command, and torch if it is among them."""
    done = subprocess.run([sys.executable, "-c", LAUNCH, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_a_local_launch_imports_few_modules_and_no_torch(tmp_path):
    (tmp_path / "script.py").write_text("print('ran')\n")
    modules = imported(tmp_path, "launch", "-n", "2", "--no-preload", "script.py")
    assert os.listdir(tmp_path / "log_output") == ["1"]
    assert len(modules) <= MOST, "\n".join(modules)
    assert "torch" not in modules


def test_a_command_imports_its_own_module_alone(tmp_path):
    modules = imported(tmp_path, "ps")
    assert {name for name in modules if name.startswith("shardwright.cli.")} == {
        "shardwright.cli.group",
        "shardwright.cli.jobs",
    }


def test_help_and_completion_know_every_command():
    from shardwright.cli.group import COMMANDS, cli

    assert cli.list_commands(None) == sorted(COMMANDS)
    for name in COMMANDS:
        assert cli.get_command(None, name).name == name
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()] == sorted(COMMANDS)
    assert "_SHARDWRIGHT_COMPLETE=bash_complete" in CliRunner().invoke(cli, ["completion", "bash"]).output
    names = os.environ | {"_SHARDWRIGHT_COMPLETE": "bash_complete", "COMP_WORDS": "shardwright ", "COMP_CWORD": "1"}
    program = Path(sys.executable).with_name("shardwright")
    found = subprocess.run([program], env=names, capture_output=True, text=True)
    assert sorted(COMMANDS) == [line.partition(",")[2] for line in found.stdout.splitlines()]
