"""Measuring a profile: the fit finds what made the times, and a real measurement gives a profile that plans can use."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shardwright as sw
from ranks import run_ranks
from shardwright.cluster.bench import device, overheads
from shardwright.cluster.bench.device import DeviceSpeeds, _attention
from shardwright.cluster.bench.profile import measure_links
from shardwright.cluster.bench.profile_fit import fit
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


@pytest.mark.parametrize("seed", range(8))
def test_a_fit_never_falls_and_is_above_nothing(seed):
    drawn = np.random.default_rng(seed)
    points = [(size, float(drawn.lognormal(-9, 1.5))) for size in GRID[:: int(drawn.integers(1, 9))]]
    found = fit(points)  # a Curve refuses to fall
    times = [found.seconds(size) for size in range(0, 2**27, 2**17)]
    assert times == sorted(times)
    assert times[0] > 0
    again = Curve(found.segments)
    assert again == found


@pytest.mark.parametrize(
    "points", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (16, 0.0)], [(8, 1.0), (9, np.nan)]]
)
def test_points_that_make_no_curve(points):
    with pytest.raises(UsageError, match="a curve needs two sizes or more, each once, with times above 0"):
        fit(points)


def test_a_device_is_measured_for_a_while(monkeypatch):
    """Ranks that share cores meet in a long call; in a short one the first has gone before the last begins."""
    counts = []

    def slowest_s(run, device, calls=7):
        before = len(done)
        run()
        counts.append(len(done) - before)
        return 0.03 * counts[-1]

    done = []
    monkeypatch.setattr(device, "slowest_s", slowest_s)
    found = device._forward_s(lambda x: done.append(x) or 2 * x, [torch.ones(3)], torch.device("cpu"), times=3)
    assert (counts, found) == ([1, 4], pytest.approx(0.01))


def beside():
    """On a rank of two: what a step takes beside operators, where these take nothing, and where they take minutes.

    And the speed of attention beside products that are as fast as no CPU is.
    """
    world = sw.init("gloo")
    overheads.beyond_caches = lambda least_bytes, cached_bytes: least_bytes  # which takes long
    found = overheads.measure_overheads(world, DeviceSpeeds((("float32", 1e18),), 1e18, 1e-12, 1.0))
    nothing_s = overheads._around_s(world, DeviceSpeeds((("float32", 1e18),), 1e18, 60.0, 1.0))
    return found, nothing_s, _attention(world.device, {"float32": 1e18})


def test_what_a_step_takes_beside_its_operators_is_measured():
    """What operators take is no part of it."""
    both = run_ranks(2, beside)
    assert both[0] == both[1]
    found, nothing_s, attention = both[0]
    assert [known.per_entry for known in found.updates] == [0, 1, 2]
    assert all(known.bandwidth > 0 and known.parameter_s > 0 for known in found.updates)
    assert found.around_s > 0
    assert found.split_s >= 0
    assert nothing_s == 0
    assert 0 < attention < 1e-3


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


def test_one_rank_has_no_links():
    alone = SimpleNamespace(size=1, hosts=("a",), local_size=1)
    with pytest.raises(UsageError, match="a profile needs 2 ranks or more to measure links between them; type -n 2"):
        measure_links(alone, (8, 16), 1)
