"""Plans are remembered between jobs, for the same question to the same planner alone."""

import json
import platform
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.common import package, private_folder
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Link, Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import PlanError
from shardwright.runtime.programs import plan_cache


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def graph():
    captured = capture(nn.Linear(4, 4), lambda model, x: model(x).sum(), torch.zeros(4, 4))
    return RuledGraph.of(rewrite(captured))


REQUEST = PlanRequest(Mesh.of(ranks=2), "data")


def ask(graph, request=REQUEST, say=plan_cache.said_once):
    """The plan, and whether it had to be made."""
    made = []

    def make(captured, asked):
        made.append(make_plan(captured, asked))
        return made[0]

    return plan_cache.remembered(graph, request, make, say), bool(made)


@pytest.fixture(scope="module")
def marked(graph):
    """Planners whose plans can be told apart."""
    plan = make_plan(graph.capture, REQUEST)
    return lambda number: lambda captured, asked: replace(plan, bound=number)


def never(captured, asked):
    raise AssertionError("a plan was made anew")


def test_a_plan_is_made_once_for_a_question(graph):
    first, made = ask(graph)
    again, made_again = ask(graph)
    assert (made, made_again) == (True, False)
    assert again == first
    assert ask(graph, PlanRequest(Mesh.of(ranks=4), "data"))[1]


OTHER_CODE = {
    "shardwright": (plan_cache, "__version__", "0.0.1"),
    "code": (plan_cache, "planner_digest", lambda: "another"),
    "torch": (torch.version, "git_version", "another"),
    "numpy": (np, "__version__", "1.0"),
    "python": (platform, "python_version", lambda: "3.10.0"),
    "rules": (plan_cache, "registered_rules", lambda: {"aten.linear.default": "b k, n k -> b n"}),
}
CPU = REQUEST.hardware
OTHER_REQUESTS = {
    "mesh": [Mesh.of(ranks=4), Mesh.of(dp=2), Mesh((Axis("ranks", 2, Link(1e-6, 1e9)),))],
    "mode": ["auto", "single"],
    "search": ["recursive"],
    "inputs": ["whole", {"batch": (1, 1)}],
    "hardware": [
        replace(CPU, launch_s=2 * CPU.launch_s),  # a profile of the same name that was measured anew
        replace(CPU, flops=(*CPU.flops[:-1], (CPU.flops[-1][0], 1.0))),
        replace(CPU, links=CPU.links[:-1]),
        replace(CPU, ranks_per_host=1),
    ],
    "storage": [{"p_weight": Layout.replicated(2)}, {"p_weight": Layout.split(2, {0: ("ranks",)})}],
    "axes": [Mesh.of(ranks=2)],
    "memory": [2**30, 2**31],
    "optimizer": [replace(REQUEST.optimizer, per_entry=0)],
    "recompute": [("*",)],
    "microbatches": [2],
    "schedule": ["gpipe"],
    "search_stages": [True],
}


def test_every_field_of_a_request_is_tried():
    assert OTHER_REQUESTS.keys() == {field.name for field in fields(PlanRequest)}


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_no_plan_is_served_for_another_request(graph, marked, name):
    asked = [REQUEST, *(replace(REQUEST, **{name: other}) for other in OTHER_REQUESTS[name])]
    made = [plan_cache.remembered(graph, request, marked(number)) for number, request in enumerate(asked)]
    assert [plan.bound for plan in made] == list(range(len(asked)))
    again = [plan_cache.remembered(graph, request, never) for request in asked]
    assert [plan.bound for plan in again] == list(range(len(asked)))


@pytest.mark.parametrize("part", OTHER_CODE)
def test_no_plan_is_served_that_other_code_made(graph, monkeypatch, part):
    ask(graph)
    before = plan_cache.plan_key(graph, REQUEST)
    monkeypatch.setattr(*OTHER_CODE[part])
    after = plan_cache.plan_key(graph, REQUEST)
    assert {name for name in after if after[name] != before[name]} == {part}
    assert ask(graph)[1]
    assert not ask(graph)[1]


class Layers(nn.Module):
    """Two layers whose activations stand inside of them, or behind."""

    def __init__(self, inside):
        super().__init__()
        activation = [nn.Tanh()] if inside else []
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), *activation) for _ in range(2))
        self.after = None if inside else nn.Tanh()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.after is None else self.after(layer(x))
        return x


def with_gradient_of(weight):
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(weight)
    return model


def summed(m, x):
    return m(x.to(m.weight.dtype)).sum() if isinstance(m, nn.Linear) else m(x).sum()


