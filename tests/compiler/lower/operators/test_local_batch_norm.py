"""Batch norm over all ranks, in float32 with a mean that is large beside the deviation."""

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from ranks import run_ranks
from shardwright.common import native_code
from shardwright.compiler.lower.operators import batch_norm, kernels
from shardwright.compiler.mesh.collectives import Communicator
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate

ROWS = {"even": (8, 8, 8), "uneven": (11, 11, 2), "empty": (12, 12, 0)}


def data(mean: float) -> torch.Tensor:
    return (torch.randn(24, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + mean).float()


def on_ranks(x: torch.Tensor, parts: tuple[int, ...], upstream: torch.Tensor) -> list[torch.Tensor]:
    """The result, the new statistics, and the gradients of x, weight and bias."""
    counts = [rows * x.shape[2] for rows in parts]
    starts = [sum(parts[:rank]) for rank in range(len(parts))]

    def run(comm: Communicator) -> list[torch.Tensor]:
        place = slice(starts[comm.rank], starts[comm.rank] + parts[comm.rank])
        local = x[place].clone().requires_grad_()
        weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        old = torch.zeros(3), torch.ones(3)
        y, _, _, *new = kernels.batch_norm_running(local, weight, bias, *old, 0.1, 1e-5, comm, ("dp",), counts)
        gradients = torch.autograd.grad(y, [local, weight, bias], upstream[place])
        return [y.detach(), *new, *gradients]

    ranks = simulate(Mesh.of(dp=len(parts)), run)
    for rank in ranks[1:]:
        assert torch.equal(rank[1], ranks[0][1])
        assert torch.equal(rank[2], ranks[0][2])
    joined = [torch.cat([rank[i] for rank in ranks]) for i in (0, 3)]
    summed = [torch.stack([rank[i] for rank in ranks]).sum(0) for i in (4, 5)]
    return [joined[0], *ranks[0][1:3], joined[1], *summed]


def on_one(x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """The same by torch, in float64."""
    x = x.double().requires_grad_()
    weight, bias = torch.ones(3, requires_grad=True).double(), torch.zeros(3, requires_grad=True).double()
    running = torch.zeros(3).double(), torch.ones(3).double()
    y = functional.batch_norm(x, *running, weight, bias, training=True, momentum=0.1, eps=1e-5)
    gradients = torch.autograd.grad(y, [x, weight, bias], upstream.double())
    return [y.detach(), *running, *gradients]


@pytest.fixture(params=["natively", "by differences", "by torch"])
def way(request, monkeypatch):
    """How what goes over the values is worked out."""
    if request.param != "natively":
        monkeypatch.setattr(batch_norm, "_native", dict)
        monkeypatch.setattr(batch_norm, "_MANY", 0 if request.param == "by differences" else 1 << 17)
    elif not batch_norm._native():
        pytest.skip("nothing compiles C here")
    return request.param


@pytest.mark.parametrize("parts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("mean", "tolerance"), [(0.0, 2e-6), (100.0, 2e-5), (1000.0, 2e-4)])
def test_merged_statistics_are_exact(parts, mean, tolerance, way):
    x = data(mean)
    assert (batch_norm._by(x, None, None, None) is batch_norm._ByTorch) == (way != "natively")
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for found, wanted in zip(on_ranks(x, parts, upstream), on_one(x, upstream), strict=True):
        assert (found - wanted).abs().max() <= tolerance * max(1, wanted.abs().max().item())


@pytest.mark.parametrize("affine", [True, False])
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(4, 20))
    | st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(500, 1100))
    | st.tuples(st.integers(2, 150), st.integers(1, 40))
    | st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(2, 9), st.integers(2, 9)),
    spread=st.sampled_from([1.0, 0.0]),
)
def test_native_code_is_as_torch_in_float64(shape, spread, affine):
    """Channels that are gone through together, and rows whose sums are made in blocks, are what they are alone. Those
    of four dims are channels last, and have an outlier first."""
    made = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(2))
    x = x * spread + 3
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        x[0, :, 0, 0] = 1e4
    x.requires_grad_()
    weight, bias = (torch.randn(shape[1], generator=made, dtype=torch.float64).requires_grad_() for _ in range(2))
    operands = (x, weight, bias) if affine else (x, None, None)
    running = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
    if batch_norm._by(*operands, None) is batch_norm._ByTorch:
        pytest.skip("nothing compiles C here")
    with patch.object(batch_norm, "_FEWEST_ALONE", 1):
        found = kernels.batch_norm_of_replica(*operands, *running, 0.1, 1e-5, [x.numel() // shape[1]])
    wanted = torch.ops.aten._native_batch_norm_legit_functional(*operands, *running, True, 0.1, 1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    leaves = [leaf for leaf in operands if leaf is not None]
    for one, other in zip(
        torch.autograd.grad(found[0], leaves, upstream), torch.autograd.grad(wanted[0], leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    with_running=st.booleans(),
)
def test_statistics_are_the_same_on_ranks_without_native_code(counts, dtype, with_running):
    """To the last bit, since each rank brings its own copy of the running ones up to date; but for a root."""
    if not batch_norm._native():
        pytest.skip("nothing compiles C here")
    made = torch.Generator().manual_seed(len(counts))
    of_ranks = torch.randn(len(counts), 2, 50, generator=made, dtype=dtype).abs() * 7
    running = (*torch.randn(2, 50, generator=made, dtype=dtype).unbind(), 0.1) if with_running else None
    given = of_ranks, tuple(count * 3 for count in counts), 1e-5, running
    found, wanted = batch_norm._native()[dtype].merged(*given), batch_norm._merged_step_by_step(*given)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-14 if dtype == torch.float64 else 1e-7, atol=0)
    for one, other in zip(found._replace(scale=None), wanted._replace(scale=None), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_what_native_code_does_not_know_is_left_to_torch():
    x, weight = data(0.0), torch.ones(3)
    running = torch.zeros(3), torch.ones(3), 0.1
    assert batch_norm._by(x, weight, weight, running) is not batch_norm._ByTorch or not batch_norm._native()
    for other in (x.bfloat16(), x.transpose(0, 2), x[..., :3].contiguous(), x[:0]):
        assert batch_norm._by(other, None, None, None) is batch_norm._ByTorch
    for of_channels in ((weight.double(), None, None), (None, None, (weight.double(), weight, 0.1))):
        assert batch_norm._by(x, *of_channels) is batch_norm._ByTorch


def one_without_a_compiler():
    torch.set_num_threads(1)
    if sw.init().rank == 1:
        native_code._folder = Mock(side_effect=PermissionError(13, "closed"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4))
    parallel = sw.parallelize(model, lambda model, x: model(x).square().mean(), torch.randn(6, 2, 5, 5), batch="global")
    parallel(torch.randn(6, 2, 5, 5)).backward()
    return len(batch_norm._native()), len(batch_norm._compiled())


def test_native_code_of_one_rank_alone_is_left_out():
    (first, has), (second, lacks) = run_ranks(2, one_without_a_compiler)
    assert (first, second, lacks) == (0, 0, 0)
    assert has == 2 or not batch_norm._native()


def test_sums_of_squares_would_not_be():
    x = data(1000.0)
    naive = (x.square().mean((0, 2)) - x.mean((0, 2)).square()).rsqrt()
    wanted = x.double().var((0, 2), correction=0).rsqrt()
    assert (naive - wanted).abs().max() > 1e-3


def test_sums_of_gradients_are_made_with_a_weight():
    """Torch's kernel for GPUs makes them like the weight, which it takes to be there."""
    noted = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            noted.extend([args[2]] if function is torch.ops.aten.native_batch_norm_backward.default else [])
            return function(*args, **(kwargs or {}))

    with Noted():
        batch_norm._gradient_sums(data(0.0), data(1.0), torch.zeros(3), torch.ones(3))
    assert [weight.shape for weight in noted] == [(3,)]
