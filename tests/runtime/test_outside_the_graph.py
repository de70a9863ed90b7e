"""What a captured step reads of Python and changes between steps: equal to plain PyTorch, or refused, on real ranks."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.capture.tracing.frozen import FrozenWarning
from shardwright.errors import UsageError
from shardwright.runtime.programs import programs

PLANS = {"data": {"mode": "data"}, "split": {"mode": "auto", "search": "propagation"}}
SCALE = 1.0  # read by `Net.forward`


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.tau = 1.0

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x)).relu())) * self.tau * SCALE


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def started(**options):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(3)
    model, batch = Net(), (torch.randn(12, 8), torch.randn(12, 4))
    model.drop.p = 0.0
    return world, model, batch


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def change_attribute(model, step):
    model.tau = 1.0 + step


def change_global(model, step):
    global SCALE
    SCALE = 1.0 + step


def stop_statistics(model, step):
    model.norm.train(step == 0)


def change_momentum(model, step):
    model.norm.momentum = 0.1 * (1 + step)


def freeze(model, step):
    model.up.requires_grad_(step == 1)


CHANGES = [change_attribute, change_global, stop_statistics, change_momentum, freeze]


def losses_with_changes(plan):
    """Losses of two steps for changes between them, by ours and by plain PyTorch; plans take turns."""
    global SCALE
    found = {}
    for change in CHANGES[list(PLANS).index(plan) :: len(PLANS)]:
        both = []
        for ours in (True, False):
            SCALE = 1.0
            _, model, batch = started()
            change(model, 0)
            parallel = sw.parallelize(model, loss_fn, batch, batch="global", **PLANS[plan]) if ours else model
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            losses = []
            for step in range(2):
                change(model, step)
                optimizer.zero_grad()
                loss = parallel(batch) if ours else loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            both.append((losses, model.norm.running_mean.tolist()))
        found[change.__name__] = both
    return found


def under_each_plan(function, *arguments):
    """Return what a function finds under each plan, in one start of the ranks."""
    return {plan: function(plan, *arguments) for plan in PLANS}


def test_what_changes_between_steps_counts():
    for by_plan in run_ranks(2, under_each_plan, losses_with_changes):
        for plan, found in by_plan.items():
            for name, ((losses, mean), (expected, expected_mean)) in found.items():
                assert losses == pytest.approx(expected, rel=1e-10), (plan, name)
                assert mean == pytest.approx(expected_mean, rel=1e-10, abs=1e-14), (plan, name)


def optimizer_made_before(plan, steps_before):
    """Loss and norm of the third step under a plan, or by plain PyTorch; what is said where it is refused."""
    _, model, batch = started()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        loss_fn(model, batch).backward()
        optimizer.step()
    try:
        parallel = sw.parallelize(model, loss_fn, batch, batch="global", **PLANS[plan]) if plan else model
        for _ in range(3):
            optimizer.zero_grad()
            loss = parallel(batch) if plan else loss_fn(model, batch)
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0))
            optimizer.step()
    except UsageError as error:
        return str(error)
    return loss.item(), norm


def optimizers_made_before():
    found = {plan: optimizer_made_before(plan, 0) for plan in (*PLANS, None)}
    return found | {"after a step": optimizer_made_before("split", 1)}


def test_an_optimizer_may_be_made_before():
    for found in run_ranks(2, optimizers_made_before):
        expected, norm = found[None]
        for plan in PLANS:
            loss, their_norm = found[plan]
            assert loss == pytest.approx(expected, rel=1e-10), plan
            assert their_norm == pytest.approx(norm, rel=1e-10), plan
        said = found["after a step"]
        assert said.startswith("this AdamW has made steps with parameters that sw.parallelize has split since; make it")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def refused(what):
    world, model, batch = started()
    weight, function, kind = torch.ones(4), loss_fn, "global"
    if what == "beside rows":
        batch, kind = (batch[0], torch.full((4,), 1.0 + world.rank)), "local"

        def function(m, b):
            return (m(b[0]) * b[1]).square().mean()

    if what == "values":
        batch = tuple(t + world.rank for t in batch)
    if what == "module":
        model.act = nn.Tanh() if world.rank else nn.ReLU()
    if what == "loss":
        function = (lambda m, b: loss_fn(m, b)) if world.rank else (lambda m, b: 2 * loss_fn(m, b))
    if what == "attribute":
        model.tau = 1.0 + world.rank
    if what == "tensor":
        weight.fill_(world.rank)

        def function(m, b):
            return (m(b[0]) * weight).square().mean()

    if what == "function":

        def function(m, b):
            return loss_fn(lambda x: Doubled.apply(m(x)), b)

        if world.rank:
            Doubled.backward = staticmethod(lambda ctx, gradient: gradient * 3)
    if what == "hook":
        model.up.weight.register_hook(lambda g: g)
    try:
        parallel = sw.parallelize(model, function, batch, batch=kind, **PLANS["split"])
        if what == "size":
            batch = tuple(t[: 6 + world.rank] for t in batch)
        parallel(batch)
    except UsageError as error:
        return str(error)
    return "nothing was said"


REFUSALS = {
    "values": "with batch='global' every rank passes the same whole batch, but rank 0 passed float64[12, 8] with",
    "size": "with batch='global' every rank passes the same whole batch, but rank 0 passed float64[6, 8]",
    "beside rows": "with batch='local' ranks pass rows of their own in tensors whose dim 0 is as long as the first "
    "one's, and all others alike, but rank 0 passed float64[4] with checksum",
    "module": "ranks disagree about module act: rank 0 has ReLU(), rank 1 has Tanh()",
    "loss": "ranks disagree about the loss function: rank 0 has refused.<locals>.<lambda>",
    "attribute": "ranks disagree about model.tau, which the step reads: rank 0 has 1.0, rank 1 has 2.0",
    "tensor": "ranks disagree about weight, which the loss function closes over, which the step reads: rank 0 has",
    "function": "ranks disagree about the code of Doubled, which the step reads: rank 0 has",
    "hook": "up.weight has a hook (register_hook), and the plan splits parameters",
}


def every_refusal():
    return {what: refused(what) for what in REFUSALS}


def test_what_ranks_have_otherwise_is_refused():
    for said in run_ranks(2, every_refusal):
        for what, text in REFUSALS.items():
            assert said[what].startswith(text), (what, said[what])


def many_values(most_programs):
    programs.MOST_PROGRAMS = most_programs
    _, model, batch = started()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel = sw.parallelize(model, loss_fn, batch, "single", batch="global")
        losses = []
        for step in range(6):
            model.tau = float(step)
            losses.append((parallel(batch).item(), loss_fn(model, batch).item()))
    return losses, [str(w.message) for w in said if "captured anew" in str(w.message)], len(parallel.executions())


def test_a_value_that_changes_often_is_warned_of_and_programs_are_forgotten():
    [(losses, [text], kept)] = run_ranks(1, many_values, 5)
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=1e-12)
    assert text.startswith("the model is captured anew for each value of model.tau, 4 times so far")
    assert kept == 5


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_what_a_graph_does_not_count_is_warned_of():
    model, calls = Counting(), []

    def loss(m, b):
        calls.append(1)
        return m(b).sum()

    with pytest.warns(FrozenWarning) as said:
        captured_step(model, loss, torch.randn(2, 4), {})
    texts = [str(w.message) for w in said]
    assert len(texts) == 2
    assert texts[1].startswith(
        "calls, which the loss function closes over, is changed by the loss function: a captured"
    )
    line = Counting.forward.__code__.co_firstlineno
    assert texts[0].startswith(f"model.calls is set while the model runs, at {__file__}:{line + 1}: a captured model")
    assert (model.calls, calls) == (0, [])


def uncaptured(kind):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    model = nn.Linear(4, 3)
    batch = torch.randn(6, 4), torch.tensor([0, 1, 2, -100, -100, 1])

    def loss(model, batch):
        x, y = batch
        if float(x.sum()) > 1e9:  # a branch on a value: not captured
            raise ValueError
        logits = model(x)
        return {
            "mean": lambda: logits.square().mean(),
            "sum": lambda: logits.square().sum(),
            "masked": lambda: F.cross_entropy(logits, y),
            "weighted": lambda: F.cross_entropy(logits, y.clamp(0), torch.tensor([1.0, 2.0, 5.0])),
        }[kind]()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sw.parallelize(model, loss, batch, "data", batch="global")(batch).item(), loss(model, batch).item()
    except UsageError as error:
        return str(error)


def each_uncaptured():
    return {kind: uncaptured(kind) for kind in ("mean", "sum", "masked", "weighted")}


def test_a_loss_that_is_no_mean_does_not_fall_back():
    for found in run_ranks(2, each_uncaptured):
        loss, expected = found.pop("mean")
        assert loss == pytest.approx(expected, rel=1e-12)
        for said in found.values():
            assert "it is no mean over samples" in said
