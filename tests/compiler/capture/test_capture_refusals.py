"""What cannot be captured is refused with the user's line and the remedy."""

import importlib
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from graph_models import Perceptron, squares
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from shardwright.compiler.capture.capture import capture
from shardwright.errors import CaptureError

BATCH = (torch.ones(4, 8), torch.ones(4, 4))
other = Perceptron()


def item(model, batch):
    return model(batch[0]).sum() * batch[1].sum().item()


def number(model, batch):
    return model(batch[0]).sum() * float(batch[1].max())


def array(model, batch):
    return model(batch[0]).sum() * batch[1].numpy()[0, 0]


def branch(model, batch):
    out = model(batch[0])
    if out.sum() > 0:
        out = out * 2
    return out.sum()


def selection(model, batch):
    out = model(batch[0])
    return out[out > 0].sum()


def positions(model, batch):
    return model(batch[0])[torch.nonzero(batch[1])[:, 0]].sum()


def distinct(model, batch):
    return model(batch[0]).sum() * torch.unique(batch[1]).sum()


def rolled(model, batch):
    return model(batch[0]).roll(batch[1][0, 0].long(), 0).square().sum()


def narrowed(model, batch):
    return model(batch[0]).narrow(0, batch[1][0, 0].long(), 1).sum()


def spaced(model, batch):
    return model(batch[0]).sum() * torch.linspace(0, 1, batch[1][0, 0].long()).sum()


def counted(model, batch):
    return model(batch[0]).sum() / torch.bincount(batch[1][:, 0].long()).sum()


def classes(model, batch):
    return model(batch[0]).sum() + F.one_hot(batch[1].long()).sum()


def packed(model, batch):
    return pack_padded_sequence(model(batch[0]).unsqueeze(-1), batch[1][:, 0].long() + 3, batch_first=True).data.sum()


def changed_input(model, batch):
    batch[0].mul_(2)
    return model(batch[0]).sum()


def changed_parameter(model, batch):
    with torch.no_grad():
        model.up.weight.mul_(0.9)
    return model(batch[0]).sum()


def changed_without_gradients(model, batch):
    out = model(batch[0])
    with torch.no_grad():
        out.clamp_(min=0)
    return out.sum()


def changed_beside_its_gradient(model, batch):
    out = model(batch[0])
    out.detach().mul_(2)
    return out.sum()


def changed_view_without_gradients(model, batch):
    out = model(batch[0])
    with torch.no_grad():
        out.transpose(0, 1).mul_(2)
    return out.sum()


def changed_data(model, batch):
    out = model(batch[0])
    out.data.mul_(2)
    return out.sum()


def detached(model, batch):
    out = model(batch[0])
    out.detach_()
    return model(batch[0]).sum() + out.sum()


def set_data(model, batch):
    out = model(batch[0])
    out.data = out * 2
    return out.sum()


def backward(model, batch):
    loss = model(batch[0]).sum()
    loss.backward()
    return loss


def other_parameters(model, batch):
    return F.mse_loss(model(batch[0]), other(batch[0]))


def wrong_shapes(model, batch):
    return F.mse_loss(model(batch[0]) @ batch[1].new_ones(3, 2), batch[1])


def typing_error(model, batch):
    return model(batch[0]).nope


def no_gradient(model, batch):
    return model(batch[0]).sum().detach()


def not_a_scalar(model, batch):
    return model(batch[0])


def whole_number(model, batch):
    return batch[0].sum().long()


def nothing(model, batch):
    model(batch[0])


@pytest.mark.parametrize(
    ("loss_fn", "what", "line", "remedy"),
    [
        (item, r"item\(\) needs the value", "batch[1].sum().item()", r"return it beside the loss"),
        (number, r"float\(\) needs the value", "float(batch[1].max())", "Keep it a tensor"),
        (array, r"numpy\(\) needs the value", "batch[1].numpy()[0, 0]", "Keep it a tensor"),
        (branch, "a Python branch depends on the value", "if out.sum() > 0:", r"torch\.where"),
        (selection, "the shape that an index by a mask", "return out[out > 0].sum()", "Keep the shape fixed"),
        (positions, "the shape that nonzero gives", "torch.nonzero(batch[1])", r"count with mask\.sum\(\).* weight 0"),
        (distinct, "the shape that unique gives", "torch.unique(batch[1])", "pass it in the batch"),
        (rolled, "would need a number out of a tensor", ".roll(batch[1][0, 0].long(), 0)", "index_select"),
        (narrowed, "depends on the values of a tensor", ".narrow(0, batch[1][0, 0].long(), 1)", "Keep shapes fixed"),
        (spaced, "depends on the values of a tensor", "torch.linspace(0, 1", "Keep shapes fixed"),
        (counted, "the shape that bincount", "torch.bincount(batch", r"F\.one_hot\(x, n\)\.sum\(0\)"),
        (classes, "the shape that one_hot", "F.one_hot(batch[1].long())", r"F\.one_hot\(x, n\)"),
        (packed, "the shape that pack_padded_sequence", "pack_padded_sequence(model", r"lengths - 1\]"),
        (changed_input, "the batch is changed in place", "batch[0].mul_(2)", r"x = x\.clone\(\)"),
        (changed_parameter, r"parameter up\.weight is changed in place", "model.up.weight.mul_(0.9)", "in a buffer"),
        (changed_without_gradients, "behind the back", "out.clamp_(min=0)", r"x = x \+ \(new - x\)\.detach\(\)"),
        (changed_beside_its_gradient, "behind the back", "out.detach().mul_(2)", "the old gradient"),
        (changed_view_without_gradients, "behind the back", "out.transpose(0, 1).mul_(2)", "the old gradient"),
        (changed_data, "behind the back", "out.data.mul_(2)", "the old gradient"),
        (detached, r"detach_\(\) of a tensor that has a gradient", "out.detach_()", r"x = x\.detach\(\)"),
        (set_data, r"x\.data of a tensor is set", "out.data = out * 2", r"buffer\.copy_"),
        (backward, r"backward\(\) is called inside", "loss.backward()", "Return the loss"),
        (other_parameters, r"a parameter of shape \[16, 8\] that is not", "self.up(x)", "submodules of it"),
        (wrong_shapes, "cannot be captured", "batch[1].new_ones(3, 2)", "RuntimeError"),
        (typing_error, "cannot be captured", "model(batch[0]).nope", "AttributeError: .*nope"),
    ],
)  # fmt: skip
def test_the_line_and_the_remedy_are_named(loss_fn, what, line, remedy, capfd):
    with pytest.raises(CaptureError, match=what) as error:
        capture(Perceptron(), loss_fn, BATCH)
    text = str(error.value)
    assert line in text
    assert f" in {'forward' if loss_fn is other_parameters else loss_fn.__name__}: " in text
    assert re.search(remedy, text)
    assert capfd.readouterr() == ("", "")


