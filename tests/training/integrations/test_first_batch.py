"""A loader's first batch is looked at without being missed, and nothing is drawn that training would draw."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from shardwright.errors import UsageError
from shardwright.training.integrations.first_batch import first_batch


class Noisy:
    """Samples with noise of Python's and numpy's generators."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index + random.random() + np.random.rand()


def generator():
    return torch.Generator().manual_seed(5)


def loaders():
    sampler = RandomSampler(range(16), generator=generator())
    yield DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator())
    yield DataLoader(Noisy(), batch_size=4, sampler=sampler)
    yield DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(range(16), generator=generator()), 4, False))


def test_the_first_epoch_is_what_it_would_be():
    for looked_at, left_alone in zip(loaders(), loaders(), strict=True):
        random.seed(1)
        np.random.seed(1)
        expected = torch.cat(list(left_alone))
        random.seed(1)
        np.random.seed(1)
        with first_batch(looked_at) as batch:
            torch.rand(3)
        assert torch.equal(batch, expected[:4])
        assert torch.equal(torch.cat(list(looked_at)), expected)


class Once(IterableDataset):
    """What gives each of its samples once."""

    def __init__(self):
        self.left = iter(range(8))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


def test_samples_that_come_only_once_are_not_lost():
    once = Once()
    with (
        pytest.raises(UsageError, match=r"Once is its own iterator.*let its __iter__ return a new"),
        first_batch(DataLoader(once, batch_size=2)),
    ):
        pass
    assert next(once) == 0
    with pytest.raises(UsageError, match="generator is its own iterator"), first_batch(x for x in range(3)):
        pass
    with pytest.raises(UsageError, match="gives no batch"), first_batch([]):
        pass
