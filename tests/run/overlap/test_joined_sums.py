"""A step waits for one small collective where its loss is a mean, and takes the sums that it would take one by one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.lower.lower import lower
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.processes import ProcessCommunicator, all_gather_single
from shardwright.world.lockstep import Lockstep
from whole import plan_of, run, same


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    target = torch.randint(4, (12,))
    target[:5] = -100
    return model, (torch.randn(12, 8, dtype=torch.float64), target)


def test_the_sum_and_the_count_of_a_loss_are_joined():
    model, batch = network()
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=3), "data")
    sums = [i for i in lower(plan, 0).instructions if i.kind in ("joined", "redistribution")]
    assert [(i.kind, len(i.outputs)) for i in sums] == [("joined", 2)]
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch), 1e-12)


def waited():
    """How often a rank waits for others in a step, and sums of several dtypes beside those one by one."""
    torch.set_num_threads(1)
    rank = sw.init().rank
    model, batch = network()
    runs, count = Lockstep.run, []

    def counted(*args, **kwargs):
        count.append(getattr(args[1], "__name__", ""))
        return runs(*args, **kwargs)

    Lockstep.run = counted
    parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
    for _ in range(4):  # the first batches are compared
        parallel(batch).backward()
    count.clear()
    parallel(batch).backward()
    comm = ProcessCommunicator(Mesh.of(d=2))
    comm.prepare([("d",)])
    mine = [torch.tensor(1.5 + rank), torch.tensor([2, 2**60 + rank]), torch.ones(3, dtype=torch.complex64)]
    sums = comm.all_reduce_together(mine, ("d",))
    for tensor, total in zip(mine, sums, strict=True):
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        assert tensor.dtype == total.dtype
    return count


def test_a_step_waits_once_for_small_sums():
    assert run_ranks(2, waited) == [[all_gather_single.__name__]] * 2
