"""For every operator of the table a function that draws invocations of it."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from rulecheck import Invocation
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import OpRule, Strategy

SIZES = [1, 2, 2, 3, 4, 4, 5, 6]


class Draw:
    """Draws what an invocation is made of."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def size(self) -> int:
        return self.pick(SIZES)

    def shape(self, low: int = 1, high: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.pick(range(low, high + 1))))

    def x(self, *shape: int) -> Tensor:
        """Normal numbers that want a gradient."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator).requires_grad_()

    def positive(self, *shape: int) -> Tensor:
        """Numbers in (0.1, 0.9) that want a gradient."""
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        return (drawn * 0.8 + 0.1).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to ``shape``."""
        dims = [self.pick([size, size, 1]) for size in shape]
        return tuple(dims[self.pick([0, 0, min(1, len(shape))]) :])

    def dim(self, shape: Sequence[int]) -> int:
        return self.pick(range(-len(shape), len(shape)))

    def strategy(self, rule: OpRule, mesh: Mesh) -> Strategy:
        """Axes, in any order, on the factors that may be split, or on partial operands."""
        choices: list[Any] = [tuple(rule.factors[i].name for i in way) for way in rule.ways]
        choices += [None] if not choices or self.pick([False, False, True]) else []
        if rule.linear_operands:
            choices.append("partial")
        assignment: dict[str, list[str]] = {}
        partial: list[str] = []
        for axis in self.data.draw(st.permutations(mesh.names)):
            chosen = self.pick(choices)
            if chosen == "partial":
                partial.append(axis)
            for name in chosen if isinstance(chosen, tuple) else ():
                assignment.setdefault(name, []).append(axis)
        return rule.strategy(assignment, mesh.ordered(partial))


Make = Callable[[Draw, str], Invocation]
CASES: list[tuple[str, Make]] = []


def _with_namespace(op: str) -> str:
    return op.replace("::", ".") if "::" in op or "shardwright" in op else f"aten.{op}"


def case(ops: str) -> Callable[[Make], Make]:
    """The function draws invocations of these operators, by their names without "aten."."""

    def register(make: Make) -> Make:
        CASES.extend((_with_namespace(op), make) for op in ops.split())
        return make

    return register


@case(
    "relu.default relu6.default gelu.default tanh.default sigmoid.default silu.default mish.default elu.default "
    "selu.default celu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default "
    "softplus.default softshrink.default hardshrink.default log_sigmoid.default exp.default exp2.default "
    "expm1.default square.default abs.default sign.default sgn.default floor.default ceil.default round.default "
    "trunc.default frac.default sin.default cos.default tan.default atan.default sinh.default cosh.default "
    "round.decimals "
    "erf.default erfc.default isnan.default isinf.default isfinite.default logical_not.default nan_to_num.default "
    "zeros_like.default ones_like.default"
)
def unary(d, op):
    return Invocation(op, (d.x(*d.shape()),), {"decimals": 1} if "decimals" in op else {})


@case(
    "log.default log2.default log10.default log1p.default sqrt.default rsqrt.default reciprocal.default "
    "asin.default acos.default erfinv.default"
)
def unary_of_positive(d, op):
    return Invocation(op, (d.positive(*d.shape()),))


@case(
    "pow.Tensor_Scalar clamp.default clamp_min.default clamp_max.default fmod.Scalar remainder.Scalar "
    "threshold.default rsub.Scalar full_like.default eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
    "floor_divide.Scalar"
)
def with_number(d, op):
    number = d.pick([2, 0.5, 3.0])
    x = d.positive(*d.shape())
    return Invocation(op, (x.detach() if "floor" in op else x, number, *([number] if "threshold" in op else [])))


@case("pow.Scalar remainder.Scalar_Tensor")
def number_first(d, op):
    x = d.positive(*d.shape())
    return Invocation(op, (d.pick([2, 0.5, 3.0]), x if "pow" in op else x.detach()))


@case(
    "pow.Tensor_Tensor maximum.default minimum.default atan2.default fmod.Tensor remainder.Tensor "
    "floor_divide.default clamp.Tensor clamp_min.Tensor clamp_max.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor "
    "gt.Tensor ge.Tensor "
    "logical_and.default logical_or.default logical_xor.default"
)
def binary(d, op):
    shape = d.shape()
    pair = [d.positive(*shape), d.positive(*d.broadcast(shape))]
    if "floor" in op:
        pair = [x.detach() for x in pair]
    return Invocation(op, tuple(pair if d.pick([True, False]) else pair[::-1]))


@case("max.other min.other")
def larger_or_smaller(d, op):
    return binary(d, op)


@case(
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor "
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar "
    "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor"
)
def bitwise(d, op):
    shape, number = d.shape(), d.pick([True, False])
    x, other = d.mask(*shape), d.mask(*d.broadcast(shape))
    kinds = {"Scalar": (x, number), "Scalar_Tensor": (number, x)}
    return Invocation(op, kinds.get(op.split(".")[2], (x, other)))


