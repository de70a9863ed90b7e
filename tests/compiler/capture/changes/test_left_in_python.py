"""What a step leaves in Python for the next one: refused where it is a tensor that is read, told of where it is not."""

import collections
import copy
import functools
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from rows import brief
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.tracing.frozen import FrozenWarning
from shardwright.compiler.capture.tracing.outside.entries import inside
from shardwright.compiler.capture.tracing.outside.values import MOST_LEAVES, NOT_PLAIN
from shardwright.errors import CaptureError

pytestmark = pytest.mark.usefixtures("float64")
state = {"h": torch.ones(3)}
latest = None
drawn, numbered, counters = random.Random(0), itertools.count(), {"steps": 0}


class Settings:
    def __init__(self):
        self.steps, self.kind = 0, None


class Slotted:
    __slots__ = ("mean", "newest")


class Keeps(nn.Module):
    shared = 0

    def __init__(self, step):
        super().__init__()
        self.layer, self.step = nn.Linear(3, 3), step
        self.hidden, self.cache, self.memory = (torch.zeros(2, 3), torch.zeros(2, 3)), {}, []
        self.last, self.settings, self.numbers = (
            collections.deque([torch.ones(3)], maxlen=1),
            Settings(),
            list(range(2000)),
        )
        self.first, self.table, self.slotted, self.counted = None, torch.ones(3), Slotted(), 0
        self.generator, self.counts = np.random.default_rng(0), np.zeros(2)
        self.narrow = torch.arange(3, dtype=torch.float16)
        self.register_buffer("average", None)
        self.fine = torch.rand(3)
        self.register_buffer("frequencies", torch.arange(3.0, dtype=torch.float32))
        self.register_buffer("seen", torch.zeros(3))
        self.frozen, self.norm = nn.Parameter(torch.ones(3), requires_grad=False), nn.BatchNorm1d(3)
        self.codebook = nn.Parameter(torch.ones(3))

    @functools.cached_property
    def turned(self):
        return self.frequencies.cos()

    @functools.lru_cache  # noqa: B019
    def scaled(self):
        return self.frequencies * 2

    def forward(self, x):
        return self.step(self, self.layer(x), x)


def a_pair(model, y, x):
    hidden, cell = model.hidden
    model.hidden = (y.detach(), cell + 1)
    return y + hidden


def an_entry_of_a_dictionary(model, y, x):
    y = y + model.cache.get("x", 0)
    model.cache["x"] = x
    return y


def an_entry_of_a_list(model, y, x):
    model.memory.append(x.detach())
    return y + torch.stack(model.memory).mean(0)


def what_was_none(model, y, x):
    if model.first is None:
        model.first = x.mean()
    return y * model.first


def what_was_not_there(model, y, x):
    if not hasattr(model, "mean"):
        model.register_buffer("mean", x.mean())
    return y * model.mean


def a_buffer_that_was_none(model, y, x):
    model.average = x.mean(0) if model.average is None else 0.9 * model.average + x.mean(0)
    return y * model.average


def random_numbers(model, y, x):
    if model.first is None:
        model.first = torch.rand(3)
    return y * model.first


def a_parameter(model, y, x):
    y = y * model.codebook
    model.codebook = nn.Parameter(0.9 * model.codebook.detach() + x.mean(0))
    return y


def made_of_a_buffer_that_is_written_into(model, y, x):
    if model.first is None:
        model.first = (model.frequencies * model.seen).cos()
    model.seen.add_(1)
    return y * model.first


def made_of_running_statistics(model, y, x):
    if model.first is None:
        model.first = model.norm.running_var.rsqrt()
    return model.norm(y) * model.first


def made_of_a_trained_parameter(model, y, x):
    if model.first is None:
        model.first = model.frozen * model.codebook.detach() * model.frequencies
    return y * model.first


def written_from_the_batch_into_what_is_of_buffers(model, y, x):
    if model.first is None:
        first = model.frequencies.clone()
        first += x.mean(0)
        model.first = first * 2
    return y * model.first


def of_itself(model, y, x):
    model.table = 0.9 * model.table * model.frequencies
    return y * model.table


