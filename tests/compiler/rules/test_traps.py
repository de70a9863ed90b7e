"""Known ways to be wrong, each by name; and proof that `rulecheck.check` sees wrong rules."""

import itertools
from dataclasses import replace

import pytest
import torch

from rulecheck import Invocation, bound, check, operator_of, rule_for, whole
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import Operand, OpRule, parse
from shardwright.compiler.rules.table import TABLE, internal_collectives, rule_of
from shardwright.errors import StrategyError

TWO = Mesh.of(a=2)
FOUR = Mesh.of(a=4)
SQUARE = Mesh.of(a=2, b=2)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def splittable(rule: OpRule) -> set[str]:
    return {rule.factors[i].name for i in rule.splittable}


# Losses and means


@pytest.mark.parametrize(
    "name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "cross_entropy_loss"]
)
def test_a_mean_over_a_local_count_is_never_split(name):
    target = torch.tensor([0, 1, 2, 1]) if name == "cross_entropy_loss" else torch.rand(4, 3, dtype=torch.float64)
    weight = (None,) if "entropy" in name else ()
    loss = Invocation(f"aten.{name}.default", (torch.rand(4, 3, dtype=torch.float64), target, *weight, 1))
    assert splittable(rule_for(loss)) == set()
    summed = replace(loss, args=(*loss.args[:-1], 2))
    assert splittable(rule_for(summed)) >= {"n"} if name == "cross_entropy_loss" else {"*0", "*1"}


@pytest.mark.parametrize("op", ["mean.default", "mean.dim"])
def test_a_split_mean_divides_by_the_global_count(op):
    mean = Invocation(f"aten.{op}", (x(5, 3), *([[0]] if op == "mean.dim" else [])))
    rule = rule_for(mean)
    check(mean, FOUR, rule.strategy({"d0": ["a"]}))  # 2, 2, 1 and 0 rows


def test_ignored_targets_count_once_on_uneven_parts():
    target = torch.tensor([0, -100, 2, -100, -100, 1, 2])
    for name, args in (("sum", (x(7, 3), target)), ("count", (target,))):
        loss = Invocation(f"shardwright.cross_entropy_{name}", args)
        rule = rule_for(loss)
        check(loss, FOUR, rule.strategy({"n" if name == "sum" else "*0": ["a"]}))


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 2), (2, 6)], ids=str)
def test_split_classes_are_never_brought_together(shape):
    """Also where a rank has no class, and there are fewer samples than ranks."""
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target[-1] = -100
    loss = Invocation("shardwright.cross_entropy_sum", (x(*shape), target))
    rule = rule_for(loss)
    check(loss, FOUR, rule.strategy({"c": ["a"]}))
    strategy = rule.strategy({"n": ["a"], "c": ["b"]})
    check(loss, SQUARE, strategy)
    forward, backward = internal_collectives(operator_of(loss, whole(loss)), rule, strategy, SQUARE, 8)
    assert ([c.kind for c in forward], backward) == (["all_to_all", "all_gather"], ())
    weighed = Invocation("shardwright.cross_entropy_sum", (x(*shape), target, torch.rand(shape[1]).double()))
    assert "c" not in splittable(rule_for(weighed))


def test_a_target_that_is_no_class_is_refused_on_every_rank():
    loss = Invocation("shardwright.cross_entropy_sum", (x(2, 4), torch.tensor([1, 4])))
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        check(loss, FOUR, rule_for(loss).strategy({"c": ["a"]}))


# Normalisation


def test_batch_statistics_take_one_collective_forward_and_one_backward():
    norm = Invocation("aten._native_batch_norm_legit.no_stats", (x(6, 8, 3), x(8), x(8), True, 0.1, 1e-5))
    rule = rule_for(norm)
    strategy = rule.strategy({"n": ["a"], "c": ["b"]})
    forward, backward = internal_collectives(operator_of(norm, whole(norm)), rule, strategy, SQUARE, 8)
    assert [(c.kind, c.axes, c.bytes) for c in (*forward, *backward)] == [
        ("all_gather", ("a",), 2 * 4 * 8 * 2),  # mean and deviation of 4 channels, from 2 ranks
        ("all_reduce", ("a",), 2 * 4 * 8),
    ]
    check(norm, SQUARE, strategy)  # which compares the collectives that were made


