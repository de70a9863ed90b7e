"""What sw.parallelize returns is used like the module that it was given: to the same effect, or with a remedy."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwright as sw
from ranks import run_ranks

PLANS = {"data": {"mode": "data"}, "split": {"mode": "auto", "search": "propagation"}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu())

    def describe(self):
        return "a net"


def loss_fn(model, batch):
    out = model(batch[0])
    return F.mse_loss(out, batch[1]), out


def started(plan):
    """A model in parallel, its twin as plain PyTorch, and a batch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = sw.init()
    sw.set_seed(3)
    model, batch = Net(), (torch.randn(12, 8), torch.randn(12, 4))
    plain = copy.deepcopy(model)
    return sw.parallelize(model, loss_fn, batch, batch="global", **PLANS[plan]), plain, batch, world


def said(do):
    try:
        return str(do())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same(parallel, plain):
    ours, theirs = parallel.full_state_dict(), plain.state_dict()
    return list(ours) == list(theirs) and all(torch.allclose(ours[n], theirs[n], rtol=1e-10) for n in ours)


def states(plan):
    """Whether states are taken as plain PyTorch takes them, in words and numbers."""
    parallel, plain, _, _ = started(plan)
    other = Net().state_dict()
    lacking = {n: t for n, t in other.items() if n != "up.bias"}
    added = {**other, "left.weight": torch.zeros(2)}
    narrow = {**other, "up.weight": torch.zeros(16, 7)}
    found = [said(lambda s=s: parallel.load_state_dict(s)) for s in (lacking, added, narrow, other)]
    expected = [said(lambda s=s: plain.load_state_dict(s)) for s in (lacking, added, narrow, other)]
    loaded = same(parallel, plain)
    loose = said(lambda: parallel.load_state_dict(lacking, strict=False))
    stored = parallel.state_dict()
    parallel.load_state_dict({n: t * 0 for n, t in stored.items()})
    zero = all(not t.any() for t in parallel.full_state_dict().values())
    whole = sw.parallelize(Net(), loss_fn, (torch.randn(12, 8), torch.randn(12, 4)), "data", batch="global")
    whole.load_state_dict(parallel.state_dict())
    return found, expected, loaded, loose, zero, same(parallel, whole.module)


def test_states_are_taken_as_torch_takes_them():
    for found, expected, loaded, loose, zero, whole in run_ranks(2, states, "split"):
        assert found == expected
        assert "size mismatch for up.weight" in found[2]
        assert loose == "_IncompatibleKeys(missing_keys=['up.bias'], unexpected_keys=[])"
        assert loaded
        assert zero
        assert whole


