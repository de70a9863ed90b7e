"""The simulated ranks: one order of everything, failures and deadlocks that name their rank."""

import threading

import pytest
import torch

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.mesh.simulate import simulate
from shardwright.errors import WorldError

PAIR = Mesh.of(a=2)
GRID = Mesh.of(a=2, b=3)


def test_collectives_among_the_ranks_along_some_axes():
    def run(comm):
        x = torch.tensor([float(comm.rank)])
        return (
            comm.all_reduce(x.clone(), ("a",)).tolist(),
            [t.item() for t in comm.all_gather(x, ("b",))],
            comm.reduce_scatter(torch.stack([x, x + 10, x + 20]), ("b",)).tolist(),
            [t.item() for t in comm.all_to_all([x + 100 * i for i in range(6)], ("a", "b"))],
            x.tolist(),
        )

    results = simulate(GRID, run)
    assert results[4] == ([5.0], [3.0, 4.0, 5.0], [42.0], [400.0 + r for r in range(6)], [4.0])


def test_collectives_are_counted_with_their_bytes():
    def run(comm):
        x = torch.zeros(2, 5, dtype=torch.float64)
        comm.all_reduce(x, ("a",))
        comm.all_gather(x, ("a", "b"))
        comm.reduce_scatter(x.expand(3, 2, 5), ("b",))
        comm.all_to_all([x] * 2, ("a",))
        return comm.collectives

    for collectives in simulate(GRID, run):
        assert collectives == [
            Collective("all_reduce", ("a",), 80),
            Collective("all_gather", ("a", "b"), 480),
            Collective("reduce_scatter", ("b",), 240),
            Collective("all_to_all", ("a",), 160),
        ]


def test_a_group_of_one_does_not_communicate():
    def run(comm):
        x = torch.arange(2)
        return (
            comm.all_reduce(x, ()) is x,
            comm.all_gather(x, ("one",)).tolist(),
            comm.reduce_scatter(x[None], ("one",)).tolist(),
            comm.collectives,
        )

    assert simulate(Mesh.of(one=1, a=2), run)[1] == (True, [[0, 1]], [0, 1], [])


def test_no_rank_sees_what_another_writes_later():
    def run(comm):
        x = torch.full((2,), float(comm.rank))
        mine = comm.all_gather(x, ("a",))
        x += 100
        mine[1 - comm.rank] += 10
        comm.all_reduce(torch.zeros(1), ("a",))
        return [t.tolist() for t in mine]

    assert simulate(PAIR, run) == [[[0.0, 0.0], [11.0, 11.0]], [[10.0, 10.0], [1.0, 1.0]]]


def test_the_first_exception_ends_all_ranks_and_names_its_own():
    threads = threading.active_count()

    def run(comm):
        if comm.rank == 3:
            raise KeyError("lost")
        comm.all_reduce(torch.zeros(1), ("a", "b"))

    with pytest.raises(KeyError, match="lost") as caught:
        simulate(GRID, run)
    assert caught.value.__notes__ == ["raised on simulated rank 3 of the mesh a=2 b=3"]
    assert threading.active_count() <= threads


def test_a_deadlock_is_seen_at_once_and_says_who_waits_where():
    threads = threading.active_count()

    def run(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.zeros(2, 3), ("a",))

    with pytest.raises(WorldError) as caught:
        simulate(PAIR, run)
    assert str(caught.value) == (
        "the ranks wait for each other for ever:\n"
        "  rank 0 waits in all_reduce over a among ranks [0, 1] of float32[2, 3]\n"
        "  rank 1 has ended"
    )
    assert threading.active_count() <= threads


def test_groups_that_cross_are_a_deadlock():
    def run(comm):
        first, second = (("a",), ("b",)) if comm.rank in (0, 3) else (("b",), ("a",))
        comm.all_reduce(torch.zeros(1), first)
        comm.all_reduce(torch.zeros(1), second)

    with pytest.raises(WorldError, match=r"rank 1 waits in all_reduce over b among ranks \[0, 1\]"):
        simulate(Mesh.of(a=2, b=2), run)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:1]])
def test_members_that_disagree_are_refused(change):
    def run(comm):
        x = torch.zeros(2)
        comm.all_reduce(change(x) if comm.rank else x, ("a",))

    with pytest.raises(WorldError, match=r"call different collectives:\n  rank 0 waits in all_reduce .* float32\[2\]"):
        simulate(PAIR, run)


def test_a_rank_that_never_comes_back_is_named():
    forever = threading.Event()

    def run(comm):
        if comm.rank == 1:
            forever.wait()
        comm.all_reduce(torch.zeros(1), ("a",))

    with pytest.raises(WorldError, match=r"rank 1 neither ended nor .* within 1 s:\n  rank 0 waits in"):
        simulate(PAIR, run, timeout_s=1)
    forever.set()


