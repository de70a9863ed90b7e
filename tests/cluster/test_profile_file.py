"""Hardware profiles as files: they come back equal, say what is wrong in them, and price what the planner asks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from mutated import mutations
from ranks import run_ranks
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.hardware import (
    Hardware,
    read_hardware,
    shipped,
)
from shardwright.compiler.plan.pricing.links import Curve, LinkCost, Segment
from shardwright.distributed.backends.table import BACKENDS
from shardwright.distributed.world import World
from shardwright.errors import UsageError
from shardwright.runtime.programs.planner import hardware_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MIB = 2**20


def hardware(**changes):
    """Two ranks inside a host and two between hosts, each kind with times of its own; 8 ranks inside for one kind."""
    links = [
        LinkCost(where, kind, 2, Curve((Segment(0, base * (i + 1), 1e9), Segment(MIB, base * (i + 1), 1e9))))
        for where, base in (("inside", 1e-4), ("between", 1e-3))
        for i, kind in enumerate(KINDS)
    ]
    links.append(LinkCost("inside", "all_reduce", 8, Curve((Segment(0, 5e-4, 2e9),)), points=((MIB, 1e-3),)))
    links.append(LinkCost("between", "all_reduce", 8, Curve((Segment(0, 2e-3, 1e9),)), per_host=4))
    made = Hardware("h", "a device", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e-6, tuple(links), 4, ("a book",))
    return replace(made, **changes)


def test_a_profile_comes_back_equal(tmp_path):
    path = tmp_path / "hardware.json"
    hardware().save(path)
    assert Hardware.load(path) == hardware()
    assert read_hardware(path) == read_hardware(str(path)) == read_hardware(hardware()) == hardware()
    assert [file.name for file in tmp_path.iterdir()] == ["hardware.json"]


SHIPPED = ("a100", "cpu_host", "cpu_host_shm", "h100", "h200", "v100")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_name_their_sources(name):
    found = shipped(name)
    assert found.name == name
    assert found.sources
    assert any("data sheet" in source or "measured" in source.lower() for source in found.sources)
    assert {(c.where, c.collective) for c in found.links} >= {(w, k) for w in ("inside", "between") for k in KINDS}
    for kind in KINDS:
        times = [found.collective_s(kind, 2**p, 2, "inside") for p in range(31)]
        assert times == sorted(times)
        assert found.collective_s(kind, MIB, 2, "inside") <= found.collective_s(kind, MIB, 2, "between")


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("backend", ["gloo", "shm", "mpi"])
def test_gradients_are_priced_in_the_buckets_in_which_they_travel(backend, hosts):
    """Whichever backend a profile is of, or none."""
    world = World(0, 2, 0, 1, "a", torch.device("cpu"), backend, tuple(hosts))
    row = BACKENDS[backend]
    for asked in (None, hardware(), hardware(backend="gloo")):
        assert hardware_of(world, asked).buckets == (row.buckets if hosts == "aa" else row.buckets_between)


def test_no_form_of_a_file_raises_another_error():
    """Whatever is accepted says what any collective and any step of an optimizer take."""
    accepted, refused = [], []
    for name, document in mutations(json.loads(hardware().to_json())):
        try:
            found = Hardware.from_json(json.dumps(document), "f.json")
        except UsageError as error:
            refused.append(str(error))
            continue
        accepted.append(name)
        assert found.collective_s("all_reduce", 1 << 20, 2, "inside") > 0 if found.links else True
        assert found.flops_in(torch.float32) > 0
        assert found.updating(2).bandwidth > 0
    added = {name for name in accepted if "one more" in name}
    assert added == {f"['{name}'] with one more" for name in ("flops", "links", "sources")}
    assert all(message.startswith("f.json") for message in refused)
    assert "['launch_s'] = 1.5" in accepted


def test_groups_between_hosts_share_the_network_of_a_host():
    """Eight groups with a rank of each host have an eighth of what one group of all ranks has, and two a half."""
    a100 = Seconds(replace(shipped("a100"), ranks_per_host=8))

    def seconds(mesh, kind="all_reduce"):
        return a100.collective(Collective(kind, ("dp",), 2**33), mesh)

    alone, two, eight = (seconds(Mesh.of(dp=256 // tp, tp=tp)) for tp in (1, 2, 8))
    assert two / alone == pytest.approx(2, rel=0.02)
    assert eight / alone == pytest.approx(8, rel=0.04)
    # Each rank of an all-to-all sends to the ranks of 31 other hosts by itself, however many of a group share its host.
    sent_alone, sent_beside = (seconds(Mesh.of(dp=256 // tp, tp=tp), "all_to_all") for tp in (1, 8))
    assert sent_beside == pytest.approx(sent_alone, rel=0.01)


def test_the_cost_asks_the_curve_of_kind_link_and_ranks():
    cost = Seconds(hardware())
    mesh = Mesh.of(dp=2, tp=2, ep=2)  # 4 ranks per host: ep and tp inside, dp between
    prices = {
        axes: cost.collective(Collective("all_gather", axes, MIB), mesh) for axes in (("dp",), ("tp",), ("tp", "ep"))
    }
    assert prices[("tp",)] == 2e-4 + MIB / 1e9
    assert prices[("dp",)] == 2e-3 + MIB / 1e9
    assert prices[("tp", "ep")] == pytest.approx(2e-4 + MIB * 1.5 / 1e9 + 2e-4)


def slow_links(factor):
    """The CPU's profile with links that are so much slower."""
    known = shipped("cpu_host")
    links = [
        replace(c, curve=Curve(tuple(Segment(s.from_bytes, s.latency_s * factor, s.bandwidth / factor)
                                     for s in c.curve.segments)))
        for c in known.links
    ]  # fmt: skip
    return replace(known, name="slow", links=tuple(links))


def batch_loss(model, batch):
    return model(batch).pow(2).sum()


def plans_by(folder):
    """What every rank holds after planning with a fast profile, a slow one of rank 0 alone, and a wrong one."""
    world = sw.init()
    given = folder / ("slow.json" if world.rank == 0 else "not here.json")
    found = []
    for hardware in (slow_links(1e-3), given):
        torch.manual_seed(0)
        model = nn.Linear(512, 512, bias=False)
        parallel = sw.parallelize(
            model, batch_loss, torch.ones(2048, 512), batch="global", inputs="whole", hardware=hardware
        )
        found.append(parallel.plan.to_json())
    try:
        sw.parallelize(nn.Linear(2, 2), batch_loss, torch.ones(4, 2), batch="global", hardware="pdp11")
    except UsageError as error:
        found.append(str(error))
    return found


def test_ranks_plan_by_the_profile_of_rank_0(tmp_path: Path):
    slow_links(1e6).save(tmp_path / "slow.json")
    first, second = run_ranks(2, plans_by, tmp_path)
    assert first == second
    quick, careful, message = first
    assert quick != careful  # with links that cost a million times as much, nothing is split
    assert "pdp11 is no hardware that is known" in message
