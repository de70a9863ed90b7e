"""Attention over keys that are split along the sequence is attention over all of them, forward and backward."""

import math
import threading
import warnings
from collections import Counter

import pytest
import torch
from rule_cases import Draw, explore
from torch.nn import functional as F

from rulecheck import Invocation, check, rule_for
from shardwright.compiler.lower.operators import attention_parts
from shardwright.compiler.lower.operators import ring_attention as ring_module
from shardwright.compiler.lower.operators.attention_parts import parts_of
from shardwright.compiler.lower.operators.ring_attention import (
    balanced_ring_attention,
    causal_attention,
    ring_attention,
)
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.rules.notation import Operand, parse
from shardwright.compiler.rules.table import rule_of
from shardwright.errors import StrategyError

ATTENTION = "aten.scaled_dot_product_attention.default"
MESHES = [Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=6), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3)]


def x(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def test_keys_are_split_along_with_queries():
    rule = parse("* l e^, * s&l e^ -> * l").bind([(2, 12, 3), (2, 6, 3)], [(2, 12)])
    assert str(rule) == "*0 l e^, *0 s&l e^ -> *0 l"
    mesh = Mesh.of(a=2, b=2, c=3)
    strategy = rule.strategy({"s": ["a"], "l": ["b"], "*0": []})
    assert rule.strategy({"s": ["a"], "l": ["b", "a"]}) == strategy
    assert [str(rule.operand_layout(i, strategy)) for i in range(2)] == ["[-, b·a, -]", "[-, a, -]"]
    assert str(rule.result_layout(0, strategy, mesh)) == "[-, b·a]"
    assert rule.merged_axes(strategy, mesh) == ("a",)
    # Over b, where ranks have other queries and the same keys, their gradients are partial; over a all is done inside.
    assert [rule.operand_gradient_partial(i, strategy, mesh) for i in range(2)] == [(), ("b",)]
    found = {(rule.operand_layout(0, s).slices(mesh)[1], rule.operand_layout(1, s).slices(mesh)[1])
             for s in rule.strategies(mesh)}  # fmt: skip
    assert {pair for pair in found if pair[1] > pair[0]} == set()
    assert {(12, 1), (12, 6), (2, 2), (4, 2), (3, 3), (1, 1)} <= found
    assert rule.most_parts(24) == 24  # the rows of queries and of sequences, which keys do not multiply


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s&l e^ -> e^", "splits a factor along with l, which no operand names alone"),
        ("l& s&l, l -> l", None),
        ("s&2 -> .", "cannot read 's&2'"),
        ("*&l l -> l", r"cannot read '\*&l'"),
    ],
)
def test_what_a_factor_may_be_split_along_with(text, message):
    if message is None:
        assert parse(text).along == (("s", "l"),)
    else:
        with pytest.raises(StrategyError, match=message):
            parse(text)


def drawn(d):
    """Heads as attention takes them: with dims before or without, few of keys, of other lengths and widths; masks."""
    e, f, length, keys = d.pick([1, 3, 8]), d.pick([None, None, 5]), d.pick(range(2, 15)), d.pick([None, None, 2, 5, 9])
    keys, f = length if keys is None else keys, e if f is None else f
    form = d.pick(["plain", "grouped", "broadcast", "bare", "many"])
    before = {"plain": ((2, 3),) * 3, "grouped": ((2, 4), (2, 2), (2, 2)), "broadcast": ((2, 3), (1, 3), (3,)),
              "bare": ((),) * 3, "many": ((2, 1, 3),) * 3}[form]  # fmt: skip
    shapes = zip(before, ((length, e), (keys, e), (keys, f)), strict=True)
    heads = [d.x(*leading, *rows) for leading, rows in shapes]
    options = {"enable_gqa": form == "grouped", "scale": d.pick([None, 0.3])}
    mask = masked(d, before[0], length, keys) if d.pick([True, False]) else None
    is_causal = mask is None and d.pick([False, True, True])
    return Invocation(ATTENTION, (*heads, mask, d.pick([0.0, 0.0, 0.4]), is_causal), options)


