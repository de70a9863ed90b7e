"""The local form of each operator, which works on this rank's parts.

Most run as they are. The rows below are those that need a change: shape arguments, which follow from the layout of
the result; a bias, which joins a split sum once; rows that are looked up elsewhere. What draws
random numbers is in `local_draws`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwright.compiler.capture.operators import is_of_torch, takes_device
from shardwright.compiler.lower import local_draws
from shardwright.compiler.lower.call import COMM, GUARD, Call, random_key
from shardwright.compiler.lower.site import ANY_DEVICE, Localiser, Site
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.row import balances, chosen_dims
from shardwright.compiler.rules.table import Column, column


def _reshape(site: Site) -> Call:
    """Return a reshape in place of a view or a squeeze.

    A shard is not always laid out in memory as the whole tensor is, and squeeze would remove a dim in which the shard
    has size 1.
    """
    return Call("torch.ops.aten.reshape.default", (Operand(0), site.local_result_shape()))


def _sized(name: str) -> Localiser:
    """Replace the argument ``name``, the shape of the result."""
    return lambda site: site.same(**{name: site.local_result_shape()})


def _repeat(site: Site) -> Call:
    shape = site.result_shape()
    times = [
        local if size == 1 else times
        for local, size, times in zip(
            site.local_result_shape(),
            (1,) * (len(shape) - len(site.operand_shape(0))) + site.operand_shape(0),
            site["repeats"],
            strict=True,
        )
    ]
    return site.same(repeats=times)


def _arange(site: Site) -> Call:
    start, step = site.arguments.get("start", 0), site.arguments.get("step", 1)
    if site.local_result_shape() == list(site.result_shape()):
        return site.same()
    part = site.result_slice()[0]
    ends = start + part.start * step, start + part.stop * step
    dtype = site.values[site.node.results[0]].dtype
    return Call("torch.ops.aten.arange.start_step", (*ends, step), (("dtype", dtype),))


def _linear(site: Site) -> Call:
    if site["bias"] is None or site.adds_bias():
        return site.same()
    return Call("kernels.linear_bias_elsewhere", (site["input"], site["weight"], site["bias"]))


def _addmm(site: Site) -> Call:
    if site.adds_bias():
        return site.same()
    return Call("kernels.product_bias_elsewhere", (Operand(0), Operand(1), Operand(2), site["beta"], site["alpha"]))


def _convolution(site: Site) -> Call:
    groups = site["groups"]
    names = [name for name in site.arguments if name not in ("input", "weight", "bias")]
    if groups > 1:
        groups = groups * site.local_operand_shape(1)[0] // site.operand_shape(1)[0]
    if site["bias"] is None or site.adds_bias():
        return site.same(groups=groups) if groups != site["groups"] else site.same()
    settings = tuple(groups if name == "groups" else site[name] for name in names)
    tensors = (site["input"], site["weight"], site["bias"])
    return Call("kernels.convolution_bias_elsewhere", (site.name, *tensors, *settings))


def _grouped_mm(site: Site) -> Call:
    """Groups end elsewhere in a part of the rows."""
    rows = site.operand_slice(0)[0]
    return Call("kernels.grouped_mm", (Operand(0), Operand(1), Operand(2), rows.start, rows.stop))


def _group_norm(site: Site) -> Call:
    x = site.local_operand_shape(0)
    name = "num_groups" if "num_groups" in site.arguments else "group"
    groups = site[name] * x[1] // site.operand_shape(0)[1]
    if name == "num_groups":
        return site.same(num_groups=groups)
    return site.same(N=x[0], C=x[1], HxW=math.prod(x[2:]), group=groups)


def _mean(site: Site) -> Call:
    if not site.result_layout().partial:
        return site.same()
    shape = site.operand_shape(0)
    dims = list(chosen_dims(site.arguments.get("dim"), len(shape)))
    count = math.prod(shape[dim] for dim in dims)
    keepdim = site.arguments.get("keepdim", False)
    return Call("kernels.mean", (Operand(0), dims, keepdim, count, site["dtype"]))


def _scatter_slice(site: Site) -> Call:
    if not site.values[site.node.results[0]].dtype.is_complex:
        return site.same()
    dim = site["dim"] % len(site.operand_shape(0))
    where = (site[name] for name in site.arguments if name not in ("self", "src", "dim"))
    return Call("kernels.scatter_of_complex", (site.name, Operand(0), Operand(1), dim, *where))


def _embedding(site: Site) -> Call:
    rows = site.operand_slice(0)[0]
    total = site.operand_shape(0)[0]
    if rows.stop - rows.start == total:
        return site.same()
    where = (site["padding_idx"], rows.start, total)
    return Call("kernels.embedding", (site["weight"], site["indices"], *where, GUARD, site.number))


def _merged_counts(site: Site, axes: tuple[str, ...]) -> list[int]:
    """Return how many values per channel each rank along ``axes`` has."""
    layout, shape = site.operand_layout(0), site.operand_shape(0)
    parts = [layout.local_shape(shape, site.mesh, member) for member in site.mesh.group(site.rank, axes)]
    return [local[0] * math.prod(local[2:]) for local in parts]


def _batch_norm(site: Site) -> Call:
    """Statistics of all parts, where there are parts and the operator makes statistics."""
    axes = site.merged_axes
    if not axes:
        return site.same()
    affine = (site["input"], site["weight"], site["bias"])
    if site.arguments.get("running_mean") is None:
        return Call("kernels.batch_norm", (*affine, site["eps"], COMM, axes, _merged_counts(site, axes)))
    running = (site["running_mean"], site["running_var"], site["momentum"])
    return Call("kernels.batch_norm_running", (*affine, *running, site["eps"], COMM, axes, _merged_counts(site, axes)))


def _batch_norm_per_replica(site: Site) -> Call:
    """Statistics of the part that is here."""
    axes = site.merged_axes
    return Call("kernels.batch_norm_per_replica", (*site.node.args, COMM, axes, _merged_counts(site, axes)))


def _cross_entropy(site: Site) -> Call:
    """The loss of all classes on every rank, where each has some of them."""
    if not site.merged_axes:
        return site.same()
    ignored = site.node.args[3] if len(site.node.args) > 3 else -100
    first, classes = site.operand_slice(0)[1].start, site.operand_shape(0)[1]
    given = (Operand(0), Operand(1), ignored, first, classes)
    return Call("kernels.cross_entropy", (*given, GUARD, site.number, COMM, site.merged_axes))


def _attention(site: Site) -> Call:
    named = site.arguments
    queries, dropped = site.result_slice()[-2], tuple[Any, ...]()
    if named["dropout_p"]:
        shape = [*site.result_shape()[:-1], site.operand_shape(1)[-2]]
        dropped = random_key(site.number), shape, [*site.result_offsets()[:-1], 0]
    heads = (named["query"], named["key"], named["value"])
    if axes := site.merged_axes:
        members = site.mesh.group(site.rank, axes)
        keys = [site.operand_slice(1, member)[-2] for member in members]
        spans, how = [(rows.start, rows.stop) for rows in keys], (named["scale"], named["enable_gqa"])
        more = (named["dropout_p"], *dropped) if dropped else ()
        if balances(site.operator, site.rule.cuts(site.strategy)):
            return Call("kernels.balanced_ring_attention", (*heads, *how, spans, COMM, axes, *more))
        given = (*heads, named["attn_mask"], named["is_causal"], *how, (queries.start, queries.stop))
        return Call("kernels.ring_attention", (*given, spans, COMM, axes, *more))
    if dropped:
        given = (*heads, *(named[name] for name in ("attn_mask", "dropout_p", "is_causal", "scale")))
        return Call("kernels.attention_with_dropout", (*given, *dropped))
    if "backends" in named:
        names = ("backends", "query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa")
        return Call("kernels.attention_by", tuple(named[name] for name in names))
    if named["is_causal"] and queries.stop - queries.start != site.result_shape()[-2]:
        return Call("kernels.causal_attention", (*heads, queries.start, named["scale"], named["enable_gqa"]))
    return site.same()


def _experts(site: Site) -> Call:
    """Rows of the experts of members along the axes that split tokens, too; of others what is here gives nothing."""
    members = site.mesh.group(site.rank, site.merged_axes) if site.merged_axes else (site.rank,)
    spans = [site.operand_slice(3, member)[0] for member in members]
    held, count = [(span.start, span.stop) for span in spans], site.operand_shape(3)[0]
    if held == [(0, count)]:
        return site.same()
    return Call("kernels.experts", (*site.node.args, held, count, COMM, site.merged_axes))


# The column of the table of operators that says how they run on local parts; the others run as they are.
LOCALISERS: Column[Localiser] = column(
    ("view.default _unsafe_view reshape flatten unflatten squeeze", _reshape),
    ("expand full zeros ones new_zeros new_ones new_full", _sized("size")),
    ("repeat", _repeat),
    ("arange", _arange),
    ("linear", _linear),
    ("addmm baddbmm", _addmm),
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution", _convolution),
    ("group_norm native_group_norm", _group_norm),
    ("shardwright.grouped_mm transformers::grouped_mm_fallback", _grouped_mm),
    ("mean", _mean),
    ("copy", lambda site: Call("kernels.copy", (Operand(0), Operand(1)))),
    ("slice_scatter select_scatter", _scatter_slice),
    ("embedding", _embedding),
    ("batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", _batch_norm),
    ("shardwright.batch_norm_per_replica", _batch_norm_per_replica),
    ("shardwright.cross_entropy_sum", _cross_entropy),
    ("scaled_dot_product_attention", _attention),
    ("shardwright.experts", _experts),
    *local_draws.LINES,
)


def _nothing_but_bias(site: Site, bias: int, shape: list[int], dtype: torch.dtype) -> Call:
    """A product whose part of the sum is empty; the bias, which another rank adds, has its gradient all the same."""
    # The bias lies along the dims of the result that its rule names as it names those of the bias.
    sizes = dict(zip(site.rule.operands[bias], site.local_operand_shape(bias), strict=True))
    broadcast = [sizes.get(factors, 1) if factors else 1 for factors in site.rule.results[0]]
    others = (Operand(index) for index in range(len(site.node.operands)) if index != bias)
    factor = site.arguments.get("beta", 1)
    return Call("kernels.nothing_but_bias", (shape, dtype, Operand(bias), broadcast, factor, *others))


def _has_empty_operand(site: Site) -> bool:
    """Return whether this rank's part of an operand is empty, and the whole is not."""
    return any(
        0 in site.local_operand_shape(index) and 0 not in site.operand_shape(index)
        for index in range(len(site.node.operands))
    )


