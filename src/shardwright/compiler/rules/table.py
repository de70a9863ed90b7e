"""Everything that is known about an operator: one row each.

A row is looked up by an operator's full name (``aten.sum.dim_IntList``), then without its overload (``aten.sum``), and
then stands for all of the operator's overloads. Its first column is its rule, in notation; where the dims depend on
arguments, a function writes the line. The operands of a line are the tensor parameters of the operator's schema; those
that are None or a number drop out. `Row` says what the other columns hold.

To add an elementwise operator, add its name to the first row that fits it. What a later room knows about an operator
(its rewrite in `graph`, its form on local parts in `lower`) is a `column` of this table that stands in that room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules import experts, layers, views
from shardwright.compiler.rules import row as facts
from shardwright.compiler.rules.notation import Operand, OpRule, Shape, Strategy, replicated_rule
from shardwright.compiler.rules.row import (
    EVERYTHING,
    FACTORS,
    NOTHING,
    OPERANDS,
    RESULTS,
    Directions,
    InternalTensor,
    Merged,
    Operator,
    Row,
    Saved,
)
from shardwright.errors import StrategyError

T = TypeVar("T")


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


def _factors(op: Operator) -> Saved:
    """A product of two tensors keeps each for the other's gradient; with a number it keeps none."""
    return FACTORS if len(op.operands) == 2 else NOTHING


def _quotient(op: Operator) -> Saved:
    """A quotient of two tensors keeps both, the dividend for the divisor's gradient alone."""
    return Saved((0, 1), (), (), factors=(0,)) if len(op.operands) == 2 else NOTHING


def _both(op: Operator) -> Saved:
    return OPERANDS if len(op.operands) == 2 else NOTHING


def _power(op: Operator) -> Saved:
    return EVERYTHING if isinstance(op["exponent"], Operand) else OPERANDS


def _indices(op: Operator) -> Saved:
    return Saved(tuple(range(1, len(op.operands))))


def _between(op: Operator) -> Saved:
    """A write by indices keeps these, which stand between the tensor and what is written to it."""
    return Saved(tuple(range(1, len(op.operands) - 1)))


def _operands(*positions: int) -> Saved:
    return Saved(operands=positions)


_whole = layers.reduced("^")  # a reduction whose dims stay whole
_SLOPES = Saved((0,), (), (InternalTensor("result", 0),))  # by what each element was multiplied
_POOLED = Saved((0,), (), (InternalTensor("result", 0, itemsize=8),))  # where the largest element of each window stands


