"""A redistribution turns a value and its gradient into what the contract says, on every mesh and shape."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.mesh.collectives import apply_step
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import possible, redistribute
from shardwright.compiler.mesh.simulate import simulate
from shardwright.errors import PlanError

MESHES = [
    Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=4), Mesh.of(a=6), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3),
    Mesh.of(a=2, b=2, c=2), Mesh.of(a=2, one=1),
]  # fmt: skip


@st.composite
def layouts(draw, mesh, shape, partial_of):
    """A layout with the axes of each dim in any order, partial over some of ``partial_of``, with units that divide."""
    places = {axis: draw(st.integers(-2, len(shape) - 1)) for axis in draw(st.permutations(mesh.names))}
    dims = []
    for dim, size in enumerate(shape):
        axes = tuple(axis for axis, place in places.items() if place == dim)
        divisors = [unit for unit in range(1, max(size, 1) + 1) if size % unit == 0]
        dims.append(Split(axes, draw(st.sampled_from(divisors)) if axes and draw(st.booleans()) else 1))
    return Layout(tuple(dims), mesh.ordered(axis for axis, p in places.items() if p == -2 and axis in partial_of))


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12]), min_size=1, max_size=3)))
    src = draw(layouts(mesh, shape, mesh.names))
    dst = draw(layouts(mesh, shape, src.partial))
    free = [axis for axis in mesh.names if axis not in dst.split_axes and axis not in dst.partial]
    gradient_partial = mesh.ordered(axis for axis in free if draw(st.booleans()))
    return mesh, shape, src, dst, gradient_partial


def summands(shape, mesh, axes, seed):
    """Whole-sized summands for every rank, equal along the axes not named, and the sum over the named ones.

    Small integers: their sums are exact in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = torch.zeros(shape, dtype=torch.float64)
    by_coordinates = {}
    for rank in range(mesh.size):
        at = tuple(mesh.coordinates(rank)[axis] for axis in axes)
        if at not in by_coordinates:
            by_coordinates[at] = torch.randint(-50, 50, shape, generator=generator, dtype=torch.float64)
            whole += by_coordinates[at]
    return [by_coordinates[tuple(mesh.coordinates(rank)[axis] for axis in axes)] for rank in range(mesh.size)], whole


@given(cases())
def test_values_gradients_and_bytes(case):
    mesh, shape, src, dst, gradient_partial = case
    steps = redistribute(src, dst, gradient_partial, shape, mesh)
    parts, whole = summands(shape, mesh, src.partial, 1)
    gradients, whole_gradient = summands(shape, mesh, gradient_partial, 2)

    def run(comm):
        x = parts[comm.rank][src.local_slice(shape, mesh, comm.rank)].clone().requires_grad_()
        y = x
        for step in steps:
            y = apply_step(y, step, shape, comm)
        forward = len(comm.collectives)
        y.backward(gradients[comm.rank][dst.local_slice(shape, mesh, comm.rank)])
        return y.detach(), x.grad, comm.collectives[:forward], comm.collectives[forward:]

    results = simulate(mesh, run)
    for rank, (value, gradient, _, _) in enumerate(results):
        # Over the axes on which the result stays partial, the values of the ranks add up to the whole.
        others = mesh.group(rank, dst.partial)
        summed = sum(results[other][0] for other in others)
        assert torch.equal(summed, whole[dst.local_slice(shape, mesh, rank)])
        assert value.is_contiguous()
        assert torch.equal(gradient, whole_gradient[src.local_slice(shape, mesh, rank)])
    planned = [step.collectives(shape, 8, mesh) for step in steps]
    assert results[0][2] == [forward for forward, _ in planned if forward]
    assert results[0][3] == [backward for _, backward in reversed(planned) if backward]


@given(cases())
def test_steps_form_a_chain(case):
    mesh, shape, src, dst, gradient_partial = case
    steps = redistribute(src, dst, gradient_partial, shape, mesh)
    layouts = [src, *(step.after for step in steps)]
    assert [step.before for step in steps] == layouts[:-1]
    for rank in range(mesh.size):
        assert layouts[-1].local_slice(shape, mesh, rank) == dst.local_slice(shape, mesh, rank)
    assert layouts[-1].partial == dst.partial
    for step in steps:
        assert step.function == {"slice": "local_slice"}.get(step.kind, step.kind)


