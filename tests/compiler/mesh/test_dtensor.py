"""Layouts and DTensor placements say the same, and cut the same."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import run_ranks
from shardwright.compiler.mesh.dtensor import device_mesh, from_placements, to_placements
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import PlanError

MESH = Mesh.parse("dp=2,tp=2")
ATOMIC = Mesh.of(x=4).atomic()  # the axes x.0 and x.1


@settings(deadline=None)
@given(st.lists(st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()]), min_size=3, max_size=3))
def test_there_and_back(placements):
    mesh = Mesh.of(a=2, b=3, c=2)
    assert to_placements(from_placements(placements, 3, mesh), mesh) == placements


def cut_by_dtensor(mesh):
    dist.init_process_group("gloo")
    devices = device_mesh(mesh, "cpu")
    assert devices.mesh_dim_names == mesh.names
    checked = 0
    for shape in [(3, 8), (1, 5), (10, 3)]:
        whole = torch.arange(shape[0] * shape[1]).reshape(shape).double()
        for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
            layout = from_placements(placements, 2, mesh)
            mine = whole[layout.local_slice(shape, mesh, dist.get_rank())]
            theirs = distribute_tensor(whole, devices, list(placements), src_data_rank=None)
            assert torch.equal(theirs.to_local(), mine), (shape, placements)
            checked += 1
    rows = Layout.split(2, {0: mesh.names})
    mine = whole[rows.local_slice(shape, mesh, dist.get_rank())]
    ours = DTensor.from_local(mine, devices, to_placements(rows, mesh), shape=shape, stride=whole.stride())
    assert torch.equal(ours.full_tensor(), whole)
    partial = DTensor.from_local(torch.ones(2, 2), devices, to_placements(Layout.split(2, {}, mesh.names), mesh))
    assert torch.equal(partial.full_tensor(), torch.full((2, 2), 4.0))
    dist.destroy_process_group()
    return checked


@pytest.mark.parametrize("mesh", [pytest.param(MESH, marks=pytest.mark.slow), ATOMIC], ids=str)
def test_dtensor_cuts_where_the_layout_does(mesh):
    assert run_ranks(4, cut_by_dtensor, mesh) == [27] * 4


def test_what_a_dtensor_cannot_express():
    with pytest.raises(PlanError, match=r"dim 0 of \[tp·dp\] is cut over tp·dp; .* in mesh order only: dp·tp"):
        to_placements(Layout.split(1, {0: ["tp", "dp"]}), MESH)
    with pytest.raises(PlanError, match=r"dim 0 of \[tp/4\] is cut between multiples of 4"):
        to_placements(Layout((Split(("tp",), 4),)), MESH)
    with pytest.raises(PlanError, match=r"placement Partial\(max\) on axis dp has no layout; those that have: Shard"):
        from_placements([Partial("max"), Replicate()], 1, MESH)
    with pytest.raises(PlanError, match=r"1 placements .* for the 2 axes of dp=2 tp=2"):
        from_placements([Replicate()], 1, MESH)
    with pytest.raises(PlanError, match="a mesh without axes is no device mesh"):
        device_mesh(Mesh(()), "cpu")
