"""What is patched in torch stands in one table and is undone; after training, torch is what it was."""

import inspect
from pkgutil import resolve_name

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.common.torch_private import PATCHES, patched

# Classes whose methods a product might be tempted to patch, beside those of the table.
CLASSES = [nn.Module, nn.Parameter, torch.Tensor, DTensor, torch.autograd.Function]
CLASSES += [kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)]


def names_in(owners):
    """What stands in the namespaces of owners, and in those of the dispatcher of DTensors."""
    dispatcher = DTensor._op_dispatcher
    found = {str(owner): dict(vars(owner)) for owner in owners}
    return found | {"dispatcher": vars(dispatcher) | dispatcher._custom_op_handlers}


def changed(before, after):
    return [
        (owner, str(name))
        for owner, names in after.items()
        for name, value in names.items()
        if before[owner].get(name) is not value and (callable(value) or isinstance(value, property))
    ]


def trained(owners):
    """The names of torch that are others after a model was split, changed by hand, trained and saved."""
    owners = [*CLASSES, *(resolve_name(owner) for owner in owners)]
    torch.optim.AdamW([torch.ones(1)])  # torch puts hooks around step where the first one is made
    before = names_in(owners)
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), (torch.randn(4, 8), torch.randn(4, 8))
    pins = {"0": ((1, 1), (2, 1), None)}
    parallel = sw.parallelize(
        model, lambda m, b: F.mse_loss(m(b[0]), b[1]), batch, "semi-auto", batch="global", mesh="tp=2", pins=pins
    )
    optimizer = torch.optim.AdamW(parallel.parameters())
    with parallel.accumulate():
        parallel(batch).backward()
    inside = "zero_grad" in {name for _, name in changed(before, names_in(owners))}
    optimizer.zero_grad()
    for _ in range(2):
        parallel(batch).backward()
        optimizer.step()
    with torch.no_grad():
        model[0].weight.normal_()
        float(model[0].weight.norm())
    parallel.load_state_dict(parallel.state_dict())
    return inside, changed(before, names_in(owners))


def test_torch_is_what_it_was_after_training():
    owners = sorted({patch.owner for patch in PATCHES.values()})
    for inside, after in run_ranks(2, trained, owners):
        assert inside, "what this test compares shows no patch"
        assert after == []


@pytest.mark.parametrize("what", PATCHES)
def test_a_patch_of_the_table_is_undone_also_by_an_error(what):
    patch = PATCHES[what]
    owner = resolve_name(patch.owner)
    before, values = dict(vars(owner)), {name: object() for name in patch.names}

    def stop():
        assert all(vars(owner)[name] is value for name, value in values.items())
        raise KeyError

    with pytest.raises(KeyError), patched(what, **values):
        stop()
    assert dict(vars(owner)) == before


def test_what_the_table_does_not_name_is_not_patched():
    with (
        pytest.raises(AssertionError, match=r"zero_grad does not say that it patches \{'step'\}"),
        patched("zero_grad", step=None),
    ):
        pass
