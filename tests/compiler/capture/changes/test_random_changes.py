"""Whatever a step changes in place, by whatever name, a graph gives what plain PyTorch gives, or is refused."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_changes import CHANGED, MADE, Net, loss_of

from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.errors import CaptureError

pytestmark = pytest.mark.usefixtures("float64")
PROGRAMS = st.lists(
    st.tuples(st.sampled_from([*MADE]) | st.sampled_from([*CHANGED]), st.integers(0, 7), st.integers(0, 7)),
    min_size=2,
    max_size=6,
)
BATCH = torch.tensor([[0.3, -1.2, 0.8], [1.5, 0.1, -0.4], [-0.9, 0.6, 2.0], [0.2, -0.3, 0.7]], dtype=torch.float64)


def plain_steps(program):
    torch.manual_seed(0)
    net, steps = Net(program), []
    for _ in range(2):
        loss, beside = loss_of(net, BATCH.clone())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        steps.append((loss, gradients, [t.clone() for t in beside], {n: b.clone() for n, b in net.named_buffers()}))
    return steps


def captured_steps(program):
    torch.manual_seed(0)
    net = Net(program)
    captured = capture(net, loss_of, BATCH)
    weights, buffers, steps = dict(net.named_parameters()), dict(net.named_buffers()), []
    for _ in range(2):
        values = evaluate(captured, weights, buffers, [BATCH])
        gradients = torch.autograd.grad(values[captured.loss], list(weights.values()))
        new = {captured.values[buffer].label: values[value].detach() for buffer, value in captured.mutations.items()}
        buffers = buffers | new
        steps.append((values[captured.loss], gradients, [values[name] for name in captured.aux], buffers))
    return steps


def hold(program):
    try:
        expected = plain_steps(program)
    except (RuntimeError, ValueError, IndexError):
        return  # nothing to be equal to
    try:
        found = captured_steps(program)
    except CaptureError:
        return
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-9, atol=1e-9)


@settings(max_examples=5)
@given(PROGRAMS)
def test_a_few_random_changes(program):
    hold(program)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_random_changes(program):
    hold(program)
