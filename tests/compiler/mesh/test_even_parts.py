"""Even parts are gathered and scattered from and into one tensor, with the numbers that padded parts have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pretended import pretended
from shardwright.compiler.mesh.collectives import Cut, all_gather, reduce_scatter
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.mesh.simulate import simulate

GRID = Mesh.of(a=2, b=3)
GATHERED, SCATTERED = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


class Work(TorchDispatchMode):
    """The operators inside that communicate or write numbers."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not any(word in str(function) for word in ("empty", "_unsafe_view")):
            self.done.append(function.name().split(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def comm():
    with pretended(1, 4):
        comm = communicator_over(Mesh.of(d=4))
        comm.prepare([("d",)])
        yield comm


@pytest.mark.parametrize(("dim", "moves"), [(0, []), (1, ["aten::clone"])])
def test_each_is_one_call_and_at_most_one_copy(comm, dim, moves):
    size = (8, 12)[dim]
    x, whole = torch.ones(8, 12).narrow(dim, 0, size // 4).clone().requires_grad_(), torch.ones(8, 12)
    with Work() as forward:
        y = all_gather(x, comm, dim=dim, axes=("d",), size=size, adjoint="reduce_scatter")
    with Work() as backward:
        (gradient,) = torch.autograd.grad(y, x, whole)
    assert (forward.done, backward.done) == ([GATHERED, *moves], [*moves, SCATTERED])
    assert y.shape == whole.shape
    assert gradient.shape == x.shape
    with Work() as forward:
        z = reduce_scatter(whole.requires_grad_(), comm, dim=dim, axes=("d",), size=size)
    with Work() as backward:
        torch.autograd.grad(z, whole, x.detach())
    assert (forward.done, backward.done) == ([*moves, SCATTERED], [GATHERED, *moves])


def test_a_program_may_write_to_what_was_gathered(comm):
    x = torch.ones(2, 3, requires_grad=True)
    y = all_gather(x, comm, dim=0, axes=("d",), size=8, adjoint="slice")
    y.mul_(2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 5, 6, 12]), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    axes=st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]),
    turned=st.booleans(),
)
def test_even_parts_have_the_numbers_of_padded_ones(shape, dim, axes, turned):
    dim = dim % len(shape)
    how = {"dim": dim, "axes": axes, "size": shape[dim]}

    def run(comm):
        whole = torch.randn(*shape[::-1] if turned else shape, generator=torch.Generator().manual_seed(comm.rank))
        whole = whole.permute(*range(len(shape))[::-1]) if turned else whole
        part = reduce_scatter(whole, comm, **how)
        again = all_gather(part, comm, adjoint="slice", **how)
        assert part.is_contiguous()
        assert again.is_contiguous()
        return part, again

    found = simulate(GRID, run)
    with pytest.MonkeyPatch.context() as patch:
        even = Cut.parts
        patch.setattr(Cut, "parts", lambda cut, comm: even(cut, comm)._replace(even=False))
        padded = simulate(GRID, run)
    for (part, again), (expected, whole) in zip(found, padded, strict=True):
        assert torch.equal(part, expected)
        assert torch.equal(again, whole)