@case(
    "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor "
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor "
    "__lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar"
)
def shifts(d, op):
    shape = d.shape()
    moved, by = d.integers(16, *shape), d.integers(3, *d.broadcast(shape))
    kinds = {"Scalar": (moved, 2), "Tensor_Scalar": (moved, 2), "Scalar_Tensor": (5, by)}
    return Invocation(op, kinds.get(op.split(".")[2], (moved, by)))


@case("bitwise_not.default")
def bitwise_not(d, op):
    return Invocation(op, (d.mask(*d.shape()),))


@case("to.other")
def cast_like(d, op):
    shape = d.shape()
    other = d.pick([shape, d.broadcast(shape), d.shape(0, 3), (2, *shape)])
    like = d.x(*other).detach()  # no gradient comes to what only tells a dtype, and graphs have `_to_copy` in its place
    return Invocation(op, (d.x(*shape), d.pick([like, d.integers(4, *other)])))


@case("complex.default polar.default")
def complex_numbers(d, op):
    shape = d.shape()
    return Invocation(op, (d.positive(*shape), d.positive(*d.broadcast(shape))))


@case("angle.default conj_physical.default view_as_real.default")
def of_complex(d, op):
    shape = d.shape()
    return Invocation(op, (torch.complex(d.x(*shape), d.x(*shape)).detach().requires_grad_(),))


@case("view_as_complex.default")
def view_as_complex(d, op):
    return Invocation(op, (d.x(*d.shape(), 2),))


@case("_fft_c2c.default _fft_r2c.default _fft_c2r.default")
def fourier(d, op):
    shape = d.shape(2, 3)
    x = d.x(*shape)
    dims = d.pick([(0,), (len(shape) - 1,), (0, 1)])
    if "r2c" not in op:
        x = torch.complex(x, d.x(*shape)).detach().requires_grad_()
    return Invocation(op, (x, dims, 0, 2 * shape[dims[-1]] - 1 if "c2r" in op else True))


@case("lerp.Scalar")
def lerp(d, op):
    shape = d.shape()
    return Invocation(op, (d.positive(*shape), d.positive(*d.broadcast(shape)), 0.3))


@case("lerp.Tensor addcmul.default addcdiv.default")
def ternary(d, op):
    shape = d.shape()
    return Invocation(op, (d.positive(*shape), d.positive(*d.broadcast(shape)), d.positive(*d.broadcast(shape))))


@case("prelu.default")
def prelu(d, op):
    n, c = d.size(), d.size()
    return Invocation(op, (d.x(n, c, *d.shape(0, 1)), d.x(d.pick([1, c]))))


@case(
    "neg.default positive.default alias.default detach.default clone.default contiguous.default lift_fresh_copy.default"
)
def linear_unary(d, op):
    return Invocation(op, (d.x(*d.shape()),))


@case("add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor")
def arithmetic(d, op):
    shape = d.shape()
    choices = [d.positive(*shape), d.positive(*d.broadcast(shape)), 2.5]
    return Invocation(op, (d.x(*shape), choices[0] if "rsub" in op else d.pick(choices)))


@case("add.Scalar sub.Scalar mul.Scalar div.Scalar")
def arithmetic_with_number(d, op):
    return Invocation(op, (d.x(*d.shape()), d.pick([2, 0.5])))


@case("div.Tensor_mode div.Scalar_mode")
def rounded_division(d, op):
    shape = d.shape()
    by = d.positive(*shape) if "Tensor" in op else 0.3
    return Invocation(op, (d.positive(*shape), by), {"rounding_mode": d.pick(["floor", "trunc"])})


@case("where.self")
def where(d, op):
    shape = d.shape()
    return Invocation(op, (d.mask(*d.broadcast(shape)), d.x(*shape), d.x(*d.broadcast(shape))))


@case("where.ScalarOther")
def where_number(d, op):
    shape = d.shape()
    return Invocation(op, (d.mask(*d.broadcast(shape)), d.x(*shape), d.pick([0.0, 1.5])))


@case("where.ScalarSelf where.Scalar")
def where_numbers(d, op):
    shape, number = d.shape(), d.pick([0.0, 1.5])
    other = d.pick([0.0, 1.5]) if op.endswith(".Scalar") else d.x(*shape)
    return Invocation(op, (d.mask(*d.broadcast(shape)), number, other))


@case("masked_fill.Scalar masked_fill.Tensor")
def masked_fill(d, op):
    shape = d.shape()
    value = d.pick([0, 1.5, -math.inf]) if "Scalar" in op else d.x()
    return Invocation(op, (d.x(*shape), d.mask(*d.broadcast(shape)), value))


@case("copy.default")
def copy(d, op):
    shape = d.shape()
    return Invocation(op, (d.x(*shape).detach(), d.x(*d.broadcast(shape))))


@case("shardwright.written_over")
def written_over(d, op):
    shape = d.shape()
    return Invocation(op, (d.x(*shape), d.x(*shape)))


@case("_to_copy.default to.dtype")
def cast(d, op):
    dtype = d.pick([torch.float64, torch.int64, torch.bool])
    x = d.x(*d.shape())
    return Invocation(
        op, (x, dtype) if op == "aten.to.dtype" else (x,), {} if op == "aten.to.dtype" else {"dtype": dtype}
    )


