"""What scripts do with split parameters gives what plain ones give, or a sentence that names what does."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.compiler.mesh.split_tensor import SplitTensor
from shardwright.errors import CaptureError, UsageError


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def models():
    """A plain model, and one whose layers are split by rows and by columns into uneven parts."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    model, batch = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)), (torch.randn(9, 7), torch.randn(9, 5))
    plain = copy.deepcopy(model)
    split = {"0": ((1, 1), (3, 1), None), "2": ((1, 3), (1, 3), None)}
    parallel = sw.parallelize(model, loss_fn, batch, "semi-auto", batch="global", mesh="tp=3", pins=split)
    return plain, parallel, batch


def by_hand(model, step):
    """Gradients that are given, clipped and used."""
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape).cumsum(0)
    clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_value_(model.parameters(), 0.05)
    torch.optim.Adam(model.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True).step()


def masked(model, step):
    """The smallest weights stay zero, as in a lottery ticket."""
    weight = model[0].weight
    smallest = weight.detach().abs().flatten().topk(40).values.min()
    mask = gathered(weight.detach().abs() > smallest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        with torch.no_grad():
            weight.mul_(mask)
        step().backward()
        weight.grad.mul_(mask)
        optimizer.step()
        optimizer.zero_grad()


def by_lbfgs(model, step):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = step()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def penalised(model, step):
    target = torch.arange(84.0).reshape(12, 7)
    model[0].weight.register_hook(lambda gradient: gradient * target)
    (step() + (model[0].weight - target).square().mean()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-5).step()


def used():
    plain, parallel, batch = models()
    found = {}
    for use in (by_hand, masked, by_lbfgs, penalised):
        use(plain, lambda: loss_fn(plain, batch))
        use(parallel.module, lambda: parallel(batch))
        pairs = zip(plain.parameters(), parallel.parameters(), strict=True)
        found[use.__name__] = max(float((p - gathered(q)).abs().max().detach()) for p, q in pairs)
        plain.zero_grad()
        parallel.module.zero_grad()
    average = torch.optim.swa_utils.AveragedModel(parallel.module)
    average.update_parameters(parallel.module)
    copies = [type(parameter) is SplitTensor for parameter in average.module.parameters()]
    file = io.BytesIO()
    torch.save(parallel.module.state_dict(), file)
    file.seek(0)
    loaded = [type(tensor).__name__ for tensor in torch.load(file, weights_only=True).values()]
    with pytest.raises(UsageError, match=r"call tensor.full_tensor\(\).numpy\(\) on every rank"):
        parallel.module[0].weight.detach().numpy()
    return found, copies, loaded


def test_what_is_done_with_split_parameters_is_what_is_done_with_plain_ones():
    for found, copies, loaded in run_ranks(3, used):
        assert max(found.values()) < 1e-9, found
        assert copies == [True] * 4
        assert loaded == ["DTensor"] * 4


def compared():
    """Numbers and lists of differently laid out tensors, entry by entry."""
    _, parallel, _ = models()
    weights = [parallel.module[0].weight.detach(), parallel.module[2].weight.detach()]
    other = weights[0].clone()
    other[0, 0] += 1  # in the part of one rank
    lists = torch._foreach_add(torch._foreach_mul(weights, weights), [1.0, 2.0])
    expected = [gathered(weight) ** 2 + number for weight, number in zip(weights, (1.0, 2.0), strict=True)]
    mixed = torch._foreach_add([weights[0], torch.ones(2)], [weights[0], torch.ones(2)])
    spread = weights[0].redistribute(placements=[Replicate()])
    return (
        (torch.equal(weights[0], weights[0] * 1), torch.equal(weights[0], other)),
        [gathered(a).equal(b) for a, b in zip(lists, expected, strict=True)],
        [gathered(mixed[0]).equal(2 * gathered(weights[0])), mixed[1].tolist() == [2.0, 2.0]],
        gathered(weights[0] + spread).equal(2 * gathered(weights[0])),
        (bool((weights[0] == other).all()), float((weights[0] == other).sum())),
    )


def test_numbers_and_lists_of_tensors_are_those_of_the_wholes():
    for equal, lists, mixed, spread, numbers in run_ranks(3, compared):
        assert equal == (True, False)
        assert all([*lists, *mixed, spread])
        assert numbers == (False, 83.0)


class Renormed(nn.Module):
    def __init__(self, max_norm):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 6, max_norm=max_norm), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.table(x))


def renormed():
    """What a lookup would do to rows is done to all of them after each step."""
    sw.init()
    sw.set_seed(0)
    batch = torch.randint(0, 10, (7,))

    def square(model, x):
        return model(x).square().mean()

    for mode in ("data", "auto"):
        with pytest.raises(
            CaptureError, match=r"max_norm= changes the rows .*\n.*weight.copy_\(torch.renorm\(weight, 2.0"
        ):
            sw.parallelize(Renormed(1.0), square, batch, mode, batch="global")
    plain, losses = Renormed(1.0), []
    model = Renormed(None)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        model.table.weight.copy_(torch.renorm(model.table.weight, 2.0, 0, 1.0))
    pins = {"table": ((2, 1), (1,))}
    parallel = sw.parallelize(model, square, batch, "semi-auto", batch="global", mesh="d=2", pins=pins)
    for each, step in ((plain, lambda: square(plain, batch)), (parallel, lambda: parallel(batch))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(3):
            loss = step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if each is parallel:
                with torch.no_grad():
                    weight = parallel.module.table.weight
                    weight.copy_(torch.renorm(weight, 2.0, 0, 1.0))
    return losses


def test_a_table_with_a_largest_norm_is_refused_with_what_serves():
    for losses in run_ranks(2, renormed):
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
