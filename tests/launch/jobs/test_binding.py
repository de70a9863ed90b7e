"""Each rank has its share of the cores, where they can be shared evenly."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.launch.supervisor import rank_start

CORES = len(os.sched_getaffinity(0))
SCRIPT = "import os; print(sorted(os.sched_getaffinity(0)))\n"


@settings(max_examples=40)
@given(cores=st.integers(1, 40), ranks=st.integers(1, 80))
def test_ranks_share_evenly_or_not_at_all(cores, ranks):
    shares = [rank_start.share(list(range(cores)), rank, ranks) for rank in range(ranks)]
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
    monkeypatch.setattr(rank_start, "_TOPOLOGY", tmp_path)
    assert rank_start.in_order(set(range(8))) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert rank_start.in_order({9, 8}) == [8, 9]  # whose topology is unknown


@pytest.mark.skipif(CORES < 2, reason="one core cannot be shared")
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ([], True),
        pytest.param(["--no-preload"], True, marks=pytest.mark.slow),
        (["--bind-to", "none"], False),
        pytest.param(["-x", f"OMP_NUM_THREADS={CORES}"], False, marks=pytest.mark.slow),
        pytest.param(["-x", "OMP_NUM_THREADS=1"], True, marks=pytest.mark.slow),
    ],
)
def test_a_job_is_bound(launching, options, bound):
    script = launching.write("cores.py", SCRIPT)
    ended = launching.run("-n", "2", *options, script, env=launching.light_torch())
    assert ended.code == 0, ended.stderr
    half = CORES // 2
    found = [len(launching.log(rank).split(",")) for rank in (0, 1)]
    assert found == ([half, half] if bound else [CORES, CORES])
    assert (launching.log(0) == launching.log(1)) is not bound


@pytest.fixture
def recorded(tmp_path):
    """The files of a host with four GPUs, two on each side of it; each side has eight cores of two threads."""
    sides = {"0000:1B:00.0": "0-7,16-23", "0000:43:00.0": "0-7,16-23", "0000:9B:00.0": "8-15,24-31"}
    for number, (address, cores) in enumerate((sides | {"0000:C3:00.0": "8-15,24-31"}).items()):
        information = tmp_path / "proc/driver/nvidia/gpus" / address / "information"
        near = tmp_path / "sys/bus/pci/devices" / address.lower() / "local_cpulist"
        for file, text in (
            (information, f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{number}abc-def\n"),
            (near, f"{cores}\n"),
        ):
            file.parent.mkdir(parents=True)
            file.write_text(text)
    return tmp_path


def shares(recorded, ranks, **environment):
    return [rank_start.near_gpu(range(32), rank, ranks, environment, recorded) for rank in range(ranks)]


def test_a_rank_has_its_share_of_the_cores_near_its_gpu(recorded):
    left, right = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    assert shares(recorded, 4) == [left[:8], left[8:], right[:8], right[8:]]
    assert shares(recorded, 2, CUDA_VISIBLE_DEVICES="3,0") == [right, left]
    assert shares(recorded, 2, CUDA_VISIBLE_DEVICES="GPU-2abc,GPU-3") == [right[:8], right[8:]]


@pytest.mark.parametrize(
    "environment",
    [{"CUDA_VISIBLE_DEVICES": "0,7"}, {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, {"CUDA_VISIBLE_DEVICES": "1"}],
)
def test_a_rank_whose_gpu_nobody_knows_is_not_bound(recorded, environment):
    assert shares(recorded, 2, **environment)[1] == []


def test_gpus_of_several_models_are_numbered_by_speed_unless_by_bus(recorded):
    file = recorded / "proc/driver/nvidia/gpus/0000:1B:00.0/information"
    file.write_text(file.read_text().replace("H100", "T4"))
    assert shares(recorded, 4) == [[]] * 4
    assert all(shares(recorded, 4, CUDA_DEVICE_ORDER="PCI_BUS_ID"))


def test_ranks_on_gpus_are_bound_nowhere_without_the_files(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    rank_start.bind({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, gpus=2)
