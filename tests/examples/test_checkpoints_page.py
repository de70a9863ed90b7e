"""The scripts and commands on the page about checkpoints run, in order, in an empty folder."""

import re
import runpy
import shlex
from pathlib import Path

import torch
from click.testing import CliRunner

from shardwright.checkpoint.exchange.exchange import read_state
from shardwright.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "saving" / "checkpoints.md"


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    printed = {}
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)[1]
            Path(name).write_text(block)
            runpy.run_path(name, run_name="__main__")
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "shardwright"
            done = CliRunner().invoke(cli, arguments)
            assert done.exit_code == 0, (line, done.output, done.exception)
            printed[line.partition("#")[0].strip()] = done.output
    assert "step-00000200" in printed["shardwright checkpoint show runs/a"]
    assert printed["shardwright checkpoint verify runs/a"].count("all as they were written") == 2
    assert read_state("model.safetensors").keys() == read_state("folder").keys() == read_state("epoch_3.pth").keys()
    everything = torch.load("everything.pt", weights_only=True)
    assert torch.equal(everything["model"]["0.weight"], read_state("folder")["0.weight"])
    assert everything["optimizer"]["param_groups"]["0"]["lr"] == 1e-3
