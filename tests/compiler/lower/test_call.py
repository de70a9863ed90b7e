"""A call of a local program is a value, and its source gives exactly that."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.capture.tracing.literals import literal
from shardwright.compiler.lower.call import COMM, DEVICE, Call, Name, random_key
from shardwright.errors import LoweringError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text()
    | st.sampled_from([torch.float16, torch.strided, torch.channels_last, -0.0, math.inf, slice(1, None)]),
    lambda values: st.lists(values) | st.lists(values).map(tuple) | st.dictionaries(st.text(), values),
)  # fmt: skip


@settings(max_examples=50)
@given(PLAIN)
def test_an_argument_is_what_its_source_says(value):
    """To the last bit and type: 1, 1.0 and True are others, as a list and a tuple are."""
    call = Call("same", (value,), (("given", value),))
    found, given_too = eval(call.source, {"same": lambda arg, given: (arg, given), "torch": torch})
    assert literal(found) == literal(given_too) == literal(value)
    assert type(found) is type(value)


def test_a_variable_is_renamed_where_it_is_read_and_nowhere_else():
    inner = Call("torch.ops.aten.relu.default", (Name("dim"),))
    how = (Name("x"), {"dim": "dim"})
    call = Call("dim", (Name("dim"), COMM, [Name("dim"), "dim"], inner), (("dim", Name("dim")), ("how", how)))
    assert call.names() == {"dim", "comm", "x"}
    renamed = call.renamed(lambda name: "new" if name == "dim" else name)
    assert renamed.source == ("dim(new, comm, [new, 'dim'], aten.relu.default(new), dim=new, how=(x, {'dim': 'dim'}))")


def test_what_draws_and_what_cannot_be_written():
    assert Call("draws.rand", (random_key(3), [2]), (("device", DEVICE),)).source == (
        "draws.rand(key(3), [2], device=device)"
    )
    assert Call("draws.rand", (random_key(3),)).draws
    assert not Call("draws.rand", ("key(3)",)).draws
    with pytest.raises(LoweringError, match=r"an argument of type object .* cannot be written into a program"):
        Call("f", (object(),)).source  # noqa: B018