LOOKING = """
from torch import nn

class Looking(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""


def test_a_line_of_an_installed_package_gets_other_advice(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "layers_of_others.py").write_text(LOOKING)
    monkeypatch.syspath_prepend(folder)
    layers_of_others = importlib.import_module("layers_of_others")
    with pytest.raises(CaptureError) as error:
        capture(nn.Sequential(nn.Linear(8, 4), layers_of_others.Looking()), squares, BATCH)
    what, whose, advice = str(error.value).splitlines()
    assert what.startswith(f"a Python branch depends on the value of a tensor, at {folder}/layers_of_others.py:6 in ")
    assert whose.startswith("The line is one of layers_of_others, in 1 of the model, called at graph_models.py:")
    assert "mode='data'" in advice


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (no_gradient, "does not depend on any parameter that requires a gradient"),
        (not_a_scalar, r"must be one floating-point number, got float32\[4, 4\]; reduce it with \.mean\(\)"),
        (whole_number, r"must be one floating-point number, got int64\[\]"),
        (nothing, r"must return the loss, or \(loss, anything else worth having\), got NoneType"),
    ],
)
def test_the_loss_must_be_one(loss_fn, message):
    with pytest.raises(CaptureError, match=message):
        capture(Perceptron(), loss_fn, BATCH)


def test_predict_needs_something_beside_the_loss():
    with pytest.raises(CaptureError, match=r"returns the loss alone\nReturn \(loss, outputs\) from it"):
        capture(Perceptron(), squares, BATCH, "predict")


def test_lazy_parameters():
    with pytest.raises(CaptureError, match="weight is not initialised; run the model on one batch"):
        capture(nn.LazyLinear(4), squares, BATCH)


class Uncopyable(Perceptron):
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


def test_models_that_cannot_be_copied():
    with pytest.raises(CaptureError, match=r"cannot be copied.*no copies\nGive the class of the module that fails"):
        capture(Uncopyable(), squares, BATCH)


def test_attributes_that_cannot_be_copied_are_shared():
    model = Perceptron()
    model.lock, model.held = threading.Lock(), {"numbers": (each for each in range(3)), "locks": [threading.Lock()]}
    assert capture(model, squares, BATCH).nodes


CHANGES = {
    "seen": (lambda model: model.seen.add_(1), r"by self.register_buffer\('seen', ...\) in __init__"),
    "kept.0": (lambda model: model.kept[0][1:].fill_(2), "by self.register_buffer in __init__"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_no_buffers_are_not_written(name):
    change, advice = CHANGES[name]

    class Counting(Perceptron):
        def __init__(self):
            super().__init__()
            self.seen, self.kept = torch.zeros(()), [torch.zeros(2)]

        def forward(self, x):
            change(self)
            return super().forward(x)

    model = Counting()
    with pytest.raises(CaptureError, match=rf"^model.{name} is changed in place, at .*: .*\n.*{advice}"):
        capture(model, squares, BATCH)
    assert model.seen + model.kept[0].sum() == 0


def test_a_failed_capture_changes_nothing():
    model = Perceptron()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError):
        capture(model, changed_parameter, BATCH)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    capture(model, squares, BATCH)


def test_another_dtype_than_the_trace_sees_is_refused():
    def loss_fn(model, x):
        zeros = torch.zeros(1, 3, 5, device=x.device)
        with torch.autocast("cpu", torch.bfloat16):
            rows, *_ = torch.lstm(x, (zeros, zeros), list(model.parameters()), True, 1, 0.0, True, False, True)
        return rows.float().square().mean()

    message = (
        "gives another dtype than torch's trace sees, at .*:\\d+ in loss_fn: "
        r"rows, \*_ = torch.lstm(.|\n)*Got: torch.bfloat16\nCall the module"
    )
    with pytest.raises(CaptureError, match=message):
        capture(nn.LSTM(4, 5, batch_first=True), loss_fn, torch.ones(3, 6, 4))
