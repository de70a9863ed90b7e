"""All ranks make the same groups in one order, and come to each collective: seen rank by rank in one process.

Each rank runs a step on a process group that only pretends, which is told to move data as NCCL does. What it has issued
is then played against what the others have: a collective takes place when all members of its group are at it.
"""

from collections import deque
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as device_mesh_of_torch
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode

from pretended import pretended
from rows import brief
from shardwright.compiler.capture.capture import flatten_batch
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.dtensor import device_mesh, to_placements
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import Execution, StepArguments
from shardwright.runtime.updates.optimizers import watch_optimizers
from shardwright.training.zoo import GPT, Perceptron, TwoMatmuls, resnet18, resnet50
from whole import tensors_of

F = torch.nn.functional


def classify(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def measure(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def images(rows):
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


ZOO = {
    "perceptron": (lambda: Perceptron(16, [32, 32], 10), classify,
                   lambda rows: (torch.randn(rows, 16), torch.randint(10, (rows,)))),
    "two_matmuls": (lambda: TwoMatmuls(16, 8), measure, lambda rows: (torch.randn(rows, 16), torch.randn(rows, 8))),
    "gpt": (lambda: GPT(32, width=32, heads=4, layers=2, sequence_length=16), classify,
            lambda rows: (torch.randint(32, (rows, 16)), torch.randint(32, (rows, 16)))),
    "resnet18": (lambda: resnet18(10), classify, images),
    "resnet50": (lambda: resnet50(10), classify, images),
}  # fmt: skip
MESHES = {4: Mesh.of(a=2, b=2), 8: Mesh.of(a=2, b=4), 16: Mesh.of(a=4, b=4)}
# Products that are split over columns, then over rows, and what the backward computes again.
PINS = {
    "perceptron": lambda rows, columns: {
        "layers.0": ((rows, 1), (columns, 1), None), "layers.2": ((rows, columns), (1, columns), None),
    },
    "gpt": lambda rows, columns: {
        "layers.*.up": ((rows, 1, 1), (columns, 1), None), "layers.*.down": ((rows, 1, columns), (1, columns), None),
    },
}  # fmt: skip
PINNED = ("tensor", "stored")
BLOCKS = {"perceptron": ("layers.2",), "gpt": ("layers.*",)}
CASES = [
    (name, mode, size)
    for name in ZOO
    for mode in ("data", "auto", *(PINNED if name in PINS else ()))
    for size in MESHES
]


class Issued(TorchDispatchMode):
    """The collectives that are issued inside, as operator, ranks and sizes; what they would have written is zeros.

    Programs issue those of c10d, DTensors functional ones, which name their group.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        names = [argument.name for argument in function._schema.arguments]
        if "group_name" in names:
            ranks = dist.get_process_group_ranks(_resolve_process_group(args[names.index("group_name")]))
            self.calls.append((str(function), tuple(ranks), str([args[0].numel()])))
        elif function.namespace == "c10d":
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            if "allreduce" not in str(function):
                for tensor in torch.utils._pytree.tree_leaves(args[0]):
                    tensor.zero_()
            sizes = sorted(tensor.numel() for tensor in tensors)
            self.calls.append((str(function), tuple(dist.get_process_group_ranks(group)), str(sizes)))
        return result


def planned(name, mode, size, model, loss_fn, batch):
    """A plan of one of the modes, "tensor" parallel, or "stored" in parts that are gathered again in the backward."""
    mesh = Mesh.of(d=size) if mode == "data" else MESHES[size]
    pins = PINS[name](*mesh.sizes.values()) if mode == "tensor" else {}
    captured = captured_step(model, loss_fn, batch, pins)
    if mode in ("data", "auto"):
        return make_plan(captured, PlanRequest(mesh, mode))
    plan = make_plan(captured, PlanRequest(mesh, "auto" if pins else "data", recompute=BLOCKS[name]))
    if mode == "tensor":
        return plan
    split = {v.name: Layout.split(2, {0: plan.mesh.names}) for v in captured.of_kind("parameter") if len(v.shape) == 2}
    return replace(plan, leaves={**plan.leaves, **split}, again=frozenset(split))


def updated(plan, parts):
    """Clip and update the parameters of a step as DTensors, as a user's loop does."""
    _clear_sharding_prop_cache()  # which knows the groups of another rank
    devices = device_mesh(plan.mesh, "cpu")
    parameters = []
    for value, part in zip(plan.capture.of_kind("parameter"), parts, strict=True):
        where = devices, to_placements(plan.leaves[value.name], plan.mesh)
        whole = {"shape": value.shape, "stride": torch.empty(value.shape, device="meta").stride()}
        parameters.append(torch.nn.Parameter(DTensor.from_local(part.detach(), *where, **whole), part.requires_grad))
        if part.grad is not None:
            parameters[-1].grad = DTensor.from_local(part.grad, *where, **whole)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    watch_optimizers()
    torch.optim.AdamW(parameters).step()


def one_rank(plan, model, batch, monkeypatch):
    """The groups that this rank makes, in order, and the collectives of a step."""
    made, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: made.append(tuple(ranks)) or new_group(ranks, **how))
    monkeypatch.setattr(device_mesh_of_torch, "new_group", dist.new_group)
    comm = communicator_over(plan.mesh)
    program = lower(plan, comm.rank, overlap=True)
    comm.prepare([*{collective.axes for _, _, collective in program.collectives()}, plan.mesh.names])
    captured = plan.capture

    def part(kind, whole):
        values = captured.of_kind(kind)
        layouts = [plan.leaves[value.name] for value in values]
        parts = [t[la.local_slice(t.shape, plan.mesh, comm.rank)].clone() for t, la in zip(whole, layouts, strict=True)]
        return [t.requires_grad_(kind == "parameter" and v.needs_gradient) for t, v in zip(parts, values, strict=True)]

    leaves = (
        part("parameter", tensors_of(captured, model, "parameter")),
        part("buffer", tensors_of(captured, model, "buffer")),
        part("input", flatten_batch(batch)),
        [captured.constants[value.name] for value in captured.of_kind("constant")],
    )
    execution = Execution(program, captured, comm, torch.device("cpu"), GradientReduction())
    with Issued() as issued:
        loss, _, _ = execution(StepArguments(*leaves, seed=0, step=0))
        loss.backward()
        if any(layout.split_axes for layout in (plan.leaves[v.name] for v in captured.of_kind("parameter"))):
            updated(plan, leaves[0])
    monkeypatch.undo()
    return made, issued.calls


def play(calls):
    """Let collectives take place until none is left; raises where ranks wait for each other for ever."""
    left = [deque(mine) for mine in calls]
    while any(left):
        ready = next(
            (mine[0] for mine in left if mine and all(left[r] and left[r][0] == mine[0] for r in mine[0][1])), 0
        )
        assert ready, "\n".join(f"rank {rank} is at {mine[0]}" for rank, mine in enumerate(left) if mine)
        for rank in ready[1]:
            left[rank].popleft()


@pytest.mark.parametrize(("name", "mode", "size"), brief(CASES, *(("perceptron", mode, 4) for mode in PINNED)))
def test_no_rank_waits_for_another_for_ever(name, mode, size, monkeypatch):
    make, loss_fn, batch_of = ZOO[name]
    torch.manual_seed(0)
    model, batch = make(), batch_of(2 * size)
    plan = planned(name, mode, size, model, loss_fn, batch)
    made, calls = [], []
    for rank in range(size):
        with pretended(rank, size):
            groups, issued = one_rank(plan, model, batch, monkeypatch)
        made.append(groups)
        calls.append(issued)
    assert all(groups == made[0] for groups in made)
    assert len(set(made[0])) == len(made[0]), "no ranks have two groups"
    assert all(calls), "every rank talks"
    play(calls)


def test_ranks_that_issue_in_another_order_are_seen():
    first, second = ("c10d::allreduce_", (0, 1), "[4]"), ("c10d::allreduce_", (0, 1), "[8]")
    play([[first, second], [first, second]])
    with pytest.raises(AssertionError, match=r"rank 0 is at .*\[4\].*\n\s*rank 1 is at .*\[8\]"):
        play([[first, second], [second, first]])
