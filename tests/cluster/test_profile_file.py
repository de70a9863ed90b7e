"""Hardware profiles as files: they come back equal, say what is wrong in them, and price what the planner asks."""

import json
import re
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
from shardwright.compiler.plan.pricing.hardware import Hardware, for_device, read_hardware, shipped
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


@pytest.mark.parametrize(
    "told", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA RTX A1000", "NVIDIA H200 NVL",
             "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Some GPU"],
)  # fmt: skip
def test_a_gpu_of_which_nothing_is_shipped_is_told(told):
    with pytest.warns(UserWarning, match=f"no figures for {re.escape(told)} are shipped.*--save-profile"):
        assert for_device("cuda", lambda: told).name == "h100"


def broken(path, value):
    """The JSON of `hardware` with one entry changed; None removes it."""
    found = json.loads(hardware().to_json())
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", 'an object with "format": .* it is \\[\\], expected an object'),
        (broken(["format"], "other"), "is no hardware profile"),
        (broken(["version"], 9), "has version 9 of the format, this program reads 1"),
        (broken(["flops"], {"float64": 1e9}), 'flops needs a figure for "float32"'),
        (broken(["flops", "float32"], -1), "float32 is -1.0; expected a number above 0"),
        (broken(["memory_bandwidth"], None), "it lacks memory_bandwidth"),
        (broken(["launch_s"], "fast"), "launch_s is 'fast', expected a number"),
        (broken(["around_s"], -1), "around_s is -1.0; expected a number from 0 on"),
        (broken(["updates"], [{"per_entry": -1, "bandwidth": 1}]), r"updates\[0\].per_entry is -1; expected a number"),
        (broken(["updates"], [{"per_entry": 1, "bandwidth": 0}]), "bandwidth is 0.0; expected a number above 0"),
        (broken(["updates"], [{"per_entry": 1}]), r"updates\[0\] lacks bandwidth"),
        (broken(["attention"], 0), "attention is 0.0; expected a number above 0"),
        (broken(["at_once"], 1.5), "at_once is 1.5; expected a number from 0 to 1"),
        (broken(["hides_gradients"], "some"), "hides_gradients is 'some', expected a number"),
        (broken(["links", 0, "where"], "beside"), r"links\[0\].where is 'beside', expected 'inside' or 'between'"),
        (broken(["links", 0, "ranks"], 1), "a link is among 1 ranks; expected 2 or more"),
        (broken(["links", 1], None), "the links inside hosts lack all_gather"),
        (broken(["links", 0, "segments"], []), "begin with from_bytes 0"),
        (broken(["links", 0, "segments", 0, "from_bytes"], 5), "begin with from_bytes 0"),
        (broken(["links", 0, "segments", 0, "bandwidth"], 0), r"bandwidth=0.0\); expected bytes, seconds"),
        (broken(["links", 0, "segments", 1, "from_bytes"], 0), "the segments of a curve rise: 0 follows 0"),
        (broken(["links", 0, "segments", 0, "latency_s"], -1.0), "takes no time"),
        (broken(["links", 0, "segments", 1, "latency_s"], -1e-3), "takes no time|less time"),
        (broken(["links", 0, "points"], [1]), r"points\[0\] is 1, expected a list of 2: a whole number, a number"),
        (broken(["ranks_per_host"], 0), "ranks_per_host is 0; expected a whole number from 1 on, or null"),
        (broken(["links", 9, "per_host"], 0), "per_host is 0 of 8 ranks; expected 1 or more"),
        (broken(["links", 9, "per_host"], 8), "per_host is 8 of 8 ranks; expected 1 or more, and fewer than all"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file(text, message, tmp_path):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        Hardware.load(path)
    assert str(path) in str(caught.value)


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
    assert added == {f"['{name}'] with one more" for name in ("flops", "peak_flops", "links", "sources")}
    assert all(message.startswith("f.json") for message in refused)
    assert "['launch_s'] = 1.5" in accepted


def test_what_is_no_hardware(tmp_path):
    with pytest.raises(
        UsageError, match=r"tpu is no hardware that is known; type one of cpu, a100, cpu_host, cpu_host_shm, h100"
    ):
        read_hardware("tpu")
    with pytest.raises(UsageError, match=r"cannot read the hardware profile .*gone.json: No such file"):
        read_hardware(tmp_path / "gone.json")
    with pytest.raises(UsageError, match=r"cannot write the profile .*: No such file"):
        hardware().save(tmp_path / "gone" / "h.json")


def test_a_curve_has_the_segment_of_its_bytes():
    curve = Curve((Segment(0, 1.0, 10.0), Segment(100, -9.0, 5.0)))
    assert [curve.seconds(b) for b in (0, 50, 99, 100, 200)] == [1.0, 6.0, 10.9, 11.0, 31.0]
    with pytest.raises(UsageError, match="more bytes would take less time at 100 bytes"):
        Curve((Segment(0, 1.0, 10.0), Segment(100, 0.0, 10.0)))


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


def test_a_link_that_was_not_measured_is_said():
    alone = replace(hardware(), links=tuple(c for c in hardware().links if c.where == "inside"))
    with pytest.raises(
        UsageError, match=r"the hardware profile h knows inside, but a group .* is between hosts; run `s"
    ):
        alone.collective_s("all_reduce", 1, 2, "between")


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
