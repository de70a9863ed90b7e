"""The loader's order belongs to the seed and the epoch; ranks, workers and resuming only divide it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.data.loading.batch import Batch
from shardwright.data.order import permutation
from shardwright.errors import UsageError
from whole_batches import global_batches

WORLD_SIZES = [1, 2, 3, 4, 8]


class Numbers(torch.utils.data.Dataset):
    """Sample i is (i, [i, i] as float32)."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index, torch.full((2,), float(index))


def loaders(size, world_size, **arguments):
    """One loader per rank of a world, all in this process."""
    return [
        sw.loader(Numbers(size), world=SimpleNamespace(rank=rank, size=world_size), **arguments)
        for rank in range(world_size)
    ]


def flat(batches):
    return [index for batch in batches for index in batch]


@settings(max_examples=30)
@given(
    size=st.integers(1, 60),
    world_size=st.sampled_from(WORLD_SIZES),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 9),
)
def test_the_parts_of_any_world_make_up_the_one_order(size, world_size, batch_size, seed, epoch):
    ranks = loaders(size, world_size, batch_size=batch_size, seed=seed)
    for rank in ranks:
        rank.set_epoch(epoch)
    batches = global_batches(ranks)
    order = permutation(size, seed, epoch).tolist()
    assert batches == [order[at : at + batch_size] for at in range(0, size, batch_size)]
    assert {len(rank) for rank in ranks} == {len(batches)}
    assert {rank.epoch for rank in ranks} == {epoch + 1}


@pytest.mark.parametrize(("size", "world_size"), [(1, 3), (5, 8), (24, 1), (37, 4)])
def test_evaluation_counts_every_sample_once(world_size, size):
    for arguments in ({"evaluate": True}, {"shuffle": False}):
        ranks = loaders(size, world_size, batch_size=10, **arguments)
        for _ in range(2):
            assert flat(global_batches(ranks)) == list(range(size))


def test_an_evaluation_that_was_left_begins_anew():
    ranks = loaders(24, 2, batch_size=10, evaluate=True)
    assert len(global_batches(ranks, limit=1)) == 1
    assert flat(global_batches(ranks)) == list(range(24))


def test_slices_are_those_of_torch_chunk_and_may_be_empty():
    parts = [next(iter(rank)) for rank in loaders(5, 4, batch_size=5, shuffle=False)]
    assert [index.tolist() for index, _ in parts] == [[0, 1], [2, 3], [4], []]
    empty = parts[3]
    assert isinstance(empty, Batch)
    assert (empty.global_size, empty.start, empty.stop) == (5, 5, 5)
    assert [(t.dtype, tuple(t.shape)) for t in empty] == [(torch.int64, (0,)), (torch.float32, (0, 2))]


def test_every_epoch_has_an_order_of_its_own_and_the_seed_fixes_them():
    ranks = loaders(30, 2, batch_size=7, seed=5)
    epochs = [flat(global_batches(ranks)) for _ in range(3)]
    assert epochs == [permutation(30, 5, epoch).tolist() for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_drop_last_leaves_out_a_batch_that_is_not_full():
    ranks = loaders(37, 3, batch_size=10, drop_last=True)
    batches = global_batches(ranks)
    assert [len(batch) for batch in batches] == [10, 10, 10]
    assert len(ranks[0]) == 3
    assert flat(global_batches(ranks)) == permutation(37, 0, 1)[:30].tolist()


def test_per_rank_batch_size_times_the_ranks_is_the_global_one():
    ranks = loaders(24, 4, per_rank_batch_size=3)
    assert ranks[0].batch_size == 12
    assert [len(batch) for batch in global_batches(ranks)] == [12, 12]


def move(ranks, state):
    for rank in ranks:
        rank.load_state_dict(state)


def test_resuming_on_8_6_1_and_4_ranks_repeats_and_skips_nothing():
    seen, state, size = [], None, 101
    for world_size, batch_size, steps in ((8, 16, 3), (6, 10, 2), (1, 7, 1), (4, 16, 8)):
        ranks = loaders(size, world_size, batch_size=batch_size, seed=3)
        if state is not None:
            move(ranks, state)
        while steps:
            batches = global_batches(ranks, limit=steps)
            steps -= len(batches)
            seen += flat(batches)
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    order = [index for epoch in range(3) for index in permutation(size, 3, epoch).tolist()]
    assert seen == order[: len(seen)]
    assert len(seen) > 2 * size - 16
    assert state["samples"] + state["epoch"] * size == len(seen)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 12), st.integers(1, 4)), max_size=5))
