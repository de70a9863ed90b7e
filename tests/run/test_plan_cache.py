"""Plans are remembered between jobs, for the same question to the same planner alone."""

from dataclasses import replace
from datetime import datetime

import pytest
import torch
from torch import nn

from shardwright import package, private_folder
from shardwright.backends.table import BACKENDS, Buckets
from shardwright.errors import PlanError
from shardwright.graph.capture import capture
from shardwright.graph.rewrite import rewrite
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.run.programs import plan_cache


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


def test_a_plan_is_made_once_for_a_question(graph):
    first, made = ask(graph)
    again, made_again = ask(graph)
    assert (made, made_again) == (True, False)
    assert again == first
    assert ask(graph, PlanRequest(Mesh.of(ranks=4), "data"))[1]


@pytest.mark.parametrize(("mode", "searched"), [("data", False), ("auto", True)])
def test_who_looks_is_told_of_a_search_that_was_saved_and_how_to_search_anew(graph, capsys, mode, searched):
    request, say = PlanRequest(Mesh.of(ranks=2), mode), plan_cache.SaidOnce()
    ask(graph, request, say)
    assert capsys.readouterr().err == ""
    ask(graph, request, say)
    [path] = plan_cache.cache_directory().iterdir()
    day = datetime.fromtimestamp(path.stat().st_mtime)
    said = (
        f"shardwright: nothing was searched: an earlier start found this plan on {day:%Y-%m-%d at %H:%M}; delete "
        f"{path} to search anew\n"
    )
    assert capsys.readouterr().err == said * searched
    assert not ask(graph, request, say)[1]  # as for another model, of which the same process says nothing more
    assert capsys.readouterr().err == ""
    path.unlink()
    assert ask(graph, request, plan_cache.SaidOnce())[1]
    assert capsys.readouterr().err == ""


def test_another_planner_is_not_answered_for(graph, monkeypatch):
    ask(graph)
    monkeypatch.setattr(plan_cache, "planner_digest", lambda: "another")
    assert ask(graph)[1]


def test_the_planner_is_known_by_its_sources(monkeypatch, tmp_path):
    for room in ("mesh", "rules", "graph", "plan", "run"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "code.py").write_text("x = 1")
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    digests = [plan_cache.planner_digest.__wrapped__()]
    (tmp_path / "run" / "code.py").write_text("x = 2")
    assert plan_cache.planner_digest.__wrapped__() == digests[0]
    for room in ("mesh", "rules", "graph", "plan"):
        (tmp_path / room / "code.py").write_text("x = 2")
        digests.append(plan_cache.planner_digest.__wrapped__())
    assert len(set(digests)) == 5


def test_the_planner_is_known_by_the_buckets_that_it_prices(monkeypatch):
    before = plan_cache.planner_digest.__wrapped__()
    smaller = replace(BACKENDS["gloo"], buckets_between=Buckets(2**20))
    monkeypatch.setattr(plan_cache, "BACKENDS", {**BACKENDS, "gloo": smaller})
    assert plan_cache.planner_digest.__wrapped__() != before


def other_mode(text):
    return text.replace(b'"mode": "data"', b'"mode": "auto"')


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:200], "it is no JSON: "),
        (lambda text: b"\xff\xfe" + text, "it is no JSON: "),
        (lambda text: b"[" * 100_000, "it is no JSON: "),
        (lambda text: b"{}", "it lacks "),
        (other_mode, "has a plan of mode auto on 2 devices"),
    ],
    ids=["short", "no UTF-8", "deep", "empty", "other mode"],
)
def test_a_damaged_file_is_made_anew_and_told_of(graph, capsys, damage, why):
    plan, _ = ask(graph)
    [path] = plan_cache.cache_directory().iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again, made = ask(graph)
    assert made
    assert again == plan
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shardwright: a kept plan is not used, and another takes its place: {path}")
    assert why in line
    assert not ask(graph)[1]
    assert capsys.readouterr().err == ""


def test_a_file_that_others_may_write_is_made_anew(graph, capsys):
    ask(graph)
    [path] = plan_cache.cache_directory().iterdir()
    path.chmod(0o666)
    assert ask(graph)[1]
    assert "may have been written by another user" in capsys.readouterr().err
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