def test_channels_alone_need_no_collective():
    norm = Invocation("aten._native_batch_norm_legit.no_stats", (x(6, 8, 3), x(8), x(8), True, 0.1, 1e-5))
    rule = rule_for(norm)
    strategy = rule.strategy({"c": ["a", "b"]})
    assert internal_collectives(operator_of(norm, whole(norm)), rule, strategy, SQUARE, 8) == ((), ())
    check(norm, SQUARE, strategy)


@pytest.mark.parametrize("rows", [5, 2, 6])
def test_batch_norm_of_uneven_and_empty_parts(rows):
    running = (torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    op = "aten._native_batch_norm_legit_functional.default"
    norm = Invocation(op, (x(rows, 3, 2), x(3), x(3), *running, True, 0.1, 1e-5))
    check(norm, FOUR, rule_for(norm).strategy({"n": ["a"]}))


# Attention, views, shapes


def test_causal_attention_split_over_queries_knows_where_they_start():
    attention = Invocation(
        "aten.scaled_dot_product_attention.default", (x(2, 2, 6, 4), x(2, 2, 6, 4), x(2, 2, 6, 4), None, 0.0, True)
    )
    check(attention, Mesh.of(a=3), rule_for(attention).strategy({"l": ["a"]}))


def test_grouped_query_attention_with_fewer_key_heads_than_ranks_splits_groups_only():
    tensors = (x(2, 4, 3, 2), x(2, 2, 3, 2), x(2, 2, 3, 2))
    attention = Invocation("aten.scaled_dot_product_attention.default", tensors, {"enable_gqa": True})
    rule = rule_for(attention)
    assert splittable(rule) == {"*0", "g", "l", "s"}
    assert len(list(rule.strategies(FOUR))) == 1  # 2 groups, 2 sequences and 3 queries do not divide among 4
    check(attention, SQUARE, rule.strategy({"g": ["a"], "*0": ["b"]}))


def test_dims_of_a_mask_that_broadcast_are_not_split():
    mask = torch.rand(2, 1, 1, 4) < 0.7
    tensors = (x(2, 4, 3, 2), x(2, 4, 4, 2), x(2, 4, 4, 2))
    attention = Invocation("aten.scaled_dot_product_attention.default", (*tensors, mask))
    rule = rule_for(attention)
    assert rule.operand_layout(3, rule.strategy({"*0": ["a"], "l": ["b"]})).split_axes == set()
    assert rule.operand_layout(3, rule.strategy({"*1": ["a"]})).slices(TWO) == (2, 1, 1, 1)
    check(attention, SQUARE, rule.strategy({"*0": ["a"], "l": ["b"]}))


def test_a_fused_projection_is_split_by_its_major_factor_only():
    chunk = Invocation("aten.chunk.default", (x(2, 12), 3, 1))
    assert splittable(rule_for(chunk)) == {"d0"}
    view = Invocation("aten.reshape.default", (x(2, 12), (2, 3, 4)))
    assert splittable(rule_for(view)) == {"f0", "f1"}
    assert str(rule_for(view)) == "~ f0 (f1 f2) -> ~ f0 f1 f2"


def test_a_merged_dim_is_never_split_by_its_minor_factor():
    merge = Invocation("aten.reshape.default", (x(4, 6), (24,)))
    rule = rule_for(merge)
    with pytest.raises(StrategyError, match="'f1' may not be split; those that may: \\['f0'\\]"):
        rule.strategy({"f1": ["a"]})
    layout = rule.result_layout(0, rule.strategy({"f0": ["a"]}), TWO)
    assert (layout.dims[0].axes, layout.dims[0].unit) == (("a",), 6)


def test_unflattening_6_into_3_and_2_on_4_ranks():
    view = Invocation("aten.reshape.default", (x(6), (3, 2)))
    rule = rule_for(view)
    assert list(rule.strategies(FOUR, partial=False)) == [rule.replicated()]  # a search does not split it
    check(view, FOUR, rule.strategy({"f0": ["a"]}))  # and where it is split, it is cut between multiples of 2


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("full.default", ((4, 6), 2.0)),
        ("zeros.default", ((4, 6),)),
        ("arange.default", (6,)),
        ("expand.default", (x(4, 1), (4, 6))),
        ("reshape.default", (x(4, 6), (2, 2, 6))),
        ("new_zeros.default", (x(4, 6), (4, 3))),
        ("squeeze.default", (x(4, 1, 6),)),
    ],
)
def test_shape_arguments_are_those_of_the_part(op, args):
    made = Invocation(f"aten.{op}", args)
    rule = rule_for(made)
    for factor in splittable(rule):
        for mesh in (TWO, FOUR):
            check(made, mesh, rule.strategy({factor: ["a"]}))