def of_an_object_with_slots(model, y, x):
    y = y * getattr(model.slotted, "mean", 1.0)
    model.slotted.mean = x.mean()
    return y


def a_variable(model, y, x):
    y = y * state["h"]
    state["h"] = x.mean(0)
    return y


REFUSED = {
    a_pair: r"model.hidden is read by the step, at .*, and holds another tensor at its end, model.hidden.0: .*\n"
    "Keep each tensor that the next step reads in a buffer, .*set self.hidden before it is read.",
    an_entry_of_a_dictionary: "model.cache.x is not there when the step begins, which looks into model.cache, at ",
    an_entry_of_a_list: r"(?s)model.memory.0 is not there .* by self.memory = \[\] in place of self.memory.clear\(\)",
    what_was_none: r"model.first is None when the step reads it, at .*, and is then set to a tensor, at .*\n"
    r"Keep it in a buffer that has its shape from the start: self.register_buffer\('first', ...\)",
    what_was_not_there: "model.mean is not there when the step reads it, at .*, and is then set to a tensor",
    a_buffer_that_was_none: "model.average is None when the step reads it, at .*, and is then set to a tensor",
    random_numbers: "model.first is None when the step reads it",
    a_parameter: "the parameter codebook is set while the model runs, at .*\nParameters are changed by the optimizer",
    made_of_a_buffer_that_is_written_into: "model.first is None when the step reads it",
    made_of_running_statistics: "model.first is None when the step reads it",
    made_of_a_trained_parameter: "model.first is None when the step reads it",
    written_from_the_batch_into_what_is_of_buffers: "model.first is None when the step reads it",
    of_itself: "model.table is read by the step and then set to another tensor",
    of_an_object_with_slots: "model.slotted.mean is not there when the step begins, which looks into model.slotted",
    a_variable: "state.h, a variable of .*, is read by the step, which then puts another tensor there: ",
}


def loss_of(model, x):
    return model(x).sum()


class Normalized:
    """A loss with state of its own, as trainers have them."""

    def __init__(self):
        self.average = torch.ones(())

    def of(self, model, x):
        self.average = 0.9 * self.average + model(x).detach().mean()
        return model(x).sum() / self.average


def of_a_method():
    return nn.Linear(3, 3), Normalized().of, "self.average, which the loss function closes over, is read by the step"


def of_a_module_beside_that_keeps_statistics():
    beside = nn.BatchNorm1d(3)

    def loss(model, x):
        return (model(x) - beside(x)).sum()

    return nn.Linear(3, 3), loss, r"beside.*, is changed in place, at .*\nIt does not belong to the model, .*eval\(\)"


def of_an_attribute_of_a_function():
    def loss(model, x):
        loss.mean = 0.9 * loss.mean + model(x).mean()
        return loss.mean

    loss.mean = torch.ones(())
    return nn.Linear(3, 3), loss, "mean, which the loss function closes over, is read by the step"


def of_what_is_given_first():
    def loss(kept, model, x):
        kept[0] = kept[0] + model(x).detach().mean()
        return model(x).sum() * kept[0]

    return (
        nn.Linear(3, 3),
        functools.partial(loss, [torch.ones(())]),
        "argument 0.0, which the loss function closes over",
    )


def of_a_hook():
    model, held = nn.Linear(3, 3), {"x": torch.zeros(3)}

    def hook(module, args, result):
        result = result + held["x"]
        held["x"] = args[0].mean(0)
        return result

    model.register_forward_hook(hook)
    return model, loss_of, r"model._forward_hooks.\d+.held.x is read by the step"


def of_a_function_that_keeps():
    class Cached(nn.Linear):
        @functools.lru_cache  # noqa: B019
        def scale(self):
            return self.weight.detach().mean()

        def forward(self, x):
            return super().forward(x) * self.scale()

    model = Cached(3, 3)
    model(torch.ones(2, 3))  # which the capture finds kept
    return model, loss_of, "model.scale.1 is not there when the step begins"


def of_requires_grad():
    def loss(model, x):
        x = model(x)
        model.bias.requires_grad_(requires_grad=False)
        x = model(x)
        model.bias.requires_grad_(True)
        return x.sum()

    return (
        nn.Linear(3, 3),
        loss,
        "requires_grad of a parameter is set while the model is captured, at .*\nSet it outside",
    )


