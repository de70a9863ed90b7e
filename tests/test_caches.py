"""Every cache says why its key holds all that the value depends on, and gives what is worked out without it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwright.checkpoint.format import containers, pieces
from shardwright.common import package, signatures
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh import collectives, dtensor, redistribute, ways
from shardwright.compiler.mesh.collectives import Cut
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Link, Mesh
from shardwright.compiler.plan.device_memory import device_memory_of
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing import cost, pairs
from shardwright.compiler.plan.pricing.cost import Bytes, PerDirection, Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph, Target, Use, each_made_by, targets_of
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.memory import states_of
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search import exact
from shardwright.compiler.plan.search.problem import CostCache, _largest_inside
from shardwright.compiler.rules import notation
from shardwright.compiler.rules.row import named_arguments
from shardwright.compiler.rules.table import rule_of
from shardwright.runtime.checks import digests
from shardwright.runtime.eager_predict import Prediction
from shardwright.runtime.updates import optimizer_steps, optimizers

FILES = sorted(package.FOLDER.rglob("*.py"))
# The cache of plans on disk has tests of its own (tests/runtime/test_plan_cache.py).
ELSEWHERE = {"runtime/programs/plan_cache.py"}
# Caches that are dictionaries, by the names of attributes and variables: beside each stands "Cached", too.
DICTIONARIES = {
    "checkpoint/api.py": ("_running",),
    "compiler/capture/functional/each_call.py": ("known",),
    "compiler/mesh/dtensor.py": ("_made",),
    "compiler/mesh/groups.py": ("_made", "_of_worlds"),
    "compiler/mesh/processes.py": ("_groups", "_channels", "_sums"),
    "compiler/plan/device_memory.py": ("_last", "_given"),
    "compiler/plan/search/bounds.py": ("_known",),
    "compiler/plan/search/exact.py": ("known",),
    "compiler/plan/pricing/memory.py": ("known",),
    "compiler/plan/pricing/pairs.py": ("_prices",),
    "compiler/plan/search/buffers.py": ("_limited", "_known"),
    "compiler/plan/search/recomputing.py": ("_either",),
    "compiler/plan/search/search.py": ("_weights",),
    "compiler/plan/search/weights.py": ("_known",),
    "compiler/plan/mesh_search.py": ("_sizes",),
    "runtime/compiled/compiler.py": ("_chosen", "_kinds"),
    "runtime/graphs/captures.py": ("_known",),
    "runtime/programs/resharded.py": ("_known",),
    "runtime/programs/programs.py": ("parts", "_by_key"),
    "runtime/programs/execute.py": ("_moved", "_leaves"),
    "runtime/updates/optimizers.py": ("_known",),
    "distributed/control.py": ("_beside",),
    "distributed/world.py": ("_worlds",),
}


def is_cache(decorator: ast.expr) -> str:
    """Return the name of the decorator of functools that this is, empty for others."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = ast.unparse(called).removeprefix("functools.")
    return name if name in ("cache", "lru_cache", "cached_property") else ""


def unjustified(path: Path) -> Iterator[str]:
    """Yield the caches of a file that say nothing; those of frozen dataclasses follow from fields that never change."""
    text = path.read_text()
    tree = ast.parse(text if "cache" in text else "")  # parsing takes long
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owners = {function: of for of in classes for function in of.body}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or not any(map(is_cache, function.decorator_list)):
            continue
        owner = owners.get(function)
        of_class = [ast.get_docstring(f) or "" for f in owner.body if isinstance(f, ast.FunctionDef)] if owner else []
        frozen = owner is not None and any("frozen=True" in ast.unparse(d) for d in owner.decorator_list)
        is_property = any(is_cache(d) == "cached_property" for d in function.decorator_list)
        told = "Cached" in (ast.get_docstring(function) or "") or any(
            "as all of this class" in text for text in of_class
        )
        if not told and not (frozen and is_property):
            yield function.name


def test_every_cache_says_what_its_key_holds():
    silent = []
    for path in FILES:
        name, lines = str(path.relative_to(package.FOLDER)), path.read_text().splitlines()
        silent += [f"{name}: {cache}" for cache in unjustified(path) if name not in ELSEWHERE]
        for cache in DICTIONARIES.get(name, ()):
            made = [
                i for i, line in enumerate(lines) if line.lstrip().startswith((f"self.{cache}", cache)) and "=" in line
            ]
            assert made, f"{name} has no {cache} any more: take it out of this list"
            if not any("ached" in "\n".join(lines[max(0, i - 5) : i + 3]) for i in made):
                silent.append(f"{name}: {cache}")
    assert not silent, f"beside a cache stands a sentence with 'Cached', why its key holds all: {silent}"