@case("full.default zeros.default ones.default")
def made(d, op):
    shape = d.shape()
    return Invocation(op, (shape, 1.5) if "full" in op else (shape,), {"dtype": torch.float64})


@case("arange.default arange.start arange.start_step")
def arange(d, op):
    ends = {"default": (d.pick([5, 6, 7.0]),), "start": (2, d.pick([8, 9])), "start_step": (1, d.pick([12, 14]), 2)}
    return Invocation(op, ends[op.split(".")[-1]])


@case("new_zeros.default new_ones.default new_full.default")
def made_like(d, op):
    shape = d.shape(2, 3)
    new = [d.pick([shape, shape[:1], (*shape, 3)]), *([2.5] if "full" in op else [])]
    return Invocation(op, (d.x(*shape), *new))


@case("scalar_tensor.default")
def scalar_tensor(d, op):
    return Invocation(op, (2.5,))


@case("eye.default eye.m")
def eye(d, op):
    return Invocation(op, (4, 6) if op.endswith(".m") else (4,))


@case("linspace.default")
def linspace(d, op):
    return Invocation(op, (0.0, 1.0, 5))


@case("matmul.default")
def matmul(d, op):
    m, k, n = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    a = d.pick([(k,), (m, k), (*batch, m, k)])
    b = d.pick([(k,), (k, n), (*d.broadcast(batch), k, n)])
    return Invocation(op, (d.x(*a), d.x(*b)))


@case("mm.default bmm.default mv.default dot.default")
def products(d, op):
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    shapes = {"mm": ((m, k), (k, n)), "bmm": ((b, m, k), (b, k, n)), "mv": ((m, k), (k,)), "dot": ((k,), (k,))}
    return Invocation(op, tuple(d.x(*shape) for shape in shapes[op.split(".")[1]]))


@case("addmm.default baddbmm.default")
def products_with_bias(d, op):
    m, k, n = d.size(), d.size(), d.size()
    batch = (d.size(),) if op == "aten.baddbmm.default" else ()
    bias = d.x(*d.broadcast((*batch, m, n)))
    numbers = d.pick([{}, {"alpha": 2.0, "beta": 0.5}])
    return Invocation(op, (bias, d.x(*batch, m, k), d.x(*batch, k, n)), numbers)


@case("shardwright.grouped_mm.default transformers::grouped_mm_fallback.default")
def grouped_product(d, op):
    if "transformers" in op:
        pytest.importorskip("transformers.integrations.moe")  # defines the operator
    rows, k, n, groups = d.size(), d.size(), d.size(), d.pick([1, 2, 3])
    ends = torch.sort(d.integers(rows + 1, groups)).values
    return Invocation(op, (d.x(rows, k), d.x(groups, k, n), ends))


@case("shardwright.experts.default")
def experts(d, op):
    tokens, choices, count, width, inner = d.size(), d.pick([1, 2, 3]), d.pick([2, 3, 4, 8]), d.size(), d.size()
    chosen = d.integers(d.pick([1, count, count + 1]), tokens, choices)  # all of one, and some of none
    up, down = d.x(count, d.pick([1, 2]), inner, width), d.x(count, d.size(), inner)
    return Invocation(op, (d.x(tokens, width), chosen, d.x(tokens, choices), up, down, d.pick(["silu", "gelu"])))


@case("outer.default")
def outer(d, op):
    return Invocation(op, (d.x(d.size()), d.x(d.size())))


@case("einsum.default")
def einsum(d, op):
    sizes = {c: d.size() for c in "bijk"}
    equation = d.pick([
        "bij,bkj->bik", "bij,jk -> bik", "bij->ji", "ij,j->", "bij,bij,j->bj", "ij,jk", "...ij,...kj->...ik",
        "b...,i...->bi...", "...ij,j",
    ])  # fmt: skip
    batch = d.shape(1, 2)
    shapes = []
    for text in equation.replace(" ", "").split("->")[0].split(","):
        before, dots, behind = text.partition("...")
        inner = d.broadcast(batch) if dots else ()
        shapes.append((*(sizes[c] for c in before), *inner, *(sizes[c] for c in behind)))
    return Invocation(op, (equation, tuple(d.x(*shape) for shape in shapes)))


@case("bilinear.default")
def bilinear(d, op):
    batch, i, j, n = d.shape(0, 2), d.size(), d.size(), d.size()
    return Invocation(op, (d.x(*batch, i), d.x(*batch, j), d.x(n, i, j), *d.pick([(), (d.x(n),)])))


@case("cosine_similarity.default")
def cosine_similarity(d, op):
    shape = d.shape(2, 3)
    return Invocation(op, (d.x(*shape), d.x(*shape), d.dim(shape)))


@case("instance_norm.default")
def instance_norm(d, op):
    n, c = d.size(), d.size()
    affine = d.pick([(None, None), (d.x(c), d.x(c))])
    return Invocation(op, (d.x(n, c, 3, 2), *affine, None, None, True, 0.1, 1e-5, False))


@case("grid_sampler.default grid_sampler_2d.default")
def grid_sampler(d, op):
    n = d.size()
    return Invocation(op, (d.x(n, d.size(), 3, 4), d.x(n, 2, 3, 2), 0, 0, False))