BESIDE = [
    of_a_method, of_a_module_beside_that_keeps_statistics,
    of_an_attribute_of_a_function, of_what_is_given_first, of_a_hook, of_a_function_that_keeps, of_requires_grad,
]  # fmt: skip


@pytest.mark.parametrize(
    "made",
    BESIDE,
)  # fmt: skip
def test_state_beside_the_model_is_refused(made):
    model, loss, message = made()
    with pytest.raises(CaptureError, match=message):
        capture(model, loss, torch.ones(2, 3))


@pytest.mark.parametrize(
    "step",
    brief(
        REFUSED, a_pair, an_entry_of_a_dictionary, an_entry_of_a_list, what_was_none, what_was_not_there, a_parameter,
        random_numbers, made_of_running_statistics, a_variable,
    ),
)  # fmt: skip
def test_a_tensor_that_the_next_step_would_read_is_refused(step):
    kept = state["h"]
    with pytest.raises(CaptureError, match=REFUSED[step]):
        capture(Keeps(step), loss_of, torch.ones(2, 3))
    assert state["h"] is kept


def made_when_it_is_first_needed(model, y, x):
    if model.first is None:
        model.first = torch.triu(torch.ones(3, 3))
        model.register_buffer("ones", torch.tensor([1.0, 2.0, 3.0]))
    return y @ model.first * model.ones


def made_of_what_does_not_change(model, y, x):
    if model.first is None:
        model.first = torch.outer(torch.arange(3.0), model.frequencies).cos() * model.frozen
        model.cache["sin"] = model.frequencies.sin()
    model.seen.add_(1)
    return y @ model.first * model.cache["sin"] * model.turned * model.scaled()


def brought_to_a_device(model, y, x):
    model.table = model.table.to(x.device)
    return y * model.table


def brought_to_a_dtype(model, y, x):
    model.table = model.table.to(x.dtype)
    model.narrow = model.narrow.double().type_as(x)
    model.frequencies = model.frequencies.to(torch.float64)
    model.memory, model.settings.kind, model.counted = list(model.memory), model.settings.kind, model.counted + 0
    return y * model.table + model.narrow * model.frequencies


def made_anew(model, y, x):
    model.memory = [y]
    model.memory.append(x)
    return sum(model.memory)


def written_before_it_is_read(model, y, x):
    model.last[0] = y
    return x + model.last[0]


def emptied_at_the_end(model, y, x):
    model.memory.append(y)
    y = x + sum(model.memory)
    model.memory.clear()
    return y


def decided_when_it_is_first_needed(model, y, x):
    model.settings.kind = model.settings.kind or ("floating" if x.is_floating_point() else "whole")
    return y


NO_STATE = [
    made_when_it_is_first_needed, made_of_what_does_not_change, brought_to_a_device, brought_to_a_dtype,
    made_anew, emptied_at_the_end,
    written_before_it_is_read,
    decided_when_it_is_first_needed,
]  # fmt: skip


@pytest.mark.parametrize("step", brief(NO_STATE, made_of_what_does_not_change, brought_to_a_dtype, emptied_at_the_end))
def test_what_each_step_finds_as_it_was_is_no_state(step):
    captured = capture(Keeps(step), loss_of, torch.ones(2, 3))
    assert "ones" not in {value.label for value in captured.of_kind("buffer")}


def counts(model, y, x):
    model.settings.steps += 1
    model.numbers.append(1)
    model.counts[0] += 1
    Keeps.shared += 1
    model.first = x
    model.last[0] = y.detach()
    model.counted += 1
    next(numbered)
    return y


TOLD = {
    "model.settings is changed while the model runs, at ",
    "model.numbers is changed while the model runs, at ",
    "model.counts is changed while the model runs, at ",
    f"numbered, a variable of {__name__}, is changed by the loss function",
    "model.counted is set while the model runs, at ",
    "model.shared is changed while the model runs",
    "model.first is set to a tensor while the model runs, at ",
    "model.last.0 is set to a tensor while the model runs, which the step does not read then",
}


