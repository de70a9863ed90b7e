"""A batch is a tuple that says how it was cut, so that nobody has to ask who has which rows."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch

import shardwright as sw
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate
from shardwright.data.loading.batch import Batch
from shardwright.errors import UsageError
from shardwright.runtime.programs.inputs import input_parts, local_inputs, rows_of

MESH = Mesh.of(a=2, b=2)
BY_PAIRS = Layout.split(2, {0: ["a"]})  # ranks 0 and 1 have the same rows, as where a tensor is split over b
DATA = torch.arange(20.0).reshape(10, 2)


@dataclass(frozen=True)
class Rank:
    rank: int
    size: int = 4


class Plan:
    def batch_rows(self, rank, rows):
        return BY_PAIRS.dims[0].bounds(rows, MESH, MESH.coordinates(rank))


def mine(batch, comm):
    """This rank's part of a batch of one tensor."""
    parts, _ = input_parts([DATA.shape], [BY_PAIRS], rows_of(batch, list(batch), None, comm.mesh.size), comm)
    return local_inputs(list(batch), parts, comm)


def inputs_of_loaders(**how):
    """On each rank, its part of what a loader gives, and the collectives that this took."""

    def one(comm):
        batch = next(iter(sw.loader(list(DATA), 10, shuffle=False, world=Rank(comm.rank), check_data=False, **how)))
        [part] = mine(batch, comm)
        return part, [collective.kind for collective in comm.collectives]

    return simulate(MESH, one)


@pytest.mark.parametrize(("plan", "talk"), [(Plan(), []), (None, ["all_gather"])], ids=["by the plan", "evenly"])
def test_ranks_exchange_rows_alone_and_no_sizes(plan, talk):
    for rank, (part, collectives) in enumerate(inputs_of_loaders(plan=plan)):
        assert torch.equal(part, DATA[:5] if rank < 2 else DATA[5:])
        assert collectives == talk


def test_a_whole_batch_on_every_rank_needs_no_exchange():
    def one(comm):
        batch = sw.loader(list(DATA), 10, shuffle=False, world=Rank(comm.rank), check_data=False).sample_batch()
        [part] = mine(batch, comm)
        return part, comm.collectives

    for rank, (part, collectives) in enumerate(simulate(MESH, one)):
        assert torch.equal(part, DATA[:5] if rank < 2 else DATA[5:])
        assert collectives == []


def test_a_batch_is_a_tuple_that_keeps_its_range_and_its_cut():
    x, y = batch = Batch([DATA[:3], torch.zeros(3)], global_size=10, start=0, stop=3, ranges=[(0, 3), (3, 10)])
    assert isinstance(batch, tuple)
    assert (x.shape, y.shape) == ((3, 2), (3,))
    for same in (batch.to("cpu"), batch.of(batch), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert type(same) is Batch
        assert torch.equal(same[0], batch[0])
        assert (same.global_size, same.start, same.stop, same.ranges) == (10, 0, 3, ((0, 3), (3, 10)))
    assert batch.to("meta")[0].device.type == "meta"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (2, 31)])
def test_a_range_outside_the_global_batch_is_refused(start, stop):
    with pytest.raises(UsageError, match=rf"samples {start} to {stop} does not lie within a global batch of 30"):
        Batch([], global_size=30, start=start, stop=stop)
    with pytest.raises(UsageError, match=r"samples 0 to 3 is that of no rank, who have \[\(0, 5\), \(5, 10\)\]"):
        Batch([DATA[:3]], global_size=10, start=0, stop=3, ranges=[(0, 5), (5, 10)])


def test_a_batch_of_a_loader_for_other_ranks_is_refused():
    batch = next(iter(sw.loader(list(DATA), 10, shuffle=False, world=Rank(1), check_data=False)))

    def one(comm):
        mine(batch, comm)

    with pytest.raises(UsageError, match="the batch was cut for 4 ranks, and there are 2: it comes from a loader for"):
        simulate(Mesh.of(a=2), one)
