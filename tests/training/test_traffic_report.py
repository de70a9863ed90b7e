"""The end of a training run: the bytes that devices moved beside those that the plan predicted, measured on devices."""

import contextlib
import io
import os
import re
import subprocess
import warnings

import pytest
import torch
from torch import nn

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.distributed.backends.table import GLOO, NCCL
from shardwright.launch.hosts.network import read_devices
from shardwright.runtime.parallel import EagerFallback
from shardwright.training.network.prediction import flows_between
from shardwright.training.network.traffic import HostTraffic, measure, traffic_lines
from sysfs import Tree
from veth import ADDRESSES, DEVICE, enter, namespaces


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


# NCCL over sockets
