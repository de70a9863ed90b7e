"""Batch norm over all ranks by the kernels of `torch.nn.SyncBatchNorm`, for which torch's operators stand in on CPUs.

The stand-ins take what torch's kernels for GPUs take, and refuse what those would read wrongly.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.compiler.lower.operators import batch_norm, kernels
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from whole import like_plain

PARTS = {"even": (4, 4), "uneven": (5, 2, 1), "empty": (5, 3, 0)}
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


class Kernels:
    """The four functions of torch, and how often each was called."""

    def __init__(self):
        self.calls = []

    def batch_norm_update_stats(self, x, running_mean, running_var, momentum):
        self._take("stats", x)
        assert running_mean is running_var is None
        variance, mean = torch.var_mean(x.to(wide(x)), beside_channels(x), correction=0)
        return mean, variance

    def batch_norm_elemt(self, x, weight, bias, mean, invstd, eps):
        self._take("elemt", x, mean, invstd, affine=(weight, bias))
        scale = invstd if weight is None else invstd * weight
        shift = torch.zeros_like(mean) if bias is None else bias
        return ((x - along(mean, x)) * along(scale, x) + along(shift, x)).to(x.dtype)

    def batch_norm_backward_reduce(self, gradient, x, mean, invstd, weight, input_g, weight_g, bias_g):
        self._take("reduce", x, mean, invstd, gradient)
        assert weight is None
        assert (input_g, weight_g, bias_g) == (True, False, False)
        gradient, nothing = gradient.to(wide(x)), torch.empty(0)
        products = gradient * (x.to(wide(x)) - along(mean, x))
        return gradient.sum(beside_channels(x)), products.sum(beside_channels(x)), nothing, nothing

    def batch_norm_backward_elemt(self, gradient, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        self._take("backward", x, mean, invstd, gradient, (weight, sum_dy, sum_dy_xmu))
        assert count.dtype == torch.int32, "the kernel reads 32 bits"
        values, factor = count.sum(), invstd if weight is None else invstd * weight
        centred = x - along(mean, x)
        less = along(sum_dy / values, x) + centred * along(sum_dy_xmu / values * invstd.square(), x)
        return ((gradient - less) * along(factor, x)).to(x.dtype)

    def _take(self, name, x, mean=None, invstd=None, gradient=None, affine=()):
        self.calls.append(name)
        assert x.numel(), "a kernel cannot be started for nothing"
        for statistic in (mean, invstd, *affine):
            assert statistic is None or (statistic.dtype == wide(x) and statistic.is_contiguous())
        if gradient is not None:
            assert gradient.dtype == x.dtype
            # For gradients whose channels are last the kernel reads x as if its were, too.
            either = [y.is_contiguous(memory_format=batch_norm._format(x)) for y in (x, gradient)]
            assert either == [True, True]


def wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def beside_channels(x):
    return [dim for dim in range(x.ndim) if dim != 1]


def along(numbers, x):
    return numbers.view(1, -1, *[1] * (x.ndim - 2))


@pytest.fixture
def on_cpus(monkeypatch):
    stand_in = Kernels()
    monkeypatch.setattr(batch_norm, "_WITH_KERNELS", ("cpu",))
    for name in (name for name in dir(Kernels) if name.startswith("batch_norm")):
        monkeypatch.setattr(torch, name, getattr(stand_in, name))
    return stand_in.calls


def data(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (3 * x + 7).to(dtype), upstream.to(dtype)


def on_ranks(parts, x, upstream, affine, local=lambda part, rank: part):
    """The result, the new statistics, the gradients of x, weight and bias; and the rank's own results."""
    counts = [rows * x[0, 0].numel() for rows in parts]
    starts = [sum(parts[:rank]) for rank in range(len(parts))]

    def run(comm):
        place = slice(starts[comm.rank], starts[comm.rank] + parts[comm.rank])
        mine, *own = [local(x[place], comm.rank), *(y.clone() for y in affine)]
        leaves = [y.detach().requires_grad_() for y in (mine, *own)]
        old = torch.zeros(3, dtype=wide(x)), torch.ones(3, dtype=wide(x))
        y, _, _, *new = kernels.batch_norm_running(
            leaves[0], *(leaves[1:] or (None, None)), *old, 0.1, 1e-5, comm, ("d",), counts
        )
        return [y.detach(), *new, *torch.autograd.grad(y, leaves, upstream[place])]

    ranks = simulate(Mesh.of(d=len(parts)), run)
    assert all(torch.equal(rank[i], ranks[0][i]) for rank in ranks for i in (1, 2)), "ranks have other statistics"
    summed = [torch.stack([rank[i] for rank in ranks]).sum(0) for i in range(4, 4 + len(affine))]
    joined = [torch.cat([rank[i] for rank in ranks]) for i in (0, 3)]
    return [joined[0], *ranks[0][1:3], joined[1], *summed], ranks


