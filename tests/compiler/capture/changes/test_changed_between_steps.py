"""What a script changes of a model between steps, beside its numbers: its mode, hooks, and what its forward reads."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import CaptureError, UsageError

ROWS = 6


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def model_and_batch():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3))
    return model, [torch.randn(ROWS, 4), torch.randint(3, (ROWS,))]


def trained(loss_of, model, change):
    """Losses, and the sums of gradients without the bias that a batch norm takes away again, of four steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        change(step)
        loss = loss_of()
        loss.backward()
        found += [loss.item(), *(float(p.grad.square().sum()) for n, p in model.named_parameters() if n != "0.bias")]
        optimizer.step()
        optimizer.zero_grad()
    return found


def beside_plain(change_of):
    """What the steps give with one device, and with these ranks; ``change_of(model)`` is called before each."""
    sw.init()
    model, batch = model_and_batch()
    plain = copy.deepcopy(model)
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    ours = trained(lambda: parallel(batch), model, change_of(model))
    return ours, trained(lambda: loss_fn(plain, batch), plain, change_of(plain))


def tuned(model):
    return lambda step: model.train(step == 2)


def hooked(model):
    handles = []

    def change(step):
        if step == 1:
            handles.append(model[0].register_forward_hook(lambda module, given, made: made * 1.5))
        if step == 2:
            handles.append(model[3].register_forward_pre_hook(lambda module, given: (given[0] - 1,)))
        if step == 3:
            handles.pop(0).remove()

    return change


@pytest.mark.parametrize("change_of", [tuned, hooked])
def test_steps_are_those_of_one_device(change_of):
    for ours, plain in run_ranks(2, beside_plain, change_of):
        assert ours == pytest.approx(plain, rel=1e-10)


def evaluated_and_tuned():
    sw.init()
    model, batch = model_and_batch()
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    model.eval()
    parallel.evaluate(batch)
    with torch.no_grad():
        parallel(batch)
    before = parallel.random_state()["step"]
    loss = parallel(batch)
    loss.backward()
    reducing = [
        any(instruction.kind == "bucket" for instruction in execution.program.instructions)
        for execution in parallel.executions()
    ]
    return reducing, [before, parallel.random_state()["step"]]


def test_gradients_are_kept_in_evaluation_mode_where_they_may_be_asked_for():
    trained, evaluated, tuned = True, False, True
    for reducing, steps in run_ranks(2, evaluated_and_tuned):
        assert reducing == [trained, evaluated, tuned]
        assert steps == [0, 1]


def hook(module, given, made):
    return made * 2


def programs_of_a_hook_that_comes_and_goes():
    sw.init()
    model, batch = model_and_batch()
    parallel = sw.parallelize(model, loss_fn, batch, "single", batch="global")
    for _ in range(4):
        handle = model[0].register_forward_hook(hook)
        parallel(batch)
        handle.remove()
    return len(parallel.executions())


def test_a_hook_that_comes_and_goes_is_the_same_each_time():
    without, with_it = 1, 1
    assert run_ranks(1, programs_of_a_hook_that_comes_and_goes) == [without + with_it]


def hooks_that_are_refused():
    world = sw.init()
    model, batch = model_and_batch()
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    handle = model[0].register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(CaptureError) as backward:
        parallel(batch)
    handle.remove()
    parallel(batch)
    if world.rank == 0:
        model[0].register_forward_hook(lambda module, given, made: None)
    with pytest.raises(UsageError) as alone:
        parallel(batch)
    return str(backward.value), str(alone.value)


def test_hooks_of_backwards_and_of_single_ranks_are_refused():
    for backward, alone in run_ranks(2, hooks_that_are_refused):
        assert "a module has a hook on its backward (register_full_backward_hook)" in backward
        assert "with the forward hooks of 0 = ['hooks_that_are_refused.<locals>.<lambda>']" in alone


class Settings:
    factor = 1.0  # of the class

    def __init__(self):
        self.scale, self.unread = 1.0, 0
        self.inner, self.table, self.array = SimpleNamespace(shift=0.0), {"power": 1.0}, np.array([1.0])
        self.large = np.ones((2, 4096)).T

    @property
    def doubled(self):
        return 2 * self.scale


