"""The shm backend: right results, ends that are told, and nothing left behind."""

import contextlib
import functools
import io
import logging
import os
import signal
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import backend_ranks
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import shardwright as sw
from ranks import run_ranks
from shardwright.common import native_code
from shardwright.compiler.mesh.processes import all_gather_single, reduce_scatter_single
from shardwright.distributed.backends import shm, shm_meeting
from shardwright.distributed.backends.segment import native
from shardwright.errors import WorldError

slow = pytest.mark.slow


@pytest.fixture
def no_compiler(tmp_path):
    """The environment of a host without one, and without what was compiled before."""
    return {"PATH": str(tmp_path), "CC": "", "XDG_CACHE_HOME": str(tmp_path)}


def collectives(examples):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sw.init("shm", timeout=60)
        dist.new_group([1])  # whose first member would say the same again
    backend_ranks.drawn = backend_ranks.settings(backend_ranks.drawn, max_examples=examples)
    reductions = backend_ranks.reduces()
    backend_ranks.moves()
    backend_ranks.messages()
    backend_ranks.order()
    return reductions, said.getvalue()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
def test_collectives(ranks):
    for reductions, said in run_ranks(ranks, collectives, 4 if ranks == 2 else 30):
        assert reductions >= 4
        assert said == ""


def by_others_and_groups():
    sw.init("shm", timeout=60)
    backend_ranks.by_others()
    backend_ranks.subgroups()


@slow
def test_other_callers_and_groups():
    run_ranks(4, by_others_and_groups)


def large():
    """Larger than a slot, in chunks of slots, and in slices; each rank has the same bits whatever the order of sums."""
    sw.init("shm", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for numel in (1, 4097, 300_001, 2_000_003):
        for dtype in (torch.float32, torch.bfloat16):
            parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
            total = parts[0].float().clone()
            for part in parts[1:]:
                total += part
            mine = parts[rank].clone()
            dist.all_reduce(mine)
            assert torch.equal(mine, total.to(dtype)), (numel, dtype)
            work = dist.all_reduce(parts[rank], dist.ReduceOp.AVG, async_op=True)
            assert work.get_future().wait()[0] is parts[rank]
            assert torch.equal(parts[rank], (total / size).to(dtype))
            found.append(mine.float().sum().item())
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=slow)])
def test_sums_go_in_the_order_of_the_ranks(ranks):
    assert len(set(map(tuple, run_ranks(ranks, large)))) == 1


def in_rows():
    """Rank 1 calls by lists, which steps in Python go through, where the others call native code."""
    sw.init("shm", timeout=60)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    native = [group._native.reduce_scatter, group._native.all_gather]
    collectives_made = []
    group._native.reduce_scatter, group._native.all_gather = (
        lambda *given, made=made: collectives_made.append(made(*given)) or collectives_made[-1] for made in native
    )
    for numel in (0, 70_001, 300_001, 1_100_001):  # in one chunk, in several, and in many
        for dtype in (torch.float32, torch.bfloat16):
            wholes = [
                torch.randn(size, numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)
            ]
            mine, everyone = torch.empty(numel, dtype=dtype), torch.empty(size, numel, dtype=dtype)
            if rank == 1:
                dist.reduce_scatter(mine, list(wholes[rank].unbind()))
                dist.all_gather(list(everyone.unbind()), mine)
            else:
                reduce_scatter_single(mine, wholes[rank].flatten())
                all_gather_single(everyone.flatten(), mine)
            total = functools.reduce(torch.add, [whole.float() for whole in wholes]).to(dtype)
            assert torch.equal(everyone, total), (numel, dtype)
    with pytest.raises(WorldError, match="reduce_scatter"):
        reduce_scatter_single(torch.ones(5 + rank), torch.ones(size * (5 + rank)))
    overlapping = torch.arange(300_001.0 * size)
    mine = overlapping[300_001 * rank : 300_001 * (rank + 1)]
    wanted = size * mine
    reduce_scatter_single(mine, overlapping)
    assert torch.equal(mine, wanted)
    return [collective is not None for collective in collectives_made]


def test_native_code_and_steps_in_python_gather_and_scatter_alike():
    by_native, by_lists = run_ranks(2, in_rows)
    # A scatter and a gather of each size: native code has no bfloat16 to reduce.
    assert by_native == [True, True, False, True] * 4 + [True, True]
    assert by_lists == [True, True]


