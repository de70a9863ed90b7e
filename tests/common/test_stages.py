"""Seconds of stages: the innermost has them, all of them add up, and nothing is recorded where nobody asks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwright.common import stages
from shardwright.common.stages import in_stage, recorded, stage


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_the_innermost_stage_has_the_seconds_and_all_add_up(clock):
    @in_stage("bounds")
    def bounds():
        clock(1)
        with stage("elimination"):
            clock(4)
        clock(2)
        return 7

    with recorded() as record:
        clock(0.5)
        with stage("planning", search="exact"):
            with stage(mesh="2 x 4"), stage(search="hiding 1"):
                assert bounds() == 7
                with stage(search="alternative"):
                    assert bounds() == 7
            clock(0.25)
    found = {(row.stage, row.mesh, row.search): (row.times, row.seconds) for row in record.rows()}
    assert {place: of for place, of in found.items() if of[1]} == {
        ("other", "", ""): (0, 0.5),
        ("planning", "", "exact"): (1, 0.25),
        ("bounds", "2 x 4", "exact > hiding 1"): (1, 3),
        ("elimination", "2 x 4", "exact > hiding 1"): (1, 4),
        ("bounds", "2 x 4", "exact > hiding 1 > alternative"): (1, 3),
        ("elimination", "2 x 4", "exact > hiding 1 > alternative"): (1, 4),
    }
    assert sum(row.seconds for row in record.rows()) == 14.75


def test_a_stage_that_fails_is_left(clock):
    @in_stage("bounds")
    def fails():
        clock(1)
        raise ValueError("no")

    with recorded() as record:
        with pytest.raises(ValueError, match="no"):
            fails()
        clock(2)
    assert {row.stage: row.seconds for row in record.rows()} == {"other": 2, "bounds": 1}


def test_nothing_is_recorded_elsewhere(clock):
    with stage("before"):
        clock(1)
    with recorded() as record, ThreadPoolExecutor(1) as pool:
        pool.submit(in_stage("beside")(lambda: None)).result()
    assert [row.stage for row in record.rows()] == ["other"]
    assert stages._RECORD.get() is None