def test_what_python_counts_is_told():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FrozenWarning)
        capture(Keeps(counts), loss_of, torch.ones(2, 3))
    texts = [str(warning.message) for warning in said]
    assert len(texts) == len(TOLD)
    assert all(any(text.startswith(begin) for text in texts) for begin in TOLD), texts


def a_number(model, y, x):
    model.counted += 1
    return y * model.counted


def a_flag(model, y, x):
    first, model.slotted.mean = not getattr(model.slotted, "mean", False), True
    return y * 2 if first else y


def a_word(model, y, x):
    y = y.relu() if model.settings.kind else y
    model.settings.kind = "second"
    return y


def a_list(model, y, x):
    model.numbers.append(len(model.numbers))
    return y * sum(model.numbers)


def an_array(model, y, x):
    model.counts += 1
    return y * float(model.counts[0])


def an_iterator(model, y, x):
    return y * next(numbered)


def a_class(model, y, x):
    Keeps.shared += 1
    return y[:, : 1 + Keeps.shared % 3]


def a_variable_of_the_loss(model, y, x):
    counters["steps"] += 1
    return y if counters["steps"] < 4 else y.detach()


def a_warm_up(model, y, x):
    model.counted += 1
    return y * 2 if model.counted > 1000 else y


def what_fails_later(model, y, x):
    model.counted += 1
    return y * {1: 1.0}[model.counted]


def a_number_in_a_buffer(model, y, x):
    model.counted += 1
    model.seen += model.counted
    return y


COMPUTED = {
    a_number: "model.counted is changed by the step from 0 to 1, at .*self.register_buffer\\('counted'",
    a_flag: "model.slotted.mean is changed by the step",
    a_word: "model.settings.kind is changed by the step from None to 'second'",
    a_list: "model.numbers.* is changed by the step",
    an_array: "model.counts is changed by the step, at ",
    an_iterator: f"numbered, a variable of {__name__}, is changed by the step",
    a_class: "model.shared is changed by the step from 0 to 1",
    a_variable_of_the_loss: f"counters.steps, a variable of {__name__}, is changed by the step from 0 to 1",
    what_fails_later: "model.counted is changed by the step",
    a_warm_up: "model.counted is changed by the step from 0 to 1",
    a_number_in_a_buffer: "model.counted is changed by the step from 0 to 1",
}


@pytest.mark.parametrize("step", brief(COMPUTED, a_number, a_word, an_iterator, a_class, what_fails_later, a_warm_up))
def test_a_value_that_a_later_step_computes_with_is_refused(step):
    with pytest.raises(CaptureError, match=f"(?s){COMPUTED[step]}.*pass the value in with the batch"):
        capture(Keeps(step), loss_of, torch.ones(2, 3))
    assert (Keeps.shared, counters) == (0, {"steps": 0})


def used_before_it_is_cast(model, y, x):
    y = y * model.narrow
    model.narrow = model.narrow.to(torch.float32)
    return y


def rounded_by_a_cast(model, y, x):
    model.fine = model.fine.to(torch.bfloat16)
    return y * model.fine


@pytest.mark.parametrize("step", [used_before_it_is_cast, rounded_by_a_cast])
def test_a_cast_that_leaves_other_numbers_is_refused(step):
    with pytest.raises(CaptureError, match="is read by the step and then set to another tensor, at "):
        capture(Keeps(step), loss_of, torch.ones(2, 3))


DRAWN = {
    lambda model, y, x: y * random.random(): "numbers of random are drawn while the model runs, at ",
    lambda model, y, x: y if np.random.rand() < 0.01 else -y: "numbers of numpy.random are drawn while",
    lambda model, y, x: y * np.random.default_rng().random(): "numbers of numpy.random are drawn while",
    lambda model, y, x: y * drawn.random(): f"numbers are drawn of drawn, a variable of {__name__}, while",
    lambda model, y, x: y * model.generator.random(): "numbers are drawn of model.generator while the model runs, at ",
}


@pytest.mark.parametrize("step", DRAWN)
def test_random_numbers_of_python_are_refused(step):
    before = random.getstate(), np.random.get_state()[1].tolist(), drawn.getstate()
    with pytest.raises(CaptureError, match=f"{DRAWN[step]}.*\nDraw with torch"):
        capture(Keeps(step), loss_of, torch.ones(2, 3))
    assert (random.getstate(), np.random.get_state()[1].tolist(), drawn.getstate()) == before