OTHER_GRAPHS = {
    "an argument": [(nn.Linear(4, 4), lambda m, x, dim=dim: m(x).softmax(dim).square().sum()) for dim in (0, 1)],
    "a dtype": [(nn.Linear(4, 4, dtype=dtype), summed) for dtype in (None, torch.double)],
    "a size": [(nn.Linear(4, size), summed) for size in (4, 8)],
    "which parameters are trained": [(with_gradient_of(flag), summed) for flag in (True, False)],
    "the module that an operator stands in": [(Layers(inside), summed) for inside in (True, False)],
    "a pin": [(nn.Linear(4, 4), summed), (sw.shard(nn.Linear(4, 4), ((2, 1), (1, 1), (1,))), summed)],
}


@pytest.mark.parametrize("what", OTHER_GRAPHS)
def test_no_plan_is_served_for_another_graph(what):
    graphs = [RuledGraph.of(rewrite(capture(model, loss, torch.zeros(4, 4)))) for model, loss in OTHER_GRAPHS[what]]
    assert [ask(graph)[1] for graph in graphs] == [True, True]
    assert [ask(graph)[1] for graph in graphs] == [False, False]


def test_the_planner_is_known_by_every_source_that_it_may_import(monkeypatch, tmp_path):
    rooms = package.WINGS[: package.WINGS.index("compiler") + 1]
    for room in (*rooms, "runtime"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "code.py").write_text("x = 1")
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    digests = [plan_cache.planner_digest.__wrapped__()]
    (tmp_path / "runtime" / "code.py").write_text("x = 2")
    assert plan_cache.planner_digest.__wrapped__() == digests[0]
    for room in rooms:
        (tmp_path / room / "code.py").write_text("x = 2")
        digests.append(plan_cache.planner_digest.__wrapped__())
    (tmp_path / "compiler" / "code.py").rename(tmp_path / "compiler" / "other.py")
    digests.append(plan_cache.planner_digest.__wrapped__())
    assert len(set(digests)) == len(rooms) + 2


def test_a_process_whose_sources_were_written_since_it_began_serves_and_keeps_none(graph, monkeypatch):
    ask(graph)
    assert not ask(graph)[1]
    monkeypatch.setattr(package, "IMPORTED_AT", Path(package.__file__).stat().st_ctime)
    before = set(plan_cache.cache_directory().iterdir())
    assert ask(graph)[1]
    assert ask(graph, replace(REQUEST, memory=2**30))[1]
    assert set(plan_cache.cache_directory().iterdir()) == before


def test_a_file_under_the_name_of_another_key_is_not_served(graph):
    other = replace(REQUEST, memory=2**30)
    ask(graph)
    [first] = plan_cache.cache_directory().iterdir()
    ask(graph, other)
    [second] = set(plan_cache.cache_directory().iterdir()) - {first}
    assert json.loads(first.read_text())["key"] == plan_cache.plan_key(graph, REQUEST)
    second.write_bytes(first.read_bytes())
    assert ask(graph, other)[1]
    assert not ask(graph, other)[1]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:200], "it is no JSON: "),
        (lambda text: b"\xff\xfe" + text, "it is no JSON: "),
        (lambda text: b"[" * 100_000, "it is no JSON: "),
        (lambda text: b"{}", "it lacks "),
        (lambda text: b'{"key": {}, "plan": {}}', "it is of another key"),
    ],
    ids=["short", "no UTF-8", "deep", "empty", "other key"],
)
def test_a_damaged_file_is_made_anew_and_told_of(graph, capsys, damage, why):
    plan, _ = ask(graph)
    [path] = plan_cache.cache_directory().iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again, made = ask(graph)
    assert made
    assert again == plan
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shardwright: {path} is not used, and another plan takes its place: ")
    assert why in line
    assert not ask(graph)[1]
    assert capsys.readouterr().err == ""


def test_a_file_that_others_may_write_is_made_anew(graph, capsys):
    ask(graph)
    [path] = plan_cache.cache_directory().iterdir()
    path.chmod(0o666)
    assert ask(graph)[1]
    assert "another user may have written it" in capsys.readouterr().err
    assert not ask(graph)[1]


def test_a_folder_where_others_may_write_is_not_used(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(private_folder, "TOP", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shardwright").mkdir()
    (tmp_path / "shardwright").chmod(0o777)
    assert ask(graph)[1]
    assert not ask(graph)[1]
    assert len([*(tmp_path / "tmp").glob("shardwright-*/plans/*.json")]) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(graph, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ask(graph)[1]
    assert ask(graph)[1]


def test_what_cannot_be_planned_is_not_remembered(graph):
    def fail(captured, asked):
        raise PlanError("no")

    for _ in range(2):
        with pytest.raises(PlanError, match="no"):
            plan_cache.remembered(graph, REQUEST, fail)