@given(cases())
def test_no_detour_by_the_whole_tensor_is_cheaper(case):
    mesh, _, src, dst, _ = case
    shape = (mesh.size * 2,) * len(src.dims)
    src, dst = (Layout(tuple(Split(dim.axes) for dim in layout.dims), layout.partial) for layout in (src, dst))

    def sent(target):
        return sum(step.forward_bytes(shape, 4, mesh) for step in redistribute(src, target, (), shape, mesh))

    assert sent(dst) <= sent(Layout.replicated(len(shape))) + 1e-6


def one(*args):
    [step] = redistribute(*args)
    return step


def kinds(*args):
    return [(step.kind, step.adjoint, step.axes) for step in redistribute(*args)]


AB = Mesh.of(a=2, b=2)
WHOLE, ROWS, COLUMNS = Layout.replicated(2), Layout.split(2, {0: ["a"]}), Layout.split(2, {1: ["a"]})
PARTIAL = Layout.split(2, {}, partial=["a"])


@pytest.mark.parametrize(
    ("src", "dst", "gradient_partial", "expected"),
    [
        (WHOLE, WHOLE, (), []),
        (WHOLE, WHOLE, ("a",), [("enter", "all_reduce", ("a",))]),
        (WHOLE, WHOLE, ("a", "b"), [("enter", "all_reduce", ("a", "b"))]),
        (WHOLE, ROWS, (), [("slice", "all_gather", ("a",))]),
        (ROWS, WHOLE, (), [("all_gather", "slice", ("a",))]),
        (ROWS, WHOLE, ("a",), [("all_gather", "reduce_scatter", ("a",))]),
        (ROWS, COLUMNS, (), [("all_to_all", "all_to_all", ("a",))]),
        (PARTIAL, WHOLE, (), [("all_reduce", "nothing", ("a",))]),
        (PARTIAL, WHOLE, ("a",), [("all_reduce", "nothing", ("a",)), ("enter", "all_reduce", ("a",))]),
        (PARTIAL, ROWS, (), [("reduce_scatter", "all_gather", ("a",))]),
        (PARTIAL, PARTIAL, (), []),
    ],
)
def test_the_table(src, dst, gradient_partial, expected):
    assert kinds(src, dst, gradient_partial, (8, 8), AB) == expected


def test_axes_travel_together():
    both = Layout.split(2, {0: ["a", "b"]})
    assert kinds(both, WHOLE, (), (8, 8), AB) == [("all_gather", "slice", ("a", "b"))]
    assert kinds(both, WHOLE, ("a", "b"), (8, 8), AB) == [("all_gather", "reduce_scatter", ("a", "b"))]
    assert kinds(WHOLE, both, (), (8, 8), AB) == [("slice", "all_gather", ("a", "b"))]
    assert kinds(Layout.split(2, {}, ["a", "b"]), WHOLE, (), (8, 8), AB) == [("all_reduce", "nothing", ("a", "b"))]
    assert kinds(Layout.split(2, {}, ["a", "b"]), both, (), (8, 8), AB) == [
        ("reduce_scatter", "all_gather", ("a", "b"))
    ]
    assert kinds(both, Layout.split(2, {1: ["a", "b"]}), (), (8, 8), AB) == [("all_to_all", "all_to_all", ("a", "b"))]


def test_sums_are_made_where_the_tensor_is_smallest():
    src = Layout.split(2, {0: ["b"]}, partial=["a"])
    assert [kind for kind, *_ in kinds(src, WHOLE, (), (8, 8), AB)] == ["all_reduce", "all_gather"]
    src = Layout.split(2, {}, partial=["a"])
    dst = Layout.split(2, {0: ["b"]})
    assert [kind for kind, *_ in kinds(src, dst, ("a",), (8, 8), AB)] == ["slice", "all_reduce", "enter"]


def test_a_major_axis_is_reached_through_the_minor_one():
    steps = kinds(Layout.split(1, {0: ["a", "b"]}), Layout.split(1, {0: ["b"]}), (), (8,), AB)
    assert steps == [("all_gather", "slice", ("a", "b")), ("slice", "all_gather", ("b",))]