@case("fill.Scalar fill.Tensor")
def fill(d, op):
    return Invocation(op, (d.x(*d.shape()), 2.5 if "Scalar" in op else d.x()))


@case("unfold.default")
def unfold(d, op):
    return Invocation(op, (d.x(d.size(), 5, d.size()), 1, 2, d.pick([1, 2])))


@case("repeat_interleave.self_int")
def repeat_interleave(d, op):
    return Invocation(op, (d.x(*d.shape(2, 3)), 2, d.pick([0, -1])))


@case("slice_scatter.default select_scatter.default")
def scatter_slice(d, op):
    a, b = d.size(), d.size()
    source, where = (d.x(a, 2, b), (1, 1, 3)) if "slice" in op else (d.x(a, b), (1, 2))
    return Invocation(op, (d.x(a, 4, b), source, *where))


@case("pixel_shuffle.default pixel_unshuffle.default")
def pixel_shuffle(d, op):
    return Invocation(op, (d.x(d.size(), d.size(), 4, 2, 4), 2))


@case("linear.default")
def linear(d, op):
    k, n = d.size(), d.size()
    bias = d.pick([(), (None,), (d.x(n),), (d.x(n),)])
    return Invocation(op, (d.x(*d.shape(0, 2), k), d.x(n, k), *bias))


@case(
    "conv1d.default conv2d.default conv3d.default convolution.default conv_transpose1d.default "
    "conv_transpose2d.input conv_transpose3d.input conv1d.padding conv2d.padding conv3d.padding"
)
def convolution(d, op):
    spatial = next((int(c) for c in op if c.isdigit()), 2)
    groups = d.pick([1, 1, 2, 3, 4])
    transposed = "transpose" in op or (op == "aten.convolution.default" and d.pick([True, False]))
    inner, outer = (d.size() for _ in range(2)) if groups == 1 else (d.pick([1, 2]), d.pick([1, 2]))
    weight = (inner * groups, outer) if transposed else (outer * groups, inner)
    batch = () if op != "aten.convolution.default" and d.pick([True, False, False, False]) else (d.size(),)
    x = d.x(*batch, inner * groups, *[4] * spatial)
    w = d.x(*weight, *[2] * spatial)
    bias = d.pick([None, d.x(outer * groups), d.x(outer * groups)])
    ones, zeros = (1,) * spatial, (0,) * spatial
    if op == "aten.convolution.default":
        return Invocation(op, (x, w, bias, ones, ones, ones, transposed, zeros, groups))
    if "transpose" in op:
        return Invocation(op, (x, w, bias, ones, zeros, zeros, groups))
    return Invocation(op, (x, w, bias, ones, "same" if "padding" in op else ones, ones, groups))


@case("sum.default mean.default sum.dim_IntList mean.dim")
def sums(d, op):
    shape = d.shape(0, 3)
    if "default" in op:
        return Invocation(op, (d.x(*shape),))
    dims = d.pick([None, (), (0,), (-1,), tuple(range(len(shape)))]) if shape else None
    return Invocation(op, (d.x(*shape), dims, d.pick([False, True])))


@case(
    "amax.default amin.default argmax.default argmin.default max.default min.default max.dim min.dim prod.dim_int "
    "any.dim all.dim var.correction std.correction var_mean.correction std_mean.correction logsumexp.default "
    "any.default all.default prod.default std.default var.default var_mean.default std_mean.default "
    "any.dims all.dims std.dim var.dim var_mean.dim std_mean.dim linalg_vector_norm.default "
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype"
)
def reductions(d, op):
    x = d.x(*d.shape(2, 3))
    dim = d.pick([0, -1])
    dims = (dim,) if any(n in op for n in ("amax", "amin", "var", "std", "logsumexp", "dims")) else dim
    _, name, overload = op.split(".")
    unbiased = [False] if "var" in name or "std" in name else []
    if overload == "default" and (unbiased or name in ("max", "min", "any", "all", "prod")):
        return Invocation(op, (x, *unbiased))
    if overload == "dim" and unbiased:
        return Invocation(op, (x, dims, *unbiased, d.pick([False, True])))
    if "norm" in op:
        over = ((dim,), d.pick([False, True])) if "_dim" in op or "linalg" in op else ()
        return Invocation(op, (x, 2, *over), {"dtype": torch.float64} if op.endswith("dtype") else {})
    if "var" in op or "std" in op:
        return Invocation(op, (x, dims), {"correction": 0, "keepdim": d.pick([False, True])})
    return Invocation(op, (x, dims, d.pick([False, True])))


@case("sort.stable argsort.stable")
def stable_sort(d, op):
    shape = d.shape(1, 3)
    return Invocation(op, (d.x(*shape),), {"stable": True, "dim": d.dim(shape)})


@case(
    "softmax.int log_softmax.int _softmax.default _log_softmax.default sort.default argsort.default "
    "cumsum.default cumprod.default"
)
def along_a_dim(d, op):
    shape = d.shape(1, 3)
    return Invocation(op, (d.x(*shape), d.dim(shape), *([False] if "._" in op else [])))


