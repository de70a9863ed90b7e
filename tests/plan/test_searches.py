"""The tables of modes and searches: everything that offers a choice takes it from there."""

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from shardwright.cli.planning import plan, verify
from shardwright.errors import UsageError
from shardwright.mesh.mesh import Mesh
from shardwright.plan import searches
from shardwright.plan.pricing.cost import Bytes
from shardwright.plan.request import PlanRequest
from shardwright.plan.searches import MODES, SEARCHES, Mode, Search, SearchName
from shardwright.run.parallel import _problem
from shardwright.zoo.options import ParallelOptions


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
    assert _problem("auto", "fewest", "mean", "global", None) is not None
    with pytest.raises(UsageError, match="unknown search 'fewest'; the searches are propagation, recursive, exact"):
        PlanRequest(Mesh.of(d=2), search="fewest")
    monkeypatch.setitem(searches.SEARCHES, "fewest", row)
    assert _problem("auto", "fewest", "mean", "global", None) is None
    assert PlanRequest(Mesh.of(d=2), search="fewest").searched == "fewest"


def test_the_tables_do_not_wait_for_torch():
    code = "import sys, shardwright.cli.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