def test_the_communicator_does_not_work_outside():
    comms = simulate(PAIR, lambda comm: comm)
    with pytest.raises(WorldError, match="communicator of simulated rank 1 works only inside"):
        comms[1].all_reduce(torch.zeros(1), ("a",))


def test_every_rank_has_its_own_stream_of_random_numbers():
    def run(comm):
        first = torch.rand(3)
        if comm.rank == 0:
            torch.rand(5)
        comm.all_reduce(torch.zeros(1), ("a",))
        return first, torch.rand(2)

    torch.manual_seed(7)
    before = torch.get_rng_state()
    (first, later), (other_first, other_later) = simulate(PAIR, run)
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(5)
    assert torch.equal(first, expected[:3])
    assert torch.equal(other_first, expected[:3])
    assert torch.equal(other_later, expected[3:])
    assert not torch.equal(later, other_later)


def test_ranks_have_the_grad_mode_of_the_caller():
    with torch.no_grad():
        assert simulate(PAIR, lambda comm: torch.is_grad_enabled()) == [False, False]
    assert simulate(PAIR, lambda comm: torch.is_grad_enabled()) == [True, True]


def test_sums_have_one_order():
    def run(comm):
        x = torch.tensor([[1e8, 1.0, -1e8, 1.0][comm.rank]])
        comm.all_reduce(x, ("a",))
        return x.item()

    # float32: ((1e8 + 1) - 1e8) + 1 = 1, whoever comes last
    assert simulate(Mesh.of(a=4), run) == [1.0] * 4


def begun_of_each_kind(comm, x):
    """The waits of one collective of each kind that can be begun, by its kind."""
    return {
        "all_reduce": comm.start_all_reduce(x[0], ("a",)),
        "all_gather": comm.start_all_gather(x[1], ("a",)),
        "reduce_scatter": comm.start_reduce_scatter(x[2], ("a",)),
        "shift": comm.start_shift(x[3], ("a",)),
    }


def test_what_is_begun_gives_what_it_gives_at_once():
    def run(comm):
        x = [torch.arange(6.0).view(2, 3) + 10 * comm.rank for _ in range(4)]
        expected = (
            comm.all_reduce(x[0].clone(), ("a",)),
            comm.all_gather(x[1], ("a",)),
            comm.reduce_scatter(x[2], ("a",)),
            torch.arange(6.0).view(2, 3) + 10 * (1 - comm.rank),
        )
        waits = begun_of_each_kind(comm, x)
        unread = bool(x[0].isnan().all())
        found = [wait() for wait in reversed(waits.values())][::-1]
        same = [torch.equal(*pair) for pair in zip(found[1:], expected[1:], strict=True)]
        return unread, torch.equal(x[0], expected[0]), *same

    assert simulate(PAIR, run) == [(True,) * 5] * 2


def test_a_shift_goes_to_the_next_and_from_the_last_to_the_first():
    def run(comm):
        wait = comm.start_shift(torch.tensor([comm.rank]), ("a",))
        assert comm.collectives == [Collective("shift", ("a",), 8)]
        assert comm.collectives[0].sent_bytes(comm.mesh) == 8
        return wait().item()

    assert simulate(Mesh.of(a=3, b=2), run) == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "shift"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_tensor_that_is_written_under_way_and_a_wait_that_is_missing_are_found(kind, dtype):
    def run(comm, spoil):
        x = [torch.ones(2, 3, dtype=dtype) for _ in range(4)]
        waits = begun_of_each_kind(comm, x)
        spoil(dict(zip(waits, x, strict=True)), waits)
        for wait in waits.values():
            wait()

    def write(tensors, waits):
        tensors[kind].view(-1)[4] = 0 if kind != "all_reduce" else 1

    with pytest.raises(WorldError, match=rf"was written while {kind} over a of \w+\[2, 3\] was under way"):
        simulate(PAIR, lambda comm: run(comm, write))
    with pytest.raises(WorldError, match=rf"{kind} over a of \w+\[2, 3\] was begun, and not waited for"):
        simulate(PAIR, lambda comm: run(comm, lambda tensors, waits: waits.pop(kind)))
    with pytest.raises(WorldError, match=rf"{kind} over a of \w+\[2, 3\] is waited for twice"):
        simulate(PAIR, lambda comm: run(comm, lambda tensors, waits: waits[kind]()))


def test_what_is_begun_in_another_order_on_another_rank_is_found():
    def run(comm):
        x = torch.zeros(2)
        starts = [comm.start_all_gather, comm.start_all_reduce]
        return [start(x, ("a",)) for start in (starts if comm.rank else reversed(starts))]

    with pytest.raises(WorldError, match="call different collectives"):
        simulate(PAIR, run)
