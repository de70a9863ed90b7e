"""A penalty over split parameters beside the loss, lazy modules, and what the loss function returns beside the loss: as
plain PyTorch, or refused with a remedy."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import data_parallel, fully_sharded
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import UsageError
from whole import plain, run, same


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def judged(model, batch):
    noise, real = batch
    made = model.make(noise).detach()
    return F.softplus(-model.judge(real)).mean() + F.softplus(model.judge(made)).mean()


def made(model, batch):
    return F.softplus(-model.judge(model.make(batch[0]))).mean()


def squares(model, batch):
    return model(batch[0]).square().mean()


def penalty(parameters):
    return 1e-2 * sum(p.square().sum() for p in parameters)


def trained():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(2)
    model, batch = Gan(), (torch.randn(12, 8), torch.randn(12, 8))
    plain = copy.deepcopy(model)
    options = {"batch": "global", "search": "propagation"}
    judging = sw.parallelize(model, judged, batch, **options)
    making = sw.parallelize(model, made, batch, **options)
    split = sum(any(s.is_shard() for s in p.placements) for p in judging.parameters())
    found = []
    for one, steps in ((model, (judging, making)), (plain, None)):
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (one.judge, one.make)]
        losses = []
        for _ in range(3):
            for at, (part, loss_fn) in enumerate([(one.judge, judged), (one.make, made)]):
                one.zero_grad()
                loss = steps[at](batch) if steps else loss_fn(one, batch)
                loss = loss + penalty(part.parameters())
                loss.backward()
                optimizers[at].step()
                losses.append(float(loss.detach()))
        found.append(losses)
    with pytest.raises(UsageError, match=r"^1.weight is not initialised .lazy modules get their"):
        sw.parallelize(lazy := nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), squares, batch, batch="global")
    with torch.no_grad():
        lazy(batch[0])
    sw.parallelize(lazy, squares, batch, batch="global")(batch).backward()
    return split, found


def test_a_penalty_beside_two_losses_trains_as_plain_pytorch():
    for split, (losses, expected) in run_ranks(2, trained):
        assert split > 0
        assert losses == pytest.approx(expected, rel=1e-10)


class Probed(nn.Module):
    """With a layer on which the loss does not depend."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.probe = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden), self.probe(hidden)


def probed(model, batch):
    given, beside = model(batch[0])
    return F.cross_entropy(given, batch[1]), beside


@pytest.mark.parametrize("known", [data_parallel, fully_sharded])
def test_what_the_loss_does_not_depend_on_has_no_gradient(known):
    """Zeros in its place would have an optimizer decay its weights, which one device leaves alone."""
    model, batch = Probed().double(), (torch.randn(12, 6).double(), torch.randint(4, (12,)))
    graph = RuledGraph.of(captured_step(model, probed, batch, {}))
    found = run(known(graph, PlanRequest(Mesh.of(d=3))), model, batch)
    assert "gradient of head.bias" in found
    assert not [name for name in found if name.startswith("gradient of probe")]
    same({name: of for name, of in found.items() if not name.startswith("aux")}, plain(model, probed, batch), 1e-12)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


def shown(model, batch):
    out = model(batch[0])
    penalty = model.body.weight.square().sum()
    loss = F.cross_entropy(out, batch[1]) + 0.1 * penalty
    right = (out.argmax(1) == batch[1]).sum()
    return loss, {
        "penalty": penalty,
        "of": [out, right, out.detach(), batch[0] * 2],
        "bias": model.head.bias,
        "all": loss,
    }


def flows(of):
    """Which tensors have a gradient of the step."""
    return [tensor.requires_grad for tensor in torch.utils._pytree.tree_leaves(of)]


WRONG = {
    "'penalty'": lambda loss, beside: loss + beside["penalty"],
    "'of.0', 'bias'": lambda loss, beside: beside["of"][0].sum() * beside["bias"].sum(),
    "'of.0'": lambda loss, beside: loss + torch.zeros(()).add_(beside["of"][0].clone()[0].sum()),
}


def added_up(mode, options):
    """What is said of backwards that come to what was returned beside the loss; all else is as plain PyTorch has it."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(2)
    model, batch = Classes(), (torch.randn(12, 6), torch.randint(4, (12,)))
    plain = copy.deepcopy(model)
    parallel = sw.parallelize(model, shown, batch, mode, batch="global", **options)
    for each in (model.eval(), model.train()):
        assert flows(parallel(batch)) == flows(shown(plain, batch)), each.training
        with torch.no_grad():
            loss, beside = parallel(batch)
            assert not any(flows((loss, beside)))
            assert beside["penalty"].numpy() == pytest.approx(shown(plain, batch)[1]["penalty"].numpy())
    assert not any(flows(parallel.predict(batch)))
    said = []
    for wrong in WRONG.values():
        with pytest.raises(UsageError) as refused:
            wrong(*parallel(batch)).backward()
        said.append(str(refused.value))
    assert all(parameter.grad is None for parameter in model.parameters())
    (_, beside), (_, known) = parallel(batch), shown(plain, batch)
    assert beside["of"][1].numpy() == known["of"][1].numpy()
    for found in (beside, known):  # the loss itself has its gradient, wherever it stands
        (2 * found["all"] + 0.5 * found["penalty"].detach()).backward()
        found["of"][0].mul_(2)[0] = 0
        found["penalty"] += 1
    assert beside["penalty"].item() == pytest.approx(known["penalty"].item())
    assert f"{beside['all']:.9f}" == f"{known['all']:.9f}"
    gradients = {name: gathered(parameter.grad) for name, parameter in model.named_parameters()}
    same(gradients, {name: parameter.grad for name, parameter in plain.named_parameters()}, 1e-12)
    return said


@pytest.mark.parametrize(
    ("ranks", "mode", "options"), [(2, "data", {}), pytest.param(1, "data", {"compile": True}, marks=pytest.mark.slow)]
)
def test_a_backward_that_comes_to_what_is_beside_the_loss_is_refused(ranks, mode, options):
    for said in run_ranks(ranks, added_up, mode, options):
        for text, names in zip(said, WRONG, strict=True):
            assert text.startswith(f"a backward came to {names}, which the loss function returned beside the loss, ")