@case("histc.default")
def histc(d, op):
    return Invocation(op, (d.positive(*d.shape()).detach(), 3, *d.pick([(0, 1), (0, 1), (0, 0)])))


@case("topk.default glu.default")
def resized(d, op):
    shape = (d.size(), 4, d.size())
    return Invocation(op, (d.x(*shape), 2, 1) if "topk" in op else (d.x(*shape), 1))


@case(
    "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default kl_div.default"
)
def losses(d, op):
    shape = d.shape()
    reduction = d.pick([0, 2, 2])
    target = d.positive(*shape) if "margin" not in op else d.x(*shape).sign().detach()
    return Invocation(op, (d.x(*shape), target, reduction))


@case("binary_cross_entropy.default binary_cross_entropy_with_logits.default")
def binary_cross_entropy(d, op):
    shape = d.shape()
    weights = [None, d.positive(*d.broadcast(shape)).detach()]
    args = [d.positive(*shape), d.positive(*shape).detach(), d.pick(weights)]
    if "logits" in op:
        args.append(d.pick([None, d.positive(shape[-1]).detach()]))
    return Invocation(op, (*args, d.pick([0, 2, 2])))


def classes(d: Draw, *, spatial: int = 0) -> tuple[Tensor, Tensor, Any]:
    n, c = d.size(), d.pick([3, 4])
    rest = tuple(d.size() for _ in range(spatial))
    return d.x(n, c, *rest), d.integers(c, n, *rest), d.pick([None, d.positive(c).detach()])


@case("cross_entropy_loss.default")
def cross_entropy(d, op):
    logits, target, weight = classes(d, spatial=d.pick([0, 1]))
    if d.pick([True, False, False]):
        target = torch.softmax(d.x(*logits.shape), 1).detach()
    return Invocation(op, (logits, target, weight, d.pick([0, 2, 2]), -100, d.pick([0.0, 0.1])))


@case("nll_loss.default nll_loss_nd.default nll_loss_forward.default nll_loss2d_forward.default nll_loss2d.default")
def nll_loss(d, op):
    logits, target, weight = classes(d, spatial=2 if "2d" in op else 0)
    return Invocation(op, (logits, target, weight, d.pick([0, 2, 2]), 1))


@case("shardwright.cross_entropy_sum")
def cross_entropy_sum(d, op):
    logits, target, weight = classes(d, spatial=d.pick([0, 1]))
    if d.pick([True, False, False]):
        target = torch.softmax(d.x(*logits.shape), 1).detach()
    options = [(), (weight, 1), (weight, -100, 0.1)] if target.dtype == torch.int64 else [(), (weight,)]
    return Invocation(op, (logits, target, *d.pick(options)))


@case("shardwright.cross_entropy_count")
def cross_entropy_count(d, op):
    _, target, weight = classes(d, spatial=d.pick([0, 1]))
    return Invocation(op, (target, *d.pick([(), (None, 1), (weight, 1)])))


@case("shardwright.ctc_losses.default")
def ctc_losses(d, op):
    samples, steps, labels, symbols = d.size(), 7, d.pick([1, 2, 3]), d.pick([3, 4])
    log_probs = d.x(steps, samples, symbols).detach().log_softmax(-1).requires_grad_()
    targets = d.integers(symbols - 1, samples, labels) + 1
    lengths = torch.full((samples,), steps) - d.integers(2, samples), d.integers(labels + 1, samples)
    return Invocation(op, (log_probs, targets, *lengths, 0, d.pick([True, False])))


@case("layer_norm.default native_layer_norm.default rms_norm.default _fused_rms_norm.default")
def layer_norm(d, op):
    shape = d.shape(2, 3)
    inner = shape[d.pick([-1, 1]) :]
    weight = d.pick([None, d.x(*inner)])
    bias = [] if "rms" in op else [None if weight is None else d.x(*inner)]
    return Invocation(op, (d.x(*shape), inner, weight, *bias, 1e-5))


@case("group_norm.default native_group_norm.default")
def group_norm(d, op):
    groups, inner = d.pick([2, 3, 4]), d.pick([1, 2])
    n, rest = d.size(), d.shape(1, 2)
    c = groups * inner
    x, weight, bias = d.x(n, c, *rest), d.x(c), d.x(c)
    if "native" in op:
        return Invocation(op, (x, weight, bias, n, c, math.prod(rest), groups, 1e-5))
    return Invocation(op, (x, groups, weight, bias, 1e-5))


@case("_native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats")
def batch_norm_training(d, op):
    c = d.size()
    x = d.x(d.pick([2, 3, 4, 5, 6]), c, *d.pick([(), (2,), (2, 3)]))
    affine = d.pick([(None, None), (d.x(c), d.x(c)), (d.x(c), d.x(c))])
    running = (d.x(c).detach(), d.positive(c).detach()) if "functional" in op else ()
    return Invocation(op, (x, *affine, *running, True, 0.1, 1e-5))


@case("_native_batch_norm_legit_no_training.default batch_norm.default")
def batch_norm_evaluation(d, op):
    c = d.size()
    x = d.x(d.size(), c, *d.pick([(), (2,), (2, 3)]))
    running = (d.x(c).detach(), d.positive(c).detach())
    mode = (False,) if op == "aten.batch_norm.default" else ()
    return Invocation(op, (x, d.x(c), d.x(c), *running, *mode, 0.1, 1e-5, *mode))


