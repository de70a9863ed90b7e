"""Random numbers by global position: equal however a tensor is split, and random."""

import itertools
import os
import subprocess
import sys
import types

import pytest
import torch

from shardwright.compiler.lower.operators import draws, randomness
from shardwright.compiler.lower.operators.randomness import kept, uniform
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh

CPU = torch.device("cpu")
SHAPE = (7, 6, 10)


def part(place: tuple[slice, ...], key: int = 3) -> torch.Tensor:
    sizes = [s.stop - s.start for s in place]
    return uniform(key, SHAPE, [s.start for s in place], sizes, CPU)


@pytest.mark.parametrize(
    "dims", [{0: "ab"}, {1: "ba"}, {2: "a", 0: "b"}, {0: "a", 1: "b"}, {1: "a", 2: "b"}, {2: "ab"}]
)
def test_an_element_has_one_number_however_the_tensor_is_split(dims):
    mesh = Mesh.of(a=2, b=4)
    layout = Layout.split(3, {dim: list(axes) for dim, axes in dims.items()})
    whole = uniform(3, SHAPE, (0, 0, 0), SHAPE, CPU)
    for rank in range(mesh.size):
        place = layout.local_slice(SHAPE, mesh, rank)
        assert torch.equal(part(place), whole[place])


def test_blocks_do_not_show():
    long = (3, 200_000)
    whole = uniform(1, long, (0, 0), long, CPU)
    assert torch.equal(uniform(1, long, (1, 70_000), (2, 100_000), CPU), whole[1:, 70_000:170_000])
    assert torch.equal(uniform(1, long, (2, 199_999), (1, 1), CPU), whole[2:, 199_999:])


def test_numbers_are_uniform():
    drawn = uniform(11, (1_000_000,), (0,), (1_000_000,), CPU).double()
    assert 0 <= drawn.min() < 1e-5
    assert 1 - 1e-5 < drawn.max() < 1
    assert abs(drawn.mean().item() - 0.5) < 4 * 12**-0.5 / 1000
    assert abs(drawn.var().item() * 12 - 1) < 0.005
    counts = torch.histc(drawn, 256, 0, 1)
    expected = 1_000_000 / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert 255 - 4 * 22.6 < chi_squared < 255 + 4 * 22.6  # 255 degrees of freedom, deviation sqrt(2 · 255)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


def test_neighbours_are_independent():
    n = 200_000
    bound = 4.5 / n**0.5
    streams = [uniform(key, (n,), (0,), (n,), CPU) for key in (0, 1, 2, 1 << 32, -1)]
    for a, b in itertools.combinations(streams, 2):
        assert abs(correlation(a, b)) < bound  # of keys
        assert abs(correlation(a[1:], b[:-1])) < bound
    for lag in (1, 2, 3, 8, 64, 1000, 4096):
        assert abs(correlation(streams[0][lag:], streams[0][:-lag])) < bound  # of positions
        assert abs(correlation((streams[0][lag:] - 0.5).square(), (streams[0][:-lag] - 0.5).square())) < bound


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_mask_keeps_what_it_should(p):
    n = 400_000
    mask = kept(7, p, (n,), (0,), (n,), CPU)
    assert mask.dtype == torch.bool
    assert abs(mask.double().mean().item() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5


def test_nothing_and_everything_are_dropped_exactly():
    x = torch.randn(100)
    assert torch.equal(draws.dropout(x, 0.0, 1, (100,), (0,)), x)
    assert torch.equal(draws.dropout(x, 1.0, 1, (100,), (0,)), torch.zeros(100))


def test_ranks_drop_other_elements_and_a_step_can_be_replayed():
    x = torch.ones(8, 64)
    first, second = (draws.dropout(x, 0.5, 9, (16, 64), (start, 0)) for start in (0, 8))
    assert not torch.equal(first, second)
    assert torch.equal(first, draws.dropout(x, 0.5, 9, (16, 64), (0, 0)))
    assert not torch.equal(first, draws.dropout(x, 0.5, 10, (16, 64), (0, 0)))


def test_dropout_keeps_only_its_mask_for_the_backward():
    saved: list[torch.Tensor] = []
    x = torch.randn(50, 50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        draws.dropout(x * 1, 0.5, 1, (50, 50), (0, 0))
    assert [tensor.dtype for tensor in saved if tensor.numel() > 1] == [torch.bool]


def test_normal_numbers():
    drawn = draws.randn(3, (500_000,), (0,), (500_000,), torch.float64, CPU)
    assert abs(drawn.mean().item()) < 0.006
    assert abs(drawn.var().item() - 1) < 0.01
    assert abs((drawn**4).mean().item() - 3) < 0.06
    assert torch.isfinite(drawn).all()


KERNEL = """
import itertools, sys, torch
from shardwright.compiler.lower.operators import randomness
shape, cpu = (7, 6, 10), torch.device("cpu")
mask = randomness.one_kernel(cpu)
for key, p in itertools.product((3, -1), (0.1, 0.7)):
    for starts, sizes in (((0, 0, 0), shape), ((2, 1, 3), (5, 3, 7)), ((1, 0, 0), (1, 6, 10)), ((0, 0, 0), (0, 6, 10))):
        found = mask(*randomness._runs(shape, starts, sizes, cpu), randomness.mixed(key), round((1 - p) * 2**32))
        assert torch.equal(found.view(sizes), randomness.kept(key, p, shape, starts, sizes, cpu)), (key, p, starts)
print("equal")
"""


def test_the_kernel_gives_the_bits_of_the_mask():
    """As on a GPU, where it takes the place of the operators; triton can interpret its kernels on a CPU."""
    pytest.importorskip("triton", reason="triton comes with torch for GPUs")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=interpreted, capture_output=True, text=True, timeout=120)
    assert done.stdout == "equal\n", done.stderr


def test_where_the_kernel_cannot_serve_the_operators_are_used_and_it_is_said(monkeypatch):
    kernel = types.ModuleType("mask_kernel")
    monkeypatch.setitem(sys.modules, "shardwright.compiler.lower.operators.mask_kernel", kernel)

    def fails(*_):
        raise RuntimeError("no compiler here\nmore")

    for below, problem in (
        (fails, "as it cannot be by one: RuntimeError: no compiler here$"),
        (lambda *given: ~randomness._below(*given), "the kernel gives other bits"),
    ):
        kernel.below = below
        randomness.one_kernel.cache_clear()
        with pytest.warns(UserWarning, match=problem):
            assert randomness.one_kernel(CPU) is None
    kernel.below = randomness._below
    randomness.one_kernel.cache_clear()
    assert randomness.one_kernel(CPU) is not None
    randomness.one_kernel.cache_clear()
