"""Tensors that the ranks of one coordinate hold alone: what scripts do with them gives what plain ones give."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.mesh.dtensor import HeldBy, device_mesh, from_placements, gathered, layout_of, to_placements
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.mesh.split_tensor import SplitTensor, laid_out, placed_as, split_tensor
from shardwright.errors import PlanError, UsageError

MESH = Mesh.of(pp=2, dp=2)
# On (pp, dp): held by a stage, and sharded within it along the same dim or another one.
PLACEMENTS = [
    (HeldBy(0, 1), Replicate()), (HeldBy(0, 0), Shard(0)), (HeldBy(0, 1), Shard(1)), (Shard(0), Replicate()),
    (HeldBy(1, 1), Shard(0)), (Replicate(), Replicate()),
]  # fmt: skip


def test_a_layout_with_a_holder_is_that_of_its_placements():
    for placements in PLACEMENTS:
        layout = from_placements(placements, 2, MESH)
        assert to_placements(layout, MESH) == list(placements)
        boxes = [layout.local_slice((5, 3), MESH, rank) for rank in range(4)]
        held = torch.zeros(5, 3)
        for box in dict.fromkeys(map(str, boxes)):
            held[boxes[[str(b) for b in boxes].index(box)]] += 1
        assert bool((held == 1).all()), placements
    layout = Layout((Split(("pp", "dp"), 2, holder=1), Split()))
    assert str(layout) == "[pp:1·dp/2, -]"
    assert layout.without("pp") == Layout((Split(("dp",), 2), Split()))
    assert layout.without("dp").normalised((6, 3), MESH) == Layout((Split(("pp",), holder=1), Split()))
    with pytest.raises(PlanError, match="on axis b has no layout"):
        from_placements([Shard(0), HeldBy(0, 1)], 1, Mesh.of(a=2, b=2))
    with pytest.raises(PlanError, match="at 1 of pp hold alone is handed over by them"):
        redistribute(layout, Layout.replicated(2), (), (6, 3), MESH)
    assert HeldBy(0, 1) != HeldBy(0, 0) != Shard(0) != HeldBy(0, 0)
    assert copy.deepcopy(HeldBy(0, 1)) == HeldBy(0, 1)


def tensors(seed=0):
    """Equal plain tensors and split ones, of uneven sizes."""
    torch.manual_seed(seed)
    plain = [torch.randn(5, 3) for _ in PLACEMENTS]
    devices = device_mesh(MESH, "cpu")
    return plain, [placed_as(each, devices, placements) for each, placements in zip(plain, PLACEMENTS, strict=True)]


def same(split, plain):
    """Compare what an operator gave of split tensors with what it gave of plain ones."""
    if isinstance(plain, (list, tuple)):
        assert len(split) == len(plain)
        for one, other in zip(split, plain, strict=True):
            same(one, other)
    elif isinstance(plain, torch.Tensor):
        assert isinstance(split, torch.Tensor)
        torch.testing.assert_close(gathered(split), plain.detach(), rtol=1e-12, atol=1e-14)
    else:
        assert split == plain


OPERATORS = {
    "mean": lambda x, y: x.mean(),
    "sum of a dim": lambda x, y: x.sum(0),
    "product": lambda x, y: x @ y.T,
    "view": lambda x, y: x.reshape(-1),
    "transposed": lambda x, y: x.t() + 1,
    "index": lambda x, y: x[1:3, 0] * 2,
    "entries": lambda x, y: torch.where(x > 0, x * 2, y).exp(),
    "broadcast": lambda x, y: x + y[0],
    "max": lambda x, y: x.max(),
    "any": lambda x, y: bool((x > 2).any()),
    "item": lambda x, y: x[0, 0].item(),
    "equal": lambda x, y: torch.equal(x, y),
    "norm": lambda x, y: torch.linalg.vector_norm(x),
    "norm 1": lambda x, y: x.norm(1),
    "inf": lambda x, y: x.norm(float("inf")),
    "-inf": lambda x, y: torch.linalg.vector_norm(x, -float("inf")),
    "norms": lambda x, y: torch._foreach_norm([x, y]),
    "infs": lambda x, y: torch._foreach_norm([x, y], float("inf")),
    "of rows": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "stack": lambda x, y: torch.stack([x, y]),
    "cat": lambda x, y: torch.cat([x, y]),
    "clone": lambda x, y: x.clone(),
    "detached": lambda x, y: x.detach() + 1,
    "cast": lambda x, y: x.to(torch.float32).double() * 0 + x,
    "zeros": lambda x, y: torch.zeros_like(x),
    "lists": lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], [y, x]), [x, x], alpha=2.0),
    "copy": lambda x, y: copy.deepcopy(x),
    "argmax": lambda x, y: x.argmax(),
    "topk": lambda x, y: x.flatten().topk(3).values,
    "outer": lambda x, y: torch.einsum("ij,ik->jk", x, y),
    "complex": lambda x, y: torch.complex(x, y).abs(),
    "half": lambda x, y: x.bfloat16().float(),
    "bools": lambda x, y: (x > 0).reshape(-1),
}


PAIRS = ((0, 1), (2, 5), (4, 3))


def add_plain(x, y, p):
    x.add_(p)


def lerp_list(x, y, p):
    torch._foreach_lerp_([x, y], [p, x * 2], 0.25)


def into_view(x, y, p):
    x[1:4, 1] = p[1:4, 1]


def by_mask(x, y, p):
    x[x > 0] = 0.5


def from_other(x, y, p):
    x.copy_(y)
    y.zero_()


def in_replicated(x, y, p):
    whole = x.redistribute(placements=[Replicate()] * 2) if isinstance(x, DTensor) else x.clone()
    whole.mul_(x)
    x.copy_(whole)


def drawn(x, y, p):
    torch.manual_seed(1)
    x.normal_()
    y.bernoulli_(0.5)


def clipped_rows(x, y, p):
    x.copy_(torch.renorm(x, 2.0, 0, 1.0))


def by_data(x, y, p):
    x.data = p
    x.data.mul_(2)


def by_norms(x, y, p):
    x.div_(x.norm())
    y.mul_(x.norm(1) + y.abs().max())
    torch._foreach_div_([x, y], torch._foreach_norm([x, y]))


CHANGES = (add_plain, lerp_list, into_view, by_mask, from_other, in_replicated, drawn, clipped_rows, by_data, by_norms)


def tried(what, at, other, mine, theirs):
    try:
        same(theirs(), mine())
    except Exception as error:
        raise AssertionError(f"{what} of {PLACEMENTS[at]} and {PLACEMENTS[other]}") from error


def operated():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    plain, split = tensors()
    for at, other in PAIRS:
        for name, operator in OPERATORS.items():
            pairs = [(of[at], of[other]) for of in (plain, split)]
            tried(name, at, other, *(lambda pair=pair, operator=operator: operator(*pair) for pair in pairs))
        for change in CHANGES:
            mine, theirs = [[of[i].clone() for i in (at, other)] for of in (plain, split)]
            change(*mine, plain[at].clone())
            change(*theirs, plain[at].clone())
            tried(change.__name__, at, other, lambda mine=mine: mine, lambda theirs=theirs: theirs)
            assert [each.placements for each in theirs] == [PLACEMENTS[at], PLACEMENTS[other]], change
            assert all(type(each) is SplitTensor for each in theirs)


def test_operators_give_what_they_give_of_whole_tensors():
    run_ranks(4, operated)


class Parameters(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.each = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def trained(folder):
    """Each optimizer with gradients as a backward leaves them and by hand, clipped, scaled, saved and loaded."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    for name, make in OPTIMIZERS.items():
        models = [Parameters(each) for each in tensors()]
        optimizers = [make(model.parameters()) for model in models]
        for step in range(2):  # the second reads what the first left in the state
            for model, optimizer in zip(models, optimizers, strict=True):

                def closure(model=model, optimizer=optimizer, step=step):
                    optimizer.zero_grad()
                    loss = sum(((p - step) ** 2).mean() + p.sin().sum() for p in model.parameters())
                    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
                    loss.backward()
                    return loss

                if name != "LBFGS":
                    closure()
                    clip_grad_norm_(model.parameters(), 0.5)
                    clip_grad_value_(model.parameters(), 0.05)
                    optimizer.step()
                else:
                    optimizer.step(closure)
        try:
            same(list(models[1].parameters()), list(models[0].parameters()))
        except AssertionError as error:
            raise AssertionError(name) from error
        assert [p.placements for p in models[1].parameters()] == PLACEMENTS
    check_states(models[1])
    scaled()
    saved(models[1], folder)


