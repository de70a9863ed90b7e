"""The rules of operators: one line each.

An operator is looked up by its full name (``aten.sum.dim_IntList``), then without its overload (``aten.sum``). Where
the dims depend on arguments, a function writes the line. The operands of a line are the tensor parameters of the
operator's schema; those that are None or a number drop out.

To add an elementwise operator, add its name to the first row that fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective
from shardwright.rules import indexing, layers, random, reductions, views
from shardwright.rules.notation import Operand, OpRule, Shape, Strategy, replicated_rule
from shardwright.rules.operator import Operator

Row = str | Callable[[Operator], OpRule]


def _add(op: Operator) -> OpRule:
    """Linear in two tensors together; adding a number is not linear, as every part would add it."""
    return op.bind("~ *, ~ * -> ~ *" if len(op.operands) == 2 else "* -> *")


def _divide(op: Operator) -> OpRule:
    return op.bind("*, * -> *" if op.arguments.get("rounding_mode") else "~ *, * -> ~ *")


def _where(op: Operator) -> OpRule:
    """Linear in both choices; a number that is chosen must be zero, as every part would choose it."""
    numbers = [arg for arg in (op["self"], op["other"]) if not isinstance(arg, Operand)]
    linear = "" if any(numbers) else "~ "
    return op.bind(f"*, {linear}*, {linear}* -> {linear}*")


def _masked_fill(op: Operator) -> OpRule:
    linear = "~ " if isinstance(op["value"], Operand) or not op["value"] else ""
    return op.bind(f"{linear}*, *, {linear}* -> {linear}*")


def _arange(op: Operator) -> OpRule:
    """Integers are exact from any start; steps that are not would be rounded differently."""
    ends = [op.arguments.get(name, 0) for name in ("start", "end", "step")]
    return op.bind("-> i" if all(isinstance(end, int) for end in ends) else "-> i^")


def _recurrent(op: Operator) -> OpRule:
    random.recurrent_without_dropout(op)
    return layers.recurrent(op)


# Operators of ATen by their names without "aten.", and their line.
_ROWS: tuple[tuple[str, Row], ...] = (
    # elementwise
    (
        "relu relu6 gelu tanh sigmoid silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus",
        "* -> *",
    ),
    ("softshrink hardshrink threshold log_sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt", "* -> *"),
    ("square reciprocal abs sign sgn floor ceil round trunc frac sin cos tan asin acos atan sinh cosh", "* -> *"),
    ("erf erfc erfinv isnan isinf isfinite logical_not bitwise_not nan_to_num rsub.Scalar", "* -> *"),
    ("full_like zeros_like ones_like", "* -> *"),
    ("pow clamp clamp_min clamp_max maximum minimum atan2 fmod remainder floor_divide", "*, *, * -> *"),
    ("eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", "*, * -> *"),
    ("lerp addcmul addcdiv", "*, *, * -> *"),
    ("prelu", lambda op: op.bind("n c *, c -> n c *" if op.operands[1][0] > 1 else "*, . -> *")),
    # elementwise and linear
    ("neg positive", "~ * -> ~ *"),
    ("add sub rsub.Tensor", _add),
    ("mul", "~ *, * -> ~ *"),
    ("div", _divide),
    ("where", _where),
    ("masked_fill", _masked_fill),
    ("copy", "*, ~ * -> ~ *"),
    ("fill", "*, * -> *"),
    ("alias detach clone contiguous lift_fresh_copy", "~ * -> ~ *"),
    ("to _to_copy", views.cast),
    # made from nothing
    ("full zeros ones", "-> *"),
    ("arange", _arange),
    ("scalar_tensor", "-> *"),
    ("linspace", "-> i^"),
    ("new_zeros new_ones new_full", views.like_shape),
    # products
    ("matmul", layers.matmul),
    ("mm", "~ m k+, k+ n -> ~ m n"),
    ("bmm", "~ b m k+, b k+ n -> ~ b m n"),
    ("mv", "~ m k+, k+ -> ~ m"),
    ("dot", "~ k+, k+ -> ~"),
    ("addmm baddbmm", layers.addmm),
    ("outer", "~ i, j -> ~ i j"),
    ("einsum", layers.einsum),
    ("cosine_similarity", layers.cosine_similarity),
    ("linear", "~ * k+, n k+, ! n -> ~ * n"),
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution", layers.convolution),
    # reductions, scans, losses
    ("sum mean", reductions.reduced("+", linear=True)),
    ("amax amin argmax argmin max min prod any all var std var_mean std_mean logsumexp", reductions.reduced("^")),
    ("linalg_vector_norm", reductions.reduced("^")),
    ("softmax log_softmax _softmax _log_softmax sort cumprod", reductions.along()),
    ("cumsum", reductions.along(linear=True)),
    ("topk glu", reductions.resized("dim")),
    ("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss", reductions.pointwise_loss),
    ("binary_cross_entropy binary_cross_entropy_with_logits kl_div", reductions.pointwise_loss),
    ("cross_entropy_loss", reductions.cross_entropy_loss),
    ("nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward", reductions.nll_loss),
    # layers
    ("layer_norm native_layer_norm rms_norm _fused_rms_norm", layers.layer_norm),
    ("group_norm native_group_norm", layers.group_norm),
    ("instance_norm", layers.instance_norm),
    ("batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", layers.batch_norm),
    ("_native_batch_norm_legit_no_training", layers.batch_norm),
    ("embedding", layers.embedding),
    ("scaled_dot_product_attention", layers.attention),
    ("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices", layers.pooling()),
    ("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d", layers.pooling(linear=True)),
    ("_adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", layers.pooling(linear=True)),
    ("adaptive_max_pool2d", layers.pooling()),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", _recurrent),
    # views
    ("view.default reshape _unsafe_view flatten unflatten", views.reshape),
    ("permute transpose t", views.permute),
    ("expand", views.expand),
    ("repeat", views.repeat),
    ("squeeze unsqueeze", views.squeeze),
    ("select", views.select),
    ("slice", views.slice_),
    ("split split_with_sizes chunk", views.split),
    ("unbind", views.unbind),
    ("pad constant_pad_nd reflection_pad2d replication_pad2d", views.pad),
    ("roll flip", views.roll),
    ("cat", views.cat),
    ("stack", views.stack),
    ("unfold", views.unfold),
    ("repeat_interleave.self_int", views.repeat_interleave),
    ("slice_scatter select_scatter", views.scatter_slice),
    ("pixel_shuffle pixel_unshuffle", views.last_whole(3, linear=True)),
    ("grid_sampler grid_sampler_2d", "~ n c . ., n . . . -> ~ n c . ."),
    ("tril triu", views.last_whole(2, linear=True)),
    # indices
    ("index_select", indexing.index_select),
    ("index.Tensor", indexing.index),
    ("gather", indexing.gather),
    ("scatter scatter_add", indexing.scatter),
    ("one_hot", "* -> * ."),
)

RULES: Mapping[str, Row] = {
    **{f"aten.{name}": row for names, row in _ROWS for name in names.split()},
    **random.LINES,
    "shardwright.batch_norm_per_replica": layers.batch_norm_per_replica,
    "shardwright.cross_entropy_sum": reductions.cross_entropy_sum,
    "shardwright.cross_entropy_count": reductions.cross_entropy_count,
}


def row_of(op: str) -> Row | None:
    """The row of an operator, by its full name or without its overload; None where it has none."""
    return RULES.get(op) or RULES.get(op.rpartition(".")[0])


def rule_of(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]
) -> OpRule:
    """The rule of one operator of a graph, bound to its shapes; nothing is split by one that has no row.

    ``args`` and ``kwargs`` hold `Operand` where the tensors go.

    >>> shapes = [(8, 4, 32), (16, 32)]
    >>> print(rule_of("aten.linear.default", (Operand(0), Operand(1)), {}, shapes, [(8, 4, 16)]))
    ~ *1 *0 k+, n k+ -> ~ *1 *0 n

    Raises:
        StrategyError: where the shapes do not fit the row, or the operator draws random numbers that would differ from
            rank to rank.
    """
    row = row_of(op)
    if row is None:
        random.refuse_unlisted(op)
        return replicated_rule(operands, results)
    operator = Operator(op, args, kwargs, tuple(map(tuple, operands)), tuple(map(tuple, results)))
    return operator.bind(row) if isinstance(row, str) else row(operator)


def internal_collectives(
    op: str, rule: OpRule, strategy: Strategy, mesh: Mesh, operands: Sequence[Shape], itemsize: int
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """What an operator communicates inside itself, forward and backward: batch statistics that are merged.

    ``itemsize`` is the size in bytes of an element of the first operand. Forward, every rank gathers the mean and the
    summed squared deviations of each of its channels; backward, two sums per channel are reduced.
    """
    merged = [axes for f, axes in zip(rule.factors, strategy.axes, strict=True) if f.kind == "merged"]
    axes = mesh.ordered(axis for along in merged for axis in along)
    if not axes:
        return (), ()
    start, stop = rule.operand_layout(0, strategy).dims[1].bounds(operands[0][1], mesh, mesh.coordinates(0))
    buffer_bytes = 2 * (stop - start) * max(itemsize, 4)  # statistics are kept in float32 at least
    if op == "shardwright.batch_norm_per_replica":  # the running statistics alone
        return (Collective("all_reduce", axes, buffer_bytes),), ()
    gathered = Collective("all_gather", axes, buffer_bytes * mesh.extent(axes))
    return (gathered,), (Collective("all_reduce", axes, buffer_bytes),)
