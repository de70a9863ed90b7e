"""`sw.verify(loop=...)`: what a user's own loop changes between its steps is compared, too."""

import itertools

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.runtime.verification.compare import KINDS, ONE_DEVICE, PLAIN

LONG = 1000  # lists in a list, which is too long to be watched


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.temperature, self.table = 1.0, [[1.0] for _ in range(LONG)]

    def forward(self, x):
        self.seen.add_(len(x))
        return self.down(torch.tanh(self.up(x))) / self.temperature * self.table[0][0]


def distillation():
    """A student, a loss that closes over its teacher and a weight, and a loop that changes both and the temperature."""
    sw.set_seed(3)
    student, teacher, weight, history = Student(), nn.Linear(6, 4).requires_grad_(False), 0.5, []

    def loss_fn(model, batch):
        return (model(batch) - weight * teacher(batch)).square().mean()

    def loop(parallel, batches):
        nonlocal weight
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
        for step, batch in enumerate(batches):
            weight = weight / 2 + len(history)  # a history of the run before would be another weight
            parallel.module.temperature = 1.0 + step
            loss = parallel(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
            optimizer.step()
            history.append(step)
            yield loss
            optimizer.zero_grad()
            with torch.no_grad():
                teacher.weight.lerp_(torch.rand_like(teacher.weight), 0.1)

    return student, teacher, loss_fn, loop


def verified_loop(options):
    torch.set_num_threads(1)
    sw.init()
    student, teacher, loss_fn, loop = distillation()
    before = teacher.weight.clone()
    batches = [torch.randn(12, 6), torch.randn(12, 6)]
    found = sw.verify(student, loss_fn, batches, steps=2, loop=loop, **options)
    return found.ok, found.deviations, str(found), torch.equal(teacher.weight, before)


@pytest.mark.parametrize(
    "options", [{"search": "propagation", "mesh": "tp=2"}, pytest.param({"mode": "data"}, marks=pytest.mark.slow)]
)
def test_a_loop_is_compared_with_one_device_and_plain_pytorch(options):
    for ok, deviations, text, put_back in run_ranks(2, verified_loop, options):
        assert ok, text
        assert put_back
        assert {(d.reference, d.kind) for d in deviations} == set(itertools.product((ONE_DEVICE, PLAIN), KINDS))
        assert any(d.largest > 0 for d in deviations)
        assert "the loop loop on 2 ranks" in text


def change_what_is_not_watched(parallel, batches):
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step, batch in enumerate(batches):
        parallel.module.table[0][0] = 1.0 + step
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def no_generator(parallel, batches):
    parallel(batches[0])


def no_loss(parallel, batches):
    yield parallel


def odd_loops():
    sw.init()
    student, _, loss_fn, _ = distillation()
    batch = torch.randn(12, 6)
    found = sw.verify(student, loss_fn, batch, mode="data", loop=change_what_is_not_watched)
    model, refused = nn.Linear(6, 4), []
    for loop, options in [(no_generator, {}), (no_loss, {}), (no_loss, {"dtypes": ("float32",)})]:
        with pytest.raises(UsageError) as error:
            sw.verify(model, lambda model, batch: model(batch).square().mean(), batch, loop=loop, **options)
        refused.append(str(error.value))
    return found.ok, [(d.reference, d.step) for d in found.deviations if not d.ok], refused


def test_a_change_that_the_capture_misses_is_beyond_tolerance_and_odd_loops_are_refused():
    [(ok, beyond, refused)] = run_ranks(1, odd_loops)
    assert not ok
    assert (PLAIN, 3) in beyond
    for message, words in zip(
        refused,
        ["must yield the loss after each step, it returned NoneType", "it yielded Parallel", "in float64 alone"],
        strict=True,
    ):
        assert words in message
