"""What ranks do to try a backend, whichever it is. Under mpirun, `python backend_ranks.py NAME` runs one of these."""

import functools
import json
import os
import random
import sys
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwright as sw
from models import NETWORKS

OPS = ("SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (1,), (7,), (3, 5), (0,), (2, 0, 3), (4, 1, 6), (130,))
EXAMPLES = int(os.environ.get("EXAMPLES", "25"))
drawn = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def loud(check):
    """A case that fails on one rank ends the job: hypothesis would try it again on that rank alone."""

    @functools.wraps(check)
    def checked(*arguments, **named):
        try:
            check(*arguments, **named)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    return checked


def ops_of(dtype):
    if dtype == torch.bool:
        return tuple(op for op in OPS if op != "AVG")
    return OPS[:5] if dtype in FLOATS else tuple(op for op in OPS if op != "AVG")


@st.composite
def reductions(draw):
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS, torch.bool)))
    return dtype, draw(st.sampled_from(ops_of(dtype))), draw(st.sampled_from(SHAPES)), draw(st.integers(0, 99))


def values(dtype, shape, seed, rank):
    """Small whole numbers, whose sums and products are exact in every dtype; each rank can draw those of all."""
    numbers = np.random.default_rng([seed, rank]).integers(0 if dtype == torch.uint8 else -2, 4, shape)
    return torch.from_numpy(np.array(numbers % 2 if dtype == torch.bool else numbers)).to(dtype)


def strided(tensor, how):
    """The same values, in memory with gaps (1) or transposed (2)."""
    if how == 1:
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]
    return (
        tensor.mT.clone(memory_format=torch.contiguous_format).mT if how == 2 and tensor.dim() >= 2 else tensor.clone()
    )


def expected(parts, op):
    """By numpy, in float64 or in the integers themselves."""
    dtype = parts[0].dtype
    arrays = [p.double().numpy() if dtype in FLOATS else p.numpy() for p in parts]
    if dtype == torch.bool:
        ufunc = {"PRODUCT": np.logical_and, "MIN": np.logical_and, "BAND": np.logical_and, "BXOR": np.logical_xor}
        ufunc = ufunc.get(op, np.logical_or)
    else:
        ufunc = {
            "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MAX": np.maximum, "MIN": np.minimum,
            "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
        }[op]  # fmt: skip
    reduced = arrays[0]
    for array in arrays[1:]:
        reduced = ufunc(reduced, array)
    return torch.from_numpy(np.asarray(reduced / len(arrays) if op == "AVG" else reduced)).to(dtype)


def same(got, wanted, *about):
    assert got.dtype == wanted.dtype, about
    assert got.shape == wanted.shape, about
    assert torch.equal(got, wanted), (about, got, wanted)