@case("embedding.default")
def embedding(d, op):
    rows = d.pick([2, 3, 4, 5, 6])
    options = d.pick([(), (d.pick(range(rows)),), (-1, True)])
    return Invocation(op, (d.x(rows, d.size()), d.integers(rows, *d.shape()), *options))


def heads(d: Draw) -> tuple[Tensor, Tensor, Tensor, bool]:
    b, groups, queries, keys, e = d.size(), d.pick([1, 2, 3]), d.size(), d.size(), 2
    shared = d.pick([1, 1, 2])
    kv = (b, groups, keys, e)
    return d.x(b, groups * shared, queries, e), d.x(*kv), d.x(*kv), shared > 1


@case("scaled_dot_product_attention.default")
def attention(d, op):
    query, key, value, grouped = heads(d)
    scores = (*query.shape[:-1], key.shape[-2])
    causal = d.pick([False, True])
    masks = [None, d.x(*d.broadcast(scores)), d.mask(*scores[-2:])]
    mask = None if causal else d.pick(masks)
    options = {"enable_gqa": grouped, "scale": d.pick([None, 0.3])}
    return Invocation(op, (query, key, value, mask, d.pick([0.0, 0.4]), causal), options)


@case("native_dropout.default dropout.default")
def dropout(d, op):
    return Invocation(op, (d.x(*d.shape()), d.pick([0.0, 0.3, 0.5, 1.0]), d.pick([True, True, False])))


@case("rand_like.default randn_like.default uniform.default normal_functional.default cauchy.default random.default")
def random_like(d, op):
    return Invocation(op, (d.pick([d.x, d.positive])(*d.shape()),))


@case("exponential.default log_normal.default geometric.default random.to")
def random_like_by_a_number(d, op):
    return Invocation(op, (d.x(*d.shape()), 3 if "random" in op else 0.3))


@case("random.from")
def random_between(d, op):
    return Invocation(op, (d.x(*d.shape()), -3, d.pick([None, 4])))


@case("bernoulli.p bernoulli.default bernoulli.Tensor")
def bernoulli(d, op):
    shape = d.shape()
    more = {"p": (0.3,), "Tensor": (d.positive(*d.broadcast(shape)),)}
    return Invocation(op, (d.positive(*shape), *more.get(op.split(".")[2], ())))


@case("randint_like.default randint_like.low_dtype randint_like.Tensor")
def randint_like(d, op):
    high = {"default": (7,), "low_dtype": (-3, 1 << 40), "Tensor": (torch.tensor(1000),)}[op.split(".")[2]]
    return Invocation(op, (d.x(*d.shape()).detach(), *high))


@case("rand.default randn.default randint.default randint.low")
def random(d, op):
    bounds = {"aten.randint.default": (9,), "aten.randint.low": (-1, 5)}.get(op, ())
    return Invocation(op, (*bounds, d.shape()), {"dtype": d.pick([torch.float64, torch.float32, torch.float16])})


@case("randperm.default")
def randperm(d, op):
    return Invocation(op, (d.size(),))


@case("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor normal.float_float")
def normal(d, op):
    shape = d.shape()
    other = d.positive(*d.broadcast(shape))
    kinds = {"Tensor_float": (d.x(*shape), 2.0), "float_Tensor": (0.5, other), "Tensor_Tensor": (d.x(*shape), other)}
    return Invocation(op, kinds.get(op.split(".")[2], (0.5, 2.0, shape)))


@case("poisson.default")
def poisson(d, op):
    return Invocation(op, (d.pick([0.1, 1, 300]) * d.positive(*d.shape()).detach(),))


@case("multinomial.default")
def multinomial(d, op):
    rows = d.pick([(), (d.size(),)])
    return Invocation(op, (d.positive(*rows, 6).detach(), d.pick([1, 2, 5]), d.pick([False, True])))


@case("rrelu.default")
def rrelu(d, op):
    return Invocation(op, (d.x(*d.shape()), 0.1, 0.4, d.pick([True, True, False])))


@case("rrelu_with_noise_functional.default")
def rrelu_with_noise(d, op):
    x = d.x(*d.shape())
    return Invocation(op, (x, torch.zeros_like(x), 0.1, 0.4, d.pick([True, True, False])))


@case(
    "max_pool2d.default max_pool2d_with_indices.default avg_pool2d.default adaptive_avg_pool2d.default "
    "_adaptive_avg_pool2d.default adaptive_max_pool2d.default upsample_nearest2d.default "
    "upsample_bilinear2d.default upsample_bicubic2d.default upsample_nearest2d.vec upsample_bilinear2d.vec "
    "upsample_bicubic2d.vec"
)
def pooling(d, op):
    x = d.x(d.size(), d.size(), 4, 5)
    if "upsample" in op:
        more = (None,) if op.endswith(".vec") else ()
        return Invocation(op, (x, (8, 10), *([False] if "bi" in op else []), *more))
    return Invocation(op, (x, (2, 2)))


