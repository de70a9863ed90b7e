"""A step waits for one small collective where its loss is a mean, and takes the sums that it would take one by one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import ProcessCommunicator, all_gather_single
from shardwright.distributed.backends.shm_group import ShmGroup
from shardwright.distributed.lockstep import Lockstep
from whole import plan_of, run, same

# Every rank computes all rows.
WHOLE = {"0": ((1, 1), (1, 1), (1,)), "2": ((1, 1), (1, 1), (1,))}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def network(width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    target = torch.randint(4, (12,))
    target[:5] = -100
    return model, (torch.randn(12, width, dtype=torch.float64), target)


def test_labels_are_gathered_before_what_is_larger():
    model, batch = network(64)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=3), "auto", WHOLE)
    gathers = [i.reads for i in lower(plan, 0).instructions if i.kind == "redistribution"]
    assert gathers == [("batch_1",), ("batch_0",)]
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch), 1e-12)


def test_the_sum_and_the_count_of_a_loss_are_joined():
    model, batch = network()
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=3), "data")
    sums = [i for i in lower(plan, 0).instructions if i.kind in ("joined", "redistribution")]
    assert [(i.kind, len(i.outputs)) for i in sums] == [("joined", 2)]
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch), 1e-12)


def normalised():
    model, batch = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(16), nn.ReLU(), nn.BatchNorm1d(16), model[2]).double(), batch


def waited():
    """In what a rank takes part in a step of each network; and sums of several dtypes beside those one by one."""
    torch.set_num_threads(1)
    rank = sw.init().rank
    count = []

    def counting(method):
        def counted(*args, **kwargs):
            count.append(getattr(args[1], "__name__", ""))
            return method(*args, **kwargs)

        return counted

    def counting_done(method, name):
        def counted(*args):
            done = method(*args)
            count.extend([name] if done else [])
            return done

        return counted

    Lockstep.run, Lockstep.begin = counting(Lockstep.run), counting(Lockstep.begin)
    ShmGroup.sum_at_once = counting_done(ShmGroup.sum_at_once, "all_reduce")
    ShmGroup.gather_at_once = counting_done(ShmGroup.gather_at_once, all_gather_single.__name__)
    found = []
    for (model, batch), each, pins in (
        (network(), "global", None),
        (normalised(), "global", None),
        (network(), "local", None),
        (network(64), "local", WHOLE),
    ):
        parallel = sw.parallelize(model, loss_fn, batch, "auto" if pins else "data", batch=each, pins=pins)
        for _ in range(4):  # the first batches are compared
            parallel(batch).backward()
        count.clear()
        parallel(batch).backward()
        found.append(list(count))
    comm = ProcessCommunicator(Mesh.of(d=2))
    comm.prepare([("d",)])
    mine = [torch.tensor(1.5 + rank), torch.tensor([2, 2**60 + rank]), torch.ones(3, dtype=torch.complex64)]
    with torch.inference_mode():
        comm.all_reduce_together(mine, ("d",))
    sums = comm.all_reduce_together(mine, ("d",))
    for tensor, total in zip(mine, sums, strict=True):
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        assert tensor.dtype == total.dtype
    return found


def test_a_step_waits_once_for_small_sums_and_once_each_way_for_a_batch_norm():
    """The bucket of gradients is begun, and waited for when all else is done; sizes are asked for with the sums, or
    with the labels that every rank needs."""
    gather, bucket = all_gather_single.__name__, "all_reduce"
    plain, normalised = [gather, bucket], [gather] * 3 + ["all_reduce"] * 2 + [bucket]
    assert run_ranks(2, waited) == [[plain, normalised, plain, [gather, gather]]] * 2