def reduces(group=None):
    """all_reduce, reduce and reduce_scatter against numpy, over dtypes, operations, shapes, strides and both ways to
    wait."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    seen = set()

    @drawn
    @given(reductions(), st.integers(0, 2), st.booleans(), st.integers(0, size - 1))
    @loud
    def check(case, how, asynchronous, root):
        dtype, op, shape, seed = case
        seen.add((dtype, op))
        parts = [values(dtype, shape, seed, r) for r in range(size)]
        wanted = expected(parts, op)
        kind = getattr(dist.ReduceOp, op)
        tensor = strided(parts[rank], how)
        work = dist.all_reduce(tensor, kind, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
            assert work.get_future().value()[0] is tensor
        same(tensor, wanted, "all_reduce", case, how)
        tensor = strided(parts[rank], how)
        dist.reduce(tensor, group_dst=root, op=kind, group=group)
        same(tensor, wanted if rank == root else parts[rank], "reduce", case, how)
        whole = [torch.stack([values(dtype, shape, seed + 1 + part, r) for part in range(size)]) for r in range(size)]
        output = strided(torch.zeros(shape).to(dtype), how)
        dist.reduce_scatter(output, [strided(t, how) for t in whole[rank]], kind, group=group)
        same(output, expected([w[rank] for w in whole], op), "reduce_scatter", case, how)
        if shape:
            output = torch.zeros(shape).to(dtype)
            dist.reduce_scatter_tensor(output, whole[rank].flatten(0, 1), kind, group=group)
            same(output, expected([w[rank] for w in whole], op), "reduce_scatter_tensor", case)

    check()
    return len(seen)


def moves(group=None):
    """What moves without reducing, for every dtype, uneven parts too."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    @drawn
    @given(
        st.sampled_from((*FLOATS, *INTEGERS, torch.bool, torch.complex64)), st.sampled_from(SHAPES),
        st.integers(0, 2), st.integers(0, 99), st.integers(0, size - 1), st.booleans(),
    )  # fmt: skip
    @loud
    def check(dtype, shape, how, seed, root, asynchronous):
        parts = [values(dtype, shape, seed, r) for r in range(size)]
        mine = strided(parts[rank], how)
        empties = [strided(torch.zeros(shape).to(dtype), how) for _ in range(size)]
        works = [dist.all_gather(empties, mine, group=group, async_op=asynchronous)]
        gathered = torch.zeros(size, *shape).to(dtype)
        works.append(dist.all_gather_into_tensor(gathered, parts[rank], group=group, async_op=asynchronous))
        sent = strided(parts[rank], how)
        works.append(dist.broadcast(sent, group_src=root, group=group, async_op=asynchronous))
        for work in works if asynchronous else ():
            work.wait()
        for got, wanted in zip(empties, parts, strict=True):
            same(got, wanted, "all_gather")
        same(gathered, torch.stack(parts), "all_gather_into_tensor")
        same(sent, parts[root], "broadcast")
        collected = [torch.zeros(shape).to(dtype) for _ in range(size)] if rank == root else None
        dist.gather(mine, collected, group_dst=root, group=group)
        for got, wanted in zip(collected or (), parts, strict=False):
            same(got, wanted, "gather")
        received = strided(torch.zeros(shape).to(dtype), how)
        dist.scatter(received, parts if rank == root else None, group_src=root, group=group)
        same(received, parts[rank], "scatter")
        exchanged = [torch.zeros(shape).to(dtype) for _ in range(size)]
        cells = [[values(dtype, shape, seed + 7 * a, b) for b in range(size)] for a in range(size)]
        dist.all_to_all(exchanged, [strided(t, how) for t in cells[rank]], group=group)
        for source, got in enumerate(exchanged):
            same(got, cells[source][rank], "all_to_all")
        # Rank a sends a + b + seed % 2 rows of 3 to rank b, so that nothing is even and some are empty.
        rows = [[a + b + seed % 2 for b in range(size)] for a in range(size)]
        blocks = [[values(dtype, (rows[a][b], 3), seed + a, b) for b in range(size)] for a in range(size)]
        uneven = torch.zeros(sum(rows[a][rank] for a in range(size)), 3).to(dtype)
        dist.all_to_all_single(
            uneven, torch.cat(blocks[rank]), [rows[a][rank] for a in range(size)], rows[rank], group=group
        )
        same(uneven, torch.cat([blocks[a][rank] for a in range(size)]), "all_to_all_single")
        gaps = [values(dtype, (r + seed % 2,), seed, r) for r in range(size)]
        into = [torch.zeros_like(gap) for gap in gaps]
        dist.all_gather(into, gaps[rank], group=group)
        for got, wanted in zip(into, gaps, strict=True):
            same(got, wanted, "uneven all_gather")

    check()


