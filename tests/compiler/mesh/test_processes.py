"""Real processes give what the simulated ranks give, for every kind of step and dtype."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

import shardwright as sw
from ranks import run_ranks
from rows import slow
from shardwright.compiler.lower.operators.experts import experts
from shardwright.compiler.lower.operators.ring_attention import ring_attention
from shardwright.compiler.mesh.collectives import all_gather, apply_step
from shardwright.compiler.mesh.dtensor import device_mesh
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import ProcessCommunicator, communicator_over
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.mesh.together import all_gather_together
from shardwright.errors import LoweringError, WorldError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def routes(mesh):
    """Redistributions that together take every kind of step, over one axis and over all; the dims are uneven."""
    one, every = mesh.names[:1], mesh.names
    for axes in dict.fromkeys([one, every]):
        whole, rows, columns = Layout.replicated(2), Layout.split(2, {0: axes}), Layout.split(2, {1: axes[::-1]})
        partial = Layout.split(2, {}, axes)
        yield from [
            (whole, whole, axes), (whole, rows, ()), (rows, whole, ()), (columns, whole, axes), (rows, columns, ()),
            (partial, whole, ()), (partial, whole, axes), (partial, rows, ()), (partial, columns, ()),
        ]  # fmt: skip


def take_every_step(comm):
    """Values and gradients of every route, as lists, and the kinds of step that were taken."""
    names = comm.mesh.names
    comm.prepare([axes for count in range(len(names) + 1) for axes in itertools.combinations(names, count)])
    shape = (7, 5)
    found, kinds = [], set()
    for dtype, (src, dst, gradient_partial) in itertools.product(DTYPES, routes(comm.mesh)):
        whole = torch.arange(35).reshape(shape) % 11
        mine = whole + comm.rank if src.partial else whole
        x = mine[src.local_slice(shape, comm.mesh, comm.rank)].to(dtype).requires_grad_(dtype.is_floating_point)
        y = x
        for step in redistribute(src, dst, gradient_partial, shape, comm.mesh):
            y = apply_step(y, step, shape, comm)
            kinds |= {step.kind, f"{step.kind} | {step.adjoint}"}
        assert y.dtype == dtype
        found.append(y.tolist())
        if dtype.is_floating_point:
            gradient = whole + comm.rank if gradient_partial else whole
            y.backward(gradient[dst.local_slice(shape, comm.mesh, comm.rank)].to(dtype))
            found.append(x.grad.tolist())
    return found, kinds


def on_processes(mesh):
    dist.init_process_group("gloo")
    comm = communicator_over(mesh)
    try:
        return take_every_step(comm)
    finally:
        comm.close()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "mesh",
    [*slow(Mesh.of(a=2), Mesh.of(a=2, b=2)), Mesh.of(a=2, b=3)],
    ids=str,
)
def test_processes_and_simulation_agree(mesh):
    simulated = simulate(mesh, take_every_step)
    assert simulated[0][1] >= {
        "enter | all_reduce", "slice | all_gather", "all_gather | slice", "all_gather | reduce_scatter",
        "all_to_all | all_to_all", "all_reduce | nothing", "reduce_scatter | all_gather",
    }  # fmt: skip
    assert run_ranks(mesh.size, on_processes, mesh) == simulated


def together(comm):
    """Values and gradients of tensors that are gathered together: in even parts of rows, of columns, and in uneven
    ones, with a gradient that is none."""
    axes, found = comm.mesh.names, []
    comm.prepare([axes])
    for dtype in (torch.float32, torch.bfloat16):
        wholes = [(100 * torch.randn(shape, generator=torch.Generator().manual_seed(7))).to(dtype) for shape in SHAPES]
        for dims in ((0, 0, 0), (0, 1, 0)):
            hows = [{"dim": dim, "size": x.shape[dim]} for x, dim in zip(wholes, dims, strict=True)]
            leaves = [
                x[Layout.split(2, {how["dim"]: axes}).local_slice(x.shape, comm.mesh, comm.rank)].clone()
                for x, how in zip(wholes, hows, strict=True)
            ]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            got = all_gather_together(comm, axes, "reduce_scatter", *zip(leaves, hows, strict=True))
            assert all(map(torch.equal, got, wholes))
            gradients = [x * (comm.rank + 1.1) for x in got[:2]]
            scattered = torch.autograd.grad(got[:2], leaves, gradients, allow_unused=True)
            one_by_one = [
                all_gather(leaf, comm, axes=axes, adjoint="reduce_scatter", **how)
                for leaf, how in zip(leaves, hows, strict=True)
            ]
            wanted = torch.autograd.grad(one_by_one[:2], leaves, gradients, allow_unused=True)
            found.append([None if x is None else torch.equal(x, y) for x, y in zip(scattered, wanted, strict=True)])
    return found


SHAPES = ((6, 70), (18, 400), (7, 5))


def over_shm():
    sw.init("shm", timeout=60)
    return together(communicator_over(Mesh.of(a=3)))


def test_what_is_gathered_and_scattered_together_has_the_bits_of_single_tensors():
    assert run_ranks(3, over_shm) == [[[True, True, None]] * 4] * 3


def sharing():
    """How many groups there are as two communicators on other meshes and DTensors come to use them, and go."""
    dist.init_process_group("gloo")
    found, shapes = [], (Mesh.of(a=2, b=2), Mesh.of(x=2, one=1, y=2))
    first, second = map(communicator_over, shapes)
    known = dist.distributed_c10d._world.pg_map
    for do in (
        lambda: first.prepare([("a",), ("b",), ("a", "b")]),
        lambda: second.prepare([("x", "one"), ("y",)]),
        first.close,
        second.close,
        second.close,
        lambda: second.prepare([("x",), ("y",)]),
        lambda: device_mesh(shapes[0], "cpu"),
        second.close,
    ):
        do()
        found.append(len(known))
    ones = DTensor.from_local(torch.ones(2), device_mesh(shapes[0], "cpu"), [Partial(), Shard(0)])
    found.append(ones.full_tensor().tolist())
    first.prepare([("a",)])
    dist.destroy_process_group()
    first.close()  # its groups have ended with the world
    return found


def test_groups_of_the_same_ranks_are_shared_until_nobody_uses_them():
    assert run_ranks(4, sharing) == [[3, 3, 3, 1, 1, 3, 3, 3, [2.0] * 4]] * 4


def without_preparation(mesh):
    dist.init_process_group("gloo")
    comm = ProcessCommunicator(mesh)
    comm.prepare([("b", "a")])
    x = torch.ones(2)
    assert comm.all_reduce(x, ("a", "b")) is x
    assert x.tolist() == [4, 4]
    assert comm.all_reduce(x, ()) is x
    messages = []
    try:
        comm.all_reduce(x, ("a",))
    except LoweringError as error:
        messages.append(str(error))
    try:
        ProcessCommunicator(Mesh.of(a=3))
    except WorldError as error:
        messages.append(str(error))
    comm.close()
    assert dist.get_world_size() == 4  # the default group is not ours to destroy
    dist.destroy_process_group()
    return messages


def test_groups_are_prepared_and_the_world_fits_the_mesh():
    assert run_ranks(4, without_preparation, Mesh.of(a=2, b=2))[0] == [
        "no group over a on the mesh a=2 b=2; prepared: a·b",
        "the mesh a=3 has 3 devices, the world 4 ranks; launch 3 ranks or choose a mesh of 4",
    ]


def ring(comm):
    """Bits of attention over uneven parts of a sequence in a ring, and of its gradients; a shift of every dtype."""
    comm.prepare([("a",), ("b",)])
    rows = [
        Layout.split(1, {0: ("a",)}).local_slice((7,), comm.mesh, rank)[0] for rank in comm.mesh.group(comm.rank, "a")
    ]
    spans, at = [(part.start, part.stop) for part in rows], comm.mesh.coordinates(comm.rank)["a"]
    generator, found = torch.Generator().manual_seed(3), []
    for dtype in (torch.float64, torch.bfloat16):
        heads = [torch.randn(1, 2, 7, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
        mine = [x[:, :, rows[at]].clone().requires_grad_() for x in heads]
        made = ring_attention(*mine, None, True, None, False, spans[at], spans, comm, ("a",))
        gradients = torch.autograd.grad(made, mine, torch.ones_like(made))
        found += [x.tolist() for x in (made.detach(), *gradients)]
    for dtype in (*DTYPES, torch.complex64, torch.bool):
        found.append(comm.start_shift(torch.tensor([comm.rank, 1]).to(dtype), ("a",))().tolist())
    return found


def ring_over(backend, mesh):
    sw.init(backend, timeout=60)
    return ring(communicator_over(mesh))


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
def test_a_ring_of_processes_has_the_bits_of_simulated_ranks(backend):
    mesh = Mesh.of(b=1, a=3)
    assert run_ranks(3, ring_over, backend, mesh) == simulate(mesh, ring)


def mixture(comm):
    """Bits of experts on three ranks, of which one gets all rows in the end, and of gradients; rows of each dtype."""
    comm.prepare([("a",), ("b",)])
    at, generator, found = comm.mesh.coordinates(comm.rank)["a"], torch.Generator().manual_seed(3), []
    held, tokens = [(0, 2), (2, 3), (3, 4)], [slice(0, 3), slice(3, 5), slice(5, 7)]
    for chosen in (torch.randint(0, 4, (7, 2), generator=generator), torch.full((7, 2), 3)):
        x, up, down = (torch.randn(shape, generator=generator) for shape in ((7, 8), (4, 2, 4, 8), (4, 8, 4)))
        weights = torch.rand(7, 2, generator=generator)
        mine = [x[tokens[at]], weights[tokens[at]], up[slice(*held[at])], down[slice(*held[at])]]
        x, weights, up, down = (part.clone().requires_grad_() for part in mine)
        made = experts(x, chosen[tokens[at]], weights, up, down, "silu", held, 4, comm, ("a",))
        gradients = torch.autograd.grad(made, (x, weights, up, down), torch.ones_like(made))
        found += [part.tolist() for part in (made.detach(), *gradients)]
    for dtype in (*DTYPES, torch.complex64, torch.bool):  # two rows for rank 0, none for the others
        rows = torch.tensor([[comm.rank, 1]] * 2).to(dtype)
        found.append(comm.exchange_rows(rows, [2, 0, 0], [2 if at == 0 else 0] * 3, ("a",)).tolist())
    return found


def mixture_over(backend, mesh):
    sw.init(backend, timeout=60)
    return mixture(communicator_over(mesh))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_experts_of_processes_have_the_bits_of_simulated_ranks(backend):
    mesh = Mesh.of(b=1, a=3)
    assert run_ranks(3, mixture_over, backend, mesh) == simulate(mesh, mixture)
