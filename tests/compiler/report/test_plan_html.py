"""The page of a plan for a browser: what it is told, and what it does in one."""

import itertools
import json

import pytest
import torch
from browser import opened
from torch import nn
from torch.nn import functional as F

from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.report.plans.html import document_of, events_of, in_html, save_html
from shardwright.errors import PlanError
from shardwright.training.zoo import GPT

H100 = read_hardware("h100")


def gpt(layers):
    with torch.device("meta"):
        model = GPT(8192, width=512, heads=8, layers=layers, sequence_length=128, dropout=0.0)
        batch = torch.zeros(64, 128, dtype=torch.long), torch.zeros(64, 128, dtype=torch.long)
    return model, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), batch


def plans_of(model, loss_fn, batch):
    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.baselines import BASELINES
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.pricing.graph import RuledGraph
    from shardwright.compiler.plan.request import PlanRequest

    graph = RuledGraph.of(captured_step(model, loss_fn, batch, {}))
    request = PlanRequest(Mesh.of(dp=2, tp=4), "auto", hardware=H100)
    return {
        "this plan": make_plan(graph.capture, request),
        "tensor parallel": BASELINES["tensor parallel"](graph, request),
    }


@pytest.fixture(scope="module")
def plans():
    return plans_of(*gpt(layers=3))


@pytest.fixture(scope="module")
def document(plans):
    return document_of("net.py:</script><b>build", plans, H100)


def totals(module, document, plan):
    """Seconds that are computed and communicated, bytes sent and bytes held, of a module with all inside."""
    ways = [document.operators[place].ways[plan] for place in module.operators]
    own = [sum(getattr(way, name) for way in ways) for name in ("computes_s", "communicates_s", "sent_bytes")]
    parts = [[*own, module.held_bytes[plan]], *(totals(child, document, plan) for child in module.children)]
    return [sum(part) for part in zip(*parts, strict=True)]


def test_equal_layers_stand_once_and_nothing_is_lost(plans, document):
    (layers,) = (child for child in document.root.children if child.name == "layers")
    assert [(child.name, child.count) for child in layers.children] == [("0-2", 3)]
    assert sum(row.times for row in document.operators) == len(plans["this plan"].capture.nodes)
    for i, plan in enumerate(plans.values()):
        prices = Prices(plan, H100)
        expected = [prices.computing_s, prices.communicating_s, plan.moved_bytes(), plan.held.parameters]
        assert totals(document.root, document, i) == pytest.approx(expected)


def test_a_layer_that_differs_has_a_row_of_its_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16, bias=i != 1) for i in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x

    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.request import PlanRequest

    capture = captured_step(Net(), lambda model, x: model(x).sum(), torch.randn(8, 16), {})
    plan = make_plan(capture, PlanRequest(Mesh.of(d=2), "data", hardware=H100))
    (layers,) = document_of("net", {"this plan": plan}, H100).root.children
    assert [(child.name, child.count) for child in layers.children] == [("0,2-3", 3), ("1", 1)]


def test_the_time_line_is_the_step(plans):
    for plan in plans.values():
        prices = Prices(plan, H100)
        events = events_of(prices)
        end_s = max(event.start_s + event.seconds for event in events)
        assert end_s == pytest.approx(prices.computing_s + prices.communicating_s - prices.hidden_s)
        assert end_s == pytest.approx(prices.step_s - prices.updating_s)
        assert [event.start_s for event in events] == sorted(event.start_s for event in events)
        computed = [event for event in events if event.lane == "computes"]
        assert [event.backward for event in computed] == sorted(event.backward for event in computed)
        for before, after in itertools.pairwise(computed):
            assert before.start_s + before.seconds <= after.start_s + 1e-12


def test_what_the_page_is_told_ends_no_script_and_needs_no_network(document):
    text = in_html(document)
    told = text.split('id="told">')[1].split("</script>")[0]
    assert json.loads(told)["title"] == "net.py:</script><b>build"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_page_that_cannot_be_written_says_why(document, tmp_path):
    with pytest.raises(PlanError, match=r"cannot write the page .*/none/plan.html: No such file"):
        save_html(document, tmp_path / "none" / "plan.html")


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def test_in_a_browser_it_folds_sorts_finds_and_compares(document, tmp_path):
    save_html(document, tmp_path / "plan.html")
    with opened(tmp_path / "plan.html", color_scheme="dark") as shown:
        assert shown.inner_text("h1") == "Plan of net.py:</script><b>build"
        assert "mesh dp=2 tp=4, 8 devices" in shown.inner_text("#answers")
        assert [text.split()[0] for text in texts(shown, "#answers b") if text] == [
            "plan",
            "run",
            "speed",
            "binds",
            "what",
            "proof",
        ]
        assert " of communication exposed (" in shown.inner_text("#answers")
        # by the keyboard: to the folded layers, open, and down to an operator
        row = shown.locator("tr.module", has_text="0-2 × 3")
        row.click()
        before = shown.locator("#rows tr").count()
        shown.keyboard.press("ArrowLeft")
        assert shown.locator("#rows tr").count() < before
        shown.keyboard.press("ArrowRight")
        assert shown.locator("#rows tr").count() == before
        # sorted by what each computes
        shown.click("#unfold")
        shown.click("th:has-text('computes') button")
        assert shown.get_attribute("th:has-text('computes')", "aria-sort") == "descending"
        assert texts(shown, "#rows tr[aria-level='2'] .name")[0] == "▾layers"
        # found by its line and by what it communicates
        shown.fill("#find", "linear all_reduce")
        found = shown.inner_text("#found")
        assert found.endswith("found")
        assert not found.startswith("0 ")
        shown.locator("#rows tr.operator").first.click()
        assert "shared by 8 of 8 devices" in shown.inner_text("#detail")
        assert "next best strategy" in shown.inner_text("#detail")
        assert shown.locator("#detail svg[aria-label='devices'] rect").count() >= 8
        # beside another plan
        shown.fill("#find", "")
        shown.select_option("#beside", label="tensor parallel")
        assert "computes, tensor parallel" in shown.inner_text("#columns")
        assert texts(shown, "#answers-beside h3") == ["Beside it: tensor parallel"]
        assert texts(shown, "#answers-beside p")[0].endswith("mesh dp=2 tp=4, 8 devices")
        shown.check("#differing")
        marked = shown.locator("#rows tr.differs").count()
        assert marked == shown.locator("#rows tr").count() > 1
        # the time line says what stands under the pointer
        shown.hover("#line", position={"x": 400, "y": 40})
        assert "computes" in shown.inner_text("#line-said")
        # on paper, across, nothing is cut off
        shown.emulate_media(media="print")
        shown.set_viewport_size({"width": 1030, "height": 700})
        assert shown.evaluate("document.documentElement.scrollWidth") <= 1030


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_of_5000_operators_does_not_stall(tmp_path):
    plan = plans_of(*gpt(layers=400))["this plan"]
    assert len(plan.capture.nodes) > 5000
    save_html(document_of("net", {"this plan": plan}, H100), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 5_000_000
    with opened(tmp_path / "plan.html") as shown:
        loaded_ms = shown.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        started = "const start = performance.now();"
        unfolded_ms = shown.evaluate(f"{started} document.getElementById('unfold').click(); performance.now() - start")
    assert max(loaded_ms, unfolded_ms) < 20_000  # no measure of speed: a page that stalls takes minutes
