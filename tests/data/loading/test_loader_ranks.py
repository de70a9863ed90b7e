"""Real processes: the loaders of all ranks agree, and a rank with other data is named on every rank."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from ranks import run_ranks
from shardwright.data.loading.same_data import Fingerprint, compare, fingerprint
from shardwright.data.order import permutation
from shardwright.errors import DataError


class Squares:
    """Sample i is i², or what `odd` says; reading sample `broken` fails."""

    def __init__(self, size, odd=None, broken=None, noisy=False):
        self.size, self.odd, self.broken, self.noisy = size, odd or {}, broken, noisy

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.broken:
            raise DataError(f"record {index} is damaged")
        noise = torch.rand(()) + random.random() + np.random.rand() if self.noisy else 0
        return torch.tensor(self.odd.get(index, index**2)) + noise


def first_epoch(datasets):
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        loader = sw.loader(datasets.get(rank, datasets[None]), batch_size=10)
        try:
            return [(batch.start, batch.stop, batch[0].tolist()) for batch in loader]
        except DataError as error:
            return str(error)
    finally:
        dist.destroy_process_group()


def test_ranks_read_their_parts_of_the_one_order():
    results = run_ranks(4, first_epoch, {None: Squares(24)})
    squares = [index**2 for index in permutation(24, 0, 0).tolist()]
    read = [[] for _ in range(3)]
    for parts in results:
        for batch, (_, _, values) in zip(read, parts, strict=True):
            batch += values
    assert read == [squares[:10], squares[10:20], squares[20:]]
    assert [parts[0][:2] for parts in results] == [(0, 3), (3, 6), (6, 9), (9, 10)]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Squares(24, odd={23: -1}), "rank 2 has another sample at index 23 than most ranks"),
        pytest.param(Squares(25), "rank 2 has 25 samples where most ranks have 24", marks=pytest.mark.slow),
        pytest.param(
            Squares(24, broken=0), "rank 2 cannot read its samples (DataError: record 0 is damaged)",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_rank_raises_and_names_the_rank_that_differs(odd, message):
    results = run_ranks(4, first_epoch, {None: Squares(24), 2: odd})
    assert len(set(results)) == 1
    assert f"the ranks do not see the same data: {message}. Every rank needs" in results[0]
    assert "rank 0" not in results[0]


def test_random_samples_are_the_same_data_on_any_number_of_ranks():
    def read(ranks):
        results = run_ranks(ranks, first_epoch, {None: Squares(24, noisy=True)})
        return [[v for _, _, values in parts for v in values] for parts in zip(*results, strict=True)]

    one = read(1)
    assert [len(values) for values in one] == [10, 10, 4]
    assert len({value % 1 for values in one for value in values}) == 24
    assert read(2) == one


def drawn_by_collate(samples):
    return (torch.stack(samples) + random.random(),)


@pytest.mark.parametrize(("noisy", "collate"), [(False, None), (True, drawn_by_collate)])
def test_a_loader_leaves_the_random_generators_and_draws_the_same_in_processes_of_its_own(noisy, collate):
    def read(num_workers):
        loader = sw.loader(Squares(24, noisy=noisy), batch_size=10, collate_fn=collate, num_workers=num_workers)
        return [batch[0].tolist() for batch in loader]

    torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1:], random.getstate()
    here = read(0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][0])
    assert (np.random.get_state()[2:], random.getstate()) == (states[1][1:], states[2])
    assert read(1) == here


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), np.zeros(2, dtype=np.float32)),
        ((1, (2, 3)), ((1, 2), 3)),
        ({"a": 1}, {"b": 1}),
        ("ab", b"ab"),
        (1, 1.0),
        (np.zeros(4), np.zeros((2, 2))),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_checksums_tell_samples_apart(a, b):
    assert fingerprint([a]) == fingerprint([a])
    assert fingerprint([a]) != fingerprint([b])


def test_the_majority_is_right_and_of_two_the_first():
    three, four = Fingerprint(3), Fingerprint(4)
    assert compare([four, three, three]) == ["rank 0 has 4 samples where most ranks have 3"]
    assert compare([three, four]) == ["rank 1 has 4 samples where most ranks have 3"]
    assert compare([three] * 5) == []
    broken = Fingerprint(3, failure="OSError: gone")
    assert compare([broken, broken, three]) == [
        f"rank {rank} cannot read its samples (OSError: gone)" for rank in (0, 1)
    ]