# Convolution, embedding, partial values


def test_the_factors_of_a_convolution():
    conv = Invocation("aten.conv2d.default", (x(2, 4, 5, 5), x(6, 4, 3, 3), x(6)))
    rule = rule_for(conv)
    assert splittable(rule) == {"n", "c", "o"}
    assert rule.result_layout(0, rule.strategy({"o": ["a"]}), TWO).partial == ()
    assert rule.result_layout(0, rule.strategy({"c": ["a"]}), TWO).partial == ("a",)
    grouped = Invocation("aten.conv2d.default", (x(2, 4, 5, 5), x(6, 2, 3, 3), x(6), (1, 1), (0, 0), (1, 1), 2))
    assert splittable(rule_for(grouped)) == {"n", "g"}
    assert len(list(rule_for(grouped).strategies(FOUR, partial=False))) == 1


@pytest.mark.parametrize("padding", [-1, 0, 3])
def test_rows_of_an_embedding_with_duplicates_and_padding(padding):
    lookup = Invocation("aten.embedding.default", (x(5, 2), torch.tensor([[0, 3, 3], [4, 3, 1]]), padding))
    for mesh, axes in ((TWO, ["a"]), (SQUARE, ["b", "a"])):
        check(lookup, mesh, rule_for(lookup).strategy({"v": axes}))


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_the_table_is_refused_by_some_rank(index):
    lookup = Invocation("aten.embedding.default", (x(5, 2), torch.tensor([0, 4])))
    rule = rule_for(lookup)
    lookup.args[1][0] = index
    with pytest.raises(IndexError):
        check(lookup, TWO, rule.strategy({"v": ["a"]}), rule)


def test_scaling_by_frequency_needs_every_index():
    lookup = Invocation("aten.embedding.default", (x(5, 2), torch.tensor([0, 0, 1, 0]), -1, True))
    assert splittable(rule_for(lookup)) == {"d"}


@pytest.mark.parametrize("op", ["aten.linear.default", "aten.addmm.default", "aten.conv1d.default"])
def test_a_bias_joins_a_split_sum_once(op):
    tensors = {
        "aten.linear.default": (x(3, 4), x(5, 4), x(5)),
        "aten.addmm.default": (x(5), x(3, 4), x(4, 5)),
        "aten.conv1d.default": (x(3, 4, 6), x(5, 4, 3), x(5)),
    }
    product = Invocation(op, tensors[op])
    rule = rule_for(product)
    factor = "c" if "conv" in op else "k"
    check(product, SQUARE, rule.strategy({factor: ["a", "b"]}))
    check(product, SQUARE, rule.strategy({factor: ["b"]}, ["a"]))
    assert rule.operand_gradient_partial(0 if "addmm" in op else 2, rule.strategy({factor: ["a"]}), TWO) == ()


def test_two_partial_values_are_never_multiplied():
    for op, tensors in (("mul.Tensor", (x(4), x(4))), ("matmul.default", (x(4, 4), x(4, 4)))):
        assert rule_for(Invocation(f"aten.{op}", tensors)).linear_operands == {0}


def test_a_number_is_not_added_to_a_partial_value():
    assert not rule_for(Invocation("aten.add.Tensor", (x(4), 1.0))).linear_operands
    assert not rule_for(Invocation("aten.masked_fill.Scalar", (x(4), torch.zeros(4) > 0, 1.0))).linear_operands
    assert not rule_for(Invocation("aten._to_copy.default", (x(4),), {"dtype": torch.int64})).linear_operands
    assert not rule_for(Invocation("aten.sum.default", (x(4).detach(),), {"dtype": torch.int64})).linear_operands
    assert not rule_for(Invocation("aten.constant_pad_nd.default", (x(4), (1, 1), 1.0))).linear_operands


def test_an_extremum_needs_its_dims_whole():
    assert splittable(rule_for(Invocation("aten.amax.default", (x(4, 5), (1,))))) == {"d0"}


# Operators without a row


