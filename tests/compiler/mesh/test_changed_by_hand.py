"""What a script changes of split parameters between steps changes the whole, as on one device, or is refused."""

import copy
from time import monotonic

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.mesh import changed as changed_by_hand
from shardwright.compiler.mesh.dtensor import gathered


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def to_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def exchanged(model):
    """Two states that take turns, as of an average and what is trained."""
    weight = model[0].weight
    kept, weight.data = weight.data, torch.ones(16, 8)
    weight.data.mul_(3)
    weight.data, other = kept, weight.data
    weight.data.add_(other)


def columns(model):
    for weight in (model[0].weight, model[2].weight):
        weight[:, 2] = 0.5
        weight[1:3] = weight[0:2] * 2
        weight[weight.abs() < 0.1] = 0
        weight[3:5] += 1
        weight[[0, 5], 3] = torch.arange(2.0)
        weight.data[4] = torch.arange(float(weight.shape[1]))


def initialised(model):
    for weight in (model[0].weight, model[2].weight):
        nn.init.xavier_uniform_(weight)
        weight.add_(torch.randn_like(weight))
        weight.mul_(torch.bernoulli(torch.full_like(weight, 0.5)))
        weight.add_(torch.empty_like(weight).exponential_())
        weight.add_(torch.empty_like(weight).normal_(generator=torch.Generator().manual_seed(3)))
        weight.copy_(F.dropout(weight, 0.3))
    model[0].reset_parameters()


def masked(model):
    """Plain tensors that all ranks have alike: masks, initial numbers, averages."""
    for weight in (model[0].weight, model[2].weight):
        mask, numbers = torch.ones(weight.shape).tril(), torch.randn(weight.shape)
        weight.mul_(mask)
        weight.add_(numbers).sub_(torch.arange(float(weight.shape[1])), alpha=0.1)
        weight.copy_(torch.where(weight > 0, numbers, weight * mask))
        weight.masked_fill_(mask == 0, 0.5)
        weight[mask == 0] += 1
        weight.data = weight.data * mask + torch.lerp(weight, numbers, 0.3)
        weight.lerp_(numbers, 0.1)
        torch.mul(weight, mask + 1, out=weight)
        torch._foreach_mul_([weight], [mask + 2])
        average = torch.zeros(weight.shape)
        average.copy_(weight).mul_(weight)
        weight.copy_(average.addcmul(weight, mask))
        weight.copy_(numbers[0])


def gradients(model):
    for weight in (model[0].weight, model[2].weight):
        numbers = torch.randn(weight.shape)
        weight.grad = numbers.clone()
        weight.grad.mul_(numbers > 0)
        weight.grad[numbers < -1] = 3
        weight.grad += weight * numbers
        weight.add_(weight.grad, alpha=-0.1)
        weight.grad = None


def flat(model):
    """What does not fit the parts is done on wholes."""
    for weight in (model[0].weight, model[2].weight):
        turned = weight.view(-1).flip(0).cumsum(0).view_as(weight)
        weight.copy_(turned / turned.norm())
        weight.copy_(torch.linalg.qr(weight)[0] @ torch.linalg.qr(weight)[1])
        weight.index_add_(0, torch.tensor([1, 2]), torch.ones(2, weight.shape[1]))
        weight.copy_(weight.flatten()[torch.randperm(weight.numel())].reshape(weight.shape))
        weight.copy_(torch.fake_quantize_per_tensor_affine(weight, 0.1, 0, -128, 127))


CHANGES = {
    "masked": masked,
    "gradients": gradients,
    "flat": flat,
    "data": lambda model: setattr(model[2].weight, "data", model[2].weight.softmax(0).data),
    "vector": to_vector,
    "exchanged": exchanged,
    "columns": columns,
    "initialised": initialised,
}


