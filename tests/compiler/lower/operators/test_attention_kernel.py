"""The kernel of attention with dropout gives what blocks of scores give, and is called where it can serve."""

import os
import subprocess
import sys
import types

import pytest
import torch

from shardwright.compiler.lower.operators import attention, randomness

SHAPE, OFFSETS = (3, 8, 60, 45), (1, 4, 20, 0)  # of the scores of all ranks, and where the part here starts


def heads(dtype=torch.float64, groups=2, width=8, queries=21):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, queries, width), (2, 4 // groups, 45, width), (2, 4 // groups, 45, width))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def kernel_of_torch(query, key, value, bases, how):
    """What the kernels do, with the scores of all queries at once."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    rows, columns = torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])
    scores = query @ key.mT * how.scale
    if how.is_causal:
        scores = scores.masked_fill(columns > rows + how.start, -torch.inf)
    position = bases[:, None, None] + (rows * how.across + columns).int()
    kept = randomness._finalised(position, how.first, how.second) < how.limit
    return (scores.softmax(-1) * kept * how.inverse) @ value


@pytest.fixture
def on_cpus(monkeypatch):
    """Kernels of torch's operators, on CPUs; how often they were called."""
    calls = []
    dropped = dict.fromkeys(("is_causal", "scale", "start", "across", "inverse", "first", "second", "limit"))
    stand_in = types.ModuleType("attention_kernel")
    stand_in.Dropped = lambda *given: types.SimpleNamespace(**dict(zip(dropped, given, strict=True)))
    stand_in.attention = lambda *given: calls.append(1) or kernel_of_torch(*given)
    name = "shardwright.compiler.lower.operators.attention_kernel"
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(
        sys.modules["shardwright.compiler.lower.operators"], "attention_kernel", stand_in, raising=False
    )
    monkeypatch.setattr(attention, "_WITH_KERNELS", ("cpu",))
    attention.one_kernel.cache_clear()
    yield calls
    attention.one_kernel.cache_clear()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_given_the_positions_of_a_part(on_cpus, is_causal, groups):
    given = 0.3, is_causal, 0.4, 7, SHAPE, OFFSETS
    tensors = heads(groups=groups)
    results = attention.fused_attention(*tensors, *given), attention._by_blocks(*tensors, None, *given)
    made, expected = ([x, *torch.autograd.grad(x.square().sum(), tensors)] for x in results)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "mask", "p", "calls"),
    [
        ({"dtype": torch.bfloat16}, None, 0.3, 2),
        ({"dtype": torch.float16, "groups": 4}, None, 0.3, 2),
        ({"dtype": torch.bfloat16, "width": 144}, None, 0.3, 0),
        ({"dtype": torch.bfloat16, "queries": 0}, None, 0.3, 0),
        ({"dtype": torch.bfloat16}, torch.ones(21, 45, dtype=torch.bool), 0.3, 0),
        ({"dtype": torch.bfloat16}, None, 1.0, 0),
        ({"dtype": torch.float32}, None, 0.3, 0),
    ],
    ids=["bf16", "fp16, grouped", "wide heads", "no queries", "a mask", "all dropped", "float32"],
)
def test_it_serves_half_precision_without_masks_and_blocks_the_rest(on_cpus, options, mask, p, calls):
    tensors = heads(**options)
    found = attention.attention_with_dropout(*tensors, mask, p, False, None, 7, SHAPE, OFFSETS)
    assert len(on_cpus) == calls, "once to compare it with blocks"
    wide = [x.double() for x in tensors]
    expected = attention.attention_with_dropout(*wide, mask, p, False, None, 7, SHAPE, OFFSETS)
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


def test_it_is_compared_with_blocks_also_where_the_first_step_is_an_evaluation(on_cpus):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert attention.one_kernel(torch.device("cpu"), torch.float16, 8) is not None


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (lambda *given: kernel_of_torch(*given) * 2, "the kernels give other numbers, which deviate by"),
        (
            lambda *given: kernel_of_torch(*given) + given[2].mean() * torch.nan,
            "the kernels give other numbers, .* nan",
        ),
        (lambda *given: [][0], "IndexError: list index out of range"),
    ],
    ids=["other numbers", "no numbers", "an error"],
)
def test_where_it_gives_something_else_blocks_are_made_and_it_is_said(on_cpus, monkeypatch, kernel, problem):
    monkeypatch.setattr(sys.modules["shardwright.compiler.lower.operators.attention_kernel"], "attention", kernel)
    tensors = heads(torch.bfloat16)
    with pytest.warns(UserWarning, match=f"as it cannot be one kernel: {problem}"):
        attention.attention_with_dropout(*tensors, None, 0.3, True, None, 7, SHAPE, OFFSETS)
    assert attention.one_kernel(torch.device("cpu"), torch.bfloat16, 8) is None


def test_words_below_its_limit_are_those_that_are_kept():
    shape, offsets, local = (4, 5, 6), (1, 2, 0), (2, 3, 6)
    for key, p in ((3, 0.1), (-1, 0.7)):
        first, second, limit = randomness.words_below(key, p)
        position = randomness.positions(shape, offsets, local, torch.device("cpu"))
        expected = randomness.kept(key, p, shape, offsets, local, torch.device("cpu"))
        assert torch.equal((randomness._finalised(position, first, second) < limit).view(local), expected)
    assert randomness.words_below(3, 1.0) is randomness.words_below(3, 0.0) is None


INTERPRETED = """
import torch
from shardwright.compiler.lower.operators import attention

def largest(a, b):
    return float(((a - b).abs().max() / b.abs().max()).detach())

# Triton cannot interpret products of bfloat16.
for heads, shared, queries, keys, width, is_causal, start, dtype, tolerance in (
    (2, 2, 70, 70, 8, False, 0, torch.float32, 2e-6),
    (4, 2, 70, 90, 20, True, 20, torch.float32, 2e-6),
    (2, 1, 5, 130, 16, True, 100, torch.float32, 2e-6),
    (2, 1, 33, 40, 16, False, 7, torch.float16, 2e-3),
):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, queries, width), (2, shared, keys, width), (2, shared, keys, width))
    tensors = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    gradient = torch.randn(sizes[0], generator=generator).to(dtype)
    given = (0.3, is_causal, 0.3, 7, (4, 2 * heads, queries + start + 3, keys), (1, heads, start, 0))
    found = attention.fused_attention(*tensors, *given)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = attention._by_blocks(*wide, None, *given)
    pairs = [(found, expected)]
    pairs += zip(torch.autograd.grad(found, tensors, gradient), torch.autograd.grad(expected, wide, gradient.double()))
    apart = [largest(a.double(), b) for a, b in pairs]
    assert max(apart) <= tolerance, (heads, queries, keys, width, is_causal, dtype, apart)
print("equal")
"""


def test_the_kernel_gives_the_numbers_of_blocks():
    """As on a GPU; triton can interpret its kernels on a CPU."""
    pytest.importorskip("triton", reason="triton comes with torch for GPUs")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=interpreted, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "equal\n", done.stderr
