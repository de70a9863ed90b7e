"""`launch --save-graphs`: what it takes, what it refuses, and how a rank comes to know of it."""

import sys

import pytest

from shardwright.errors import UsageError
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.options.save_graphs import VARIABLE, SaveGraphs


def options(**given):
    return read_options(LaunchRequest(kind="program", arguments=[sys.executable], ranks="2", **given))


def test_the_option_reaches_the_ranks_by_their_environment():
    assert options(save_graphs="graphs").environment == {VARIABLE: "graphs:2"}
    assert options(save_graphs="/a b/c:d:1").environment == {VARIABLE: "/a b/c:d:1"}
    assert options().environment == {}


def test_a_script_that_says_where_wins_over_the_command_line():
    said = {VARIABLE: "there:1"}
    assert SaveGraphs.wanted(None, said) == SaveGraphs("there", 1)
    assert SaveGraphs.wanted("here", said) == SaveGraphs("here", 2)
    assert SaveGraphs.wanted(("here", 1), said) == SaveGraphs("here", 1)
    assert SaveGraphs.wanted(None, {}) is None


def test_what_is_no_folder_or_no_level_is_refused():
    with pytest.raises(UsageError, match="save_graphs has level 3; 1 dumps the strategies, 2 the program of each rank"):
        options(save_graphs="graphs:3")
    with pytest.raises(UsageError, match="names no folder; type --save-graphs DIR, or DIR:1 for the strategies alone"):
        options(save_graphs=":1")
