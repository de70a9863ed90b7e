"""The functions that local programs call: what they read, keep, refuse, and send."""

import pytest
import torch
import torch.nn.functional as F

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.lower.call import Name
from shardwright.compiler.lower.lower import step_call
from shardwright.compiler.mesh import collectives
from shardwright.compiler.mesh.collectives import all_gather, all_reduce, apply_step, enter, local_slice, reduce_scatter
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.mesh.together import all_gather_together
from shardwright.errors import LoweringError

PAIR = Mesh.of(a=2)
GRID = Mesh.of(a=2, b=2)
WHOLE, ROWS, COLUMNS = Layout.replicated(2), Layout.split(2, {0: ["a"]}), Layout.split(2, {1: ["a"]})
PARTIAL = Layout.split(2, {}, partial=["a"])
ONE_STEP = [
    (WHOLE, WHOLE, ("a",)), (WHOLE, ROWS, ()), (ROWS, WHOLE, ()), (COLUMNS, WHOLE, ("a",)), (ROWS, COLUMNS, ()),
    (PARTIAL, WHOLE, ()), (PARTIAL, COLUMNS, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("src", "dst", "gradient_partial"),
    [
        *ONE_STEP,
        (Layout.split(2, {0: ["b", "a"]}), Layout.split(2, {0: ["b"]}), ("a",)),
        (Layout((Split(("a", "b"), 3), Split())), Layout((Split(("b",), 3), Split(("a",)))), ()),
    ],
)
def test_the_printed_call_does_what_the_step_does(src, dst, gradient_partial):
    shape = (9, 5)
    value = Value("x", "result", "x", shape, torch.float32, True)
    steps = redistribute(src, dst, gradient_partial, shape, GRID)

    def run(comm):
        part = torch.arange(45.0).reshape(shape)[src.local_slice(shape, GRID, comm.rank)]
        x, y = part.clone().requires_grad_(), part.clone().requires_grad_()
        applied, called = x, y
        for step in steps:
            applied = apply_step(applied, step, shape, comm)
            source = step_call(step, Name("called"), value).source
            called = eval(source, vars(collectives), {"called": called, "comm": comm})
        (applied * comm.rank).sum().backward()
        (called * comm.rank).sum().backward()
        return torch.equal(applied, called) and torch.equal(x.grad, y.grad)

    assert simulate(GRID, run) == [True] * 4


@pytest.mark.parametrize(("src", "dst", "gradient_partial"), ONE_STEP)
def test_gradients_may_be_expanded_or_transposed_and_nothing_is_saved(src, dst, gradient_partial):
    shape = (6, 5)
    [step] = redistribute(src, dst, gradient_partial, shape, PAIR)

    def run(comm):
        saved = []
        x = torch.ones(shape)[src.local_slice(shape, PAIR, comm.rank)].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
            y = apply_step(x, step, shape, comm)
        results = []
        for gradient in (torch.ones(()).expand(y.shape), torch.ones(y.shape[::-1]).t()):
            kept = gradient.clone()
            (got,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
            results.append(got)
            assert torch.equal(gradient, kept)
        assert torch.equal(*results)
        assert results[0].shape == x.shape
        return saved

    assert simulate(PAIR, run) == [[], []]


def test_a_sum_leaves_its_operand_and_other_gradients_alone():
    def run(comm):
        x = torch.ones(3, requires_grad=True)
        other = torch.ones(3, requires_grad=True)
        summed = all_reduce(x, comm, axes=("a",))
        (enter(summed, comm, axes=("a",)) + other).sum().backward()
        return x.tolist(), summed.tolist(), x.grad.tolist(), other.grad.tolist()

    assert simulate(PAIR, run) == [([1.0] * 3, [2.0] * 3, [2.0] * 3, [1.0] * 3)] * 2


def test_a_slice_does_not_keep_the_whole_alive():
    def run(comm):
        x = torch.zeros(100, 4)
        return [
            local_slice(x, comm, dim=dim, axes=("a",), size=size).untyped_storage().nbytes()
            for dim, size in [(0, 100), (1, 4)]
        ]

    assert simulate(PAIR, run) == [[800, 800], [800, 800]]


def test_query_key_and_value_share_one_reduction():
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    weights = [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    whole = x.clone().requires_grad_()
    sum(F.linear(whole, weight).square().sum() for weight in weights).backward()

    def run(comm):
        mine = x.clone().requires_grad_()
        [step] = redistribute(WHOLE, WHOLE, ("a",), (3, 4), PAIR)
        shared = apply_step(mine, step, (3, 4), comm)
        parts = [weight[ROWS.local_slice((6, 4), PAIR, comm.rank)] for weight in weights]
        sum(F.linear(shared, part).square().sum() for part in parts).backward()
        return mine.grad, [collective.kind for collective in comm.collectives]

    for gradient, kinds in simulate(PAIR, run):
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)
        assert kinds == ["all_reduce"]


def test_bools_travel_but_are_not_summed():
    mask = torch.tensor([True, False, True])

    def run(comm):
        part = local_slice(mask, comm, dim=0, axes=("a",), size=3)
        return all_gather(part, comm, dim=0, axes=("a",), size=3, adjoint="slice").tolist()

    assert simulate(PAIR, run) == [mask.tolist()] * 2
    for fn in (
        lambda comm: all_reduce(mask, comm, axes=("a",)),
        lambda comm: reduce_scatter(mask, comm, dim=0, axes=("a",), size=3),
    ):
        with pytest.raises(LoweringError, match="bools cannot be a partial sum; convert it to an integer type first"):
            simulate(PAIR, fn)


def test_tensors_that_are_gathered_together_take_their_parts_of_gradients_that_are_whole():
    wholes = [torch.arange(15.0).reshape(5, 3), torch.arange(4.0)]

    def run(comm):
        at = [Layout.split(whole.ndim, {0: ["a"]}).local_slice(whole.shape, PAIR, comm.rank) for whole in wholes]
        parts = [whole[mine].clone().requires_grad_() for whole, mine in zip(wholes, at, strict=True)]
        given = [(part, {"dim": 0, "size": len(whole)}) for part, whole in zip(parts, wholes, strict=True)]
        made = all_gather_together(comm, ("a",), "slice", *given)
        gradients = torch.autograd.grad(made, parts, [3 * whole for whole in wholes])
        assert all(map(torch.equal, made, wholes))
        assert all(torch.equal(found, 3 * part) for found, part in zip(gradients, parts, strict=True))

    simulate(PAIR, run)


def test_a_part_of_another_size_is_named():
    def run(comm):
        return all_gather(torch.zeros(4, 2), comm, dim=0, axes=("a",), size=6, adjoint="slice")

    with pytest.raises(
        LoweringError, match=r"rank 0 holds 4 rows of dim 0 where 3 were expected: .*\(4, 2\)"
    ) as caught:
        simulate(PAIR, run)
    assert "size=6" in str(caught.value)
    assert "mesh a=2" in str(caught.value)