class Reader(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.linear, self.settings, self.act, self.acts = nn.Linear(4, 3), settings, torch.tanh, [torch.tanh]

    def forward(self, x):
        of = self.settings
        made = self.acts[0](self.act(self.linear(x)))
        made = made * of.doubled * of.factor * float(of.array[0] * of.large[5, 1]) + of.inner.shift
        return made.abs() ** of.table["power"] * SHARED.scale


SHARED = Settings()


def new_settings(model):
    model.settings = Settings()
    model.settings.scale = 3.0


CHANGES = {
    "an attribute of an object": lambda model: setattr(model.settings, "scale", 3.0),
    "an entry of a table in it": lambda model: model.settings.table.update(power=2.0),
    "a number in a large array in it": lambda model: model.settings.large.__setitem__((5, 1), 0.5),
    "of its class": lambda model: setattr(Settings, "factor", 2.0),
    "the object": new_settings,
    "a variable's attribute": lambda model: setattr(SHARED, "scale", 2.0),
    "a function in a list": lambda model: model.acts.__setitem__(0, torch.relu),
    "a method": lambda model: setattr(model, "forward", lambda x: model.settings.scale * torch.tanh(x[:, :3])),
}


def read_anew():
    """For each change whether steps are those of plain PyTorch before and after it, and how many programs there are."""
    sw.init()
    found = {}
    for what, change in CHANGES.items():
        SHARED.scale, Settings.factor = 1.0, 1.0
        torch.manual_seed(0)
        model = Reader(Settings())
        batch = [torch.randn(ROWS, 4), torch.randint(3, (ROWS,))]
        parallel = sw.parallelize(model, loss_fn, batch, "single", batch="global")
        steps = []
        for step in range(3):
            model.settings.unread = step
            if step == 1:
                change(model)
                if what == "a method":
                    with pytest.raises(CaptureError, match="the loss does not depend on any parameter"):
                        parallel(batch)
                    break
            steps.append(float(parallel(batch)) == pytest.approx(float(loss_fn(model, batch)), rel=1e-12))
        found[what] = steps, len(parallel.executions())
    return found


def test_what_a_step_reads_in_objects_and_functions_is_read_anew_where_it_changes():
    [found] = run_ranks(1, read_anew)
    assert found.pop("a method") == ([True], 1)
    assert found == dict.fromkeys(found, ([True] * 3, 2))


def disagreeing(name):
    world = sw.init()
    model = Reader(Settings())
    setattr(model.settings, name, float(world.rank))
    model.settings.inner.rank = world.rank  # which nothing reads
    batch = [torch.randn(ROWS, 4), torch.randint(3, (ROWS,))]
    try:
        sw.parallelize(model, loss_fn, batch, "data", batch="global")
    except UsageError as error:
        return str(error)
    return "agreed"


@pytest.mark.slow
def test_ranks_agree_about_what_a_step_reads_in_objects_and_not_about_the_rest():
    assert run_ranks(2, disagreeing, "unread") == ["agreed"] * 2
    for said in run_ranks(2, disagreeing, "scale"):
        assert "ranks disagree about model.settings.scale, which the step reads: rank 0 has 0.0, rank 1 has 1.0" in said


def evaluated_without_versions():
    sw.init()
    model, batch = model_and_batch()
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    with torch.inference_mode():
        first = float(parallel.eval()(batch))
    loss = parallel(batch)
    loss.backward()
    return first, loss.item()


def test_programs_made_in_inference_mode_serve_training():
    for first, second in run_ranks(2, evaluated_without_versions):
        assert first == pytest.approx(second, rel=1e-12)


class Tables:
    """Tensors that a class holds, of which no module knows."""

    shift = torch.zeros(3)


class OfItsClass(nn.Module):
    """Computes with a tensor of its class, and with one of another class."""

    scale = torch.ones(3)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) * self.scale + Tables.shift


def changed_in_classes():
    sw.init()
    _, batch = model_and_batch()
    OfItsClass.scale, Tables.shift = torch.ones(3), torch.zeros(3)
    model = OfItsClass()
    plain = copy.deepcopy(model)
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    found = []
    for step in range(3):
        if step == 1:
            OfItsClass.scale.mul_(torch.tensor([1.0, 2.0, 3.0]))
        if step == 2:
            OfItsClass.scale, Tables.shift = torch.full((3,), 0.5), torch.tensor([0.0, 1.0, 0.0])
        found.append((parallel(batch).item(), loss_fn(plain, batch).item()))
    return found


def test_tensors_that_classes_hold_are_read_at_each_step():
    for found in run_ranks(2, changed_in_classes):
        ours, plain = zip(*found, strict=True)
        assert ours == pytest.approx(plain, rel=1e-12)
        assert len(set(plain)) == 3