def test_resuming_anywhere_is_as_if_never_stopped(pieces):
    seen, state, size = [], None, 23
    for world_size, batch_size, steps in pieces:
        ranks = loaders(size, world_size, batch_size=batch_size)
        if state is not None:
            move(ranks, state)
        seen += flat(global_batches(ranks, limit=steps))
        state = ranks[0].state_dict()
    order = [index for epoch in range(9) for index in permutation(size, 0, epoch).tolist()]
    assert seen == order[: len(seen)]


def test_a_state_saved_after_the_last_batch_continues_with_the_next_epoch():
    one = sw.loader(Numbers(20), batch_size=10)
    for _ in one:
        state = one.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 20)
    other = sw.loader(Numbers(20), batch_size=10)
    other.load_state_dict(state)
    assert other.epoch == 1
    assert flat([batch[0].tolist() for batch in other]) == permutation(20, 0, 1).tolist()


def test_the_next_loop_continues_one_that_was_left():
    one = sw.loader(Numbers(20), batch_size=5)
    first = [next(iter(one))[0].tolist() for _ in range(2)]
    rest = [batch[0].tolist() for batch in one]
    assert flat(first + rest) == permutation(20, 0, 0).tolist()


def test_an_unshuffled_loader_resumes_from_a_loaded_state_once():
    one = sw.loader(Numbers(20), batch_size=5, shuffle=False)
    next(iter(one))
    other = sw.loader(Numbers(20), batch_size=5, shuffle=False)
    other.load_state_dict(one.state_dict())
    assert flat(batch[0].tolist() for batch in other) == list(range(5, 20))
    assert flat(batch[0].tolist() for batch in other) == list(range(20))


def test_the_epoch_set_is_the_epoch_read_and_resuming_survives_it():
    one = sw.loader(Numbers(20), batch_size=5)
    one.load_state_dict({**one.state_dict(), "epoch": 4, "samples": 10})
    one.set_epoch(4)  # torch users' habit, at the top of the epoch
    assert flat(batch[0].tolist() for batch in one) == permutation(20, 0, 4)[10:].tolist()
    assert one.epoch == 5
    one.set_epoch(2)
    assert flat(batch[0].tolist() for batch in one) == permutation(20, 0, 2).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_counts_what_was_handed_out_not_what_was_read_ahead(num_workers):
    one = sw.loader(Numbers(40), batch_size=4, num_workers=num_workers)
    for step, _ in enumerate(one, start=1):
        assert one.state_dict()["samples"] == 4 * step
        assert one.epoch == 0
    assert (one.state_dict()["epoch"], one.state_dict()["samples"]) == (1, 0)


def test_the_sample_batch_is_the_whole_next_global_batch():
    ranks = loaders(24, 4, batch_size=10)
    assert [rank.sample_batch()[0].tolist() for rank in ranks] == [permutation(24, 0, 0)[:10].tolist()] * 4
    sample = ranks[2].sample_batch()
    assert (sample.global_size, sample.start, sample.stop) == (10, 0, 10)
    assert flat(global_batches(ranks)) == permutation(24, 0, 0).tolist()
    assert ranks[0].sample_batch()[0].tolist() == permutation(24, 0, 1)[:10].tolist()


