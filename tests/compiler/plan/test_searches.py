"""The tables of modes and searches: everything that offers a choice takes it from there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from shardwright.cli.planning import plan, verify
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import searches
from shardwright.compiler.plan.pricing.cost import Bytes
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import MODES, SEARCHES, Mode, Search, SearchName
from shardwright.errors import UsageError
from shardwright.runtime.parallel import _problem
from shardwright.training.zoo.options import ParallelOptions


def test_every_name_has_a_row():
    assert get_args(Mode) == tuple(MODES)
    assert get_args(SearchName) == tuple(SEARCHES)


@pytest.mark.parametrize("command", [plan, verify], ids=["plan", "verify"])
def test_the_command_line_offers_the_rows(command):
    options = [option for option in command.params if option.name in ("mode", "search")]
    offered = {option.name: tuple(option.type.choices) for option in options}
    assert offered == {"mode": tuple(MODES), "search": tuple(SEARCHES)}


def test_a_configuration_offers_the_rows():
    hints = get_type_hints(ParallelOptions)
    assert get_args(hints["mode"]) == tuple(MODES)
    assert get_args(hints["search"]) == (SearchName, type(None))


def test_a_row_that_is_added_is_a_choice(monkeypatch):
    row = Search(lambda hardware: Bytes(), "B", lambda strategy, rule, mesh: True, first_axes=1, most_axes=1)
    assert _problem("fewest", "mean", "global", None) is not None
    with pytest.raises(UsageError, match="unknown search 'fewest'; the searches are propagation, recursive, exact"):
        PlanRequest(Mesh.of(d=2), search="fewest")
    monkeypatch.setitem(searches.SEARCHES, "fewest", row)
    assert _problem("fewest", "mean", "global", None) is None
    assert PlanRequest(Mesh.of(d=2), search="fewest").searched == "fewest"


def test_the_tables_do_not_wait_for_torch():
    code = "import sys, shardwright.cli.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


SAID = """
import torch
from models import NETWORKS
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
torch.manual_seed(0)
make, loss_fn, batch_of = NETWORKS["perceptron"]
captured = captured_step(make(), loss_fn, batch_of(24), {})
plan = make_plan(captured, PlanRequest(Mesh.of(a=2, b=2), "auto", "exact", hardware=read_hardware("h100")))
print(plan.to_json(), plan, *(plan.explain(node.name) for node in captured.nodes))
"""


def said(hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "support")
    return subprocess.run(
        [sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True, timeout=280
    ).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_choices_that_cost_the_same_every_process_says_the_same():
    """In the order of sets of names, which is another one in every process, there were others."""
    first = said("1")
    assert "The next best strategy" in first
    assert said("2") == first