def on_one(x, upstream, affine):
    """The same of one device, in float64."""
    leaves = [y.double().detach().requires_grad_() for y in (x, *affine)]
    running = torch.zeros(3).double(), torch.ones(3).double()
    y = functional.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.1, eps=1e-5)
    return [y.detach(), *running, *torch.autograd.grad(y, leaves, upstream.double())]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("order", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("has_affine", [True, False], ids=["weight and bias", "neither"])
def test_they_give_the_numbers_of_one_device_in_the_order_of_the_images(on_cpus, parts, order, has_affine):
    x, upstream = data(torch.float64, 8, 3, 4, 5)
    affine = [torch.tensor([0.5, -2.0, 3.0]).double(), torch.tensor([1.0, 0.0, -4.0]).double()] if has_affine else []
    found, ranks = on_ranks(parts, x.contiguous(memory_format=order), upstream, affine)
    for ours, theirs in zip(found, on_one(x, upstream, affine), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    with_rows = sum(rows > 0 for rows in parts)
    assert {name: on_cpus.count(name) for name in on_cpus} == dict.fromkeys(
        ("stats", "elemt", "reduce", "backward"), with_rows
    )
    assert all(rank[i].is_contiguous(memory_format=order) for rank in ranks for i in (0, 3))


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 1, 1), (8, 3, 2, 3, 2)], ids=str)
def test_they_serve_every_number_of_dims(on_cpus, shape):
    x, upstream = data(torch.float64, *shape)
    found, _ = on_ranks((5, 3), x, upstream, [])
    for ours, theirs in zip(found, on_one(x, upstream, []), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert on_cpus.count("backward") == 2


def test_half_precision_is_read_as_it_is_and_summed_in_float32(on_cpus):
    x, upstream = data(torch.bfloat16, 64, 3, 8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        on_cpus.clear()
        affine = [torch.tensor([0.5, -2.0, 3.0], dtype=dtype), torch.tensor([1.0, 0.0, -4.0], dtype=dtype)]
        found, _ = on_ranks((40, 24), x.contiguous(memory_format=torch.channels_last), upstream, affine)
        bf16, float32 = 2**-8, 1e-5
        of_affine = (bf16, 1e-3) if dtype == torch.bfloat16 else (float32, float32)
        tolerances = [bf16, float32, float32, bf16, of_affine[0], of_affine[0]]
        assert [y.dtype for y in found] == [x.dtype, torch.float32, torch.float32, x.dtype, dtype, dtype]
        for ours, theirs, tolerance in zip(found, on_one(x, upstream, affine), tolerances, strict=True):
            torch.testing.assert_close(
                ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())
            )
        assert on_cpus.count("backward") == 2


def test_a_rank_whose_images_lie_otherwise_tells_the_others_the_same(on_cpus):
    """It makes its sums by other operators, and nobody else has to know."""
    x, upstream = data(torch.float64, 8, 3, 4, 5)
    affine = [torch.tensor([0.5, -2.0, 3.0]).double(), torch.tensor([1.0, 0.0, -4.0]).double()]

    def strided(part, rank):
        return part if rank else torch.stack([part, part], -1)[..., 0]

    found, _ = on_ranks((5, 3), x, upstream, affine, strided)
    for ours, theirs in zip(found, on_one(x, upstream, affine), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert on_cpus == ["stats", "elemt", "reduce", "backward"], "by the rank whose images lie as kernels want them"


def test_whole_programs_of_them_equal_plain_pytorch(on_cpus):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2),
        nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(4 * 9, 5),
    ).double()  # fmt: skip
    batch = torch.randn(10, 3, 8, 8).double(), torch.randint(5, (10,))
    like_plain(model, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), batch, sizes=(2, 3))
    assert on_cpus.count("backward") == on_cpus.count("stats") >= 2 * (2 + 3)