def _is_summed_dense(site: Site) -> bool:
    """Return whether a sparse gradient of a table is to be dense, since ranks sum and cut gradients densely."""
    if not (is_of_torch(site.node.op) and site.arguments.get("sparse")):
        return False
    return site.splits_parameters or bool(site.strategy.used)


def localise(site: Site) -> Call:
    """The local operator of a node on one rank."""
    op = site.node.op
    if _has_empty_operand(site) and not site.merged_axes:
        made = [site.values[name] for name in site.node.results]
        shapes = [site.local_result_shape(index) for index in range(len(made))]
        operands = (Operand(index) for index in range(len(site.node.operands)))
        for bias in site.rule.added_operands:
            if 0 not in shapes[0]:
                return _nothing_but_bias(site, bias, shapes[0], made[0].dtype)
        connected = [value.needs_gradient for value in made]
        return Call("kernels.nothing", (shapes, [value.dtype for value in made], connected, *operands))
    localiser = LOCALISERS.of(op)
    call = localiser(site) if localiser else site.same()
    if call == site.same() and _is_summed_dense(site):
        call = site.same(sparse=False)
    if call.function.startswith("torch.ops.") and takes_device(call.function.removeprefix("torch.ops.")):
        return Call(call.function, call.args, (*call.kwargs, ("device", ANY_DEVICE)))
    return call
