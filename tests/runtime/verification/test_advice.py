"""The batch that gives most, the fewest devices that are enough, and what more of them would change: by plans made."""

import json
import math
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.cli import main
from shardwright.common.stages import StageRow
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.report.plans.stages_page import stages_page
from shardwright.errors import PlanError, UsageError
from shardwright.runtime.verification import advice
from shardwright.runtime.verification.advice import best_batch, fewest_devices
from shardwright.runtime.verification.build import BuildFunction
from shardwright.runtime.verification.file_planner import FilePlanner, PlanningOptions, with_rows
from shardwright.runtime.verification.plan_file import plan_file

NET = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    def build():
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        return model, lambda m, b: F.mse_loss(m(b[0]), b[1]), (torch.randn(16, 256), torch.randn(16, 256))

    def scalar():
        return nn.Linear(4, 4), lambda m, b: m(torch.ones(2, 4)).sum() * b, torch.ones(())
"""
FAST = {"hardware": "h100", "mode": "data"}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("net.py").write_text(textwrap.dedent(NET))


def shardwright(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["shardwright", "plan", "net.py:build", "--hardware", "h100", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    written = capsys.readouterr()
    return exit_.value.code or 0, written.out, written.err


def test_rows_are_the_first_dim_of_the_tensors_of_a_batch():
    batch = {"x": torch.arange(6).reshape(3, 2), "y": torch.arange(3), "mask": torch.ones(2, 2), "scale": 0.5}
    more = with_rows(batch, 7)
    assert more["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert more["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert (more["mask"].shape, more["scale"]) == ((2, 2), 0.5)
    assert with_rows((torch.ones(4, 3, device="meta"),), 2)[0].shape == (2, 3)


def test_the_best_batch_is_the_fastest_of_those_that_fit(monkeypatch, capsys):
    given = ["--devices", "4", "--memory", "11MB", "--mode", "data"]
    code, shown, _ = shardwright(monkeypatch, capsys, *given, "--batch", "search", "--json")
    assert code == 0
    found = json.loads(shown)
    tried = {one["rows"]: one for one in found["tried"]}
    assert {16, 32, 64} <= set(tried)
    fitting = {rows: one["rows_s"] for rows, one in tried.items() if one["error"] is None}
    assert found["throughput"]["rows"] == max(fitting, key=fitting.get)
    assert max(one["held_bytes"] for one in tried.values() if one["held_bytes"]) <= 11e6
    least = min(rows for rows, one in tried.items() if one["error"])  # the limit was met
    assert "does not fit: at least " in tried[least]["error"]
    # The best is the plan of that batch: made alone it is the same.
    alone = shardwright(monkeypatch, capsys, *given, "--batch", str(found["throughput"]["rows"]), "--json")[1]
    assert json.loads(alone)["step_s"] == found["step_s"]


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved_and_the_table_says_so():
    fits = plan_file("net.py:build", devices=1, batch=4, **FAST).plan.held.total
    found = plan_file("net.py:build", devices=1, batch="search", memory=str(fits), **FAST)
    assert found.plan.capture.rows == 4
    lines = str(found).splitlines()
    assert re.match(r"devices +batch +a step takes +samples/s +a device +MFU +each device holds", lines[0])
    told = {line.split()[1]: line for line in lines[2 : lines.index("")]}
    assert [batch for batch, line in told.items() if line.endswith("  <- this plan")] == ["4"]
    assert {batch for batch, line in told.items() if "does not fit: at least " in line} == {"6", "8", "16"}
    with pytest.raises(OverBudget, match="no plan was found"):
        plan_file("net.py:build", devices=1, batch="search", memory="1kB", **FAST)


def least_devices(memory, **more):
    """The fewest devices, by trying one number after the other."""
    for devices in [1, 2, 4, *range(8, 65, 8)]:
        try:
            return plan_file("net.py:build", devices=devices, memory=memory, hardware="h100", **more).plan.mesh.size
        except PlanError:
            pass
    return None


@pytest.mark.parametrize("memory", ["9MB", pytest.param("1200kB", marks=pytest.mark.slow)])
def test_the_fewest_devices_are_those_that_one_finds_one_by_one(memory):
    found = plan_file("net.py:build", devices="min", memory=memory, hardware="h100")
    assert found.plan.mesh.size == least_devices(memory)
    assert found.plan.held.total <= found.plan.memory
    assert found.advised.tried
    assert f"{found.plan.mesh.size} devices" in str(found)


def simulated(monkeypatch, holds, speed=lambda rows: rows**0.5):
    """Have plans hold so many bytes, by the number of devices and the rows, at a speed; return what is tried."""
    tried = []

    def plan(self, graph, request):
        tried.append((request.mesh.size, graph.capture.rows))
        if (least := holds(*tried[-1])) > request.memory:
            raise OverBudget("too much", least)
        return tried[-1]

    def graph(self, rows=None):
        return SimpleNamespace(capture=SimpleNamespace(rows=rows or 16, of_kind=lambda kind: ()))

    def of(plan, hardware):
        devices, rows = plan
        return advice.Tried(devices, rows, 0, 1.0, speed(rows), 0.0, 0.1, 0)

    monkeypatch.setattr(FilePlanner, "plan", plan)
    monkeypatch.setattr(FilePlanner, "graph", graph)
    monkeypatch.setattr(advice.Tried, "of", staticmethod(of))
    return tried


def planner(memory):
    options = PlanningOptions(shipped("h100"), memory=memory)
    return FilePlanner(BuildFunction.parse("net.py:build"), options)


@pytest.mark.parametrize("enough", [1, 8, 40, 4096])
def test_few_numbers_of_devices_are_tried(monkeypatch, enough):
    tried = simulated(monkeypatch, lambda devices, rows: 10**8 * enough // devices)
    found = fewest_devices(planner(10**8), None)
    assert found.plan == (enough, 16)
    assert len(tried) <= 22
    assert all(devices < 8 or devices % 8 == 0 for devices, _ in tried)


def test_where_more_devices_hold_no_less_none_is_enough(monkeypatch):
    tried = simulated(monkeypatch, lambda devices, rows: 2 * 10**8)
    with pytest.raises(
        PlanError, match=r"(?s)however many devices there are:\n  1 devices: does not fit.*\n  2 dev.*--memory"
    ):
        fewest_devices(planner(10**8), None)
    assert [devices for devices, _ in tried] == [1, 2]


@pytest.mark.parametrize(
    ("most", "best", "expected"),
    [
        (100, math.inf, [16, 32, 64, 128, 48, 96]),  # up to what fits
        (100, 16, [16, 32, 8, 12, 24]),  # from where on more is slower
        (100, 4, [16, 32, 8, 4, 2, 3, 6]),  # which lies below
        (5, math.inf, [16, 8, 4, 2, 3, 6]),  # where not even the first fits
    ],
)
def test_few_batches_are_tried_up_or_down_from_the_one_there_is(monkeypatch, most, best, expected):
    tried = simulated(monkeypatch, lambda devices, rows: 10**5 * rows, lambda rows: min(rows, best**2 / rows))
    monkeypatch.setattr(FilePlanner, "rows", 16)
    given = planner(10**5 * most)
    devices = 1 if most == 5 or best == 4 else 4
    found = best_batch(given, given.options.request(Mesh.of(dp=devices)))
    assert [rows for _, rows in tried] == expected
    fitting = [rows for rows in expected if rows <= most]
    assert found.plan == (devices, max(fitting, key=lambda rows: min(rows, best**2 / rows)))


def test_what_if_plans_one_more_host_and_twice_the_memory(monkeypatch, capsys):
    given = ["--devices", "8", "--memory", "11MB", "--mode", "data"]
    plain = shardwright(monkeypatch, capsys, *given, "--json")[1]
    assert "what_if" not in json.loads(plain)
    found = json.loads(shardwright(monkeypatch, capsys, *given, "--json", "--what-if")[1])
    host, memory = found["what_if"]
    assert (host["tried"]["devices"], host["tried"]["rows"]) == (16, 32)
    assert (memory["tried"]["devices"], memory["tried"]["memory"]) == (8, 22_000_000)
    for change in (host, memory):
        assert change["gain"] == pytest.approx(change["tried"]["rows_s"] / found["throughput"]["rows_s"] - 1)
    other = plan_file("net.py:build", devices=16, hosts=2, batch=32, memory="11MB", **FAST)
    assert host["tried"]["held_bytes"] == other.plan.held.total
    page = shardwright(monkeypatch, capsys, *given, "--what-if", "--html", "plan.html")[1]
    [line] = [line for line in page.splitlines() if line.startswith("what if: ")]
    assert line.startswith("what if: one more host (16 devices, 32 samples): ")
    assert "; twice the memory: " in line
    assert line.removeprefix("what if: ") in Path("plan.html").read_text()
    free = shardwright(monkeypatch, capsys, "--devices", "2", "--mode", "data", "--what-if")[1]
    assert "twice the memory: nothing, since no limit of it was given" in free


def test_one_more_host_keeps_the_names_of_the_mesh():
    def larger(mesh, hosts=None):
        made = planner(None).options.request(mesh, hosts)
        return advice._one_more_host(made, hosts)

    assert [str(part) for part in larger(Mesh.of(dp=2, tp=8))] == ["dp=3 tp=8", "None"]
    assert [str(part) for part in larger(Mesh.of(dp=2, tp=4), 2)] == ["dp=3 tp=4", "3"]
    assert [str(part) for part in larger(Mesh.of(dp=4))] == ["dp=8", "2"]
    made = replace(planner(None).options.request(Mesh.of(dp=3, tp=8)), mesh=Mesh.of(dp=3, tp=8))
    assert str(advice._one_more_host(made, None)[0]) == "dp=4 tp=8"


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("build", ["--devices", "min"], "--devices min looks for what fits: type how much a device may hold"),
        ("build", ["--devices", "4", "--batch", "search"], "--batch search looks for what fits: type how much"),
        ("build", ["--devices", "few"], "--devices few is no number of devices; type a whole number from 1 on, or min"),
        ("build", ["--devices", "4", "--batch", "0"], "--batch 0 is no number of rows of a batch; type a whole number"),
        ("build", ["--devices", "min", "--memory", "1GB", "--mesh", "dp=2"], "hardware profile: leave out --mesh"),
        ("build", ["--devices", "min", "--memory", "1GB", "--hosts", "2"], "hardware profile: leave out --hosts"),
        ("build", ["--devices", "min", "--batch", "search", "--memory", "1GB"], "each look for something: type"),
        ("build", ["--load", "p.json", "--what-if"], "--what-if makes plans, and --load shows one that is made"),
        ("build", ["--load", "p.json", "--devices", "min", "--memory", "1GB"], "--devices min makes plans, and --load"),
        ("scalar", ["--devices", "2", "--batch", "8"], "is a Tensor with tensors of the shapes [[]]"),
        ("scalar", ["--devices", "2", "--batch", "search", "--memory", "1GB"], "with tensors of the shapes [[]]"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_readable_message(target, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardwright", "plan", f"net.py:{target}", "--hardware", "h100", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    written = capsys.readouterr()
    assert (exit_.value.code, written.out) == (2, "")
    assert message in written.err
    assert "Traceback" not in written.err


def test_a_plan_of_another_batch_is_loaded_with_it():
    plan_file("net.py:build", devices=2, batch=64, **FAST).plan.save("plan.json")
    assert plan_file("net.py:build", load="plan.json", batch=64, hardware="h100").plan.capture.rows == 64
    with pytest.raises((PlanError, UsageError)):
        plan_file("net.py:build", load="plan.json", batch=8, devices=4, hardware="h100")


def test_a_profile_says_where_the_seconds_of_planning_went(monkeypatch, capsys):
    found = json.loads(shardwright(monkeypatch, capsys, "--devices", "8", "--memory", "2MB", "--profile", "--json")[1])
    stages = {row["stage"] for row in found["profile"]}
    assert {"capturing", "rules", "spaces", "tables", "bounds", "elimination", "budget", "pricing"} <= stages
    seconds = sum(row["seconds"] for row in found["profile"])
    assert sum(found["seconds"].values()) <= seconds <= sum(found["seconds"].values()) + 1
    meshes = {row["mesh"] for row in found["profile"]} - {""}
    assert {line for line in found["considered"] if " not searched: its axes" not in line} == {
        line for line in found["considered"] for mesh in meshes if line.startswith(f"{mesh} ")
    }
    assert "exact > hiding 1, 1" in {row["search"] for row in found["profile"]}
    page = stages_page([StageRow(**row) for row in found["profile"]])
    assert page.startswith(f"{seconds:.2f} s by stage\n")
    for name in ("elimination", "bounds", "capturing"):
        assert re.search(rf"\n +{name} +[\d,]+ +\d+\.\d\d +\d+\.\d%", page)
    assert re.search(rf"by mesh and search(?s:.*){min(meshes)} +exact > hiding 1, 1 +\d", page)
    given = ["--devices", "2", "--mode", "data"]
    assert ["by stage" in shardwright(monkeypatch, capsys, *given, *more)[1] for more in ([], ["--profile"])] == [0, 1]


@pytest.mark.slow
def test_plans_with_stages_answer_what_more_hardware_and_other_batches_bring(monkeypatch, capsys):
    Path("net.py").write_text(textwrap.dedent(NET).replace("nn.ReLU(), ", "*[nn.Tanh(), nn.Linear(1024, 1024)] * 2, "))
    given = ["--mesh", "pp=2,dp=2", "--mode", "data", "--memory", "40MB", "--json"]
    code, shown, _ = shardwright(monkeypatch, capsys, *given, "--batch", "search", "--what-if")
    assert code == 0
    found = json.loads(shown)
    assert len(found["stages"]) == 2
    fitting = {one["rows"]: one["rows_s"] for one in found["tried"] if one["error"] is None}
    assert found["throughput"]["rows"] == max(fitting, key=fitting.get)
    assert {one["devices"] for one in found["tried"]} == {4}
    host, memory = found["what_if"]
    assert host["name"] == f"one more host (8 devices, {2 * found['throughput']['rows']:,} samples)"
    assert host["tried"]["devices"] == 8
    assert memory["tried"]["memory"] == 80e6
    page = shardwright(monkeypatch, capsys, *given[:4], "--what-if")[1]
    assert re.search(r"^what if: one more host \(8 devices, 32 samples\): [0-9,.]+ samples/s, \S+ more", page, re.M)