def messages():
    """Rings in both directions at once, without waiting in any order; any source; to itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        right, left = torch.zeros(shape), torch.zeros(2, *shape)[1].mT if len(shape) > 1 else torch.zeros(shape)
        operations = [
            dist.P2POp(dist.irecv, left, (rank + 1) % size, tag=2), dist.P2POp(dist.irecv, right, (rank - 1) % size),
            dist.P2POp(dist.isend, torch.full(shape, rank + 1.0), (rank + 1) % size),
            dist.P2POp(dist.isend, torch.full(left.shape, -rank - 1.0), (rank - 1) % size, tag=2),
        ]  # fmt: skip
        for work in dist.batch_isend_irecv(operations):
            work.wait()
            assert work.is_completed()
        same(right, torch.full(shape, (rank - 1) % size + 1.0), "ring")
        same(left, torch.full(left.shape, -((rank + 1) % size) - 1.0), "ring back")
    for _ in range(size - 1 if rank == 0 else 0):
        got = torch.zeros(3, dtype=torch.int64)
        source = dist.recv(got)
        same(got, torch.full((3,), source), "any source")
    if rank:
        dist.send(torch.full((3,), rank), 0)
    dist.barrier()


def refused():
    """Each message says what was got and what is expected; nobody waits for a call that was refused."""
    from shardwright.errors import UsageError, WorldError

    size = dist.get_world_size()
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
        lambda: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1)),
        lambda: sw.init(backend="gloo"),
    ):
        try:
            call()
        except (UsageError, WorldError) as error:
            found.append(str(error))
    return found


def small_counts():
    """Every collective, where one call of MPI may count 40 elements: the ways for more than 2**31 of them."""
    group = dist.group.WORLD
    group.collectives.largest_count = group.messages.largest_count = 40
    reduces()
    moves()
    messages()
    group.collectives.largest_count = group.messages.largest_count = 2**31 - 1


def subgroups():
    """Groups by both ways of making them, which work side by side, and end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = dist.new_group(list(range(size)))
    reduces(whole)
    pair = [r for r in range(size) if r % 2 == rank % 2]
    own = sw.create_group(pair)
    total = torch.tensor([float(rank)])
    work = dist.all_reduce(total, group=own, async_op=True)
    elsewhere = torch.tensor([1.0])
    dist.all_reduce(elsewhere, group=whole)
    work.wait()
    same(total, torch.tensor([float(sum(pair))]), "pair")
    same(elsewhere, torch.tensor([float(size)]), "whole")
    moves(own)
    sw.destroy_group(own)
    dist.destroy_process_group(whole)
    for _ in range(20):  # they give back what they held
        group = sw.create_group(pair)
        dist.barrier(group=group)
        sw.destroy_group(group)
    dist.barrier()  # rank 0 serves the store by which the others make theirs


def order():
    """Collectives that are waited for run behind those that are not; all ranks see the same order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(40_000)
    works = []
    for i in range(30):
        if i % 3 != rank % 3 or i % 2:
            works.append(dist.all_reduce(tensor[1000 * i :], async_op=True))
        else:
            dist.all_reduce(tensor[1000 * i :])
        if i == 0:
            works[-1:] and works[-1].wait()
            tensor += 1
    for work in works:
        work.wait()
    assert tensor.min() >= 1
    gathered = [torch.zeros_like(tensor) for _ in range(size)]
    dist.all_gather(gathered, tensor)
    assert all(torch.equal(other, tensor) for other in gathered)


def by_others():
    """DistributedDataParallel and DTensor, which call from C++."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    same(model.module.weight.grad, torch.full((2, 3), 2 * (size + 1) / 2), "DDP")
    weights = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(w, weights[0]) for w in weights)
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).view(8, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    same(tensor.full_tensor(), whole, "full_tensor")
    same(tensor.redistribute(mesh, [Shard(1)]).full_tensor(), whole, "redistribute")
    same((tensor.T @ tensor).redistribute(mesh, [Replicate()]).to_local(), whole.T @ whole, "partial")
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]