# Operators and their row: those of ATen by their names without "aten.", others with their namespace and "::".
_ROWS: tuple[tuple[str, Row], ...] = (
    # elementwise
    ("relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal tan", Row("* -> *", RESULTS)),
    ("relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid", Row("* -> *", OPERANDS)),
    ("softplus softshrink hardshrink threshold log log2 log10 log1p square abs", Row("* -> *", OPERANDS)),
    ("sin cos asin acos atan sinh cosh erf erfc erfinv nan_to_num", Row("* -> *", OPERANDS)),
    ("log_sigmoid", Row("* -> *", Saved((0,), (), (InternalTensor("operand", 0),)))),
    ("sgn", Row("* -> *")),
    ("sign floor ceil round trunc frac isnan isinf isfinite logical_not bitwise_not", Row("* -> *", NOTHING)),
    ("rsub.Scalar", Row("* -> *", NOTHING)),
    ("full_like zeros_like ones_like", Row("* -> *", NOTHING, differentiable=0)),
    # What memory holds that nobody wrote differs between ranks.
    ("empty.memory_format", Row(saves=NOTHING, written_as="aten.zeros.default")),
    ("empty_like", Row(saves=NOTHING, differentiable=0, written_as="aten.zeros_like.default")),
    ("new_empty", Row(saves=NOTHING, differentiable=0, written_as="aten.new_zeros.default")),
    ("new_empty_strided", Row(saves=NOTHING, differentiable=0)),
    ("clamp clamp_min clamp_max maximum minimum atan2", Row("*, *, * -> *", OPERANDS)),
    ("fmod remainder", Row("*, *, * -> *", _both)),
    ("max.other min.other", Row("*, * -> *", OPERANDS)),
    ("pow", Row("*, *, * -> *", _power)),
    ("eq ne lt le gt ge logical_and logical_or logical_xor floor_divide", Row("*, * -> *", NOTHING)),
    ("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__", Row("*, * -> *", NOTHING)),
    ("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__", Row("*, * -> *", NOTHING)),
    ("lerp", Row("*, *, * -> *", OPERANDS)),
    ("addcmul addcdiv", Row("*, *, * -> *", _operands(1, 2))),
    ("complex.default", Row("*, * -> *", OPERANDS)),
    ("polar.default", Row("*, * -> *", RESULTS)),
    ("angle.default", Row("* -> *", OPERANDS)),
    ("conj_physical", Row("* -> *", NOTHING)),
    ("_conj", Row(written_as="aten.conj_physical.default")),
    ("prelu", Row(lambda op: op.bind("n c *, c -> n c *" if op.operands[1][0] > 1 else "*, . -> *"), OPERANDS)),
    # elementwise and linear
    ("neg positive", Row("~ * -> ~ *", NOTHING)),
    ("add sub rsub.Tensor", Row(_add, NOTHING)),
    ("mul", Row("~ *, * -> ~ *", _factors)),
    ("div", Row(_divide, _quotient)),
    ("where", Row(_where, _operands(0))),
    ("masked_fill", Row(_masked_fill, _operands(1))),
    ("copy shardwright.written_over", Row("*, ~ * -> ~ *", NOTHING)),
    ("fill", Row("*, * -> *", NOTHING)),
    ("alias", Row("~ * -> ~ *", view=True, identity="always")),
    ("detach", Row("~ * -> ~ *", view=True, identity="no gradient", differentiable=0)),
    ("clone lift_fresh_copy", Row("~ * -> ~ *", NOTHING, identity="always")),
    ("lift_fresh detach_", Row(view=True, identity="always")),
    ("contiguous", Row("~ * -> ~ *", NOTHING)),
    ("to", Row(views.cast, NOTHING)),
    ("_to_copy", Row(views.cast, NOTHING, identity="same dtype", casts=True)),
    # Not type_as, which may be its operand without its schema saying so: what then changes it would be lost.
    ("to.other", Row(views.cast_like, NOTHING)),
    # made from nothing
    ("full zeros ones", Row("-> *", NOTHING)),
    ("arange", Row(_arange, NOTHING)),
    ("scalar_tensor", Row("-> *", NOTHING)),
    ("linspace", Row("-> i^", NOTHING)),
    ("eye", Row("-> i^ j^", NOTHING)),
    ("linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor", Row(saves=NOTHING)),
    ("new_zeros new_ones new_full", Row(views.like_shape, NOTHING, differentiable=0)),
    # random
    ("native_dropout", Row("~ * -> ~ *, *", Saved(results=(1,)), differentiable=1, draws=True)),
    ("dropout", Row("~ * -> ~ *", Saved(internal=(InternalTensor("result", 0, itemsize=1),)), draws=True)),
    ("rand.default randn.default randint.default randint.low", Row("-> *", NOTHING, draws=True)),
    ("randperm", Row("-> i^", NOTHING, draws=True)),
    ("rand_like randn_like", Row("* -> *", NOTHING, differentiable=0, draws=True)),
    ("randint_like", Row("*, * -> *", NOTHING, differentiable=0, draws=True)),
    ("bernoulli", Row("*, * -> *", NOTHING, draws=True)),
    ("normal", Row(layers.normal, NOTHING, draws=True)),
    ("uniform normal_functional exponential cauchy log_normal geometric random", Row("* -> *", NOTHING, draws=True)),
    ("poisson", Row("* -> *", NOTHING, draws=True)),
    ("multinomial", Row(layers.multinomial, NOTHING, draws=True)),
    ("rrelu", Row("* -> *", _SLOPES, draws=True)),
    ("rrelu_with_noise_functional", Row("*, * -> *, *", OPERANDS, differentiable=1, draws=True)),
    # products
    ("matmul", Row(layers.matmul, FACTORS, facts.product)),
    ("mm", Row("~ m k+, k+ n -> ~ m n", FACTORS, facts.product)),
    ("bmm", Row("~ b m k+, b k+ n -> ~ b m n", FACTORS, facts.product)),
    ("mv", Row("~ m k+, k+ -> ~ m", FACTORS, facts.product)),
    ("dot", Row("~ k+, k+ -> ~", FACTORS, facts.product)),
    ("addmm baddbmm", Row(layers.addmm, Saved((1, 2), factors=(1, 2)), facts.product_with_bias)),
    ("outer", Row("~ i, j -> ~ i j", FACTORS)),
    ("einsum", Row(layers.einsum, OPERANDS)),
    ("bilinear", Row("* i^, * j^, n i^ j^, n -> * n")),
    ("cosine_similarity", Row(layers.cosine_similarity)),
    (
        "shardwright.grouped_mm transformers::grouped_mm_fallback",
        Row("~ s k+, . k+ n, . -> ~ s n", _operands(0, 1), facts.product),
    ),
    (
        "shardwright.experts",
        Row(
            experts.RULE,
            experts.kept_by_experts,
            experts.products_of_experts,
            inside=experts.exchanged_rows,
            between=experts.between_experts,
        ),
    ),
    ("linear", Row("~ * k+, n k+, ! n -> ~ * n", FACTORS, facts.product)),
    ("conv1d conv2d conv3d convolution", Row(layers.convolution(), _operands(0, 1), facts.convolution)),
    (
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        Row(layers.convolution(transposed=True), _operands(0, 1), facts.transposed_convolution),
    ),
    # reductions, scans, losses
    ("sum mean", Row(layers.reduced("+", linear=True), NOTHING)),
    ("any all argmax argmin", Row(_whole, NOTHING)),
    ("amax amin max min prod std logsumexp", Row(_whole)),
    ("max.dim min.dim", Row(_whole, Saved(results=(1,)))),
    ("var var_mean", Row(_whole, OPERANDS)),
    ("std_mean", Row(_whole, Saved((0,), (0,)))),
    ("linalg_vector_norm norm", Row(_whole)),
    ("softmax log_softmax _softmax _log_softmax", Row(layers.along(), RESULTS)),
    ("histc", Row(layers.counted, NOTHING, differentiable=0)),
    ("sort", Row(layers.along(), Saved(results=(1,)))),
    ("argsort", Row(layers.along(), NOTHING)),
    ("cumprod", Row(layers.along())),
    ("cumsum", Row(layers.along(linear=True), NOTHING)),
    ("topk", Row(layers.resized("dim"), Saved(results=(1,)))),
    ("glu", Row(layers.resized("dim"), OPERANDS)),
    ("_fft_c2c _fft_c2r", Row(layers.resized("dim"), NOTHING)),
    ("_fft_r2c", Row(layers.resized("dim"), OPERANDS)),
    ("mse_loss smooth_l1_loss huber_loss soft_margin_loss kl_div", Row(layers.pointwise_loss, OPERANDS)),
    ("binary_cross_entropy binary_cross_entropy_with_logits", Row(layers.pointwise_loss, OPERANDS)),
    ("l1_loss", Row(layers.pointwise_loss, Saved(internal=(InternalTensor("operand", 0),)))),
    (
        "cross_entropy_loss",
        Row(
            layers.cross_entropy_loss,
            Saved((1, 2), (), (InternalTensor("operand", 0),)),
            traffic=facts.log_probabilities,
        ),
    ),
    ("nll_loss nll_loss_nd nll_loss2d", Row(layers.nll_loss, OPERANDS)),
    ("nll_loss_forward nll_loss2d_forward", Row(layers.nll_loss, Saved(None, (1,)), differentiable=1)),
    (
        "shardwright.cross_entropy_sum",
        Row(
            layers.cross_entropy_sum,
            Saved((1, 2), (), (InternalTensor("operand", 0),)),
            traffic=facts.log_probabilities,
            inside=facts.class_statistics,
        ),
    ),
    ("shardwright.ctc_losses", Row("t^ b c^, b s^, b, b -> b")),
    ("shardwright.cross_entropy_count", Row(layers.cross_entropy_count, NOTHING)),
    # layers
    ("layer_norm rms_norm", Row(layers.layer_norm, OPERANDS)),
    ("native_layer_norm", Row(layers.layer_norm, Saved(None, (1, 2)), differentiable=1)),
    ("_fused_rms_norm", Row(layers.layer_norm, Saved(None, (1,)))),
    ("_weight_norm_interface", Row(layers.weight_norm, Saved(None, (1,)), differentiable=1)),
    ("group_norm", Row(layers.group_norm, _operands(0, 1))),
    ("native_group_norm", Row(layers.group_norm, Saved((0, 1), (1, 2)))),
    ("instance_norm", Row(layers.instance_norm)),
    ("batch_norm", Row(layers.batch_norm, OPERANDS, inside=facts.batch_statistics)),
    (
        "_native_batch_norm_legit _native_batch_norm_legit_functional",
        Row(layers.batch_norm, Saved(None, (1, 2)), differentiable=1, inside=facts.batch_statistics),
    ),
    (
        "shardwright.batch_norm_per_replica",
        Row(layers.batch_norm_per_replica, Saved(None, (1, 2)), differentiable=1, inside=facts.running_statistics),
    ),
    (
        "_native_batch_norm_legit_no_training",
        Row(layers.batch_norm_in_evaluation, OPERANDS, differentiable=1),
    ),
    ("embedding", Row(layers.embedding, _operands(1), facts.none, facts.looked_up)),
    (
        "scaled_dot_product_attention",
        Row(
            layers.attention,
            EVERYTHING,
            facts.attention,
            draws=True,
            inside=facts.ring_of_keys,
            in_blocks=facts.scores_in_blocks,
            busiest=facts.causal_rows,
        ),
    ),
    ("max_pool1d", Row(layers.pooling(1), _POOLED)),
    ("max_pool2d", Row(layers.pooling(2), _POOLED)),
    ("max_pool3d", Row(layers.pooling(3), _POOLED)),
    ("fractional_max_pool2d", Row(layers.fractional_pooling(2), Saved((0,), (1,)))),
    ("fractional_max_pool3d", Row(layers.fractional_pooling(3), Saved((0,), (1,)))),
    ("max_pool2d_with_indices adaptive_max_pool2d", Row(layers.pooling(2), Saved((0,), (1,)))),
    ("avg_pool1d adaptive_avg_pool1d", Row(layers.pooling(1, linear=True), OPERANDS)),
    ("avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d", Row(layers.pooling(2, linear=True), OPERANDS)),
    ("avg_pool3d", Row(layers.pooling(3, linear=True), OPERANDS)),
    ("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", Row(layers.pooling(2, linear=True), NOTHING)),
    ("im2col", Row(layers.windows, NOTHING)),
    ("col2im", Row(layers.joined_windows, NOTHING)),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", Row(layers.recurrent, flops=facts.recurrent, draws=True)),
    # views
    ("view.default", Row(views.reshape, view=True, written_as="aten.reshape.default")),
    ("view.dtype", Row(view=True)),
    ("view_as_real", Row("* -> * .", view=True)),
    ("view_as_complex", Row("* . -> *", view=True)),
    ("_unsafe_view", Row(views.reshape, NOTHING, written_as="aten.reshape.default")),
    ("reshape", Row(views.reshape, view=True)),
    ("flatten unflatten", Row(views.reshape, NOTHING)),
    ("permute transpose t", Row(views.permute, view=True)),
    ("expand", Row(views.expand, view=True, identity="same shape")),
    ("broadcast_tensors", Row(saves=NOTHING, written_as="aten.expand.default", broadcasts=True)),
    ("repeat", Row(views.repeat, NOTHING)),
    ("squeeze unsqueeze", Row(views.squeeze, view=True)),
    ("select", Row(views.select, view=True)),
    ("slice", Row(views.slice_, view=True, identity="same shape")),
    ("split split_with_sizes chunk", Row(views.split, view=True)),
    ("unbind", Row(views.unbind, view=True)),
    ("pad constant_pad_nd", Row(views.pad, NOTHING)),
    ("reflection_pad2d replication_pad2d", Row(views.pad, OPERANDS)),
    ("roll flip", Row(views.roll, NOTHING)),
    ("cat", Row(views.cat, NOTHING)),
    ("stack", Row(views.stack, NOTHING)),
    ("unfold", Row(views.unfold, NOTHING)),
    ("repeat_interleave.self_int", Row(views.repeat_interleave, NOTHING)),
    ("slice_scatter select_scatter", Row(views.scatter_slice, NOTHING)),
    ("pixel_shuffle pixel_unshuffle", Row(views.last_whole(3, linear=True), NOTHING)),
    ("grid_sampler grid_sampler_2d", Row("~ n c . ., n . . . -> ~ n c . .", OPERANDS)),
    ("tril triu", Row(views.last_whole(2, linear=True), NOTHING)),
    # indices
    ("index_select", Row(views.index_select, _operands(1))),
    ("index.Tensor", Row(views.index, _indices)),
    ("index_put.default", Row(views.index_put, _between)),
    ("index_add index_copy", Row(views.index_written(linear=True), _operands(1, 2))),
    ("index_fill", Row(views.index_written(), _operands(1))),
    ("gather", Row(views.gather, OPERANDS)),
    ("scatter scatter_add", Row(views.scatter, _operands(1))),
    ("one_hot", Row("* -> * .", NOTHING)),
    # what only asserts
    ("_assert_async _assert_scalar _assert_tensor_metadata", Row(checks=True)),
    ("_functional_assert_async _functional_assert_scalar", Row(checks=True)),
    ("sym_constrain_range sym_constrain_range_for_size", Row(checks=True)),
)