def test_variables_hold_no_tensors_of_the_trace():
    found, last = [], None

    def loss(model, x):
        nonlocal last
        last = model(x)
        found.append(last)
        return last.sum()

    with pytest.warns(FrozenWarning, match="is changed by the loss function"):
        capture(nn.Linear(3, 3), loss, torch.ones(2, 3))
    assert (found, last) == ([], None)


class Wraps(nn.Module):
    """Finds in the module that it wraps what it does not have, as adapters do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x) * self.table * self.settings.steps


def test_what_a_wrapper_finds_elsewhere_is_not_remembered_as_missing():
    captured = capture(Wraps(Keeps(lambda model, y, x: y)), loss_of, torch.ones(2, 3))
    assert not {"model.table", "model.settings"} & {str(place) for place in captured.frozen}
    assert repr(NOT_PLAIN) == "an object"


class Strict(collections.OrderedDict):
    def update(self, *args):
        raise TypeError("made once")


def test_variables_of_any_class_are_as_they_were():
    counted, strict, kept = collections.Counter(a=2, b=3), Strict(a=1), functools.lru_cache(lambda: object())
    slotted = Slotted()
    empty, teacher = Slotted(), nn.Linear(3, 3)
    held, slotted.mean = [counted, strict, kept, slotted, empty], 1
    first = kept()

    def loss(model, x):
        held.append(model(x))
        strict["b"] = slotted.mean = slotted.newest = empty.newest = teacher.out = x
        teacher.register_buffer("seen", x)
        Keeps.newest = x
        globals()["latest"] = x
        return held[-1].sum()

    with pytest.warns(FrozenWarning):
        capture(Keeps(lambda model, y, x: y * (getattr(Keeps, "newest", 0) is not latest)), loss, torch.ones(2, 3))
    assert (counted, list(strict.items()), len(held), kept()) == ({"a": 2, "b": 3}, [("a", 1)], 5, first)
    assert (slotted.mean, hasattr(slotted, "newest"), hasattr(empty, "newest")) == (1, False, False)
    assert not any(hasattr(teacher, name) for name in ("out", "seen"))
    assert not hasattr(Keeps, "newest")
    assert latest is None


def test_further_steps_change_nothing_beside_the_model():
    held = [np.zeros(2), set(), list(range(100)), {}]
    before = copy.deepcopy(held)

    def counts(array, names, counted, kept):
        array += 1
        names.add(len(names))
        counted.append(1)

    def loss(model, x):
        held[-1]["x"] = model(x)
        counts(*held)
        return held[-1]["x"].sum()

    with pytest.warns(FrozenWarning, match="held, which the loss function closes over, is changed"):
        capture(nn.Linear(3, 3), loss, torch.ones(2, 3))
    assert (held[0].tolist(), held[1:]) == (before[0].tolist(), before[1:])


def test_a_capture_that_is_interrupted_leaves_no_tensors_of_the_trace():
    held, calls = {}, []

    def loss(model, x):
        held["x"] = model(x)
        calls.append(0)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return held["x"].sum()

    with pytest.raises(KeyboardInterrupt):
        capture(nn.Linear(3, 3), loss, torch.ones(2, 3))
    assert not held


def test_objects_of_many_kinds_may_stand_beside_a_step():
    with torch.inference_mode():
        inference = torch.ones(3)
    held = [random.SystemRandom(), inference, np.array([{}, [1], np.ones(2)], dtype=object), np.array([np.nan])]

    def loss(model, x):
        return model(x).sum() * len(held)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FrozenWarning)
        capture(nn.Linear(3, 3), loss, torch.ones(2, 3))


def test_what_is_looked_into_has_a_bound_and_short_names():
    large = [[[len] * 100 for _ in range(100)] for _ in range(3)]
    assert len(list(inside(large, {}))) == MOST_LEAVES
    keyed = {torch.ones(3): 0, ("a", 1): 1, "b": 2}
    first, *others = dict(inside(keyed, {}))
    assert first.startswith("Tensor@")
    assert others == ["('a', 1)", "b"]
