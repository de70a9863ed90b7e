"""A search that is too wide on many axes is made on fewer; where that does not help, it says so."""

import pytest
import torch

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import mesh_search
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.exact import TooWide
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.errors import PlanError, UsageError
from shardwright.training.zoo import TwoMatmuls
from whole import plan_of, run, same

SEARCH = mesh_search.search
EIGHT = Mesh.of(d=8)


def square(model, batch):
    return model(*batch).square().mean()


@pytest.fixture(scope="module")
def quick_start():
    """The quick start's model and batch, the graph of their step, and what one device gives."""
    torch.manual_seed(0)
    model, batch = TwoMatmuls(16, 8).double(), (torch.randn(16, 16, dtype=torch.float64),)
    captured = captured_step(model, square, batch, {})
    return model, batch, captured, run(make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch)


@pytest.fixture
def plan(monkeypatch, quick_start):
    """Plans the quick start, where a search is too wide on more than so many axes."""

    def planned(most, mesh=EIGHT, **options):
        def search(space, objective, budget, below, known, built=None):
            if len(space.mesh.axes) > most:
                raise TooWide("the search would need a table")
            return SEARCH(space, objective)

        monkeypatch.setattr(mesh_search, "search", search)
        model, batch, captured, expected = quick_start
        found = make_plan(captured, PlanRequest(mesh, "auto", **options))
        same(run(found, model, batch), expected)
        return found

    return planned


@pytest.mark.parametrize("method", ["propagation", "exact"])
def test_fewer_axes_serve(plan, method):
    wide = plan(3, search=method).mesh
    assert len(plan(2, search=method).mesh.axes) == 2
    assert str(plan(1, search=method).mesh) == "d.0=8"
    assert len(wide.axes) == SEARCHES[method].first_axes


def test_axes_that_were_given_are_kept(plan):
    with pytest.raises(PlanError, match=r"on the mesh dp=4 tp=2: the search would need a table; try fewer axes"):
        plan(1, Mesh.of(dp=4, tp=2))


def test_the_least_is_one_axis(plan):
    with pytest.raises(PlanError, match=r"no plan was found on the mesh d.0=8"):
        plan(0)


def test_no_search_is_no_search():
    with pytest.raises(UsageError, match="unknown search 'none'; the searches are propagation, recursive, exact"):
        plan_of(TwoMatmuls(4, 4), square, (torch.ones(4, 4),), Mesh.of(d=2), "auto", search="none")
