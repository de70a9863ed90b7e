"""The script on the page about DistributedDataParallel runs."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

from ranks import run_ranks
from shardwright.data.digits import write_digits

PAGE = Path(__file__).parents[2] / "docs" / "training" / "ddp.md"


def run_script(script, data):
    sys.argv = [script, data]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


def test_the_script_of_the_page_trains(tmp_path):
    [code] = re.findall(r"```python\n(# cifar10\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    for full, short in (
        ("resnet18()", "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))"),
        ("epochs=10", "steps=2"), ("every=10", "every=1"),
        ('"checkpoints"', f'"{tmp_path}/checkpoints"'),
    ):  # fmt: skip
        assert full in code
        code = code.replace(full, short)
    (tmp_path / "cifar10.py").write_text(code)
    write_digits(tmp_path / "data", "cifar10")
    first, second = run_ranks(2, run_script, str(tmp_path / "cifar10.py"), str(tmp_path / "data"))
    start, *losses, validation, traffic = first.splitlines()
    assert traffic.startswith("traffic | ")
    assert start == "global batch: 64 samples on 2 ranks, learning rate: 0.01, precision: float32"
    assert [line.partition(",")[0] for line in losses] == ["epoch: 1 step: 1", "epoch: 1 step: 2"]
    assert re.fullmatch(r"val \| epoch: 1 \| loss: \d+\.\d{4} \| accuracy: 0\.\d{4}", validation)
    assert second == ""
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000002\n"