def masked(d, before, length, keys):
    """A mask of as many dims as it likes, any of which may be 1: of bools, or of numbers that may have a gradient."""
    whole = (*before, d.pick([length, 1]), d.pick([keys, keys, 1]))
    leading = [size if d.pick([True, False]) else 1 for size in before[d.pick(range(len(before) + 1)) :]]
    shape = (*leading, *whole[len(before) :])
    seen = torch.rand(shape) < d.pick([0.3, 0.8])  # of some queries nothing
    kind = d.pick(["seen", "hidden", "least", "numbers"])
    if kind == "seen":
        return seen
    added = torch.randn(shape, dtype=torch.float64)
    if kind != "numbers":
        added = added.masked_fill(~seen, -math.inf if kind == "hidden" else torch.finfo(torch.float64).min)
    return added.requires_grad_(kind == "numbers" and d.pick([True, False]))


@pytest.mark.parametrize("examples", [10, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [False, True], ids=["kernels", "blocks"])
def test_a_ring_gives_what_one_device_gives(examples, blocks, monkeypatch):
    if blocks:  # as where torch has no kernels, and few scores fit into one
        monkeypatch.setattr(attention_parts, "_way_of", lambda heads, scores: attention_parts._Blocks())
        monkeypatch.setattr(attention_parts, "_MOST_CPU", 20)

    def body(d: Draw) -> None:
        invocation, mesh = drawn(d), d.pick(MESHES)
        rule = rule_for(invocation)
        assignment = {"s": d.pick([mesh.names, mesh.names[::-1], mesh.names[:1], mesh.names[-1:]])}
        others = [axis for axis in mesh.names if axis not in assignment["s"]]
        free = [rule.factors[i].name for i in rule.splittable if rule.factors[i].name != "s"]
        if others:
            assignment[d.pick(free)] = others
        elif d.pick([False, True]):  # queries in another order than keys
            assignment["l"] = assignment["s"][::-1]
        torch.default_generator.manual_seed(0)
        check(invocation, mesh, rule.strategy(assignment), rule)

    explore(examples, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rounding_is_that_of_one_device(dtype):
    """Beside numbers in float64, results and gradients are as near as one device's, which rounds a sum once, too."""
    torch.manual_seed(0)
    shapes = [(1, 4, 96, 16), (1, 2, 96, 16), (1, 2, 96, 16)]
    whole = [torch.randn(shape, dtype=dtype) for shape in shapes]
    gradient, mesh = torch.randn(shapes[0], dtype=dtype), Mesh.of(a=3)

    def attended(heads, cotangent, attend):
        heads = [head.clone().requires_grad_() for head in heads]
        result = attend(*heads)
        return [result.detach(), *torch.autograd.grad(result, heads, cotangent)]

    def run(comm):
        rows = [(32 * i, 32 * i + 32) for i in range(3)]
        mine = slice(*rows[comm.rank])
        parts = [t[:, :, mine] for t in (*whole, gradient)]

        def ring(q, k, v):
            return balanced_ring_attention(q, k, v, None, True, rows, comm, ("a",))

        return attended(parts[:3], parts[3], ring)

    def one_device(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    found = [torch.cat(parts, 2) for parts in zip(*simulate(mesh, run), strict=True)]
    exact = attended([t.double() for t in whole], gradient.double(), one_device)
    for ours, theirs, true in zip(found, attended(whole, gradient, one_device), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours - true).abs().max() <= 1.5 * (theirs - true).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("queries", [(0, 5), (6, 9)])
@pytest.mark.parametrize("keys", [(0, 0), (0, 8), (5, 9)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_are_what_queries_see_once(queries, keys, is_causal):
    seen = torch.zeros(9, 9, dtype=torch.int64)
    for part in parts_of(queries, keys, is_causal):
        rows, columns = seen[slice(*queries)][part.queries], slice(*keys)
        block = rows[:, columns][:, part.keys]
        block += torch.ones_like(block).tril() if part.diagonal else 1
        assert not part.diagonal or block.shape[0] == block.shape[1]
    expected = torch.zeros_like(seen)
    expected[slice(*queries), slice(*keys)] = 1
    assert torch.equal(seen, expected.tril() if is_causal else expected)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_rank_holds_few_blocks_and_no_mask_of_all_keys(balanced):
    """No tensor that is made has as many numbers as all keys, or as scores of the queries here with them."""
    torch.manual_seed(0)
    length, width, ranks = 64, 4, 8
    rows = [(8 * i, 8 * i + 8) for i in range(ranks)]
    heads = [torch.randn(1, 1, length, width, dtype=torch.float64) for _ in range(3)]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(tensor, torch.Tensor):
                    Sizes.largest = max(Sizes.largest, tensor.nbytes // 8)
            return made

    def run(comm):
        parts = [t[:, :, slice(*rows[comm.rank])].clone().requires_grad_() for t in heads]
        with Sizes():
            if balanced:
                made = balanced_ring_attention(*parts, None, False, rows, comm, ("a",))
            else:
                made = ring_attention(*parts, None, True, None, False, rows[comm.rank], rows, comm, ("a",))
            made.sum().backward()

    simulate(Mesh.of(a=ranks), run)
    block = (length // ranks) * width
    assert Sizes.largest == (3 if balanced else 2) * block < length * width  # rows that are exchanged; or a block
    assert Sizes.largest < length // ranks * length


def test_causal_queries_from_the_middle_on_make_no_mask():
    torch.manual_seed(0)
    heads = x(2, 4, 3, 8), x(2, 2, 9, 8), x(2, 2, 9, 8)
    seen = torch.ones(3, 9, dtype=torch.bool).tril(4)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
    found = causal_attention(*heads, 4, None, True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_kernels_that_give_something_else_are_not_used():
    class Wrong(attention_parts._CpuKernels):
        def gradients(self, *given):
            of_query, *rest = super().gradients(*given)
            return 2 * of_query, *rest

    class Missing(attention_parts._CpuKernels):
        def attend(self, *given):
            raise RuntimeError("no kernel image")

    given = torch.device("cpu"), torch.bfloat16, 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels = attention_parts._CpuKernels()
        assert attention_parts._checked(kernels, *given) is kernels
    for way, problem in ((Wrong(), "deviate by 1"), (Missing(), "no kernel image")):
        with pytest.warns(UserWarning, match=f"torch's kernels cannot be used: .*{problem}"):
            assert isinstance(attention_parts._checked(way, *given), attention_parts._Blocks)


def test_kernels_that_the_step_has_chosen_are_offered_no_ring():
    heads = x(2, 2, 4, 4), x(2, 2, 4, 4), x(2, 2, 4, 4)
    rule = rule_for(Invocation(ATTENTION, heads))
    assert rule.operand_layout(1, rule.strategy({"s": ["a"]})) == Layout.split(4, {2: ["a"]})
    operands, shapes = tuple(map(Operand, range(3))), [(2, 2, 4, 4)] * 3
    chosen = rule_of(ATTENTION, operands, {"backends": ("MATH",)}, shapes, shapes[:1])
    with pytest.raises(StrategyError, match="factor 's' may not be split"):
        chosen.strategy({"s": ["a"]})


@pytest.mark.parametrize(("ranks", "length"), [(3, 12), (4, 14), (6, 9)])
def test_a_balanced_ring_gives_each_rank_the_same_work(ranks, length, monkeypatch):
    """As many scores on each where the parts are even, in each round; and no more than the part of the longest else."""
    part, found = -(-length // ranks), Counter()
    rows = [(min(at * part, length), min((at + 1) * part, length)) for at in range(ranks)]
    heads = [torch.randn(1, 1, length, 4, dtype=torch.float64) for _ in range(3)]
    attend = attention_parts.attend

    def counting(heads, scores):
        queries, keys = heads[0].shape[-2], heads[1].shape[-2]
        found[here.rank] += queries * (queries + 1) // 2 if scores.diagonal else queries * keys
        return attend(heads, scores)

    here = threading.local()
    monkeypatch.setattr(ring_module, "attend", counting)

    def run(comm):
        here.rank = comm.rank
        mine = [t[:, :, slice(*rows[comm.rank])] for t in heads]
        return balanced_ring_attention(*mine, None, False, rows, comm, ("a",))

    made = torch.cat(simulate(Mesh.of(a=ranks), run), 2)
    torch.testing.assert_close(made, F.scaled_dot_product_attention(*heads, is_causal=True), rtol=0, atol=1e-13)
    assert found.total() == length * (length + 1) // 2
    even = length % (2 * ranks) == 0
    assert len(set(found.values())) == 1 if even else max(found.values()) <= part * (length + 1) / 2 + 1
