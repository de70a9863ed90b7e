"""Hand-written loops reduce their gradients in few collectives."""

import torch
import torch.distributed as dist

import shardwright as sw
from ranks import run_ranks
from shardwright.distributed import gradients
from shardwright.errors import UsageError


def parameter(value, shape, dtype=torch.float64, has_gradient=True):
    made = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    if has_gradient:
        made.grad = torch.full(shape, value, dtype=dtype)
    return made


def reduce_some(op, bucket_bytes):
    world = sw.init(timeout=60)
    gradients.BUCKET_BYTES = bucket_bytes
    value = world.rank + 1.0
    some = [
        parameter(value, (4, 3)),
        parameter(2 * value, (5,), torch.float32),
        parameter(value, (2,), has_gradient=False),
        parameter(3 * value, (7,)),
    ]
    kept = some[0].grad
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor: (calls.append(tensor.dtype), all_reduce(tensor))
    sw.reduce_gradients(some, op=op) if op else sw.reduce_gradients(iter(some))
    dist.all_reduce = all_reduce
    in_place = some[0].grad is kept
    return [p.grad if p.grad is None else p.grad.unique().tolist() for p in some], len(calls), in_place


def test_gradients_are_reduced_in_place_with_one_collective_for_each_dtype():
    for reduced, calls, in_place in run_ranks(3, reduce_some, None, 2**20):
        assert reduced == [[2.0], [4.0], None, [6.0]]
        assert calls == 2
        assert in_place


def test_large_gradients_travel_in_several_buckets():
    # 96 bytes | 16 and 56 bytes | float32: three buckets of at most 100 bytes
    for reduced, calls, _ in run_ranks(2, reduce_some, "sum", 100):
        assert reduced == [[3.0], [6.0], None, [9.0]]
        assert calls == 3


def one_lacks():
    world = sw.init(timeout=60)
    some = [parameter(world.rank + 1.0, (2,)), parameter(1.0, (3, 4), has_gradient=world.rank == 1)]
    try:
        sw.reduce_gradients(some)
    except UsageError as error:
        return str(error), some[0].grad.tolist()


def test_a_gradient_that_some_ranks_lack_is_named_before_anything_changes():
    said = run_ranks(2, one_lacks)
    message = "parameter 1 (shape [3, 4]) has a gradient on some ranks and none on others"
    for rank, (text, first) in enumerate(said):
        assert text.startswith(message)
        assert f"({['none', 'one'][rank]} on rank {rank})" in text
        assert first == [rank + 1.0] * 2


def refuse_sparse():
    sw.init(timeout=60)
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    said = []
    for options in ({}, {"op": "max"}):
        try:
            sw.reduce_gradients(embedding.parameters(), **options)
        except UsageError as error:
            said.append(str(error))
    return said


def test_sparse_gradients_and_unknown_operations_are_refused():
    sparse, operation = run_ranks(1, refuse_sparse)[0]
    assert sparse.startswith(
        "the gradient of parameter 0 (shape [4, 2]) is torch.sparse_coo; reduce_gradients takes dense"
    )
    assert operation == "op='max' is unknown; choose one of mean, sum"
