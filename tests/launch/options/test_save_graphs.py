"""`launch --save-graphs`: what it takes, what it refuses, and how a rank comes to know of it."""

import sys

import pytest

from shardwright.errors import UsageError
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest


def options(**given):
    return read_options(LaunchRequest(kind="program", arguments=[sys.executable], ranks="2", **given))


def test_what_is_no_folder_or_no_level_is_refused():
    with pytest.raises(UsageError, match="save_graphs has level 3; 1 dumps the strategies, 2 the program of each rank"):
        options(save_graphs="graphs:3")
    with pytest.raises(UsageError, match="names no folder; type --save-graphs DIR, or DIR:1 for the strategies alone"):
        options(save_graphs=":1")
