"""A batch without storage whose mask is made of ones is planned as a run finds it: attention without a mask."""

import pytest

from shardwright.compiler.capture.rewriting.masks import ATTENTION, mask_of
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.runtime.verification.build import BuildFunction
from shardwright.runtime.verification.file_planner import FilePlanner, PlanningOptions

FILE = """
import torch
from decoder import Decoder, loss_fn

def build():
    ids = torch.zeros(2, 8, dtype=torch.long)
    seen = {seen}
    {then}
    return Decoder(layers=1), loss_fn, (ids, seen, ids)
"""


@pytest.mark.parametrize(
    ("seen", "then", "masked"),
    [
        ("torch.ones_like(ids)", "", False),
        ("torch.ones_like(ids)", "seen[0, 4:] = 0", True),
        pytest.param("torch.ones(2, 8, dtype=torch.bool)", "", False, marks=pytest.mark.slow),
        pytest.param("torch.zeros_like(ids)", "", True, marks=pytest.mark.slow),
    ],
)
def test_a_mask_of_ones_on_the_meta_device(tmp_path, monkeypatch, seen, then, masked):
    (tmp_path / "net.py").write_text(FILE.format(seen=seen, then=then))
    monkeypatch.chdir(tmp_path)
    planner = FilePlanner(BuildFunction.parse("net.py:build"), PlanningOptions(shipped("h100")))
    [attention] = [node for node in planner.graph(6).capture.nodes if ATTENTION.of(node.op)]
    assert (mask_of(attention) is not None) == masked
    assert not planner.notes
