"""Each rank has its share of the cores, where they can be shared evenly."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.launch.supervisor import binding

CORES = len(os.sched_getaffinity(0))
SCRIPT = "import os; print(sorted(os.sched_getaffinity(0)))\n"


@given(cores=st.integers(1, 40), ranks=st.integers(1, 80))
def test_ranks_share_evenly_or_not_at_all(cores, ranks):
    shares = [binding.share(list(range(cores)), rank, ranks) for rank in range(ranks)]
    assert len({len(mine) for mine in shares}) == 1
    load = [sum(core in mine for mine in shares) for core in range(cores)]
    if ranks <= cores:
        assert max(load) == 1
        assert sum(load) > cores - ranks  # what is left over would not do for one more each
    elif ranks % cores == 0:
        assert set(load) == {ranks // cores}
    else:
        assert set(load) == {0}


def test_threads_of_one_core_stay_together(tmp_path, monkeypatch):
    """Eight threads of four cores in two packages, numbered as x86 does: the second threads come last."""
    for thread, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(binding, "_TOPOLOGY", tmp_path)
    assert binding.in_order(set(range(8))) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert binding.in_order({9, 8}) == [8, 9]  # whose topology is unknown


@pytest.mark.skipif(CORES < 2, reason="one core cannot be shared")
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ([], True),
        (["--no-preload"], True),
        (["--bind-to", "none"], False),
        (["-x", f"OMP_NUM_THREADS={CORES}"], False),
        (["-x", "OMP_NUM_THREADS=1"], True),
    ],
)
def test_a_job_is_bound(launching, options, bound):
    script = launching.write("cores.py", SCRIPT)
    ended = launching.run("-n", "2", *options, script)
    assert ended.code == 0, ended.stderr
    half = CORES // 2
    found = [len(launching.log(rank).split(",")) for rank in (0, 1)]
    assert found == ([half, half] if bound else [CORES, CORES])
    assert (launching.log(0) == launching.log(1)) is not bound


def test_ranks_on_gpus_are_not_bound(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    binding.bind({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, gpus=2)
