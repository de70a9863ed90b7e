"""What a planner is asked, and the digest by which its answer is remembered."""

from dataclasses import dataclass, fields, replace

import pytest

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Link, Mesh
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.memory import OptimizerStates
from shardwright.compiler.plan.request import PlanRequest, read_memory
from shardwright.errors import UsageError

REQUEST = PlanRequest(Mesh.of(dp=2, tp=4))
# By field, values that all decide another plan.
OTHERS = {
    "mesh": (Mesh.of(dp=4, tp=2), Mesh.of(tp=2, dp=4), Mesh((Axis("dp", 2, Link(1e-5, 1e9)), Axis("tp", 4)))),
    "mode": ("single", "data", "semi-auto"),
    "search": ("propagation", "exact"),
    "inputs": ("whole", {}, {"x": (2, 1)}, {"x": (1, 2)}, {"y": (1, 2)}, {"x": (1, 2), "y": (1,)}),
    "hardware": (shipped("h100"), replace(shipped("cpu_host"), launch_s=1.0), shipped("cpu_host").on_hosts(["a", "b"])),
    "storage": ({"w": Layout.replicated(2)}, {"v": Layout.replicated(2)}, {"w": Layout.split(2, {0: ("dp",)})}),
    "axes": (Mesh.of(ranks=8), Mesh.of(dp=2, tp=4)),
    "memory": (1, 2**36),
    "recompute": (("blocks.*",), ("blocks.0", "blocks.1")),
    "microbatches": (2, 4),
    "schedule": ("gpipe", "1f1b"),
    "search_stages": (True,),
    "optimizer": (OptimizerStates("sgd", 0, 0), OptimizerStates("adamw", 3, 4)),
}


@pytest.mark.parametrize("name", [field.name for field in fields(PlanRequest)])
def test_a_field_that_differs_makes_another_digest(name):
    digests = [REQUEST.digest, *(replace(REQUEST, **{name: other}).digest for other in OTHERS[name])]
    assert len(set(digests)) == len(OTHERS[name]) + 1
    assert PlanRequest(**{field.name: getattr(REQUEST, field.name) for field in fields(REQUEST)}).digest == digests[0]


def test_a_field_to_come_is_in_the_digest():
    @dataclass(frozen=True)
    class Later(PlanRequest):
        budget_bytes: int | None = None

    assert Later(REQUEST.mesh, budget_bytes=1).digest != Later(REQUEST.mesh, budget_bytes=2).digest


def test_the_order_in_which_a_mapping_was_filled_does_not_count():
    x, y = ("x", (2, 1)), ("y", (1,))
    assert replace(REQUEST, inputs=dict([x, y])).digest == replace(REQUEST, inputs=dict([y, x])).digest


def test_a_value_without_a_text_of_its_own_has_no_digest():
    with pytest.raises(TypeError, match=r"is object, which has no text that is the same in every process"):
        replace(REQUEST, storage={"w": object()}).digest  # noqa: B018  # the property raises


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(UsageError, match=r"mode='fast' is unknown; choose one of 'single', 'data', 'semi-auto'"):
        PlanRequest(REQUEST.mesh, "fast")
    with pytest.raises(UsageError, match="unknown search 'none'; the searches are propagation, recursive, exact"):
        PlanRequest(REQUEST.mesh, search="none")
    with pytest.raises(UsageError, match=r"inputs is 'split', 'whole' or a mapping .*, got 'rows'"):
        PlanRequest(REQUEST.mesh, inputs="rows")


@pytest.mark.parametrize("given", ["80 apples", "", "0GiB", "-1", 0, True, 1.5, "iB", None])
def test_what_is_no_memory_is_refused(given):
    with pytest.raises(UsageError, match=r"expected how many bytes each device may hold, as '80GiB' or '512MB'"):
        read_memory(given)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("stand_alone", "single"),
        ("data_parallel", "data"),
        ("semi_auto_parallel", "semi-auto"),
        ("auto_parallel", "auto"),
    ],
)
def test_mindspores_names_of_modes_are_read_as_ours(theirs, ours):
    assert PlanRequest(REQUEST.mesh, theirs) == PlanRequest(REQUEST.mesh, ours)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("semi_auto", "; did you mean 'semi-auto'?"),
        ("dat", "; did you mean 'data'?"),
        ("hybrid_parallel", "; pin operators (pins=, sw.shard) with mode='semi-auto', which places the collectives"),
        (None, ""),
    ],
)
def test_a_mode_that_is_none_says_what_was_meant(name, hint):
    with pytest.raises(UsageError) as refused:
        PlanRequest(REQUEST.mesh, name)
    start = f"mode={name!r} is unknown; choose one of 'single', 'data', 'semi-auto', 'auto'"
    assert str(refused.value).startswith(start + hint)
    assert hint or str(refused.value) == start