def test_units_matter_only_where_parts_are_uneven():
    by_unit = Layout((Split(("a",), 4),))
    plain = Layout((Split(("a",)),))
    assert kinds(by_unit, plain, (), (16,), AB) == []
    assert [kind for kind, *_ in kinds(by_unit, plain, (), (12,), AB)] == ["all_gather", "slice"]
    assert kinds(plain, Layout((Split(("a", "b"), 4),)), (), (20,), AB) == [
        ("all_gather", "slice", ("a",)),
        ("slice", "all_gather", ("a", "b")),
    ]
    assert kinds(plain, Layout((Split(("a", "b"), 4),)), (), (16,), AB) == [("slice", "all_gather", ("b",))]


def test_a_reduce_scatter_costs_half_of_an_all_reduce_and_a_slice():
    shape = (8, 8)
    direct = redistribute(PARTIAL, ROWS, (), shape, AB)
    detour = redistribute(PARTIAL, WHOLE, (), shape, AB) + redistribute(WHOLE, ROWS, (), shape, AB)
    assert [step.kind for step in detour] == ["all_reduce", "slice"]
    sent = [sum(step.forward_bytes(shape, 4, AB) for step in steps) for steps in (direct, detour)]
    assert sent == [math.prod(shape) * 4 / 2, math.prod(shape) * 4]


def test_bytes_of_each_kind():
    mesh = Mesh.of(a=4)
    rows, columns, partial = (
        Layout.split(2, {0: ["a"]}), Layout.split(2, {1: ["a"]}), Layout.split(2, {}, ["a"]),
    )  # fmt: skip
    shape, whole = (8, 12), 8 * 12 * 4
    for src, dst, gradient_partial, forward, backward in [
        (WHOLE, WHOLE, ("a",), 0, 2 * 3 / 4 * whole),
        (WHOLE, rows, (), 0, 3 / 4 * whole),
        (rows, WHOLE, (), 3 / 4 * whole, 0),
        (rows, WHOLE, ("a",), 3 / 4 * whole, 3 / 4 * whole),
        (rows, columns, (), 3 / 4 * whole / 4, 3 / 4 * whole / 4),
        (partial, WHOLE, (), 2 * 3 / 4 * whole, 0),
        (partial, rows, (), 3 / 4 * whole, 3 / 4 * whole),
    ]:
        step = one(src, dst, gradient_partial, shape, mesh)
        assert (step.forward_bytes(shape, 4, mesh), step.backward_bytes(shape, 4, mesh)) == (forward, backward)


def test_what_cannot_be():
    assert not possible(WHOLE, PARTIAL)
    assert not possible(ROWS, PARTIAL)
    assert possible(PARTIAL, ROWS)
    with pytest.raises(PlanError, match=r"\[a, -\] cannot become \[-, -\] Σa: it is not a partial sum over a"):
        redistribute(ROWS, PARTIAL, (), (8, 8), AB)
    with pytest.raises(PlanError, match=r"replicated; \[a, -\] with a gradient partial over a"):
        redistribute(WHOLE, ROWS, ("a",), (8, 8), AB)


def test_the_arguments_name_what_differs_from_the_default():
    step = redistribute(Layout((Split(("a", "b"), 3),)), Layout((Split(("a",), 3),)), ("b",), (9,), AB)[0]
    expected = {"dim": 0, "axes": ("b",), "size": 9, "within": ("a",), "unit": 3, "adjoint": "reduce_scatter"}
    assert step.arguments((9,)) == expected
    step = one(ROWS, COLUMNS, (), (8, 6), AB)
    assert step.arguments((8, 6)) == {"dim": 0, "to_dim": 1, "axes": ("a",), "size": 8, "to_size": 6}
    assert one(PARTIAL, WHOLE, (), (8, 6), AB).arguments((8, 6)) == {"axes": ("a",)}
    assert str(step) == "all-to-all over a: [a, -] -> [-, a]"


def test_a_layout_is_sent_without_its_hash():
    """Which is another one in each process, as those of texts are."""
    layout = Layout.split(2, {1: ["a"]}, ["b"])
    known = hash(layout)
    sent = pickle.loads(pickle.dumps(layout))
    assert vars(sent) == {"dims": layout.dims, "partial": layout.partial}
    assert (hash(sent), sent) == (known, layout)
