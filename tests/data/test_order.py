"""The order is the same for ever, and the parts of it are torch's."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.mesh.layout import chunk
from shardwright.data.order import even_range, permutation, sample_seeds, worker_seed


def test_the_order_is_the_same_for_ever():
    assert permutation(10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]
    assert permutation(10, seed=2**64 - 1, epoch=0).tolist() != permutation(10, seed=0, epoch=0).tolist()


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_an_order_holds_every_sample_once(size, seed, epoch):
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


@given(st.integers(1, 200), st.integers(1, 20))
def test_chunks_are_those_of_torch(size, parts):
    chunks = [torch.arange(size)[slice(*chunk(0, size, parts, i))].tolist() for i in range(parts)]
    theirs = [part.tolist() for part in torch.arange(size).chunk(parts)]
    assert chunks == theirs + [[]] * (parts - len(theirs))


@given(st.integers(0, 200), st.integers(1, 20))
def test_even_parts_are_contiguous_and_differ_by_at_most_one(size, parts):
    ranges = [even_range(size, parts, i) for i in range(parts)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_sample_seeds_are_those_of_each_sample_and_stay_what_they_are():
    assert sample_seeds(0, 0, [0, 1, 2**40]) == [955467153387892950, 7169060670827172034, 2065248195113045467]
    together = sample_seeds(2**64 - 1, 3, range(100))
    assert together == [sample_seeds(2**64 - 1, 3, [index])[0] for index in range(100)]
    assert len(set(together)) == 100


def test_worker_seeds_differ_between_ranks_and_epochs():
    seeds = [worker_seed(seed, epoch, rank) for seed in range(3) for epoch in range(3) for rank in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
