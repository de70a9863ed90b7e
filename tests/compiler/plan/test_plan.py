"""A plan as JSON: it comes back equal, and refuses every graph but its own and every text that is none."""

import gc
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from mutated import mutations
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.rewrite import rewrite
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Link, Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Bytes
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Space
from shardwright.compiler.plan.search.search import search
from shardwright.errors import PlanError

MESH = Mesh((Axis("dp", 2, Link(1e-4, 1e9)), Axis("tp", 3)))


def net(width=12, layers=2):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)], nn.BatchNorm1d(width), nn.Dropout(0.1))


def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return nn.functional.mse_loss(out, y), out


def graph_of(model, rows=6, dtype=torch.float32):
    batch = torch.randn(rows, 12, dtype=dtype), torch.randn(rows, 12, dtype=dtype)
    return RuledGraph.of(rewrite(capture(model.to(dtype), loss_fn, batch)))


@pytest.fixture(scope="module")
def graph():
    return graph_of(net())


@pytest.fixture(scope="module")
def plan(graph):
    return make_plan(graph.capture, PlanRequest(MESH, search="propagation"))


@pytest.mark.parametrize(
    ("mode", "search", "mesh"),
    [
        ("single", None, MESH),
        ("data", None, MESH),
        ("auto", "propagation", MESH),
        ("auto", "exact", Mesh.of(ranks=4)),
        ("auto", "propagation", Mesh.of(ranks=1)),
    ],
)
def test_a_plan_comes_back_equal(mode, search, mesh, graph, tmp_path):
    made = make_plan(graph.capture, PlanRequest(mesh, mode, search))
    again = Plan.from_json(made.to_json(), made.graph)
    assert again == made
    assert again.to_json() == made.to_json()
    assert again.named == mesh
    assert again.transfers == made.transfers
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", made.graph) == made
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_written(plan, tmp_path):
    with pytest.raises(PlanError, match=r"cannot write the plan .*gone/plan.json: No such file or directory"):
        plan.save(tmp_path / "gone" / "plan.json")


def test_plans_that_differ_are_not_equal(plan):
    node = next(name for name, strategy in plan.strategies.items() if strategy.used)
    rule = plan.graph.rules[node]
    assert replace(plan, strategies={**plan.strategies, node: rule.replicated()}) != plan
    assert replace(plan, mode="semi-auto") != plan


def test_a_plan_of_another_graph_is_refused_with_what_differs(plan):
    text = plan.to_json()
    with pytest.raises(PlanError, match=r"made for \d+ values, the model has \d+; plan again"):
        Plan.from_json(text, graph_of(net(layers=3)))
    with pytest.raises(PlanError, match=r"it has 'input batch_0 0 \[6, 12\] .*', the model 'input batch_0 0 \[8, 12\]"):
        Plan.from_json(text, graph_of(net(), rows=8))
    with pytest.raises(PlanError, match=r"it has 'parameter .* torch.float32', the model '.* torch.float64'"):
        Plan.from_json(text, graph_of(net(), dtype=torch.float64))
    document = json.loads(text)
    document["graph"]["operators"][0] = "aten.bilinear(batch_0)"
    with pytest.raises(PlanError, match=r"another model: it has 'aten\.bilinear\(batch_0\)', the model 'aten\.linear"):
        Plan.from_json(json.dumps(document), plan.graph)


@pytest.mark.parametrize(
    "text",
    ["", "null", "3", "[]", "{}", '{"format": 1}', '{"format": 1, "graph": 2}', '{"format": 1, "graph": {}}', "\0"],
)
def test_what_is_no_plan_is_refused(text, graph):
    with pytest.raises(PlanError, match="this is not a plan as"):
        Plan.from_json(text, graph)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(part, plan, graph, tmp_path):
    path = tmp_path / "plan.json"
    text = plan.to_json()
    path.write_text(text[: int(len(text) * part)])
    with pytest.raises(PlanError) as error:
        Plan.load(path, graph)
    assert str(error.value).startswith(f"{path}: this is not a plan as Plan.to_json writes it: it is no JSON: ")


@pytest.mark.parametrize("edit", ["mesh", "strategies", "leaves", "outputs"])
def test_every_entry_of_another_type_is_refused(edit, plan, graph):
    for junk in (None, 1, "x", [1], {"x": 1}, [["dp", 2, 3]], [["dp", "two"]]):
        document = json.loads(plan.to_json())
        document[edit] = junk
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(document), graph)


def test_another_format_is_refused(plan, graph):
    document = json.loads(plan.to_json())
    document["format"] = 99
    with pytest.raises(PlanError, match="the plan has format 99, this release reads 1; plan again"):
        Plan.from_json(json.dumps(document), graph)


def test_a_plan_that_lacks_a_decision_is_refused(plan, graph):
    document = json.loads(plan.to_json())
    lost = next(iter(document["strategies"]))
    del document["strategies"][lost]
    with pytest.raises(PlanError, match=f"the strategies of the plan lack or add {lost}; plan again"):
        Plan.from_json(json.dumps(document), graph)