def wrapped():
    sw.init("shm", timeout=60)
    sums = []
    for numel in (5, 2**17):
        inner = torch.ones(numel)
        dist.all_reduce(AsyncCollectiveTensor(inner) if dist.get_rank() else inner)
        sums.append(inner.unique().tolist())
    for dtype in (torch.bool, torch.bfloat16, torch.complex64):
        inner, everyone = torch.full((3,), 1 + dist.get_rank(), dtype=dtype), torch.empty(2, 3, dtype=dtype)
        all_gather_single(everyone, AsyncCollectiveTensor(inner) if dist.get_rank() else inner)
        sums.append(everyone[:, 0].tolist())
    inner, everyone = torch.full((2**17,), 1.0 + dist.get_rank()), torch.empty(2, 2**17)
    all_gather_single(everyone, AsyncCollectiveTensor(inner))
    return [*sums, everyone.unique(dim=1)[:, 0].tolist()]


def test_a_tensor_that_wraps_another_meets_plain_ones():
    """Native code and steps in Python come to the same stages, in all-gathers too."""
    expected = [[2.0], [2.0], [True, True], [1.0, 2.0], [1 + 0j, 2 + 0j], [1.0, 2.0]]
    assert run_ranks(2, wrapped) == [expected] * 2


def chained():
    """What a callback sums once more; and what the other rank needs, who sends a message only when it has the sum."""
    rank = sw.init(backend="shm").rank
    work = dist.all_reduce(torch.ones(200_000), async_op=True)
    again = work.get_future().then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0])
    found = [again.wait()[0].item()]
    summed, message = torch.ones(65_536), torch.zeros(1)
    work = dist.all_reduce(summed, async_op=True)
    if rank:
        work.wait()
        dist.send(message + 5, 0)
    else:
        dist.recv(message, 1)
        work.wait()
    return [*found, summed[0].item(), message.item()]


def test_who_waits_for_something_else_holds_nobody_up():
    assert run_ranks(2, chained) == [[4.0, 2.0, 5.0], [4.0, 2.0, 0.0]]


def stressed(seconds):
    sw.init("shm", timeout=120)
    return backend_ranks.stress(seconds)


@slow
@pytest.mark.timeout(600)
def test_many_in_any_order():
    counts = run_ranks(3, stressed, 20, timeout=400)
    assert len(set(counts)) == 1
    assert counts[0] > 100


def unlike():
    """What all ranks are told where they do not call the same; the group serves on."""
    sw.init("shm", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    said = []
    for call in (
        lambda: dist.all_reduce(torch.ones(3 + rank)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX) if rank else dist.barrier(),
        lambda: dist.broadcast(torch.ones(3), rank),
        lambda: (
            dist.all_gather([torch.ones(2)] * size, torch.ones(2), async_op=True).wait()
            if rank
            else dist.all_gather([torch.ones(2, dtype=torch.int64)] * size, torch.ones(2, dtype=torch.int64))
        ),
        lambda: (
            dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size), [2] * size, [2] * size)
            if rank
            else dist.all_to_all_single(torch.ones(4), torch.ones(2 * size), [2, 1, 1], [2] * size)
        ),
    ):
        with pytest.raises(WorldError) as error:
            call()
        said.append(str(error.value))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == size
    return said


def test_ranks_that_do_not_call_the_same_are_named():
    first, *others = run_ranks(3, unlike)
    assert all(other == first for other in others)
    sizes, kinds, roots, dtypes, parts = first
    assert (
        "the ranks do not call the same: rank 0 called all_reduce of 3 elements of float32 by SUM, rank 1 called "
        "all_reduce of 4 elements of float32 by SUM, rank 2 called all_reduce of 5 elements of float32 by SUM" in sizes
    )
    assert "rank 0 called barrier, ranks 1, 2 called all_reduce of 3 elements of float32 by MAX" in kinds
    assert "rank 0 called broadcast of 3 elements of float32, rank 1 called broadcast" in roots
    assert "rank 0 called all_gather of 2 elements of int64, ranks 1, 2 called all_gather" in dtypes
    assert "all_to_all of float32: rank 1 sends 8 bytes to rank 0, which awaits 4 from it" in parts


