"""The language of rules: what it accepts, what it derives, what it refuses."""

import pytest

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import parse
from shardwright.errors import StrategyError

MESH = Mesh.of(a=2, b=2, c=2)


def test_matmul_of_the_documented_strategy():
    rule = parse("~ m k+, k+ n -> ~ m n").bind([(16, 32), (32, 16)], [(16, 16)])
    strategy = rule.strategy({"m": ["a"], "k": ["b", "c"]})
    assert rule.operand_layout(0, strategy).slices(MESH) == (2, 4)
    assert rule.operand_layout(1, strategy).slices(MESH) == (4, 1)
    assert str(rule.result_layout(0, strategy, MESH)) == "[a, -] Σb·c"
    assert rule.operand_gradient_partial(0, strategy, MESH) == ()
    assert rule.operand_gradient_partial(1, strategy, MESH) == ("a",)


def test_partial_operands_stay_partial_and_make_the_other_gradient_partial():
    rule = parse("~ m k+, k+ n -> ~ m n").bind([(4, 4), (4, 4)], [(4, 4)])
    strategy = rule.strategy({"m": ["a"]}, partial=["b"])
    assert str(rule.operand_layout(0, strategy)) == "[a, -] Σb"
    assert str(rule.operand_layout(1, strategy)) == "[-, -]"
    assert str(rule.result_layout(0, strategy, MESH)) == "[a, -] Σb"
    assert rule.operand_gradient_partial(0, strategy, MESH) == ()
    assert rule.operand_gradient_partial(1, strategy, MESH) == ("a", "b")


def test_star_broadcasts_to_the_right():
    rule = parse("*, * -> *").bind([(4, 1, 8), (6, 8)], [(4, 6, 8)])
    strategy = rule.strategy({"*0": ["a"], "*1": ["b"], "*2": ["c"]})
    assert str(rule.operand_layout(0, strategy)) == "[c, -, a]"
    assert str(rule.operand_layout(1, strategy)) == "[b, a]"
    assert rule.operand_gradient_partial(0, strategy, MESH) == ("b",)
    assert rule.operand_gradient_partial(1, strategy, MESH) == ("c",)


def test_only_the_major_factor_of_a_merged_dim_is_split():
    rule = parse("(h d) -> h d").bind([(12,)], [(4, 3)], {"h": 4, "d": 3})
    assert [rule.factors[i].name for i in rule.splittable] == ["h"]
    layout = rule.operand_layout(0, rule.strategy({"h": ["a"]}))
    assert (layout.dims[0].axes, layout.dims[0].unit) == (("a",), 3)
    with pytest.raises(StrategyError, match="'d' may not be split; those that may"):
        rule.strategy({"d": ["a"]})


def test_strategies_are_even_and_start_with_the_replicated_one():
    rule = parse("n c -> n c").bind([(6, 4)], [(6, 4)])
    found = list(rule.strategies(Mesh.of(a=3, b=2)))
    assert found[0] == rule.replicated()
    assert {tuple(rule.operand_layout(0, s).slices(Mesh.of(a=3, b=2))) for s in found} == {
        (1, 1), (2, 1), (1, 2), (3, 1), (6, 1), (3, 2)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "operands -> results"),
        ("m k, k n -> m n", r"\['k'\] disappear"),
        ("m (k -> m", "not closed"),
        ("m! -> m", "cannot read 'm!'"),
    ],
)
def test_bad_notation_is_refused(text, message):
    with pytest.raises(StrategyError, match=message):
        parse(text)


def test_shapes_that_do_not_fit_are_refused_with_the_rule():
    with pytest.raises(StrategyError, match=r"'m k\+, k\+ n -> m n' does not fit.*k is 3 and 4"):
        parse("m k+, k+ n -> m n").bind([(2, 3), (4, 5)], [(2, 5)])


def test_an_axis_splits_one_factor_only():
    rule = parse("n c -> n c").bind([(4, 4)], [(4, 4)])
    with pytest.raises(StrategyError, match="one factor only"):
        rule.strategy({"n": ["a"], "c": ["a"]})
