"""The end of a training run: the bytes that devices moved beside those that the plan predicted, measured on devices."""

import contextlib
import io
import itertools
import os
import re
import socket
import subprocess
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import ProcessCommunicator
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.distributed.backends.table import GLOO, NCCL, SHM
from shardwright.launch.hosts.network import Device, read_devices
from shardwright.runtime.parallel import EagerFallback
from shardwright.training.network.nccl_network import chosen_network, over_sockets
from shardwright.training.network.prediction import flows_between
from shardwright.training.network.traffic import HostTraffic, TrafficWatch, measure, traffic_lines
from sysfs import Tree
from veth import ADDRESSES, DEVICE, enter, namespaces

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
AXES = ("x",)
TIMES = 8


def loopback_payload():
    lo = read_devices().devices["lo"]
    return lo.out_bytes - 52 * lo.out_packets


def quiet():
    """Returns when the loopback has counted everything that was on its way."""
    before = None
    while before != (before := loopback_payload()):
        time.sleep(0.03)


def communicate(name, folder):
    """(kind, bytes) -> what this rank's namespace moved for `TIMES` collectives of ours, without packet headers."""
    enter(name)
    torch.set_num_threads(1)
    size, met = sw.init("gloo").size, itertools.count()

    def meet():
        """By files, which move nothing over the loopback."""
        number = next(met)
        (folder / f"{number}.{os.environ['RANK']}").touch()
        until_s = time.monotonic() + 60
        while len(list(folder.glob(f"{number}.*"))) < size:
            assert time.monotonic() < until_s
            time.sleep(0.002)

    comm = ProcessCommunicator(Mesh.of(x=size))
    comm.prepare([AXES])
    found = {}
    for kind in KINDS:
        for elements in (1, 300_000):
            whole, pieces = torch.ones(elements * size), [torch.ones(elements) for _ in range(size)]
            run = {
                "all_reduce": lambda x=whole: comm.all_reduce(x, AXES),
                "all_gather": lambda x=pieces: comm.all_gather(x[0], AXES),
                "reduce_scatter": lambda x=pieces: comm.reduce_scatter(torch.stack(x), AXES),
                "all_to_all": lambda x=pieces: comm.all_to_all(x, AXES),
            }[kind]
            run()
            meet()
            quiet()
            before = loopback_payload()
            meet()
            for _ in range(TIMES):
                run()
            meet()
            quiet()
            found[kind, elements * size * 4] = loopback_payload() - before
            meet()  # the others read too before anything is sent
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo_moves_what_the_table_of_ways_says(size, tmp_path):
    with namespaces(1) as (name,):
        measured = run_ranks(size, communicate, name, tmp_path)[0]
    for (kind, buffer_bytes), payload in measured.items():
        counted = {Collective(kind, AXES, buffer_bytes): TIMES}
        predicted = flows_between(counted, Mesh.of(x=size), ["here"] * size, GLOO)["here", "here"]
        assert payload == pytest.approx(predicted, rel=0.05), (kind, buffer_bytes)