def goes(how, folder):
    """Rank 1 goes, while the others wait for it; what they are told, and after how long."""
    before = mapped()
    sw.init("shm", timeout=60)
    rank, made = dist.get_rank(), mapped() - before
    assert "/memfd:shardwright (deleted)" in made  # which has no name, so that nothing is left by a rank that ends
    assert not any(path.startswith("/dev/shm") for path in made)
    dist.broadcast(torch.ones(2), 0)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stalls":
            return backend_ranks.until(lambda: len(list(folder.iterdir())) == dist.get_world_size() - 1)
        os._exit(3)
    if how == "stalls":
        dist.group.WORLD.queue.timeout_s = 3.0  # from here on, since ranks may take longer to meet
    found = backend_ranks.told_of_the_end()
    (folder / str(rank)).touch()
    return found


def mapped():
    """The files behind what this process shares with others, without those of programs and libraries."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5].strip() for line in lines if len(line) == 6 and line[1].endswith("s")}


@pytest.mark.parametrize("how", ["killed", pytest.param("exits", marks=slow)])
def test_a_rank_that_ends_is_named(how, tmp_path):
    found = run_ranks(3, goes, how, tmp_path, dying=(1,))
    for rank in (0, 2):
        said, _ = found[rank]
        assert "rank 1 (process " in said or "rank 1 has left" in said
        assert "has ended, while rank" in said


@slow
def test_a_rank_that_stalls_is_named(tmp_path):
    found = run_ranks(3, goes, "stalls", tmp_path)
    for rank in (0, 2):
        said, took_s = found[rank]
        assert "longer than the 3 s of sw.init(timeout=...): rank " in said
        assert "rank 1 last came to number" in said
        assert "broadcast of 2 elements of float32" in said
        assert took_s > 2.5


def by_gloo():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        world = sw.init(timeout=60)
    total = torch.ones(1000)
    dist.all_reduce(total)
    return world.backend, total.sum().item(), said.getvalue()


def test_gloo_takes_its_place_without_native_code(no_compiler):
    first, second = run_ranks(2, by_gloo, env=no_compiler)
    assert first[:2] == second[:2] == ("gloo", 2000.0)
    assert "gloo takes its place: there is no native code, since there is no C compiler" in first[2]
    assert second[2] == ""


@pytest.fixture
def installed(tmp_path):
    """A folder that says of the package what an installation says of it."""
    project = tomllib.loads((Path(sw.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "shardwright-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shardwright\nVersion: 0\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
        for group, found in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(points))
    return str(tmp_path)


BY_TORCH = (
    "import sys, torch, torch.distributed as dist\n"
    "assert len([name for name in sys.modules if name.startswith('shardwright')]) < 25\n"
    "dist.init_process_group('shm', store=dist.HashStore(), rank=0, world_size=1)\n"
    "x = torch.ones(2); dist.all_reduce(x); print(x.tolist(), dist.get_backend())\n"
    "dist.destroy_process_group()\n"
)
BY_INIT = "import shardwright as sw\nprint(sw.init('shm').backend)\n"


@pytest.mark.parametrize(
    ("code", "variables", "says"),
    [
        (BY_TORCH, {}, "[1.0, 1.0] shm\n"),
        pytest.param(BY_INIT, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "shm\n", marks=slow),
    ],
    ids=["torch", "init"],
)
def test_torch_learns_of_it_when_it_is_imported_or_from_init(installed, code, variables, says):
    path = os.pathsep.join([installed, str(Path(sw.__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.stdout == says, ended.stderr


def card(**changes):
    return {"host": "a", "machine": "1", "processes": 7, "pid": 1, "started": "0"} | changes


def test_who_shares_no_memory_is_told_why():
    with pytest.raises(shm_meeting._NoMemory) as problem:
        shm_meeting._check_places([card(), card(processes=8)])
    assert str(problem.value) == "the ranks are in several containers, which do not see each other's processes"


@pytest.mark.parametrize(
    ("of_a_world", "said"),
    [
        (False, "shardwright: backend='shm' cannot share memory, gloo takes its place: the ranks are in several"),
        (True, "shardwright: the group of the ranks 1, 3 shares no memory, gloo takes the place of shm there, and in "
               "no other group: the ranks are in several containers"),
    ],
)  # fmt: skip
def test_a_group_between_containers_says_that_it_is_this_group_alone(of_a_world, said, monkeypatch, capsys):
    options = SimpleNamespace(
        group_rank=0, global_ranks_in_group=[1, 3], group_size=2, timeout=timedelta(seconds=9), store=dist.HashStore()
    )
    monkeypatch.setattr(shm_meeting, "_of_a_world", lambda: of_a_world)
    monkeypatch.setattr(shm_meeting, "backends_of", lambda: "shm")
    monkeypatch.setattr(shm_meeting, "_gloo", lambda meeting: "gloo")
    cards = [card(), card(processes=8)]
    monkeypatch.setattr(shm_meeting._Meeting, "exchange", lambda self, what, make: cards)
    assert shm_meeting.create(options) == "gloo"
    assert capsys.readouterr().err.startswith(said)


FAILS = [
    ("_card", RuntimeError, 1), ("make_file", AttributeError, 0), ("Memory", RuntimeError, 1),
]  # fmt: skip


def one_fails():
    """What is said, and who sums, where one rank fails at one step of making a group."""
    shm.register()
    dist.init_process_group("gloo")
    found = []
    for name, error, rank in FAILS:
        right, said, total = getattr(shm_meeting, name), io.StringIO(), torch.ones(2)
        if dist.get_rank() == rank:
            setattr(shm_meeting, name, Mock(side_effect=error))
        with contextlib.redirect_stderr(said):
            group = dist.new_group(backend="shm")
        setattr(shm_meeting, name, right)
        dist.all_reduce(total, group=group)
        files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        found.append((total.tolist(), said.getvalue(), sum("memfd:shardwright" in file for file in files)))
    dist.destroy_process_group()
    return found


def test_where_one_rank_cannot_share_memory_gloo_takes_its_place_on_all():
    first, second = run_ranks(2, one_fails, timeout=100)
    for (name, error, rank), (sums, said, files), other in zip(FAILS, first, second, strict=True):
        assert f"gloo takes its place: rank {rank} failed with {error.__name__}" in said, name
        assert sums == [2.0, 2.0], name
        assert files == 0, name
        assert other == (sums, "", 0), name


@pytest.mark.parametrize("error", [RuntimeError("no home"), PermissionError(13, "closed")])
def test_without_a_folder_of_caches_there_is_no_native_code(monkeypatch, error):
    monkeypatch.setattr(native_code, "_folder", Mock(side_effect=error))
    assert native.built() is None


def forked():
    shm.register()
    dist.init_process_group("shm")
    group = dist.group.WORLD
    tensor = torch.ones(2**18)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        peer = 1 - dist.get_rank()
        refused = sum(map(refuses, [
            lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(torch.ones(1)), dist.barrier,
            lambda: dist.send(tensor, peer), lambda: dist.recv(tensor, peer),
        ]))  # fmt: skip
        group.shutdown()  # as at its exit
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.unique().tolist()


def refuses(call):
    try:
        call()
    except WorldError as error:
        return f"process {os.getpid()} was forked from rank {dist.get_rank()}, " in str(error)
    return False


@pytest.mark.slow
def test_a_forked_child_leaves_tensors_and_group_to_its_parent():
    assert run_ranks(2, forked) == [[4.0]] * 2


def on_pretended_hosts(hosts):
    """The kinds of the groups of all ranks and of those of a host, a sum over all, and what is logged."""
    heard, card, mine = [], shm_meeting._card, hosts[int(os.environ["RANK"])]
    log = logging.getLogger("shardwright.shm")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: heard.append(record.getMessage()))
    shm_meeting._card = lambda: card() | {"machine": mine, "host": mine}
    world = sw.init("shm", timeout=60)
    groups = {name: dist.new_group([r for r, host in enumerate(hosts) if host == name]) for name in sorted({*hosts})}
    total = torch.ones(2)
    dist.all_reduce(total)
    kinds = [type(group).__name__ for group in (dist.group.WORLD, groups[mine])]
    return kinds, world.backend, total.tolist(), heard


def test_gloo_moves_all_between_hosts_and_ranks_of_one_share_memory():
    kinds, backends, totals, heard = zip(*run_ranks(3, on_pretended_hosts, "aba"), strict=True)
    assert list(kinds) == [["ProcessGroup", "ShmGroup"]] * 3
    assert (set(backends), totals) == ({"gloo"}, ([3, 3],) * 3)
    assert heard[0][0] == "shm: gloo moves all between hosts (a, b)"