def test_an_operator_without_a_row_is_replicated_and_says_so():
    rule = rule_of("aten.trapz.x", (Operand(0), Operand(1)), {}, [(4,), (4,)], [()])
    assert not rule.listed
    assert list(rule.strategies(FOUR)) == [rule.replicated()]


def test_an_operator_that_would_draw_differently_on_each_rank_is_refused():
    with pytest.raises(StrategyError, match=r"aten\.binomial.default draws random numbers from each device's own"):
        rule_of("aten.binomial.default", (Operand(0), Operand(1)), {}, [(4,), (4,)], [(4,)])


def test_adding_an_elementwise_operator_is_one_line():
    line = {"aten.sinc": "* -> *"}
    assert "aten.sinc" not in TABLE
    rule = parse(line["aten.sinc"]).bind([(4, 3)], [(4, 3)])
    check(Invocation("aten.sinc.default", (x(4, 3),)), SQUARE, rule.strategy({"*0": ["a"], "*1": ["b"]}), rule)


# Wrong rules are seen


def wrong(op: str, args: tuple, text: str) -> tuple[Invocation, str]:
    return Invocation(f"aten.{op}", args), text


@pytest.mark.parametrize(
    ("invocation", "text"),
    [
        wrong("softmax.int", (x(4, 4), 1), "* d -> * d"),
        wrong("layer_norm.default", (x(4, 4), (4,)), "* d -> * d"),
        wrong("cumsum.default", (x(4, 4), 0), "d * -> d *"),
        wrong("relu.default", (x(4, 4),), "~ * -> ~ *"),
        wrong("add.Tensor", (x(4, 4), 1.0), "~ * -> ~ *"),
        wrong("add.Tensor", (x(4, 4), x(4, 4)), "~ *, * -> ~ *"),
        wrong("mul.Tensor", (x(4, 4), x(4, 4)), "~ *, ~ * -> ~ *"),
        wrong("amax.default", (x(4, 4), (1,)), "m d+ -> m"),
        wrong("mse_loss.default", (x(4, 4), x(4, 4), 1), "*+, *+ -> "),
        wrong("transpose.int", (x(4, 4), 0, 1), "a b -> a b"),
        wrong("reshape.default", (x(4, 4), (16,)), "a b -> (b a)"),
        wrong("slice.Tensor", (x(4, 4), 0, 1, 3), "a+ b -> . b"),
        wrong("cat.default", ((x(4, 4), x(4, 4)), 0), "a+ c, b+ c -> . c"),
        wrong("conv1d.default", (x(4, 4, 6), x(4, 4, 3)), "n c+ l+, o c+ . -> n o ."),
    ],
    ids=lambda value: value.op if isinstance(value, Invocation) else value,
)
def test_a_wrong_rule_is_caught(invocation, text):
    assert caught(invocation, wrong_rule(text, invocation))


@pytest.mark.parametrize("op", ["mm.default", "sum.default", "embedding.default"])
def test_a_sum_that_is_taken_for_whole_is_caught(op):
    args = {"mm.default": (x(4, 4), x(4, 4)), "sum.default": (x(4),), "embedding.default": (x(4, 2), torch.arange(4))}
    invocation = Invocation(f"aten.{op}", args[op])
    rule = rule_for(invocation)
    factors = tuple(replace(f, kind="free") for f in rule.factors)
    assert caught(invocation, replace(rule, factors=factors))


def test_right_rules_are_not_caught():
    for op, args in (("softmax.int", (x(4, 4), 1)), ("mm.default", (x(4, 4), x(4, 4))), ("relu.default", (x(4, 4),))):
        invocation = Invocation(f"aten.{op}", args)
        assert not caught(invocation, rule_for(invocation))


def wrong_rule(text: str, invocation: Invocation) -> OpRule:
    """The rule that ``text`` gives the shapes of an invocation."""
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (bound(invocation)[2], whole(invocation))]
    return parse(text).bind(*shapes, {"a": 4, "b": 4} if "(" in text else None)


def caught(invocation: Invocation, rule: OpRule) -> bool:
    """Whether some strategy of the rule fails the check."""
    for strategy in itertools.islice(rule.strategies(TWO), 1, None):
        try:
            check(invocation, TWO, strategy, rule)
        except (AssertionError, RuntimeError, StrategyError):
            return True
    return False
