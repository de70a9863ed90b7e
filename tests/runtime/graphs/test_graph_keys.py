"""What the graph of a step depends on is compared exactly, so that no step runs the graph of another one."""

import enum
import functools
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from rows import slow
from shardwright.compiler.capture.tracing.outside.values import comparable, exactly, same
from shardwright.errors import UsageError
from shardwright.runtime.graphs.captures import Captures
from shardwright.runtime.graphs.equal import same_bits
from shardwright.runtime.programs.batches import problem_with_sample, tensors_of
from shardwright.runtime.programs.inputs import Keys, look_at


class Short(float):
    def __repr__(self):
        return "a number"


class Kind(enum.Enum):
    A, B = 1, 2

    def __repr__(self):
        return "a kind"


OTHER_KIND = enum.Enum("Kind", {"A": 3}, module=Kind.__module__, qualname=Kind.__qualname__)


NAN = float("nan")


# Values of which Python, or their own repr, says that they are equal, and of which a step can make other numbers.
UNLIKE = {
    "a whole number, a flag and a float": (1, True, 1.0, np.float32(1), np.float64(1), np.int64(1), 1 + 0j, "1", b"1"),
    "zeros": (0, 0.0, -0.0, False, complex(0, -0.0), complex(-0.0, 0), np.float32(-0.0), np.float32(0)),
    "numbers that are shown alike": (Short(1), Short(2), 1e-30, 0.1, 0.1 + 2**-56),
    "kinds that are shown alike": (Kind.A, Kind.B, OTHER_KIND.A),
    "nothing": (None, "None", ()),
}
EVERY = [value for values in UNLIKE.values() for value in values]


def with_each(value):
    """Return ``value``, and collections of it."""
    return value, [value], (value,), {"a": value}, {"a": [0, (value,)]}


@pytest.mark.parametrize("values", UNLIKE.values(), ids=UNLIKE)
def test_values_that_differ_are_not_the_same(values):
    for one in values:
        for other in values:
            for a, b in zip(with_each(one), with_each(other), strict=True):
                assert same(comparable(a), comparable(b)) == (one is other), (a, b)
                assert (exactly(a) == exactly(b)) == (one is other), (a, b)


def test_equal_values_are_the_same():
    for one, other in ((NAN, -np.inf + np.inf), (257, int("257")), (Kind.A, Kind.A), ("a b", "a " + "b"), (0.5, 1 / 2)):
        for a, b in zip(with_each(one), with_each(other), strict=True):
            if type(one) is type(other):
                assert same(comparable(a), comparable(b))
                assert exactly(a) == exactly(b)


def key_of(batch, model=None, device=None):
    """Return the key of a training step by both ways in which it is found, which agree."""
    captures = Captures(model or nn.Linear(2, 2), lambda model, batch: batch, {}, device=device)
    key = captures.key("training", batch)
    keys = Keys(captures)
    assert keys.of("training", batch, look_at(batch)) == key == keys.of("training", batch, look_at(batch))
    return key


def test_every_value_of_a_batch_is_in_the_key_of_its_graph():
    x = torch.ones(3, 2)
    batches = [{"x": x, "value": value} for value in EVERY if not isinstance(value, tuple)]
    batches += [{"x": x, value: x} for value in EVERY if not isinstance(value, tuple)]
    batches += [
        x,
        [x],
        (x,),
        {"x": x},
        {"x": [x]},
        {"x": (x,)},
        defaultdict(list, x=x),
        {"y": x},
        [x, x],
        {"x": x.double()},
    ]
    batches += [{"x": x, "y": x.int()}, {"y": x, "x": x.int()}, {"x": x[0]}]
    found = [key_of(batch) for batch in batches]
    assert len(set(found)) == len(batches)


def test_every_state_of_torch_that_a_trace_asks_is_in_the_key():
    x, model = torch.ones(3, 2), nn.Linear(2, 2)
    captures = Captures(model, lambda model, batch: batch, {})
    keys, found = Keys(captures), []

    def note(kind="training"):
        by_both = captures.key(kind, x), keys.of(kind, x, look_at(x))
        assert by_both[0] == by_both[1]
        found.append(by_both[0])

    for kind in ("training", "fine-tuning", "evaluation", "predict"):
        note(kind)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            note()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        note()
        parameter.requires_grad_(True)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        note()
    finally:
        torch.set_default_dtype(before)
    assert len(set(found)) == len(found)
    note()
    assert found[-1] == found[0]