class Wide(nn.Module):
    """1.2 MB of parameters, with batch normalisation, whose statistics are communicated too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x):
        return self.layers(x)


def wide_batch(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=generator), torch.randn(rows, 512, generator=generator)


def wide_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


RUNS = {
    "data": ("data", {}, {}),
    "accumulated": ("data", {}, {"accumulate": 2}),
    "tensor": ("semi-auto", {"pins": {"layers.0": ((1, 1), (2, 1), None)}, "mesh": "tp=2"}, {}),
}


def train(names, large, runs, backend=None):
    """What rank 0 prints of each run, on two hosts with half of the ranks each."""
    each = int(os.environ["WORLD_SIZE"]) // 2
    host, local_rank = divmod(int(os.environ["RANK"]), each)
    enter(names[host], f"node{host}")
    if not large:  # as a device counts that is handed packets of the MTU
        subprocess.run(["ip", "link", "set", "dev", DEVICE, "gso_max_segs", "1"], check=True)
    os.environ |= {
        "MASTER_ADDR": ADDRESSES[0],
        "GLOO_SOCKET_IFNAME": DEVICE,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(each),
    }
    torch.set_num_threads(1)
    sw.init(backend)
    printed = {}
    for name in runs:
        mode, options, training = RUNS[name]
        data = [wide_batch(12, seed) for seed in range(4)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            parallel = sw.parallelize(Wide(), wide_loss, data[0], mode, batch="global", **options)
            trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), **training)
            trainer.fit(data, epochs=2, validate=data[:1])
        printed[name] = out.getvalue()
    if "tensor" in runs:
        printed["eager"] = by_ddp()
    return printed


def by_ddp():
    """A model that cannot be captured runs by DistributedDataParallel, without a plan."""
    make, loss_fn, batch = NETWORKS["perceptron"]

    def loss(model, batch):
        value = loss_fn(model, batch)
        first = value[0] if isinstance(value, tuple) else value
        return first * (1.0 if first.item() > -1 else 2.0)

    data = [batch(12, 0)]
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerFallback)
        parallel = sw.parallelize(make(), loss, data[0], "data", batch="global")
        sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1)).fit(data)
    return out.getvalue()


SIZE = r"[\d.]+ (?:k|M)?B"
LINE = re.compile(
    rf"traffic \| (?P<place>.*) \| predicted: (?P<pin>{SIZE}) in, (?P<pout>{SIZE}) out"
    rf" \| (?P<device>\w+): (?P<min>{SIZE}) in, (?P<mout>{SIZE}) out"
    r" \| (?P<din>[+-][\d.]+)% in, (?P<dout>[+-][\d.]+)% out"
    rf" \| besides, headers: {SIZE} in, {SIZE} out"
)


def read_line(line):
    """The place, the device and the bytes that were predicted; what was measured is within 5 % of them."""
    found = LINE.fullmatch(line)
    assert found is not None, line
    numbers = {name: float(found[name].split()[0]) * UNITS[found[name].split()[1]] for name in NUMBERS}
    for predicted, measured, deviation in (("pin", "min", "din"), ("pout", "mout", "dout")):
        assert numbers[measured] == pytest.approx(numbers[predicted], rel=0.05), line
        assert float(found[deviation]) == pytest.approx(100 * (numbers[measured] / numbers[predicted] - 1), abs=0.2), (
            line
        )
    return found["place"], found["device"], numbers["pout"]


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6}
NUMBERS = ("pin", "pout", "min", "mout")


@pytest.mark.parametrize(
    "large",
    [pytest.param(True, marks=pytest.mark.slow, id="large packets"), pytest.param(False, id="packets of the MTU")],
)
def test_a_run_on_two_hosts_predicts_what_the_link_counts(large):
    runs = list(RUNS) if large else ["data", "accumulated"]
    with namespaces() as names:
        printed, silent = run_ranks(2, train, names, large, runs, timeout=90)
    assert not any("traffic" in text for text in silent.values())
    predicted = {}
    for run in runs:
        lines = [read_line(line) for line in printed[run].splitlines() if line.startswith("traffic")]
        # No line for what stays within a host: it has one rank.
        assert [line[:2] for line in lines] == [(f"node{i}, with other hosts", DEVICE) for i in (0, 1)]
        predicted[run] = lines[0][2]
    parameters = sum(p.numel() for p in Wide().parameters()) * 4
    assert predicted["data"] == pytest.approx(8 * parameters, rel=0.05)
    assert predicted["accumulated"] == pytest.approx(4 * parameters, rel=0.05), "one reduction for two batches"
    if not large:
        return
    first, _ = [line for line in printed["eager"].splitlines() if line.startswith("traffic")]
    assert first.startswith(
        "traffic | node0, with other hosts | predicted: nothing, since the model runs without a plan"
    )
    assert f"{DEVICE}: " in first


@pytest.mark.slow
def test_with_several_ranks_on_each_host_only_what_crosses_is_predicted_for_the_link():
    with namespaces() as names:
        printed = run_ranks(4, train, names, True, ["data"], "gloo", timeout=110)[0]["data"]
    lines = [read_line(line) for line in printed.splitlines() if line.startswith("traffic")]
    assert [line[:2] for line in lines] == [
        (f"node{i}, {place}", device)
        for i in (0, 1)
        for place, device in (("with other hosts", DEVICE), ("within it", "lo"))
    ]
    once_around = (
        8 * sum(p.numel() for p in Wide().parameters()) * 4 * 2 * 3 / 4
    )  # one edge of the ring, both ways round
    assert [line[2] for line in lines] == pytest.approx([once_around] * 4, rel=0.05)


def test_a_world_of_one_says_nothing(capsys):
    world = SimpleNamespace(size=1, rank=0)
    TrafficWatch(None, world).end()
    assert capsys.readouterr().out == ""


# Who sends to whom


def test_what_crosses_hosts_depends_on_the_way():
    hosts = ["a", "a", "b", "b"]
    ring = flows_between({Collective("all_reduce", ("dp",), 1000): 1}, Mesh.of(dp=4), hosts, NCCL)
    assert dict(ring) == {("a", "a"): 1500, ("a", "b"): 1500, ("b", "b"): 1500, ("b", "a"): 1500}
    pairs = flows_between({Collective("all_to_all", ("dp",), 1000): 1}, Mesh.of(dp=4), hosts, NCCL)
    assert dict(pairs) == {("a", "a"): 500, ("a", "b"): 1000, ("b", "b"): 500, ("b", "a"): 1000}
    mesh = Mesh.of(dp=2, tp=2)
    assert set(flows_between({Collective("all_reduce", ("tp",), 1000): 1}, mesh, hosts, GLOO)) == {
        ("a", "a"),
        ("b", "b"),
    }
    assert set(flows_between({Collective("all_reduce", ("dp",), 1000): 1}, mesh, hosts, GLOO)) == {
        ("a", "b"),
        ("b", "a"),
    }


def test_hosts_whose_ranks_share_memory_send_nothing_twice():
    """All kinds by what each host has and the other lacks; where hosts have not as many ranks all goes by gloo."""
    sent = {
        kind: flows_between({Collective(kind, ("dp",), 1000): 1}, Mesh.of(dp=4), ["a", "a", "b", "b"], SHM)
        for kind in KINDS
    }
    expected = {"all_reduce": 1000, "all_gather": 500, "reduce_scatter": 500, "all_to_all": 1000}
    assert sent == {kind: {("a", "b"): size, ("b", "a"): size} for kind, size in expected.items()}
    reduced, uneven = {Collective("all_reduce", ("dp",), 1000): 1}, ["a", "b", "b", "b"]
    assert flows_between(reduced, Mesh.of(dp=4), uneven, SHM) == flows_between(reduced, Mesh.of(dp=4), uneven, GLOO)
    large = flows_between({Collective("all_reduce", ("dp",), 3_000_000): 1}, Mesh.of(dp=6), [*"aabbcc"], SHM)
    assert set(large.values()) == {2_000_000}


# NCCL over sockets

PORT = Device("mlx5_0/1", "infiniband", True, 0, 0, speed="100 Gb/sec (4X EDR)", unit_bytes=4, network_device="ib0")
ETH0 = Device("eth0", "ethernet", True, 0, 0)


@pytest.fixture
def seen(tmp_path):
    """The report of two hosts like this tree, on which a port and eth0 sent and received so many bytes."""
    tree = Tree(tmp_path / "sys")

    def report(port_bytes, eth0_bytes, nccl=None):
        before = read_devices(tree.root)
        words = port_bytes // 4
        tree.count({"rx_bytes": eth0_bytes, "tx_bytes": eth0_bytes}, {"port_rcv_data": words, "port_xmit_data": words})
        between, within = measure(before, read_devices(tree.root))
        flows = {("a", "b"): 1e9, ("b", "a"): 1e9, ("a", "a"): 5e8}
        return traffic_lines([HostTraffic(name, between, within, nccl) for name in ("a", "b")], flows, NCCL)

    return report


def test_nccl_over_infiniband_is_in_order(seen):
    lines = seen(1_010_000_000, 20_000)
    assert lines == [
        "traffic | a, with other hosts | predicted: 1.00 GB in, 1.00 GB out | mlx5_0/1: 1.01 GB in, 1.01 GB out"
        " | eth0: 20.00 kB in, 20.00 kB out | +1.0% in, +1.0% out",
        "traffic | a, within it | predicted: 500.00 MB | not over the network",
        "traffic | b, with other hosts | predicted: 1.00 GB in, 1.00 GB out | mlx5_0/1: 1.01 GB in, 1.01 GB out"
        " | eth0: 20.00 kB in, 20.00 kB out | +1.0% in, +1.0% out",
    ]


@pytest.mark.parametrize(
    ("port_bytes", "eth0_bytes", "nccl", "how"),
    [
        (0, 1_050_000_000, None, "sent its bytes over eth0"),
        (0, 1_050_000_000, "Socket", "says that it uses sockets"),
        (800_000_000, 0, "Socket", "says that it uses sockets"),  # another job's bytes on the port excuse nobody
    ],
)
def test_nccl_over_sockets_although_infiniband_is_there(seen, port_bytes, eth0_bytes, nccl, how):
    warnings_ = [line for line in seen(port_bytes, eth0_bytes, nccl) if "warning" in line]
    assert len(warnings_) == 2
    assert warnings_[0].startswith(
        f"traffic | a | warning: NCCL {how} although InfiniBand is active on mlx5_0/1 (100 Gb/sec (4X EDR)); look at "
    )
    for word in ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "ulimit -l", "NCCL_DEBUG=INFO"):
        assert word in warnings_[0]


@pytest.mark.parametrize(
    ("sent", "predicted_bytes", "chosen"),
    [
        ([(PORT, 0), (ETH0, 10**9)], 1e9, "IB"),  # another program used Ethernet
        ([(replace(PORT, up=False), 0), (ETH0, 10**9)], 1e9, "Socket"),
        ([(ETH0, 10**9)], 1e9, "Socket"),
        ([(PORT, 0), (ETH0, 10**9)], 1e4, None),  # too little to tell
        ([(PORT, 10**9), (ETH0, 10**9)], 1e9, None),
    ],
)
def test_no_warning_without_cause(sent, predicted_bytes, chosen):
    assert over_sockets("a", sent, predicted_bytes, chosen) == []


def test_nccl_s_own_words(tmp_path):
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p"}
    assert chosen_network(variables) is None
    log = tmp_path / f"nccl.{socket.gethostname().split('.')[0]}.{os.getpid()}"
    log.write_text(
        "node0:7:7 [0] NCCL INFO NET/IB : No device found.\n"
        "node0:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
        "node0:7:7 [0] NCCL INFO Using network Socket\n"
    )
    assert chosen_network(variables) == "Socket"
    assert chosen_network({**variables, "NCCL_DEBUG": "WARN"}) is None
    log.write_text(
        "node0:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>\nUsing network IB\n"
    )
    assert chosen_network(variables) == "IB"
