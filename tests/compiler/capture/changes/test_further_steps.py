"""What a step leaves in Python is no state where no further step computes from it, and is refused where one does."""

import collections
import copy
import types
import warnings

import pytest
import torch
from torch import nn

from rows import brief
from shardwright.compiler.capture.tracing.frozen import FrozenWarning
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import CaptureError
from whole import plan_of, run, same

pytestmark = pytest.mark.usefixtures("float64")
latest, flags = {}, {}


@pytest.fixture(autouse=True)
def cleared():
    yield
    latest.clear()
    flags.clear()


class Net(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.last, self.step = nn.Linear(4, 4), nn.Linear(4, 4), step
        self.features, self.outputs, self.recent = {}, [], collections.deque(maxlen=3)
        self.context = types.SimpleNamespace(mask=None)
        self.mask, self.hidden, self.older, self.calls = None, None, None, 0
        self.one, self.other = torch.zeros(6, 4), torch.ones(6, 4)
        self.register_buffer("table", torch.arange(8.0).view(2, 4))

    def forward(self, x):
        return self.step(self, self.first(x), x)


class Hooked(Net):
    def __init__(self, step):
        super().__init__(step)
        self.first.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.features["middle"] = output


def loss_of(model, x):
    return model(x).square().mean()


def what_a_hook_keeps():
    return Hooked(lambda m, y, x: m.last(y)), lambda m, x: loss_of(m, x) + m.features["middle"].abs().mean()


def an_attribute_of_an_object():
    def step(m, y, x):
        m.context.mask = x.gt(0).to(x.dtype)
        return m.last(y) * m.context.mask

    return Net(step), loss_of


def losses_in_a_list():
    def loss(m, x):
        m.outputs.append(loss_of(m, x))
        return m.outputs[-1] * 2

    return Net(lambda m, y, x: m.last(y)), loss


def the_losses_of_late():
    def loss(m, x):
        found = loss_of(m, x)
        m.recent.append(found.detach())
        return found

    return Net(lambda m, y, x: m.last(y)), loss


def a_list_that_is_emptied_first():
    def step(m, y, x):
        m.outputs.clear()
        m.outputs += [y.softmax(-1), m.last(y)]
        return sum(m.outputs)

    return Net(step), lambda m, x: loss_of(m, x) + m.outputs[0].log().mean()


def beside_a_mask_that_is_made_once():
    def step(m, y, x):
        if m.mask is None:
            m.mask = torch.triu(torch.tensor([[0.5, 2.0]] * 4).repeat(1, 2))
        m.features["y"] = y @ m.mask
        return m.last(m.features["y"])

    return Net(step), lambda m, x: loss_of(m, x) + m.features["y"].mean()


def what_looks_into_a_parameter():
    model = Net(lambda m, y, x: m.last(y) @ m.turned)

    def keep(module, args):
        module.turned = module.features["weight"] = module.last.weight.t()

    model.turned = None
    model.register_forward_pre_hook(keep)
    return model, lambda m, x: loss_of(m, x) + m.features["weight"].abs().mean()


def by_the_module_that_made_it():
    def step(m, y, x):
        m.features[m.first], m.features[id(m)] = y, x
        return m.last(y)

    return Net(step), lambda m, x: loss_of(m, x) + m.features[m.first].abs().mean()


def a_variable():
    def loss(m, x):
        latest["y"] = m(x)
        return latest["y"].square().mean()

    return Net(lambda m, y, x: m.last(y)), loss


HARMLESS = {
    what_a_hook_keeps: "",
    an_attribute_of_an_object: "",
    losses_in_a_list: "model.outputs gets another tensor at each step, at ",
    the_losses_of_late: "model.recent gets another tensor at each step, at ",
    a_list_that_is_emptied_first: "",
    beside_a_mask_that_is_made_once: "",
    what_looks_into_a_parameter: "",
    by_the_module_that_made_it: "",
    a_variable: f"latest, a variable of {__name__}, is changed by the loss function",
}


def steps_of(value_of, model, batches):
    """Loss and gradients of steps that descend."""
    found = []
    for batch in batches:
        found.append(value_of(batch))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * found[-1][f"gradient of {name}"]
    return found


def plainly(model, loss):
    def value_of(batch):
        model.zero_grad()
        value = loss(model, batch)
        value.backward()
        return {"loss": value.detach()} | {f"gradient of {n}": p.grad for n, p in model.named_parameters()}

    return value_of


@pytest.mark.parametrize(
    "made",
    brief(
        HARMLESS,
        an_attribute_of_an_object,
        losses_in_a_list,
        beside_a_mask_that_is_made_once,
        what_looks_into_a_parameter,
    ),
)
def test_what_a_further_step_does_not_compute_from_is_no_state(made):
    (model, loss), batches = made(), [torch.randn(6, 4) for _ in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FrozenWarning)
        plan = plan_of(model, loss, batches[0], Mesh.of(d=2), "data")
    assert [str(warning.message)[: len(HARMLESS[made])] for warning in said] == [HARMLESS[made]] * bool(HARMLESS[made])
    assert not any((model.features, model.outputs, model.recent))
    assert not latest
    start = copy.deepcopy(model.state_dict())
    ours = steps_of(lambda batch: run(plan, model, batch), model, batches)
    model.load_state_dict(start)
    for found, expected in zip(ours, steps_of(plainly(model, loss), model, batches), strict=True):
        same(found, expected)


def a_branch(m, y, x):
    y = y * 2 if "x" in m.features else y
    m.features["x"] = x
    return m.last(y)


def how_many_there_are(m, y, x):
    m.outputs.append(y.detach())
    return m.last(y) * (2 if len(m.outputs) > 3 else 1)


def what_is_counted(m, y, x):
    m.calls += 1
    y = y + m.features["x"] if m.calls > 3 else y
    m.features["x"] = x
    return m.last(y)


def of_two_steps_before(m, y, x):
    y = y if m.older is None else y + m.older
    m.older, m.hidden = m.hidden, y.detach()
    return m.last(y)


def passed_on(m, y, x):
    y = y + m.other
    m.other, m.one = m.one, y.detach()
    return m.last(y)


def by_module(m, y, x):
    before = m.features.get(m.first, y.detach())
    m.features[m.first] = y.detach()
    return m.last(y) + before


def once_of_all_captures(m, y, x):
    if m.hidden is None and not flags:
        flags["ready"] = True
        m.hidden = x.mean()
    return m.last(y) * (1 if m.hidden is None else m.hidden)


def a_mark(m, y, x):
    if m.hidden is None:
        m.hidden = torch.zeros(4)
        return m.last(y) * 0.1
    return m.last(y)


def written_into_later(m, y, x):
    if m.hidden is None:
        m.hidden = torch.ones(4)
    else:
        m.hidden.mul_(0.5)
    return m.last(y) * m.hidden


def the_next_of_a_table(m, y, x):
    m.hidden = m.table[0] if m.hidden is None else m.table[1]
    return m.last(y) * m.hidden


STATE = {
    a_branch: "features.x is not there",
    how_many_there_are: "outputs.0 is not there",
    what_is_counted: "features.x is not there",
    of_two_steps_before: "hidden is None",
    passed_on: "one is read",
    by_module: "features.Linear@0 is not there",
    once_of_all_captures: "hidden is None",
    a_mark: "hidden is None",
    written_into_later: "hidden is None",
    the_next_of_a_table: "hidden is None",
}


@pytest.mark.parametrize(
    "step", brief(STATE, a_branch, how_many_there_are, once_of_all_captures, a_mark, written_into_later)
)
def test_what_a_further_step_does_otherwise_for_is_refused(step):
    with pytest.raises(CaptureError, match=rf"model\.{STATE[step]} "):
        plan_of(Net(step), loss_of, torch.ones(6, 4), Mesh.of(d=2), "data")


def test_a_hook_that_reads_what_it_has_kept_is_refused():
    held, model = {}, Net(lambda m, y, x: m.last(y))

    def hook(module, args, output):
        output = output + held["x"] if "x" in held else output
        held["x"] = args[0].mean()
        return output

    model.first.register_forward_hook(hook)
    with pytest.raises(CaptureError, match=r"model.first._forward_hooks.\d+.held.x is read by the step"):
        plan_of(model, loss_of, torch.ones(6, 4), Mesh.of(d=2), "data")
    assert not held