def test_autocast_of_the_device_that_a_model_without_parameters_is_to_run_on():
    x, plain = torch.ones(3, 2), nn.ReLU()
    keys = Keys(Captures(plain, lambda model, batch: batch, {}, device=torch.device("cuda")))
    before = keys.of("training", x, look_at(x))
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert keys.of("training", x, look_at(x)) != before
    finally:
        torch.set_autocast_enabled("cuda", enabled)


class Weight:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Weight"


def test_a_key_that_cannot_be_looked_into_is_refused():
    batch = {Weight(1.0): torch.ones(2)}
    assert look_at(batch) is None
    with pytest.raises(
        UsageError, match="a dict with a Weight as a key, Weight, which cannot be looked into; use words"
    ):
        tensors_of(batch)
    assert "a Weight as a key" in problem_with_sample([0, batch])
    assert problem_with_sample({("user", "buys", 1): torch.ones(2), Kind.A: {2: torch.ones(2)}}) is None


def test_constants_are_compared_by_their_bits():
    zero = torch.zeros(2)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[:, None])
    assert same_bits(zero + NAN, zero + NAN)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factor, self.side = nn.Linear(4, 4), [2], {"zero": (0.0,)}

    def forward(self, x):
        scaled = self.layer((x * self.factor[0]).to(self.layer.weight.dtype))
        side = torch.atan2(torch.full((4,), self.side["zero"][0]), -torch.ones(4))
        return scaled + side + (torch.ones(4) / 3).to(scaled.dtype)


def loss_fn(model, x):
    return model(x).double().square().mean()


def steps_after_changes():
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(0)
    x = torch.full((6, 4), 200, dtype=torch.uint8)  # times 2 it is 144, times 2.0 it is 400
    parallel = sw.parallelize(Net(), loss_fn, x, batch="global", mode="data")

    def compare():
        with torch.no_grad():
            return float(parallel(x)), float(loss_fn(parallel.module, x))

    found = [compare()]
    parallel.module.factor[0] = 2.0
    found.append(compare())
    torch.set_default_dtype(torch.float64)
    found.append(compare())
    return found


def test_a_step_follows_values_that_python_takes_for_equal():
    [found] = run_ranks(1, steps_after_changes)
    for ours, expected in found:
        assert ours == pytest.approx(expected, rel=1e-12)
    assert len({expected for _, expected in found}) == len(found)


class Scaled:
    """A loss function that is an object, or has a method that is one."""

    def __init__(self):
        self.scale = 1.0

    def __call__(self, model, x, kept=None):
        return model(x).float().sum() * (kept or self).scale, model(x) * self.scale

    def outputs(self, model, x):
        return model(x).float().sum() * self.scale


def after_a_change(of):
    """How much larger the loss is, and what is predicted, in each precision, once the scale is."""
    sw.init()
    found = []
    for precision in (None, "bf16"):
        scaled, x = Scaled(), torch.ones(2, 4)
        loss_fn = {
            "object": scaled,
            "method": scaled.__call__,
            "argument": functools.partial(Scaled.__call__, scaled, kept=scaled),
        }[of]
        options = {"mode": "single", "precision": precision, "predict_fn": scaled.outputs}
        parallel = sw.parallelize(nn.Linear(4, 4), loss_fn, x, **options)
        before = parallel(x)[0], parallel.predict(x)
        scaled.scale = 3.0
        after = parallel(x)[0], parallel.predict(x)
        found += [float(new / old) for new, old in zip(after, before, strict=True)]
    return found


@pytest.mark.parametrize("of", ["argument", *slow("object", "method")])
def test_loss_functions_that_we_wrap_are_followed_as_others(of):
    [found] = run_ranks(1, after_a_change, of)
    assert found == pytest.approx([3.0] * 4, rel=1e-3)