def _by_name(lines: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the entries by the name of each operator with its namespace.

    Raises:
        ValueError: where a name stands twice.
    """
    named: dict[str, T] = {}
    for names, fact in lines:
        for name in names.split():
            own = name.startswith("shardwright.")
            key = name.replace("::", ".") if own or "::" in name else f"aten.{name}"
            if key in named:
                raise ValueError(f"{key} stands twice in one table; one row says everything about it")
            named[key] = fact
    return named


TABLE: Mapping[str, Row] = _by_name(_ROWS)
REGISTERED: dict[str, Row] = {}
"""The rows that users have added for other operators, by full name: `register.register_rule` writes them."""
_UNLISTED = Row()


def key_of(op: str) -> str | None:
    """Under which name an operator stands in the table, with its overload or without; None where it does not."""
    return next((key for key in (op, op.rpartition(".")[0]) if key in TABLE), None)


def row_of(op: str) -> Row:
    """The row of an operator, by its full name or without its overload; the defaults where it has none."""
    key = key_of(op)
    return REGISTERED.get(op, _UNLISTED) if key is None else TABLE[key]


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of the table that stands in the room which knows its facts; made by `column`."""

    facts: Mapping[str, T]

    def of(self, op: str) -> T | None:
        """The fact about an operator, looked up as its row is; None where it has none."""
        key = key_of(op)
        return None if key is None else self.facts.get(key)


def column(*lines: tuple[str, T]) -> Column[T]:
    """A column of the table from lines of names, as they stand in the table, and a fact about each of them.

    Raises:
        ValueError: where a name has no row, or stands twice.
    """
    facts = _by_name(lines)
    if unknown := sorted(set(facts) - set(TABLE)):
        raise ValueError(
            f"{', '.join(unknown)}: no row of shardwright.compiler.rules.table has this name; add one there first"
        )
    return Column(facts)


def rule_of(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape]
) -> OpRule:
    """The rule of one operator of a graph, bound to its shapes; nothing is split by one that has no rule.

    ``args`` and ``kwargs`` hold `Operand` where the tensors go.

    >>> shapes = [(8, 4, 32), (16, 32)]
    >>> print(rule_of("aten.linear.default", (Operand(0), Operand(1)), {}, shapes, [(8, 4, 16)]))
    ~ *1 *0 k+, n k+ -> ~ *1 *0 n

    Raises:
        StrategyError: where the shapes do not fit the row, or the operator draws random numbers that would differ from
            rank to rank.
    """
    row = row_of(op)
    if not row.draws:
        layers.refuse_drawing(op)
    if row.rule is None:
        return replicated_rule(operands, results)
    operator = Operator(op, args, kwargs, tuple(map(tuple, operands)), tuple(map(tuple, results)))
    return operator.bind(row.rule) if isinstance(row.rule, str) else row.rule(operator)


def internal_collectives(operator: Operator, rule: OpRule, strategy: Strategy, mesh: Mesh, itemsize: int) -> Directions:
    """Return the collectives inside an operator, forward and backward: statistics that are merged.

    ``itemsize`` is the size in bytes of an element of the first operand.

    Raises:
        StrategyError: where the row of an operator that merges does not say how.
    """
    axes = rule.merged_axes(strategy, mesh)
    if not axes:
        return (), ()
    inside_of = row_of(operator.op).inside
    if inside_of is None:
        raise StrategyError(f"the rule of {operator.op} merges over {', '.join(axes)}, and its row has no inside=")
    operands = [
        rule.operand_layout(i, strategy).local_shape(shape, mesh, 0) for i, shape in enumerate(operator.operands)
    ]
    results = [
        rule.result_layout(i, strategy, mesh).local_shape(shape, mesh, 0) for i, shape in enumerate(operator.results)
    ]
    apart = mesh.extent({axis for at in rule.along for axis in strategy.axes[at] if axis not in axes})
    ranks, cuts = mesh.extent(axes), rule.cuts(strategy)
    return inside_of(Merged(operator, axes, ranks, tuple(operands), tuple(results), itemsize, cuts, apart))
