"""Checkpoints and functions with a backward of their own, on simulated ranks beside plain PyTorch."""

import functools
import re
import warnings

import pytest
import torch
from graph_models import Perceptron
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from equals_eager import captured_and_checked
from rows import brief
from shardwright.compiler.capture.capture import capture
from shardwright.compiler.capture.tracing.frozen import RecomputationWarning
from shardwright.compiler.rules.register import name_of, register_rule
from shardwright.compiler.rules.table import REGISTERED
from shardwright.errors import CaptureError
from whole import like_plain

pytestmark = pytest.mark.usefixtures("float64")


def batch():
    return torch.randn(8, 6), torch.randn(8, 4)


class Deep(nn.Module):
    """Three blocks, which ``through`` calls."""

    def __init__(self, through):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in "ab"))
        self.through = through

    def forward(self, x):
        return self.last(self.through(self.blocks, self.first(x)))


def squares(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def each(blocks, x, **how):
    for block in blocks:
        x = checkpoint(block, x, **how)
    return x


def applied_to_a_method(blocks, x):
    return CheckpointFunction.apply(Method(blocks).forward, True, x)


class Method:
    def __init__(self, blocks):
        self.blocks = blocks

    def forward(self, x):
        return self.blocks(x)


def within_a_mode(blocks, x):
    policy = functools.partial(checkpointing.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(blocks, x, use_reentrant=False, context_fn=policy)


CHECKPOINTS = {
    "without reentrant": functools.partial(each, use_reentrant=False),
    "reentrant": functools.partial(each, use_reentrant=True),
    "sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False),
    "partial": functools.partial(checkpointing.checkpoint, use_reentrant=False),
    "keywords": lambda blocks, x: checkpoint(lambda x, scale: blocks(x) * scale, x, scale=3.0, use_reentrant=False),
    "selective": within_a_mode,
    "applied to a method": applied_to_a_method,
    "of a method": lambda blocks, x: checkpoint(Method(blocks).forward, x, use_reentrant=True),
}


@pytest.mark.parametrize(
    "name", brief(CHECKPOINTS, "without reentrant", "reentrant", "keywords", "selective", "applied to a method")
)
def test_checkpoints_are_the_function_itself(name):
    before = checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        like_plain(Deep(CHECKPOINTS[name]), squares, batch())
    found = [str(one.message) for one in said if one.category is RecomputationWarning]
    assert len(found) == 1
    assert found[0].startswith("activation checkpointing saves no memory in a captured step, at ")
    assert "test_own_backwards.py:" in found[0]
    assert before == (checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator)


def first_reentrant(model, batch):
    return F.mse_loss(model.last(checkpoint(model.first, batch[0], use_reentrant=True)), batch[1])


@pytest.mark.filterwarnings("ignore:activation checkpointing saves no memory")
def test_a_reentrant_checkpoint_of_the_batch_trains_nothing_as_in_torch():
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        like_plain(Deep(None), first_reentrant, batch())


def test_a_checkpoint_that_changes_buffers_is_refused():
    model = Deep(CHECKPOINTS["without reentrant"])
    model.blocks[0].append(nn.BatchNorm1d(16))
    with pytest.raises(CaptureError, match=r"changes buffers, at .*test_own_backwards.py:\d+: torch calls it a second"):
        capture(model, squares, batch())


class Clip(torch.autograd.Function):
    """Clips what flows back; keeps a number and a tuple."""

    @staticmethod
    def forward(ctx, x, bounds, name="clip"):
        assert isinstance(bounds, tuple)
        assert isinstance(name, str)
        ctx.bounds = bounds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(*ctx.bounds), None, None


class StraightThrough(torch.autograd.Function):
    """Written with `setup_context`, and a default argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale=2.0):
        return torch.round(x * scale) / scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.scale, None


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return F.gelu(x + bias, approximate="tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, bias = ctx.saved_tensors
        slope = gradient * (x + bias > 0)
        return slope if ctx.needs_input_grad[0] else None, slope.sum(0) if ctx.needs_input_grad[1] else None


class Largest(torch.autograd.Function):
    """Several results: one without a gradient though it is a float, one of integers, one that is no tensor."""

    @staticmethod
    def forward(ctx, x, weight):
        values, at = x.max(dim=1)
        count = torch.full_like(values, x.shape[1])
        ctx.mark_non_differentiable(count)
        ctx.save_for_backward(at, weight)
        ctx.shape = x.shape
        return values * weight.sum(), count, None, at

    @staticmethod
    def backward(ctx, gradient, *_):
        at, weight = ctx.saved_tensors
        spread = torch.zeros(ctx.shape).scatter(1, at[:, None], (3 * gradient * weight.sum())[:, None])
        return spread, gradient.sum().expand_as(weight)


clip = Clip.apply  # as people keep it


class Functions(Perceptron):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)
        self.bias, self.weight = nn.Parameter(torch.randn(16)), nn.Parameter(torch.rand(3))


def straight_through(model, batch):
    return F.mse_loss(model.down(StraightThrough.apply(model.up(batch[0]))), batch[1])


def saved(model, batch):
    return F.mse_loss(model.down(Gelu.apply(F.linear(batch[0], model.up.weight), model.bias)), batch[1])


def only_one_needs(model, batch):
    return F.mse_loss(model.down(Gelu.apply(model.up(batch[0]).detach(), model.bias)), batch[1])


def several(model, batch):
    values, count, nothing, at = Largest.apply(model(batch[0]), model.weight)
    assert nothing is None
    return (values * count).mean() + (values * at).sum() / 100


def without_gradients(model, batch):
    with torch.no_grad():
        target = clip(model(batch[0]), (-1.0, 1.0))
    return F.mse_loss(clip(model(batch[0]), (-0.01, 0.01)), target + batch[1])


FUNCTIONS = [straight_through, only_one_needs, several, without_gradients]


@pytest.mark.parametrize("loss_fn", FUNCTIONS)
def test_a_function_keeps_its_backward(loss_fn):
    plans = like_plain(Functions(), loss_fn, batch())
    for plan in plans:
        [op] = {node.op for node in plan.graph.unlisted if node.op.startswith("autograd.")}
        assert op.startswith(f"autograd.{__name__}:")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.to(weight.dtype) @ weight, gradient.T.to(x.dtype) @ x


def with_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return Product.apply(model.up(batch[0]).float(), model.down.weight).float().square().mean()


def test_casts_around_a_function_are_those_of_the_capture():
    captured_and_checked(Functions().float(), with_autocast, (torch.randn(8, 6, dtype=torch.float32),))


def test_a_rule_splits_a_function():
    register_rule(Gelu, "b n, n -> b n")
    try:
        *_, plan = like_plain(Functions(), saved, batch())
    finally:
        del REGISTERED[name_of(Gelu)]
    [node] = [node for node in plan.graph.capture.nodes if node.op == name_of(Gelu)]
    assert any(plan.strategies[node.name].axes)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, what):
        return what(x) if callable(what) else x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None


class Noisy(Scaled):
    @staticmethod
    def forward(ctx, x, what):
        return x + torch.rand_like(x)


class NoisyBackward(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.bernoulli(torch.full_like(gradient, 0.5)), None


class InPlace(Scaled):
    @staticmethod
    def forward(ctx, x, what):
        ctx.mark_dirty(x)
        return x.mul_(2)


class Gathering(Scaled):
    @staticmethod
    def forward(ctx, x, what):
        return torch.ops._c10d_functional.all_reduce(x, "sum", "default")


class Deciding(Scaled):
    @staticmethod
    def forward(ctx, x, what):
        return x * 2 if x.sum() > 0 else x * 1


class Tensorless(Scaled):
    @staticmethod
    def forward(ctx, x, what):
        return 3


def inside_a_function(x):
    class Local(Scaled):
        pass

    return Local.apply(x, 1)


def hooked(x):
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda module, given, made: None)
    return layer(x)


REFUSED = {
    "local": (inside_a_function, "Local has a backward of its own and cannot be found", "at the top level"),
    "module": (lambda x: Scaled.apply(x, nn.ReLU()), r"argument 2 of Scaled.apply is a ReLU", "Give it tensors"),
    "nested": (lambda x: Scaled.apply(x, [x]), r"argument 2 of Scaled.apply is a list", "an argument of its own"),
    "random": (lambda x: Noisy.apply(x, 1), r"Noisy draws random numbers by aten.rand_like.default", "Draw them"),
    "random backward": (lambda x: NoisyBackward.apply(x, 1), "NoisyBackward draws random numbers", "Draw them"),
    "in place": (lambda x: InPlace.apply(x, 1), "InPlace changes a tensor that it is given", r"x = x.clone\(\)"),
    "collective": (lambda x: Gathering.apply(x, 1), "Gathering communicates by _c10d_functional", "leave out"),
    "values": (lambda x: Deciding.apply(x, 1), "Deciding cannot be captured", r", at .*if x.sum\(\) > 0.*\n.*where"),
    "no tensor": (lambda x: Tensorless.apply(x, 1), "Tensorless returns no tensor", "at "),
    "hook": (hooked, r"a hook on its backward \(register_full_backward_hook\)", "Remove it"),
    "vmap": (lambda x: torch.vmap(StraightThrough.apply)(x), "inside a transform of torch.func", "outside of vmap"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "what", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused(call, what, remedy, capfd):
    before = dict(vars(torch.autograd.function._SingleLevelFunction))
    with pytest.raises(CaptureError, match=what) as error:
        capture(Functions(), lambda model, batch: call(model.up(batch[0])).sum(), batch())
    text = str(error.value)
    assert f"{__file__}:" in text.splitlines()[0]
    assert re.search(remedy, text)
    assert capfd.readouterr() == ("", "")
    assert dict(vars(torch.autograd.function._SingleLevelFunction)) == before