def test_an_axis_that_there_is_not_is_refused(plan, graph):
    document = json.loads(plan.to_json())
    document["mesh"][1][0] = "pp"
    with pytest.raises(PlanError, match=r"the plan splits over tp, which its mesh \(dp=2 pp=3\) has not; plan again"):
        Plan.from_json(json.dumps(document), graph)


def test_a_file_that_cannot_be_read_is_named(graph, tmp_path):
    with pytest.raises(PlanError, match=r"cannot read the plan .*none\.json: No such file or directory"):
        Plan.load(tmp_path / "none.json", graph)


def test_the_same_decisions_serve_other_sizes_and_dtypes_but_no_other_graph(plan):
    other = graph_of(net(), rows=12, dtype=torch.float64)
    served = plan.for_capture(other.capture)
    assert served.strategies == plan.strategies
    assert served.capture is other.capture
    with pytest.raises(PlanError, match=r"made for \d+ operators, the model has \d+; plan again"):
        plan.for_capture(graph_of(net(layers=3)).capture)


@pytest.mark.parametrize("dear", [False, True])
def test_an_objective_that_prices_leaves_decides_how_parameters_are_stored(graph, dear):
    """Where one way of holding them costs more than any bytes that move, every parameter is held the other way."""

    class Held(Bytes):
        def leaf(self, value, layout, mesh):
            return 1e9 * (layout.is_replicated == dear)

    mesh = Mesh.of(d=2)
    leaves = {v.name: [Layout.replicated(len(v.shape))] for v in graph.capture.values.values() if v.kind != "result"}
    parameters = [value.name for value in graph.capture.of_kind("parameter")]
    for name in parameters:
        leaves[name].append(Layout.split(len(graph.capture.values[name].shape), {0: "d"}))
    strategies = {node.name: tuple(graph.rules[node.name].strategies(mesh)) for node in graph.capture.nodes}
    found = search(Space(graph, mesh, strategies, leaves, {}), Held())
    assert {found.leaves[name].is_replicated for name in parameters} == {not dear}


@pytest.mark.parametrize("collected", [True, False])
def test_cycles_are_looked_for_after_a_search_where_they_were_before_it(collected, graph, monkeypatch):
    """Also after one that fails."""
    inside, were = [], gc.isenabled()

    def made(*_):
        inside.append(gc.isenabled())
        raise PlanError("none")

    monkeypatch.setattr("shardwright.compiler.plan.make._made", made)
    try:
        (gc.enable if collected else gc.disable)()
        with pytest.raises(PlanError, match="none"):
            make_plan(graph.capture, PlanRequest(MESH))
        assert (inside, gc.isenabled()) == ([False], collected)
    finally:
        (gc.enable if were else gc.disable)()


@pytest.fixture(scope="module")
def split(graph):
    """A plan with splits, links and hardware in it."""
    return make_plan(graph.capture, PlanRequest(MESH, search="propagation", hardware=read_hardware("cpu")))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_form_of_a_plan_raises_another_error(split, graph, every):
    """A file that is wrong in one place is refused when it is read, or it is a plan that is shown and lowered."""
    document = json.loads(split.to_json())
    document["hardware"] = None  # tests of profiles draw those
    accepted, refused = [], []
    for name, changed in itertools.islice(mutations(document), 0, None, every):
        try:
            read = Plan.from_json(json.dumps(changed), graph)
        except PlanError as error:
            refused.append(str(error))
            continue
        accepted.append(name)
        assert str(read)
        assert [lower(read, rank) for rank in (0, read.mesh.size - 1)]
    assert not [message for message in refused if "\n" in message]
    assert every > 1 or "['mode'] = 'x'" in accepted
    assert len(accepted) < 60


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["mesh"][0].__setitem__(1, 10**9), "the meshes .* which are not of the same devices"),
        (lambda d: d["strategies"].clear(), "the strategies of the plan lack or add"),
        (lambda d: d["outputs"].clear(), "the outputs of the plan lack or add"),
        (lambda d: d["leaves"].update(model_0_bias={"dims": [], "partial": []}), "the leaves of the plan lack or add"),
        (lambda d: d.update(again=["nothing"]), "the values of the plan lack or add nothing"),
        (lambda d: d.update(cost=-1), "cost of the plan is -1.0, expected a number from 0 on"),
        (lambda d: d.update(hardware={}), "no hardware profile"),
        (lambda d: d.update(one=1), "it has 'one', which is not known"),
        (lambda d: d["graph"].update(values="x"), "graph.values is 'x', expected a list"),
    ],
)
def test_impossible_plans_say_what_is(split, graph, edit, message):
    document = json.loads(split.to_json())
    edit(document)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(document), graph)


def test_a_plan_that_is_no_text_is_refused(graph, tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(PlanError, match=r"plan.json: this is not a plan as Plan.to_json writes it: it is no JSON: "):
        Plan.load(tmp_path / "plan.json", graph)