def test_every_decorated_cache_is_seen():
    text = '@functools.lru_cache(1)\ndef a(): "Cached"\n@cache\ndef b(): ...\n'
    text += "class C:\n @cached_property\n def c(self): ..."
    path = SimpleNamespace(read_text=lambda: text)
    assert list(unjustified(path)) == ["b", "c"]


# What is cached is what is worked out without the cache, whatever was asked for before.

A, B = Mesh.of(a=2, b=4), Mesh.of(b=4, a=2)
LINKED = Mesh((Axis("a", 2, Link(1e-3, 1e6)), Axis("b", 4)))
ROWS, COLUMNS, BOTH = Layout.split(2, {0: ["a"]}), Layout.split(2, {1: ["a"]}), Layout.split(2, {0: ["a", "b"]})
SUM = Layout.split(2, {}, ["a"])
# Of each: arguments, and for each of these others. All combinations are asked for, one dependency after the other.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]]] = {
    "steps": (
        redistribute._redistribute,
        (
            (ROWS, SUM, BOTH), (ROWS, COLUMNS, Layout.replicated(2)), ((), ("b",)), ((8, 8), (6, 8), (0, 8)),
            (A, B, LINKED),
        ),
    ),
    "ways": (
        ways.way_of,
        (
            (ways.Change((((0,), ()),)), ways.Change((((), (0,)),), (1,)), ways.Change((), (0,), (), (1,))),
            ((2, 4), (4, 2), (2, 2)),
        ),
    ),
    "parts": (
        collectives._parts,
        (
            [Cut(*of) for of in itertools.product((0, 1), (("a",), ("b",)), (8, 6), ((), ("a",), ("b",)), (1, 2))
             if of[1] != of[3]],
            (A, B), (0, 5),
        ),
    ),
    "layouts of DTensors": (
        dtensor._layout_of,
        (
            (("a", "b"), ("b", "a")), ((2, 4), (4, 2)),
            ((Shard(0), Replicate()), (Shard(-1), Replicate()), (Replicate(), Partial()), (Replicate(), Shard(1))),
            ((Shard, Replicate),), (2, 3),
        ),
    ),
    "links": (cost._links, ((A, B, LINKED), (("a",), ("b",), ("a", "b")), (None, 2, 4))),
    "notation": (notation.parse, (("~ m k+, k+ n -> ~ m n", "m k+, k+ n -> m n", "m k^, k^ n -> m n"),)),
    "orders": (
        exact._steps, (((2, 3, 4), (4, 3, 2)), (((0, 1), (1, 2)), ((0, 2), (1, 2)), ((0, 1, 2), (0, 0))), (6, 1e6))
    ),
    "neighbours": (exact._neighbours, ((((0, 1), (1, 2)), ((0, 2), (1, 2))),)),
    "frames": (
        containers.frame_of,
        ((torch.float32, torch.int32, torch.float64), (torch.Size([4, 2]), torch.Size([8]), torch.Size([]))),
    ),
    "boxes": (pieces._box, (((8, 8), (6, 8)), (ROWS, COLUMNS, BOTH), (A, B), (0, 5))),
    "holders": (pieces._holders, (((8, 8), (0, 8)), (ROWS, BOTH), (A, B), (4, 8))),
    "numbers of places": (digests._numbers_of_places, ((3, 4), (torch.device("cpu"), torch.device("cpu", 0)))),
    "parameters": (
        signatures._parameters_of, ((torch.ops.aten.add.Tensor, torch.ops.aten.add.out, torch.ops.aten.neg.default),)
    ),
    "written operands": (
        signatures.written_operands,
        ((torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.add.out),),
    ),
}  # fmt: skip


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what can be compared of a call, also where it is refused."""
    try:
        found = function(*arguments)
    except Exception as error:
        return type(error), str(error)
    if isinstance(found, torch.Tensor):
        return found.tolist()
    return dict(found) if hasattr(found, "items") else found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_cached_is_what_is_not(name):
    cached, choices = FUNCTIONS[name]
    for arguments in itertools.product(*choices):
        for _ in range(2):
            assert answer(cached, *arguments) == answer(cached.__wrapped__, *arguments), arguments


@given(
    st.lists(st.sampled_from(["", "a", "b"]), min_size=4, max_size=4), st.lists(st.sampled_from([4, 6, 8]), min_size=2)
)
def test_steps_of_drawn_layouts(axes, sizes):
    one, other = ([axes[at], axes[at + 1]] for at in (0, 2))
    if any(of[0] and of[0] == of[1] for of in (one, other)):
        return
    layouts = [Layout.split(2, {dim: [axis] for dim, axis in enumerate(of) if axis}) for of in (one, other)]
    for mesh in (A, B):
        arguments = *layouts, (), (sizes[0], sizes[1]), mesh
        expected = answer(redistribute._redistribute.__wrapped__, *arguments)
        assert answer(redistribute._redistribute, *arguments) == expected
        assert answer(redistribute.redistribute, *arguments) == expected


# The graph of a step: operators that differ in one thing each, and are asked for their rules and costs in turn.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up(x), self.down(x)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    u, v = model(batch)
    fixed = u.detach()
    whole, real, twice = torch.arange(8), torch.arange(8.0), torch.arange(8.0, dtype=torch.float64)
    terms = [u @ u, u @ v, v @ u, u @ fixed, fixed @ fixed, u * u, u * v, u * 2, u * 2.0, u * True, u.T @ u, v.T @ u]
    terms += [u.softmax(0), u.softmax(1), u.cumsum(0), u.cumsum(1), torch.where(u > 0, u, 0), torch.where(u > 0, u, 1)]
    terms += [torch.where(u > 0, u, 0.0), u.double() @ u.double(), u * whole, u * real, u * twice, u + (whole > 3)]
    terms += [u.masked_fill(v > 0, 0), u.masked_fill(v > 0, 1), u.masked_fill(v > 0, 0.0), u.masked_fill(v > 0, True)]
    terms += [u.view(2, 4, 8).transpose(0, 1), u.t(), torch.cat([u, u]), torch.cat([u, v]), torch.stack([u, u])]
    return sum(term.double().sin().sum() for term in terms)


@pytest.fixture(scope="module")
def graph() -> RuledGraph:
    return RuledGraph.of(captured_step(Net(), loss_fn, torch.randn(8, 8), {}))


def test_every_operator_has_the_rule_of_its_own_arguments(graph):
    values = graph.capture.values
    for node in graph.capture.nodes:
        shapes = [[values[name].shape for name in names] for names in (node.operands, node.results)]
        assert graph.rules[node.name] == rule_of(node.op, node.args, dict(node.kwargs), *shapes), node.call
    made = [node for node in graph.capture.nodes if node.op.startswith("aten.arange")]
    assert made[0].args == made[1].args  # 8 and 8.0
    assert {str(graph.rules[node.name]).strip() for node in made} == {"-> i", "-> i^"}


@pytest.mark.parametrize("objective", [Seconds(shipped("cpu_host")), Bytes()], ids=["seconds", "bytes"])
def test_every_operator_costs_what_it_costs_alone(graph, objective):
    mesh = Mesh.of(a=2, b=2)
    known = CostCache(graph, objective, mesh)
    lists: dict[Hashable, tuple[notation.Strategy, ...]] = {}  # equal ones are one object, as in a space
    for node in graph.capture.nodes:
        strategies = tuple(graph.rules[node.name].strategies(mesh))
        strategies = lists.setdefault(strategies, strategies)
        alone = RuledGraph(graph.capture, graph.rules)  # which knows nothing
        priced = {known.operator: objective.operator, known.forward: objective.forward}
        for found, of in (*priced.items(), (known.largest_inside, _largest_inside)):
            assert found(node, strategies).tolist() == [of(alone, node, strategy, mesh) for strategy in strategies]
        for index in range(len(node.results)):
            assert known.layouts(node, index, strategies) == each_made_by(alone, node, index, strategies, mesh)
        for index in range(len(node.operands)):
            assert known.targets(Use(node, index), strategies) == targets_of(alone, node, index, strategies, mesh)


def test_every_way_costs_what_it_costs_alone(graph):
    layouts = tuple(
        Layout.split(2, {dim: [axis]} if axis else {}) for dim, axis in ((0, "a"), (1, "a"), (0, "b"), (0, ""))
    )
    value = next(value for value in graph.capture.of_kind("parameter") if len(value.shape) == 2)
    perturbed = (
        value, replace(value, shape=(8, 6)), replace(value, dtype=torch.float64), replace(value, needs_gradient=False),
        replace(value, kind="result"), replace(value, name="other", label="other"),
    )  # fmt: skip
    for mesh, objective in itertools.product(
        (A, LINKED), (Seconds(shipped("cpu_host")), Seconds(shipped("h100")), Bytes())
    ):
        known = CostCache(graph, objective, mesh)
        targets = tuple(Target(layout, of) for layout in layouts for of in ((), ("b",)) if "b" not in layout.split_axes)
        for facts in perturbed:
            alone = pairs.Pairs(objective, pairs.Ways(mesh))
            assert known.pairs is pairs.pairs_on(objective, mesh)
            assert np.array_equal(known.array(facts, layouts, targets), alone.costs(facts, layouts, targets))
            assert np.array_equal(
                known.largest_buffers(facts, layouts, targets), alone.buffers(facts, layouts, targets)
            )


def test_what_objectives_share_does_not_depend_on_what_they_hide(graph):
    layouts = (Layout.replicated(2), Layout.split(2, {0: ["a"]}), Layout.split(2, {1: ["b"]}))
    targets = tuple(Target(layout) for layout in layouts)
    parameter = next(value for value in graph.capture.of_kind("parameter") if len(value.shape) == 2)
    seconds = Seconds(replace(shipped("h100"), ranks_per_host=2))
    still = None
    for weights in (PerDirection(1.0, 1.0), PerDirection(0.3, 0.8), PerDirection(0.0, 0.0)):
        known = CostCache(graph, seconds.hiding(weights), LINKED, still)
        still = known.still
        for value in (parameter, replace(parameter, kind="result"), replace(parameter, kind="result", reduced_in=None)):
            alone = CostCache(graph, seconds.hiding(weights), LINKED)
            assert np.array_equal(known.array(value, layouts, targets), alone.array(value, layouts, targets))
            assert np.array_equal(known.leaf(value, layouts), alone.leaf(value, layouts))


def test_what_is_held_depends_on_blocks_and_on_what_is_gathered_again():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    captured = captured_step(Layers(), lambda model, x: model(x).square().mean(), torch.randn(16, 8), {})
    plan = make_plan(captured, PlanRequest(Mesh.of(d=2), "auto", hardware=shipped("h100")))
    blocks = [f"layers.{number}" for number in range(3)]
    values = frozenset(value.name for value in captured.of_kind("parameter"))
    for count in range(4):
        for names, again in itertools.product(itertools.combinations(blocks, count), (frozenset(), values)):
            shared = plan.computing_again(set(names), again)
            alone = replace(plan, recomputed=frozenset(names), again=again)
            assert shared.held == device_memory_of(alone, plan.optimizer)
            assert list(shared.collectives()) == list(alone.collectives())
            assert shared.costing(1.0, 0.5).held == shared.held


# Operators, optimizers and buffers that change under one name.


def define(parameters: str) -> torch.library.Library:
    library = torch.library.Library("tests_of_caches", "FRAGMENT")
    library.define(f"renewed({parameters}) -> Tensor")
    return library


def test_an_operator_that_is_defined_anew_is_seen_as_it_is():
    op, found = "tests_of_caches.renewed.default", []
    for parameters in ("Tensor x", "Tensor(a!) x, float by, Device device", "Tensor x, int by=2"):
        library = define(parameters)
        try:
            found.append(named_arguments(op, (1,), {}))
            operator = torch.ops.tests_of_caches.renewed.default
            assert signatures.changes_operands(operator) == ("!" in parameters)
            assert signatures.written_operands(operator) == (((0, "x"),) if "!" in parameters else ())
        finally:
            library._destroy()
    assert found == [{"x": 1}, {"x": 1, "by": None, "device": None}, {"x": 1, "by": 2}]


def test_optimizers_that_are_named_keep_what_they_keep_now():
    before, found = torch.get_default_dtype(), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append((states_of("adam"), states_of(torch.optim.Adam)))
        finally:
            torch.set_default_dtype(before)
    assert all(named == classed for named, classed in found)
    assert found[0][0] != found[1][0]  # a count of steps of 4 bytes, and of 8


def test_an_optimizer_that_is_given_other_parameters_is_looked_at_again():
    ours, others = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(others.parameters(), lr=0.1)
    optimizers.note_trained(ours.parameters())
    assert not optimizers.look_at(optimizer).is_ours
    assert optimizers.look_at(optimizer) is optimizers.look_at(optimizer)
    optimizer.param_groups[0]["params"] = list(ours.parameters())
    assert optimizers.look_at(optimizer).is_ours
    optimizer.param_groups[0]["params"][0] = others.weight
    optimizer.param_groups[0]["params"][1] = others.bias
    assert not optimizers.look_at(optimizer).is_ours


def test_settings_are_told_as_they_are():
    for rates in itertools.permutations((0.0, -0.0, 0, False, 1, True, 1.0)):
        told = [optimizer_steps._described("SGD", ((1, None, (("lr", (rate,)),)),)) for rate in rates]
        assert told == [f"SGD of 1 parameters, lr={rate:.6g}" for rate in rates]


def test_which_outputs_have_rows_is_tried_for_each_batch():
    x, table = torch.ones(4, 2), torch.ones(4, 2)
    predict = Prediction(lambda part: part.get("rows", table), torch.device("cpu"))
    found = [predict._tried({what: x}, 4, [x]) for what in ("rows", "table", "rows")]
    assert found == [(True,), (False,), (True,)]