@case("fractional_max_pool2d.default fractional_max_pool3d.default")
def fractional_pooling(d, op):
    spatial = 2 if "2d" in op else 3
    rows, c = d.pick([(), (d.size(),)]), d.size()
    samples = d.positive(*(rows or (1,)), c, spatial).detach()
    return Invocation(op, (d.x(*rows, c, *[4] * spatial), (2,) * spatial, (2,) * spatial, samples))


@case("max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default max_pool3d.default avg_pool3d.default")
def pooling_elsewhere(d, op):
    spatial = (4,) if "1d" in op else (4, 3, 2)
    return Invocation(op, (d.x(d.size(), d.size(), *spatial), (2,) * len(spatial)))


@case("im2col.default col2im.default")
def windows(d, op):
    batch, c = d.shape(0, 1), d.size()
    x = d.x(*batch, c, 4, 5) if "im2" in op else d.x(*batch, 6 * c, 15)
    return Invocation(op, (x, *([(4, 5)] if "col2" in op else []), (2, 3), (1, 1), (0, 1), (1, 1)))


@case("_weight_norm_interface.default")
def weight_norm(d, op):
    shape = d.shape(2, 3)
    dim = d.pick([0, len(shape) - 1])
    g = [size if i == dim else 1 for i, size in enumerate(shape)]
    return Invocation(op, (d.x(*shape), d.x(*g), dim))


