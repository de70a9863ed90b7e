"""What a script changes of a model between steps, beside its numbers: the mode of the model, and hooks."""

import copy

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
    between = parallel.random_state()["step"]
    loss.backward()
    reducing = [
        any(instruction.kind == "bucket" for instruction in execution.program.instructions)
        for execution in parallel.executions()
    ]
    return reducing, [before, between, parallel.random_state()["step"]]


def test_gradients_are_kept_in_evaluation_mode_where_they_may_be_asked_for():
    trained, evaluated, tuned = True, False, True
    for reducing, steps in run_ranks(2, evaluated_and_tuned):
        assert reducing == [trained, evaluated, tuned]
        assert steps == [0, 0, 1]


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
