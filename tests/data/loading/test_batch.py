"""A batch is a tuple that carries its place in the global batch."""

import copy
import pickle

import pytest
import torch

from shardwright.data.loading.batch import Batch
from shardwright.errors import UsageError


def test_it_unpacks_like_a_tuple_and_knows_its_range():
    x, y = batch = Batch([torch.ones(2, 3), torch.zeros(2)], global_size=30, start=4, stop=6)
    assert isinstance(batch, tuple)
    assert (x.shape, y.shape) == ((2, 3), (2,))
    assert (batch.global_size, batch.start, batch.stop) == (30, 4, 6)


@pytest.mark.parametrize("again", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy, lambda b: b.to("cpu")])
def test_it_survives_pickling_copying_and_moving(again):
    batch = Batch([torch.arange(2.0)], global_size=30, start=4, stop=6)
    other = again(batch)
    assert type(other) is Batch
    assert repr(other) == repr(batch)
    assert torch.equal(other[0], batch[0])


def test_it_moves_its_tensors():
    batch = Batch([torch.arange(2.0)], global_size=2, start=0, stop=2).to("meta")
    assert batch[0].device.type == "meta"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (2, 31)])
def test_a_range_outside_the_global_batch_is_refused(start, stop):
    with pytest.raises(UsageError, match=rf"samples {start} to {stop} does not lie within a global batch of 30"):
        Batch([], global_size=30, start=start, stop=stop)