@case("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def recurrent(d, op):
    batch_first, both, layers = d.pick([True, False]), d.pick([False, True]), d.pick([1, 2, 3])
    b, length, inner, hidden = d.size(), 3, 2, 2
    gates = {"aten.lstm.input": 4, "aten.gru.input": 3}.get(op, 1)
    x = d.x(b, length, inner) if batch_first else d.x(length, b, inner)
    states = [d.x(layers * (1 + both), b, hidden) for _ in range(2 if "lstm" in op else 1)]
    inputs = [inner] * (1 + both) + [hidden * (1 + both)] * (1 + both) * (layers - 1)
    parameters = [d.x(gates * hidden, *columns) for i in inputs for columns in ((i,), (hidden,), (), ())]
    hx = tuple(states) if "lstm" in op else states[0]
    return Invocation(op, (x, hx, tuple(parameters), True, layers, d.pick([0.0, 0.4]), True, both, batch_first))


@case("reshape.default view.default _unsafe_view.default")
def reshape(d, op):
    a, b, c = d.size(), d.size(), d.size()
    source, target = d.pick([
        ((a, b, c), (a * b, c)), ((a * b, c), (a, b, c)), ((a, b, c), (a, b * c)), ((a * b * c,), (a, b, c)),
        ((a * b, c), (a, b * c)), ((4, 6, a), (6, 4, a)), ((a, 6), (a, 3, 2)), ((2, a, 3), (2, 1, a * 3)),
        ((4, 6), (8, 3)), ((a, b * c), (a * b, c)), ((1, a), (a,)), ((6, 4), (4, 6)),
    ])  # fmt: skip
    return Invocation(op, (d.x(*source), target))


@case("flatten.using_ints unflatten.int")
def flatten(d, op):
    a, b, c = d.size(), d.size(), d.size()
    return Invocation(op, (d.x(a, b, c), 0, 1) if "flatten.u" in op else (d.x(a * b, c), 0, (a, b)))


@case("permute.default transpose.int t.default")
def permute(d, op):
    if op == "aten.t.default":
        return Invocation(op, (d.x(d.size(), d.size()),))
    shape = d.shape(3, 3)
    order = d.pick([(0, 2, 1), (2, 0, 1), (-1, 1, 0)])
    return Invocation(op, (d.x(*shape), order) if "permute" in op else (d.x(*shape), d.pick([0, -1]), 1))


@case("expand.default")
def expand(d, op):
    shape = d.shape(1, 3)
    source = d.broadcast(shape)
    return Invocation(op, (d.x(*source), shape))


@case("repeat.default")
def repeat(d, op):
    shape = d.shape(1, 2)
    times = tuple(d.pick([1, 1, 2, 3]) for _ in range(len(shape) + d.pick([0, 1])))
    return Invocation(op, (d.x(*shape), times))


@case("squeeze.default squeeze.dim squeeze.dims unsqueeze.default")
def squeeze(d, op):
    shape = d.shape(2, 3)
    argument = {"aten.squeeze.default": (), "aten.squeeze.dims": ((0, 1),)}.get(op, (d.dim(shape),))
    return Invocation(op, (d.x(*shape), *argument))


@case("select.int unbind.int")
def select(d, op):
    shape = d.shape(2, 3)
    return Invocation(op, (d.x(*shape), d.dim(shape), *([0] if "select" in op else [])))


@case("slice.Tensor")
def slice_(d, op):
    shape = d.shape(2, 3)
    dim = d.dim(shape)
    ends = d.pick([(0, 2**63 - 1), (0, 1), (0, shape[dim])])
    return Invocation(op, (d.x(*shape), dim, *ends))


@case("split.sizes split.default")
def split_in_sizes(d, op):
    return Invocation(op, (d.x(d.size(), 6, d.size()), (1, 2, 3), 1))


@case("split.Tensor split_with_sizes.default chunk.default")
def split(d, op):
    shape = (d.size(), 6, d.size())
    sizes = {"aten.split.Tensor": d.pick([2, 4]), "aten.chunk.default": d.pick([2, 3])}
    return Invocation(op, (d.x(*shape), sizes.get(op, (1, 5)), 1))


@case("constant_pad_nd.default pad.default reflection_pad2d.default replication_pad2d.default")
def pad(d, op):
    amounts = d.pick([(1, 1), (1, 0, 2, 1), (0, 0, 1, 1)]) if "2d" not in op else (1, 1, 2, 1)
    more = {"aten.pad.default": ("constant", 0.0), "aten.constant_pad_nd.default": (d.pick([0.0, 1.5]),)}.get(op, ())
    return Invocation(op, (d.x(d.size(), d.size(), 4, 4), amounts, *more))


@case("roll.default flip.default")
def roll(d, op):
    shape = d.shape(2, 3)
    dim = d.pick([0, 1])
    return Invocation(op, (d.x(*shape), (1,), (dim,)) if "roll" in op else (d.x(*shape), (dim,)))


@case("cat.default stack.default")
def cat(d, op):
    shape = d.shape(2, 3)
    dim = d.dim(shape)
    other = list(shape)
    if "cat" in op:
        other[dim] = d.size()
    return Invocation(op, ((d.x(*shape), d.x(*other), d.x(*shape)), dim))


@case("tril.default triu.default")
def triangle(d, op):
    return Invocation(op, (d.x(*d.shape(3, 3)), d.pick([0, 1])))


@case("index_select.default")
def index_select(d, op):
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    return Invocation(op, (d.x(*shape), dim, d.integers(shape[dim], d.size())))


@case("index.Tensor")
def index(d, op):
    a, b, c = (d.pick([2, 3, 4]) for _ in range(3))
    n, m = d.size(), d.size()
    i, j, k = d.integers(a, n), d.integers(b, m, 1), d.integers(c, n)
    indices = d.pick([(i,), (None, j), (i, j), (None, j, k), (i, None, k), (d.integers(a, m, n),)])
    return Invocation(op, (d.x(a, b, c), indices))


@case("index_put.default")
def index_put(d, op):
    a, b, c = (d.pick([2, 3, 4]) for _ in range(3))
    n = d.size()
    i, mask = d.integers(a, n), d.mask(a, b)
    indices, values = d.pick([
        ((i,), (n, b, c)), ((i,), (1, b, 1)), ((i,), (c,)), ((None, d.integers(b, n)), (a, n, c)),
        ((d.integers(a, n), d.integers(b, n)), (n, c)), ((mask,), (c,)), ((mask,), ()), ((mask[:, 0],), (1, b, c)),
    ])  # fmt: skip
    accumulate = d.pick([False, True])
    if not accumulate:  # a place that is written twice would have no certain value
        indices = tuple(x if x is None or x.dtype == torch.bool else x * 0 for x in indices)
        values = tuple(1 if size == n else size for size in values) if n > 1 else values
    return Invocation(op, (d.x(a, b, c), indices, d.x(*values), accumulate))


@case("index_add.default index_copy.default index_fill.int_Scalar index_fill.int_Tensor")
def index_written(d, op):
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    index = torch.randperm(shape[dim], generator=d.generator)
    source = {"aten.index_fill.int_Scalar": 2.5, "aten.index_fill.int_Tensor": d.x()}.get(op, d.x(*shape))
    return Invocation(op, (d.x(*shape), dim, index, source), {"alpha": d.pick([1, 0.5])} if "add" in op else {})


@case("gather.default")
def gather(d, op):
    shape = d.shape(2, 3)
    dim = d.dim(shape)
    sizes = [d.pick([size, size, 1]) for size in shape]
    sizes[dim] = d.size()
    return Invocation(op, (d.x(*shape), dim, d.integers(shape[dim], *sizes)))


@case("scatter.src scatter.value scatter_add.default")
def scatter(d, op):
    shape = d.shape(2, 3)
    dim = d.dim(shape) % len(shape)
    sizes = [d.pick([size, size, size, 1]) for size in shape]
    sizes[dim] = 1  # a place that is written twice would have no certain value
    source = 2.5 if "value" in op else d.x(*sizes)
    return Invocation(op, (d.x(*shape), dim, d.integers(shape[dim], *sizes), source))


@case("scatter.reduce scatter.value_reduce")
def scatter_joined(d, op):
    shape = d.shape(2, 3)
    source = 2.5 if "value" in op else d.positive(*shape).detach()
    dim = d.dim(shape)
    index = d.integers(shape[dim], *shape)
    return Invocation(op, (d.x(*shape).detach(), dim, index, source), {"reduce": d.pick(["add", "multiply"])})


@case("one_hot.default")
def one_hot(d, op):
    return Invocation(op, (d.integers(3, *d.shape()), 3))


def explore(examples: int, body: Callable[[Draw], None], of: str = "") -> None:
    """Call ``body`` with this many draws, the same ones on every run, and others for each ``of``."""

    @seed(zlib.crc32(of.encode()))
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        body(Draw(data))

    torch.set_num_threads(1)
    run()
