"""Every rank reads a whole stream and keeps its rows; a position means the same samples on any number of ranks."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from ranks import run_ranks
from shardwright.data.iterable import Stream
from shardwright.errors import DataError, UsageError
from whole_batches import global_batches


def count(epoch):
    """23 samples an epoch, those of each epoch after those before."""
    for number in range(23 * epoch, 23 * epoch + 23):
        yield number, torch.full((2,), float(number))


class Iterable(torch.utils.data.IterableDataset):
    def __iter__(self):
        return count(0)


def loaders(source, world_size, **arguments):
    return [sw.loader(source, world=SimpleNamespace(rank=r, size=world_size), **arguments) for r in range(world_size)]


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_make_up_the_stream_epoch_after_epoch(ranks):
    world = loaders(count, ranks, batch_size=5)
    for epoch in range(3):
        batches = global_batches(world)
        assert flat(batches) == list(range(23 * epoch, 23 * epoch + 23))
        assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert {loader.epoch for loader in world} == {3}


@pytest.mark.parametrize(
    "source",
    [Iterable(), Stream(Iterable()), functools.partial(count, 0), lambda: count(0), Stream(lambda: list(count(0)))],
    ids=["dataset", "stream", "partial", "function", "list"],
)
def test_sources(source):
    for _ in range(2):
        assert flat(global_batches(loaders(source, 2, batch_size=5))) == list(range(23))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 12), st.integers(1, 4)), max_size=5))
def test_resuming_anywhere_is_as_if_never_stopped(pieces):
    seen, state = [], None
    for world_size, batch_size, steps in pieces:
        ranks = loaders(count, world_size, batch_size=batch_size)
        for rank in ranks if state is not None else []:
            rank.load_state_dict(state)
        seen += flat(global_batches(ranks, limit=steps))
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
    assert seen == list(range(len(seen)))


def test_a_function_with_a_start_is_spared_the_skipping():
    asked = []

    def seekable(epoch, start):
        asked.append((epoch, start))
        yield from range(100 * epoch + start, 100 * epoch + 10)

    one = sw.loader(seekable, batch_size=4)
    next(iter(one))
    assert [batch[0].tolist() for batch in one] == [[4, 5, 6, 7], [8, 9]]
    assert asked == [(0, 0), (0, 4)]


def test_a_loop_that_was_left_goes_on_unless_it_evaluates():
    for arguments, rest in (({}, 5), ({"evaluate": True}, 0), ({"shuffle": False}, 0)):
        one = sw.loader(lambda: count(0), batch_size=5, **arguments)
        next(iter(one))
        assert flat([batch[0].tolist() for batch in one]) == list(range(rest, 23))


def test_the_sample_batch_is_the_next_global_batch_and_stays():
    ranks = loaders(count, 2, batch_size=5)
    for _ in range(2):
        assert ranks[1].sample_batch()[0].tolist() == [0, 1, 2, 3, 4]
    assert flat(global_batches(ranks, limit=1)) == [0, 1, 2, 3, 4]
    assert ranks[1].sample_batch()[0].tolist() == [5, 6, 7, 8, 9]


def test_an_empty_part_shows_shapes_and_types():
    parts = [next(iter(loader)) for loader in loaders(lambda: iter([(1, torch.ones(2))]), 3, batch_size=4)]
    assert [(part.start, part.stop, part.global_size) for part in parts] == [(0, 1, 1), (1, 1, 1), (1, 1, 1)]
    assert [(t.dtype, tuple(t.shape)) for t in parts[2]] == [(torch.int64, (0,)), (torch.float32, (0, 2))]


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (count(0), {}, "got a generator, which can be read only once; expected .* pass the function that makes it"),
        (count, {"shuffle": True}, "count is a stream: its samples .* order of their own.* remove shuffle=True"),
        (count, {"num_workers": 2}, "each process reads them all; remove num_workers=2"),
        (Iterable(), {"shuffle": True}, "Iterable is a stream"),
    ],
)
def test_what_a_stream_cannot(source, arguments, message):
    with pytest.raises(UsageError, match=message):
        sw.loader(source, batch_size=5, **arguments)


def test_a_stream_that_gives_nothing_and_a_length_that_nobody_knows():
    with pytest.raises(UsageError, match="gave no batch in epoch 0: expected at least 1 samples from what can"):
        list(sw.loader(lambda: iter([]), batch_size=5))
    with pytest.raises(UsageError, match="expected at least 50 samples"):
        list(sw.loader(lambda: count(0), batch_size=50, drop_last=True))
    with pytest.raises(TypeError, match="does not say how many batches"):
        len(sw.loader(count, batch_size=5))


def test_a_position_of_another_stream_and_an_old_loop():
    one = sw.loader(count, batch_size=5)
    with pytest.raises(UsageError, match="a loader with stream=other, this one has stream=count"):
        one.load_state_dict({**one.state_dict(), "stream": "other"})
    with pytest.raises(UsageError, match=r"expected what state_dict\(\) of a loader returned"):
        one.load_state_dict(sw.loader([1, 2], batch_size=1).state_dict())
    old = iter(one)
    next(old)
    next(iter(one))
    with pytest.raises(UsageError, match="a newer one has begun"):
        next(old)


def read(sources):
    dist.init_process_group("gloo")
    try:
        source = sources.get(dist.get_rank(), sources[None])
        try:
            return [batch[0].tolist() for batch in sw.loader(source, batch_size=10)]
        except DataError as error:
            return str(error)
    finally:
        dist.destroy_process_group()


def broken():
    raise OSError("the disk is gone")
    yield


def shifted(epoch):
    yield from list(count(epoch))[1:]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (shifted, "rank 1 has another sample at index 0 than most ranks"),
        pytest.param(broken, "rank 1 cannot read its samples (OSError: the disk is gone)", marks=pytest.mark.slow),
    ],
)
def test_a_rank_with_another_stream_is_named_everywhere(odd, message):
    results = run_ranks(3, read, {None: count, 1: odd})
    assert len(set(results)) == 1
    assert f"the ranks do not see the same data: {message}" in results[0]