def check_states(model):
    """States are laid out as parameters are, and are taken back from whole ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape).cumsum(0)
    optimizer.step()
    state = optimizer.state_dict()
    for number, placements in enumerate(PLACEMENTS):
        assert state["state"][number]["exp_avg"].placements == placements
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(copy.deepcopy(state))
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    for number, parameter in enumerate(model.parameters()):
        same(again.state[parameter]["exp_avg"], gathered(state["state"][number]["exp_avg"]))
        assert average.module.each[number].placements == PLACEMENTS[number]


def scaled():
    """An infinite gradient on one rank, of a tensor that comes last, is found on all of them."""
    for infinite in (False, True):
        _, split = tensors()
        split.insert(0, split.pop())  # replicated: torch would ask its layout alone
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = Parameters(split)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler.scale(torch.zeros(()))
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 8.0)
        if infinite:
            model.each[2].grad[4, 2] = float("inf")
        before = [gathered(p).clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        same(list(model.parameters()), [b if infinite else b - 1 for b in before])
        assert scaler.get_scale() == (4.0 if infinite else 8.0)


def saved(model, folder):
    """Files, one of each rank, and torch's distributed checkpoints, read in other layouts."""
    wholes = [gathered(p) for p in model.parameters()]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same(list(map(laid_out, loaded.values(), model.parameters())), wholes)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    _, other = tensors(7)
    for moved in (1, 3):  # to other layouts
        read = Parameters([laid_out(other[i], other[(i + moved) % len(other)]) for i in range(len(other))])
        state = read.state_dict()
        dcp.load(state, checkpoint_id=folder)
        same(list(state.values()), wholes)