def asked(plan):
    """What is said to what scripts ask of modules."""
    parallel, plain, batch, world = started(plan)
    assert [n for n, _ in parallel.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert [n for n, _ in parallel.named_modules()] == [n for n, _ in plain.named_modules()]
    assert (len(list(parallel.modules())), len(list(parallel.children()))) == (4, 3)
    assert [n for n, _ in parallel.named_children()] == ["up", "norm", "down"]
    parallel.module.norm.eval()
    parallel.predict(batch)
    assert (parallel.training, parallel.module.norm.training) == (True, False)
    assert parallel.to("cpu").to(torch.float64) is parallel
    assert not any(p.requires_grad for p in parallel.requires_grad_(False).parameters())
    parallel.requires_grad_()
    with parallel.accumulate():
        parallel(batch)[0].backward()
    parallel.zero_grad()
    parallel(batch)[0].backward()
    once = sum(float(p.grad.norm()) for p in parallel.parameters())
    parallel.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
    parallel(batch)[0].backward()
    assert sum(float(p.grad.norm()) for p in parallel.parameters()) == pytest.approx(once, rel=1e-12)
    torch.manual_seed(world.rank)  # rank 0's numbers are to count
    found = {
        "to": said(lambda: parallel.to(torch.float32)),
        "half": said(lambda: parallel.half()),
        "describe": said(lambda: parallel.describe()),
        "model": said(lambda: parallel.model),
        "copy": said(lambda: copy.deepcopy(parallel)),
        "call": said(lambda: parallel.module(batch[0]).shape),
        "part": said(lambda: parallel.module.up(batch[0]).shape),
        "apply": said(lambda: type(parallel.apply(lambda m: m.reset_parameters() if hasattr(m, "weight") else m))),
    }
    parallel.module.down = nn.Linear(16, 4)
    return found, said(lambda: parallel(batch)), parallel.full_state_dict()["up.weight"].sum().item()


ANSWERS = {
    "to": "UsageError: up.weight is float64 on cpu, and Parallel.to(...) would make it float32 on cpu, while",
    "half": "AttributeError: what sw.parallelize returns has no 'half'; call model.half before sw.parallelize",
    "describe": "AttributeError: what sw.parallelize returns has no 'describe'; the model has, as parallel.module.desc",
    "model": "AttributeError: what sw.parallelize returns has no 'model'; the model that it runs is parallel.module",
    "copy": "UsageError: what sw.parallelize returns cannot be copied or pickled, since it talks to the other ranks; c",
}
OF_A_PLAN = {
    "data": {"call": "torch.Size([12, 4])", "part": "torch.Size([12, 16])", "apply": "<class"},
    "split": {
        "call": "UsageError: this Net holds this rank's parts of its parameters, which take no plain tensors; call par",
        "part": "UsageError: this Linear holds this rank's parts of its parameters, which take no plain tensors",
        "apply": "UsageError: apply() would show asked.<locals>.<lambda>.<locals>.<lambda> this rank's parts of par",
    },
}


@pytest.mark.parametrize("plan", ["split", pytest.param("data", marks=pytest.mark.slow)])
def test_what_modules_are_asked_is_answered_or_refused_with_what_to_type(plan):
    everyone = run_ranks(2, asked, plan)
    for found, replaced, weights in everyone:
        for name, text in (ANSWERS | OF_A_PLAN[plan]).items():
            assert found[name].startswith(text), (name, found[name])
        assert replaced.startswith("UsageError: down of the model was replaced after sw.parallelize, which knows the")
        assert weights == everyone[0][2]


def averaged(plan):
    """The loss with averaged parameters, by ours and by plain PyTorch."""
    parallel, plain, batch, _ = started(plan)
    losses = []
    for model, step in ((parallel, parallel), (plain, lambda b: loss_fn(plain, b))):
        inner = getattr(model, "module", model)
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step(batch)[0].backward()
            optimizer.step()
            average.update_parameters(inner)
        model.load_state_dict(average.module.state_dict())
        model.eval()
        losses.append(step(batch)[0].item())
    return losses


def test_averages_of_torch_are_those_of_one_device():
    for loss, expected in run_ranks(2, averaged, "split"):
        assert loss == pytest.approx(expected, rel=1e-10)


def steps(model, optimizer, batch, count):
    losses = []
    for _ in range(count):
        loss = loss_fn(model, batch)[0] if isinstance(model, nn.Module) else model(batch)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def written(folder):
    """What becomes of states that were written by torch.save, and of those of plain PyTorch."""
    parallel, plain, batch, world = started("split")
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.01) for model in (parallel, plain))
    before = steps(plain, theirs, batch, 2)
    parallel.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    losses = before, steps(parallel, ours, batch, 3), steps(plain, theirs, batch, 3)
    states = {"model": parallel.state_dict(), "optimizer": ours.state_dict()}
    torch.save(states, f"{folder}/{world.rank}.pt")
    torch.distributed.barrier()
    own, first = (torch.load(f"{folder}/{rank}.pt") for rank in (world.rank, 0))
    found = {"model": said(lambda: parallel.load_state_dict(first["model"]))}
    ours.load_state_dict(first["optimizer"])
    found["optimizer"] = said(lambda: steps(parallel, ours, batch, 1))
    ours.zero_grad()
    parallel.load_state_dict(own["model"])
    ours.load_state_dict(own["optimizer"])
    losses += steps(parallel, ours, batch, 2), steps(plain, theirs, batch, 2)
    beside = {"states": [parallel.state_dict()]}
    found["extra"] = said(lambda: sw.checkpoint.save(f"{folder}/run", parallel, step=1, extra=beside))
    parallel.module.norm.__class__ = type("Other", (type(parallel.module.norm),), {})
    found["kind"] = said(lambda: parallel(batch))
    return losses, found


WRITTEN = {
    "model": "UsageError: up.weight is the part of a tensor that another rank has saved: of split parameters torch.",
    "optimizer": "UsageError: 'exp_avg' of an optimizer's state is the part of a tensor that another rank has saved",
    "extra": "run.extra['states'][0]['up.weight'] is a DTensor, which belongs to the rank that holds it, while values",
    "kind": "UsageError: norm was a BatchNorm1d and was made a Other after sw.parallelize, which knows the model as it",
}


def test_states_of_files_and_of_plain_pytorch_are_those_of_this_rank_or_refused(tmp_path):
    for rank, (losses, found) in enumerate(run_ranks(2, written, str(tmp_path))):
        _, ours, theirs, later, expected = losses
        assert ours == pytest.approx(theirs, rel=1e-10)
        assert later == pytest.approx(expected, rel=1e-10)
        for name, text in WRITTEN.items():
            if (rank, name) != (0, "optimizer"):  # rank 0 was given its own
                assert text in found[name], (name, found[name])