def test_a_dataset_that_gathers_is_asked_for_whole_batches():
    asked = []

    class Gathering(Numbers):
        def gather(self, indices):
            asked.append(indices)
            return torch.tensor(indices), torch.zeros(len(indices), 2)

    one = sw.loader(Gathering(6), batch_size=4, shuffle=False)
    assert [batch[0].tolist() for batch in one] == [[0, 1, 2, 3], [4, 5]]
    assert asked == [[0, 1, 2, 3], [4, 5]]


def test_getitems_of_a_subset_and_a_collate_function():
    subset = torch.utils.data.Subset(Numbers(10), [9, 8, 7])
    one = sw.loader(subset, 2, shuffle=False, collate_fn=lambda samples: torch.tensor([i for i, _ in samples]))
    assert [[t.tolist() for t in batch] for batch in one] == [[[9, 8]], [[7]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected either batch_size .* or per_rank_batch_size .*, got neither"),
        ({"batch_size": 8, "per_rank_batch_size": 2}, "got both: 8 and 2"),
        ({"batch_size": 0}, "expected batch_size to be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "expected batch_size to be a whole number of at least 1, got 2.5"),
        ({"per_rank_batch_size": -1}, "expected per_rank_batch_size to be a whole number of at least 1, got -1"),
        ({"batch_size": 4, "num_workers": -1}, "expected num_workers to be a whole number of at least 0, got -1"),
        ({"batch_size": 4, "seed": -1}, r"expected seed from 0 to 2\*\*64 - 1, got -1"),
        ({"batch_size": 4, "evaluate": True, "shuffle": True}, "evaluate=True counts .*; remove shuffle=True"),
        ({"batch_size": 4, "evaluate": True, "drop_last": True}, "remove drop_last=True"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch: the global batch is 11, the dataset has 10 samples"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(UsageError, match=message):
        sw.loader(Numbers(10), **arguments)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1, 2]), "got a list_iterator, which can be read only once; .* pass the function that makes it"),
        ({1, 2}, "expected a dataset with __getitem__ .*, got set without"),
        ([], r"the dataset \(list\) is empty"),
    ],
)
def test_datasets_that_do_not_fit(dataset, message):
    with pytest.raises(UsageError, match=message):
        sw.loader(dataset, batch_size=1)


def test_samples_that_are_no_tensors():
    with pytest.raises(UsageError, match="got a batch with a tuple of 2 samples; pass a collate_fn"):
        next(iter(sw.loader([("a", 1), ("b", 2)], batch_size=2)))
    with pytest.raises(UsageError, match="expected a sample to be a tensor or a tuple"):
        next(iter(sw.loader([{"x": 1}, {"x": 2}], batch_size=2)))


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}),
        ("OpenMPI", {f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "3"), ("LOCAL_RANK", "3"))}
            | {f"OMPI_COMM_WORLD_{k}": "8" for k in ("SIZE", "LOCAL_SIZE")}),
    ],
)  # fmt: skip
def test_a_process_of_many_without_a_process_group(monkeypatch, launcher, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"{launcher} started this process as one of 8.*call sw\.init\(\) before"):
        sw.loader(Numbers(10), batch_size=2)


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("shuffle", False), ("dataset_size", 21)])
def test_a_position_of_another_order_is_refused(name, value):
    one = sw.loader(Numbers(20), batch_size=5)
    with pytest.raises(UsageError, match=f"a loader with {name}={value}, this one has {name}="):
        one.load_state_dict({**one.state_dict(), name: value})


def test_a_state_that_is_none():
    with pytest.raises(UsageError, match=r"expected what state_dict\(\) .* \(epoch, samples, seed, .*\), got step"):
        sw.loader(Numbers(20), batch_size=5).load_state_dict({"step": 3})


def test_one_loop_at_a_time():
    one = sw.loader(Numbers(20), batch_size=5)
    old = iter(one)
    next(old)
    next(iter(one))
    with pytest.raises(UsageError, match="a newer one has begun"):
        next(old)