def changed():
    """After each of the changes: parameters by plain PyTorch and split, and the losses of a next step."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    model, batch = net(), (torch.randn(12, 8), torch.randn(12, 6))
    plain = copy.deepcopy(model)
    split = {"0": ((1, 1), (2, 1), None), "2": ((1, 2), (1, 2), None)}
    parallel = sw.parallelize(model, loss_fn, batch, "semi-auto", batch="global", mesh="tp=2", pins=split)
    found = {}
    for name, change in CHANGES.items():
        for each in (plain, model):
            sw.set_seed(7)
            with torch.no_grad():
                change(each)
        same = [gathered(p).equal(q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        found[name] = same, parallel(batch).item(), loss_fn(plain, batch).item()
    return found, refused(parallel, batch)


def refused(parallel, batch):
    weight, found = parallel.module[0].weight, []

    def row():
        with torch.no_grad():
            weight[3].mul_(2)
        parallel(batch)

    found.append(said(row))
    found.append(said(lambda: setattr(weight, "data", torch.ones(8, 8))))
    found.append(said(lambda: weight.__setitem__(0, 1.0)))
    with torch.no_grad():
        assert weight[3].norm() > 0  # what only reads a row is no change
        weight[:, 3].mul_(2)  # nor does this need the parts of several ranks
    found.append(said(lambda: parallel(batch)))
    return found


REFUSED = [
    r"what select\(\) or an index gave of a split tensor of shape \[16, 8\] was changed in place",
    r"a split tensor of float64\[16, 8\] on cpu is given data of float64\[8, 8\] on cpu",
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
    "^$",
]


def test_changes_of_split_parameters_are_those_of_whole_ones():
    for found, said in run_ranks(2, changed):
        for name, (same, loss, expected) in found.items():
            assert all(same), name
            assert loss == pytest.approx(expected, rel=1e-10), name
        for text, words in zip(said, REFUSED, strict=True):
            with pytest.raises(RuntimeError, match=words):
                raise RuntimeError(text)


# How to get a view of the first row or column of a tensor, as a method and as a function.
VIEWS = {
    "[]": lambda p, dim: p[0] if dim == 0 else p[:, 0],
    "[:]": lambda p, dim: p[:1] if dim == 0 else p[:, :1],
    "select method": lambda p, dim: p.select(dim, 0),
    "select": lambda p, dim: torch.select(p, dim, 0),
    "narrow method": lambda p, dim: p.narrow(dim, 0, 1),
    "narrow": lambda p, dim: torch.narrow(p, dim, 0, 1),
    "chunk method": lambda p, dim: p.chunk(3, dim)[0],
    "chunk": lambda p, dim: torch.chunk(p, 3, dim)[0],
    "split method": lambda p, dim: p.split(3, dim)[0],
    "split": lambda p, dim: torch.split(p, 3, dim)[0],
    "tensor_split method": lambda p, dim: p.tensor_split(3, dim)[0],
    "tensor_split": lambda p, dim: torch.tensor_split(p, 3, dim)[0],
    "hsplit or vsplit method": lambda p, dim: (p.vsplit(4) if dim == 0 else p.hsplit(4))[0],
    "hsplit or vsplit": lambda p, dim: (torch.vsplit(p, 4) if dim == 0 else torch.hsplit(p, 4))[0],
    "diagonal method": lambda p, dim: p.diagonal(),
    "diagonal": lambda p, dim: torch.diagonal(p),
    "unbind method": lambda p, dim: p.unbind(dim)[0],
    "unbind": lambda p, dim: torch.unbind(p, dim)[0],
    "of a transposed one": lambda p, dim: p.t().select(1 - dim, 0),
    "data": lambda p, dim: torch.select(p, dim, 0).data,
    "kept data": lambda p, dim: [row := torch.select(p, dim, 0), row.data][1],
}


def said(do):
    """What an error says that torch or the package raises, else nothing."""
    try:
        do()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def split_model():
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    batch = torch.randn(12, 8), torch.randn(12, 8)
    split = {"0": ((1, 1), (2, 1), None), "2": ((1, 2), (1, 2), None)}  # by rows, and by columns
    return sw.parallelize(model, loss_fn, batch, "semi-auto", batch="global", mesh="tp=2", pins=split), batch


def views():
    """Of each view of each weight by each dim: whether a write came to the whole, and what was said then."""
    parallel, _ = split_model()
    found = {}
    for layer in (0, 2):
        weight = parallel.module[layer].weight
        for name, view in VIEWS.items():
            for dim in (0, 1):
                plain = gathered(weight).clone()
                with torch.no_grad():
                    view(plain, dim).fill_(9)
                    refusal = said(lambda: view(weight, dim).fill_(9))  # noqa: B023
                same = gathered(weight).equal(plain)
                refusal = refusal or said(parallel.full_state_dict)
                found[layer, name, dim] = same, refusal
                with torch.no_grad():
                    weight.copy_(weight * 0.5)
    return found


def test_a_change_by_any_view_is_made_or_refused():
    for found in run_ranks(2, views):
        assert any(same for same, _ in found.values())
        for case, (same, refusal) in found.items():
            refused = "was changed in place" in refusal or "unbind along the sharded dimension" in refusal
            assert refused != same, (case, same, refusal)
            assert refused or not refusal, (case, refusal)


def unlike_numbers():
    parallel, batch = split_model()
    weight, rank = parallel.module[0].weight, torch.distributed.get_rank()
    found = []
    with torch.no_grad():
        for change in (
            lambda: weight.mul_(torch.full((16, 8), float(rank))),
            lambda: weight.copy_(torch.ones(16, 8)),
            lambda: setattr(weight, "grad", torch.randn(16, 8) * rank),
            lambda: weight.__setitem__(torch.eye(16, 8) == rank, 1.0),
            lambda: setattr(weight, "data", torch.full((16, 8), float(rank))),
            lambda: weight.__setitem__(slice(None), torch.full((8,), float(rank))),
        ):
            change()
            found.append(said(lambda: parallel(batch)))
    return found


def test_plain_tensors_that_differ_between_ranks_are_refused_on_all():
    for found in run_ranks(2, unlike_numbers):
        assert [bool(text) for text in found] == [True, False, True, True, True, True], found
        words = (
            "rank 0 called mul_() a tensor of float32[16, 8] on cpu, rank 1 with other numbers; a plain tensor stands"
        )
        assert words in found[0]


def kept_views():
    parallel, batch = split_model()
    weight, found = parallel.module[0].weight, []
    noted = changed_by_hand._copies._noted
    with torch.no_grad():
        if torch.distributed.get_rank() == 1:  # what needs no other rank, one may look into alone
            weight[:, 2].to_local()
        found.append(said(lambda: parallel(batch)))
        early, kept = weight[3], [weight[row % 16] for row in range(100)]
        found.append(said(lambda: parallel(batch)))  # they were read alone
        early.mul_(2)
        found.append(said(lambda: parallel.load_state_dict(parallel.state_dict())))
        kept[0].zero_()
        del early, kept
        found.append(said(lambda: parallel(batch)))
        for row in range(100):
            weight[row % 16].norm()
            weight.mul_(1.0)
        end = monotonic() + 60  # what has gathered them may hold them a moment longer
        while any(each.parts for each in noted) and monotonic() < end:
            changed_by_hand._copies._settle()
        assert not any(each.parts for each in noted), "memory of what was only read is kept"
        found.append(said(parallel.full_state_dict))
        row = weight[5]
        if torch.distributed.get_rank() == 1:  # a part that only one rank changes is refused on all
            row.to_local().add_(1)
        found.append(said(parallel.full_state_dict))
        found.append(said(parallel.full_state_dict))
    hidden = weight * 2
    found.append(said(lambda: hidden.__setitem__(0, 1.0)))
    return found


KEPT = [
    "",
    "",
    "was changed in place",
    "was changed in place",
    "",
    "was changed in place",
    "",
    "with gradients that would",
]


def test_views_that_are_kept_are_watched_and_those_that_were_read_are_not():
    for found in run_ranks(2, kept_views):
        for text, words in zip(found, KEPT, strict=True):
            assert words in text, found
            assert bool(words) == bool(text), found


def unlike_generators():
    parallel, _ = split_model()
    weight, rank = parallel.module[0].weight, torch.distributed.get_rank()
    own = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        found = [said(lambda: weight.normal_(generator=own))]
        found.append(said(lambda: weight.normal_(generator=own.manual_seed(5))))
        torch.manual_seed(rank)
        found.append(said(lambda: nn.init.xavier_uniform_(weight)))
        found.append(said(lambda: torch.randn_like(weight)))
        sw.set_seed(1)
        found.append(said(lambda: nn.init.xavier_uniform_(weight)))
    return found


def test_draws_from_generators_that_differ_are_refused_on_all_ranks():
    for found in run_ranks(2, unlike_generators):
        assert [bool(text) for text in found] == [True, False, True, True, False], found
        assert "rank 1 would draw others than rank 0; call sw.set_seed(seed) on all ranks" in found[0]


def of_others():
    """A DTensor that no model of ours has is given data, and written to, as torch does it."""
    split_model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("others",))
    tensor = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    tensor.data = distribute_tensor(torch.ones(4, 4, dtype=torch.float64), mesh, [Shard(0)])
    with torch.no_grad():
        torch.select(tensor, 0, 0).fill_(2)
    return str(tensor.dtype), changed_by_hand._copies._noted


def test_dtensors_of_others_are_changed_as_torch_changes_them():
    assert run_ranks(2, of_others) == [("torch.float64", [])] * 2
