"""Changes of buffers that no operator in place makes, or that an operator does not tell of."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rows import brief, slow
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.compiler.capture.tracing.frozen import FrozenWarning
from shardwright.errors import CaptureError

pytestmark = pytest.mark.usefixtures("float64")


class Keeps(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.each = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("kept", torch.arange(9.0).view(3, 3))
        self.register_buffer("other", torch.ones(3, 3))
        self.plain = torch.ones(3)
        self.again = self.norm
        self.step = step

    def forward(self, x):
        return self.step(self, self.layer(x))


def an_average_is_set(model, x):
    before = model.kept
    model.kept = 0.9 * model.kept + x.mean().detach()
    return x @ model.kept + before.sum()


def two_are_exchanged(model, x):
    model.kept, model.other = model.other, model.kept * 2
    return x @ model.kept


def the_old_one_is_returned(model, x):
    old = model.kept
    model.kept = old.mT + 1
    return x, old


def statistics_alone_are_wanted(model, x):
    model.norm(x), model.each(x.unsqueeze(-1) * torch.arange(4.0))
    return x


def statistics_are_read_around(model, x):
    before = model.each.running_var.clone()
    y = model.each(x.unsqueeze(-1) * torch.arange(4.0))
    return y.square() + (before - model.each.running_var).view(3, 1)


def nothing_is_dropped(model, x):
    same, zero = F.dropout(model.kept, 0.5, False), nn.Dropout(0.0)(model.other)
    model.kept.mul_(2)
    zero.add_(1)
    return x @ same @ model.other


def a_number_fills_a_tensor(model, x):
    model.kept.copy_(x.detach().sum())
    y = torch.zeros(4, 3)
    y[:] = x[:1] * model.kept.sum()
    return y.square(), model.kept


def a_part_is_seen_again(model, x):
    part = torch.unsafe_chunk(model.kept, 3)[0]
    model.kept.mul_(3)
    return x * part


def a_module_has_two_names(model, x):
    return model.again(model.norm(x) * torch.arange(3.0)).square()


EQUAL = [
    a_module_has_two_names,
    an_average_is_set,
    two_are_exchanged,
    the_old_one_is_returned,
    statistics_alone_are_wanted,
    statistics_are_read_around,
    nothing_is_dropped,
    a_number_fills_a_tensor,
    a_part_is_seen_again,
]


def loss_of(model, x):
    result = model(x)
    result, *beside = result if isinstance(result, tuple) else (result,)
    return (result * torch.arange(1.0, result.numel() + 1).view_as(result)).sum(), beside


@pytest.mark.parametrize(
    "step",
    brief(EQUAL, a_module_has_two_names, two_are_exchanged, statistics_are_read_around, a_number_fills_a_tensor),
)
def test_two_steps_equal_plain_pytorch(step):
    model, x = Keeps(step), torch.randn(4, 3)
    captured, plain = capture(model, loss_of, x), copy.deepcopy(model)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for _ in range(2):
        values = evaluate(captured, weights, buffers, [x])
        loss, beside = loss_of(plain, x)
        torch.testing.assert_close(values[captured.loss], loss)
        torch.testing.assert_close([values[name] for name in captured.aux], beside)
        (gradient,) = torch.autograd.grad(values[captured.loss], model.layer.weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, plain.layer.weight)[0])
        new = {captured.values[buffer].label: values[value].detach() for buffer, value in captured.mutations.items()}
        buffers |= new
        torch.testing.assert_close(buffers, dict(plain.named_buffers()))


def two_become_one(model, x):
    model.kept = model.other
    return x


def it_grows(model, x):
    model.kept = torch.cat([model.kept, x.detach()])
    return x


def it_is_no_buffer(model, x):
    model.plain = x.mean(0).detach() + model.plain
    return x


REFUSED = {
    two_become_one: "the buffer kept is set to a tensor, at .*set_buffers.py:.*, and other is the same\nWrite .clone",
    it_grows: r"the buffer kept is float64\[3, 3\] and is set to float64\[7, 3\], at .*\nKeep its shape",
    it_is_no_buffer: r"model.plain is read by the step and then set to another .*\nKeep it in a buffer: ",
}


@pytest.mark.parametrize("step", REFUSED)
def test_what_no_graph_can_keep_is_refused(step):
    with pytest.raises(CaptureError, match=REFUSED[step]):
        capture(Keeps(step), loss_of, torch.ones(4, 3))


def of_a_parameter(model):
    model.register_buffer("seen", model.layer.weight.data[1:])
    return model


def of_a_parameter_that_is_frozen(model):
    model.layer.requires_grad_(False)
    return of_a_parameter(model)


def of_a_buffer(model):
    model.register_buffer("seen", model.kept.view(9)[::2])
    return model


def beside_a_buffer(model):
    both = torch.zeros(3, 6)
    model.kept, model.seen = both[:, ::2], nn.Buffer(both[:, 1::2])
    return model


def changing(model, x):
    model.kept.add_(1)
    return model.norm(x) + x @ model.kept


@pytest.mark.parametrize("sharing", [of_a_parameter, *slow(of_a_buffer)])
def test_tensors_that_share_memory_with_one_that_changes_are_refused(sharing):
    name = {of_a_parameter: "layer.weight", of_a_buffer: "kept"}[sharing]
    with pytest.raises(CaptureError, match=f"{name} of the model changes, and seen looks into the same memory"):
        capture(sharing(Keeps(changing)), loss_of, torch.ones(4, 3))


@pytest.mark.parametrize("sharing", [*slow(of_a_parameter_that_is_frozen), beside_a_buffer])
def test_tensors_that_lie_beside_each_other_are_not(sharing):
    capture(sharing(Keeps(changing)), loss_of, torch.ones(4, 3))


def test_a_tensor_that_is_only_set_is_forgotten():
    def noting(model, x):
        model.last = x
        return x * model.plain

    with pytest.warns(FrozenWarning, match="model.last is set to a tensor .*, at .* return it beside"):
        captured = capture(Keeps(noting), loss_of, torch.ones(4, 3))
    assert [str(place) for place in captured.outside.values()] == ["model.plain"]


class SetsBeforeItReads(nn.Module):
    """Sets a tensor in each call, and reads it then: nothing of it is carried to the next call."""

    def __init__(self):
        super().__init__()
        self.layer, self.scaled, self.table = nn.Linear(3, 3), torch.zeros(3), torch.ones(3)

    def forward(self, x):
        self.scaled = self.layer.weight[0] * 2
        self.table = self.table.to(x.device) if self.table.device != x.device else self.table
        return self.layer(x) * self.scaled + self.table


def test_a_tensor_that_each_call_sets_before_it_is_read_is_the_one_of_the_call():
    model, x = nn.Sequential(*[SetsBeforeItReads()] * 2), torch.randn(2, 3)
    captured = capture(model, lambda model, x: model(x).sum(), x)
    values = evaluate(captured, dict(model.named_parameters()), {}, [x])
    torch.testing.assert_close(values[captured.loss], model(x).sum())