def stress(seconds, *groups_of):
    """Collectives at random on the world and on groups of some ranks, each rank with pauses of its own; returns how
    many were right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [None]
    for members in groups_of or ([0, size - 1], list(range(1, size)), list(range(0, size, 2))):
        group = dist.new_group(members)
        groups += [(members, group)] if len(members) > 1 else []
    together, own, count = random.Random(7), random.Random(rank), 0
    end = time.monotonic() + seconds
    while True:
        go_on = torch.tensor([time.monotonic() < end or count < 200])
        dist.broadcast(go_on, 0)
        if not go_on:
            return count
        for _ in range(50):
            pick, seed = together.choice(groups), together.randrange(1 << 30)
            members, group = (list(range(size)), None) if pick is None else pick
            if rank in members:
                if own.random() < 0.1:
                    time.sleep(own.choice((0.0, 0.0005, 0.005)))
                one_at_random(group, members.index(rank), len(members), seed, own)
            count += 1


def one_at_random(group, rank, size, seed, own):
    draw, share = random.Random(seed), getattr(group or dist.group.WORLD, "empty", torch.empty)
    kind = draw.choice(("sum", "sum", "gather", "scatter", "exchange", "broadcast"))
    dtype, numel = draw.choice((*FLOATS, torch.int64)), draw.choice((0, 1, 3, 100, 1024, 5000, 70_000, 300_001))
    more, root = {"group": group, "async_op": draw.random() < 0.5}, draw.randrange(size)
    parts = [values(dtype, (numel,), seed, r) for r in range(size)]
    mine = (share if own.random() < 0.7 else torch.empty)(numel, dtype=dtype).copy_(parts[rank])
    got, wanted = [mine], [expected(parts, "SUM")]
    if kind == "sum":
        work = dist.all_reduce(mine, **more)
    elif kind == "broadcast":
        work, wanted = dist.broadcast(mine, group_src=root, **more), [parts[root]]
    elif kind == "scatter":
        got = [torch.zeros(numel).to(dtype)]
        work = dist.reduce_scatter(got[0], [mine + r for r in range(size)], **more)
        wanted = [expected([part + rank for part in parts], "SUM")]
    else:
        got, wanted = [torch.zeros(numel).to(dtype) for _ in range(size)], parts
        if kind == "gather":
            work = dist.all_gather(got, mine, **more)
        else:
            work, wanted = dist.all_to_all(got, [mine + r for r in range(size)], **more), [p + rank for p in parts]
    if work is not None:
        work.wait()
    for one, other in zip(got, wanted, strict=True):
        same(one, other, kind, numel, more)


def verified(name, options):
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS[name]
    found = sw.verify(make(), loss_fn, [batch_of(24, seed) for seed in range(3)], **options)
    return found.ok, str(found), found.plan.moved_bytes() > 0


def cheap():
    found = refused()
    reductions_seen = reduces()
    moves()
    messages()
    order()
    by_others()
    exact = [verified("perceptron", {"mode": "data"})]
    return {"refused": found, "reductions": reductions_seen, "exact": exact}


def groups():
    small_counts()
    subgroups()
    return {}


def until(condition):
    """For a minute."""
    end_s = time.monotonic() + 60
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)


def told_of_the_end():
    """What a small and a large collective raise where a rank has gone, which is the same, and after how long."""
    start, said = time.monotonic(), []
    for numel in (3, 1_000_000):
        try:
            dist.all_reduce(torch.ones(numel))
        except RuntimeError as error:
            said.append(str(error))
    small, large = said
    assert small == large
    return small, time.monotonic() - start


def dies(how):
    """Rank 1 goes, while rank 0 waits for it."""
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("the end of rank 1")
        if how == "exits":
            sys.exit(3)
        if how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(600)
    if how == "hangs":
        dist.group.WORLD.queue.timeout_s = 6.0  # from here on, since ranks may take longer to meet
    dist.all_reduce(torch.ones(3))
    return {}


def main():
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:]
    world = sw.init(timeout=float(os.environ.get("TIMEOUT", "100")), **json.loads(os.environ.get("INIT", "{}")))
    answer = globals()[name](*arguments)
    if world.rank == 0:
        print("ANSWER", json.dumps(answer | {"world": str(world)}), flush=True)


if __name__ == "__main__":
    main()