def test_optimizers_clipping_scalers_and_files_take_them(tmp_path):
    run_ranks(4, trained, tmp_path / "checkpoint")


def refused():
    torch.set_default_dtype(torch.float64)
    sw.init()
    _, split = tensors()
    with pytest.raises(UsageError, match=r"call tensor.full_tensor\(\).numpy\(\)"):
        split[0].numpy()
    with pytest.raises(UsageError, match=r"HeldBy\(dim=0, holder=1\).* cannot be placed as"):
        split[0].redistribute(placements=[Partial(), Replicate()])
    x = split[1].detach().requires_grad_()
    (x.full_tensor() * torch.arange(3.0)).sum().backward()
    same(x.grad, torch.arange(3.0).expand(5, 3))
    assert x.grad.placements == x.placements
    (x.to_local() * 2).sum().backward()
    same(x.grad, torch.arange(3.0).expand(5, 3) + 2)
    layout, mesh = layout_of(x)
    assert layout.held == ("pp", 0)
    assert x.to_local().shape == layout.local_shape((5, 3), mesh, dist.get_rank())
    assert type(split_tensor(x).redistribute(placements=[Replicate(), Shard(1)])) is SplitTensor


def test_gradients_go_through_wholes_and_parts():
    run_ranks(4, refused)
