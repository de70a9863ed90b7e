"""Measuring a profile: the fit finds what made the times, and a real measurement gives a profile that plans can use."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import shardwright as sw
from ranks import run_ranks
from shardwright.cluster.bench import overheads, profile
from shardwright.cluster.bench.device import DeviceSpeeds
from shardwright.cluster.bench.profile import KINDS, SIZES, measure_hardware, measure_links, report
from shardwright.cluster.bench.profile_fit import fit, monotone
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.errors import UsageError

GRID = [round(2 ** (i / 2)) for i in range(16, 53)]  # 256 bytes to 64 MiB, two to an octave
# Latency 20 us and 1 GB/s, from 16 KiB on 4 GB/s, from 1 MiB on 2 GB/s.
MADE = Curve((
    Segment(0, 20e-6, 1e9),
    Segment(2**14, 20e-6 + 2**14 * (1e-9 - 0.25e-9), 4e9),
    Segment(2**20, 20e-6 + 2**14 * 0.75e-9 - 2**20 * 0.25e-9, 2e9),
))  # fmt: skip


def test_known_breakpoints_are_found():
    found = fit([(size, MADE.seconds(size)) for size in GRID], tolerance=1e-6)
    assert [segment.from_bytes for segment in found.segments] == [0, 2**14, 2**20]
    for ours, theirs in zip(found.segments, MADE.segments, strict=True):
        assert ours.latency_s == pytest.approx(theirs.latency_s, rel=1e-5)
        assert ours.bandwidth == pytest.approx(theirs.bandwidth, rel=1e-5)
    assert found.seconds(2**30) == pytest.approx(MADE.seconds(2**30), rel=1e-5)  # beyond the largest


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_are_smoothed(seed):
    drawn = np.random.default_rng(seed)
    noisy = {size: MADE.seconds(size) * float(drawn.normal(1, 0.03)) for size in GRID}
    noisy[GRID[9]] *= 3  # a disturbed size
    found = fit(list(noisy.items()))
    held_out = [2 ** (i / 2 + 0.25) for i in range(24, 52)]
    ratios = [found.seconds(size) / MADE.seconds(size) for size in held_out]
    assert min(ratios) > 0.85
    assert max(ratios) < 1.15
    assert len(found.segments) < len(GRID) / 2


def test_one_disturbed_size_at_the_end_does_not_bend_what_lies_beyond():
    sizes = [size for size in GRID if 2**18 <= size <= 2**22]
    points = [(size, size / 1e9 * (0.85 if size == sizes[-2] else 1.0)) for size in sizes]
    assert fit(points).seconds(2**26) == pytest.approx(2**26 / 1e9, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_a_fit_never_falls_and_is_above_nothing(seed):
    drawn = np.random.default_rng(seed)
    points = [(size, float(drawn.lognormal(-9, 1.5))) for size in GRID[:: int(drawn.integers(1, 9))]]
    found = fit(points)  # a Curve refuses to fall
    times = [found.seconds(size) for size in range(0, 2**27, 2**17)]
    assert times == sorted(times)
    assert times[0] > 0
    again = Curve(found.segments)
    assert again == found


def test_times_that_fall_are_averaged_with_their_neighbours():
    assert monotone(np.array([1.0, 4.0, 1.0, 8.0])).tolist() == pytest.approx([1.0, 2.0, 2.0, 8.0])


@pytest.mark.parametrize(
    "points", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (16, 0.0)], [(8, 1.0), (9, np.nan)]]
)
def test_points_that_make_no_curve(points):
    with pytest.raises(UsageError, match="a curve needs two sizes or more, each once, with times above 0"):
        fit(points)


def test_the_sizes_leave_the_powers_of_two_out():
    held_out = [2**power for power in range(12, 27)]
    assert not set(held_out) & set(SIZES)
    assert min(SIZES) < min(held_out)
    assert max(held_out) < max(SIZES)


def measured():
    """On a rank of four: a small profile, and what groups were measured."""
    world = sw.init("gloo")
    hardware = measure_hardware(world, sizes=(64, 4096, 1 << 16), rounds=2)
    return hardware.to_json(), report(hardware)


@pytest.mark.slow
def test_four_ranks_measure_pairs_and_all_four():
    found = run_ranks(4, measured, timeout=110)
    assert {text for text, _ in found} == {found[0][0]}  # every rank has the same
    hardware = Hardware.from_json(found[0][0])
    assert [(link.where, link.collective, link.ranks) for link in hardware.links] == [
        ("inside", kind, ranks) for ranks in (2, 4) for kind in KINDS
    ]
    assert all([size for size, _ in link.points] == [64, 4096, 65536] for link in hardware.links)
    assert all(len(link.residuals()) == 3 for link in hardware.links)
    assert [name for name, _ in hardware.flops] == ["float32", "float64", "bfloat16"]
    assert (hardware.ranks_per_host, hardware.launch_s > 0) == (None, True)
    assert "measured 20" in hardware.sources[0]
    assert "4 ranks on 1 host, gloo" in hardware.sources[0]
    assert [known.per_entry for known in hardware.updates] == [0, 1, 2]
    text = found[0][1]
    assert "an optimizer with 2 states of an entry:" in text
    assert "all_to_all inside a host, groups of 4:" in text
    assert text.count("residual") == len(hardware.links)


def beside():
    """On a rank of two: what a step takes beside operators, where these take nothing, and where they take minutes."""
    world = sw.init("gloo")
    found = overheads.measure_overheads(world, DeviceSpeeds((("float32", 1e18),), 1e18, 1e-12, 1.0))
    return found, overheads._around_s(world, DeviceSpeeds((("float32", 1e18),), 1e18, 60.0, 1.0))


def test_what_a_step_takes_beside_its_operators_is_measured():
    """What operators take is no part of it."""
    both = run_ranks(2, beside)
    assert both[0] == both[1]
    found, nothing_s = both[0]
    assert [known.per_entry for known in found.updates] == [0, 1, 2]
    assert all(known.bandwidth > 0 and known.parameter_s > 0 for known in found.updates)
    assert found.around_s > 0
    assert found.split_s >= 0
    assert nothing_s == 0


def impatient():
    """On a rank of two, where every call takes too long: the sizes of each collective that were timed all the same."""
    profile.LONGEST_S = 0.0
    return [[size for size, _ in link.points] for link in measure_links(sw.init("gloo"), (4096, 64, 128), rounds=1)]


def test_sizes_beyond_one_that_takes_too_long_are_left_out():
    """But for the two that a curve needs."""
    assert run_ranks(2, impatient) == [[[64, 128]] * len(KINDS)] * 2


def hurried():
    """On a rank of two, with next to no time: how often each collective was timed at each size, and all times."""
    visited = []
    visit = profile._visit
    profile._visit = lambda rows, buffer: (visited.extend(rows), visit(rows, buffer))
    found = measure_links(sw.init("gloo"), (4096, 64), rounds=50, within_s=1e-6)
    return [len(cell.visits) for row in visited for cell in row.cells], all(
        s > 0 for link in found for _, s in link.points
    )


def test_a_budget_of_seconds_leaves_rounds_out():
    assert run_ranks(2, hurried) == [([profile.FEWEST_ROUNDS] * 2 * len(KINDS), True)] * 2


@pytest.mark.parametrize("megabits", [10, 100, 1000, 10_000, 100_000])
def test_a_collective_is_timed_for_as_long_as_it_may(megabits, monkeypatch):
    """By a clock that calls alone move on: each takes what its bytes take over such a link, and a millisecond."""
    clock = [0.0]

    def call(size):
        clock[0] += 1e-3 + size * 8e-6 / megabits

    def timed(run, device):
        before = clock[0]
        run()
        return clock[0] - before

    monkeypatch.setattr(profile, "timed_s", timed)
    monkeypatch.setattr(profile, "from_all_ranks", lambda mine: [mine])
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock[0])
    cells = [profile._Cell(size, lambda size=size: call(size)) for size in profile.SIZES]
    within_s = profile.LINKS_S / 12  # two hosts of two ranks
    row = profile._row(None, "all_reduce", cells, profile.ROUNDS, within_s, torch.device("cpu"))
    profile._visit([row], torch.zeros(1))
    assert clock[0] <= within_s
    assert len(row.cells) >= 10
    assert row.rounds >= profile.FEWEST_ROUNDS


def test_fewer_rounds_lie_evenly_between_the_others():
    row = profile._Row(None, "all_reduce", (), 3)
    assert [turn for turn in range(9) if row.takes_part(turn, 9)] == [0, 3, 6]


def alone():
    with pytest.raises(UsageError, match="a profile needs 2 ranks or more to measure links between them; type -n 2"):
        measure_links(sw.init("gloo"), (8, 16), 1)


def test_one_rank_has_no_links():
    run_ranks(1, alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_saves_a_profile_that_plans_take(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n"
        "    return nn.Linear(8, 8), lambda model, batch: model(batch).sum(), torch.ones(8, 8)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(*words):
        command = [sys.executable, "-m", "shardwright", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=600
        ).stdout

    assert "saved as hw.json" in run("bench", "-n", "2", "--save-profile", "hw.json")
    assert json.loads((tmp_path / "hw.json").read_text())["format"] == "shardwright hardware profile"
    assert "search exact" in run("plan", "net.py:build", "--devices", "2", "--hardware", "hw.json")
