"""A function of a notebook on several ranks."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import shardwright as sw
from shardwright.errors import LaunchError, UsageError

SCRIPT = """
import torch
import shardwright as sw

factor = 2.0

def main(start):
    world = sw.init()
    print("rank", world.rank, "begins")
    tensor = torch.tensor([start + world.rank]) * factor
    torch.distributed.all_reduce(tensor)
    return world.rank, tensor

print(sw.notebook_launch(main, 2, 1.0))
"""


def test_what_is_defined_in_main_runs_on_ranks_and_comes_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(SCRIPT, {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "rank 0 begins\n" in said
    assert "[(0, tensor([6.])), (1, tensor([6.]))]" in said
    assert "rank 1 begins" in (tmp_path / "log_output/1/rank.1/stdout").read_text()


def failing():
    if sw.init().rank == 1:
        raise ValueError("of my own")


@pytest.mark.slow
def test_a_rank_that_fails_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"(?s)a rank failed \(exit code 1\).*rank 1 failed.*ValueError: of my own"):
        sw.notebook_launch(failing, 2)
    assert "of my own" in capsys.readouterr().out


def test_what_cannot_be_copied_is_refused():
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"the function or an argument cannot be copied .*lock.*; make it inside"):
        sw.notebook_launch(lambda: lock, 2)


@pytest.mark.slow
def test_an_interrupted_cell_leaves_no_rank(tmp_path):
    sleeping = "lambda: (print(os.getpid(), flush=True), time.sleep(600))"
    script = f"import os, time, shardwright as sw\nsw.notebook_launch({sleeping}, 2)"
    cell = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    rank = int(cell.stdout.readline())
    os.kill(cell.pid, signal.SIGINT)
    cell.communicate(timeout=60)
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(rank) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not psutil.pid_exists(rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_in_a_notebook(ranks, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    *first, last = SCRIPT.strip().split("\n\n")
    codes = "\n\n".join(first), last.replace("print(", "results = (").replace("main, 2", f"main, {ranks}") + "; results"
    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[-1].outputs
    assert "rank 0 begins" in "".join(output.get("text", "") for output in outputs)
    assert f"({ranks - 1}, tensor([{ranks * (ranks + 1):.0f}.]))" in outputs[-1]["data"]["text/plain"]
