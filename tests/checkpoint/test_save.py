"""What a save writes: every element once, readable by us, by torch.load and by torch.distributed.checkpoint."""

import io
import json
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from ranks import run_ranks
from shardwright.checkpoint.format import pieces
from shardwright.checkpoint.format.manifest import BLOCK_BYTES, TensorEntry, ValueEntry
from shardwright.checkpoint.format.pieces import TensorShard
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.store import Store
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.ranks import OneRank, ProcessRanks
from shardwright.errors import CheckpointError
from simulated_ranks import SimulatedRanks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def a_state():
    torch.manual_seed(0)
    big = torch.randn(40, 30)
    return {
        ("model", "fc.weight"): torch.randn(6, 5),
        ("model", "view"): big[3:9, 2:7],
        ("model", "transposed"): big.t(),
        ("model", "row"): big[5],
        ("model", "scalar"): torch.tensor(3.5),
        ("model", "empty"): torch.empty(0, 4),
        ("model", "conjugated"): torch.randn(3, dtype=torch.complex64).conj(),
        ("model", "parameter"): torch.nn.Parameter(torch.randn(3)),
        **{("model", "dtypes", str(d)[6:]): (torch.arange(11) % 2).to(d) for d in DTYPES},
        ("optimizer", "state", "fc.weight", "exp_avg"): torch.randn(6, 5),
        ("optimizer", "param_groups", "0"): {"lr": 0.1, "betas": [0.9, 0.999], "params": ["fc.weight"]},
        ("run", "epoch"): 3,
        ("run", "note"): "a word",
    }


def elements(directory, manifest, name):
    """The whole of a tensor, from the raw bytes of its chunks alone; every checksum is looked at."""
    entry = manifest.entries[name]
    whole = torch.zeros(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        place = chunk.place
        raw = (directory / place.file).read_bytes()[place.start : place.start + place.length]
        blocks = [raw[i : i + BLOCK_BYTES] for i in range(0, len(raw), BLOCK_BYTES)]
        assert [xxhash.xxh3_64_hexdigest(block) for block in blocks] == list(place.checksums)
        count = chunk.box.numel
        size = count * entry.dtype.itemsize
        data = bytearray(raw[place.data : place.data + size])
        assert len(data) == size
        part = torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype) if size else torch.empty(0)
        where = tuple(slice(o, o + n) for o, n in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
        if count:
            whole[where] = part.reshape(chunk.box.sizes)
        assert torch.load(io.BytesIO(raw), weights_only=True).shape == chunk.box.sizes
    return whole


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_a_save_of_one_rank_holds_every_entry(tmp_path):
    state = a_state()
    saved = save(Store(tmp_path), "step-1", state, {"step": 1}, {"plan.json": b"{}"}, OneRank(TO_SAVE))
    manifest = Store(tmp_path).manifest("step-1")
    assert manifest.entries == saved.entries
    assert {entry.path for entry in manifest.entries.values()} == set(state)
    for path, value in state.items():
        entry = manifest.entries[".".join(path)]
        if isinstance(value, torch.Tensor):
            want = value.detach().resolve_conj().contiguous()
            assert same(elements(tmp_path / "step-1", manifest, entry.name), want), path
        else:
            assert isinstance(entry, ValueEntry)
            raw = (tmp_path / "step-1" / entry.place.file).read_bytes()
            part = raw[entry.place.start : entry.place.start + entry.place.length]
            assert torch.load(io.BytesIO(part), weights_only=True) == value
    assert manifest.info["step"] == 1
    assert manifest.info["versions"]["torch"] == str(torch.__version__)
    assert (tmp_path / "latest").read_text() == "step-1\n"
    assert sorted(p.name for p in (tmp_path / "step-1").iterdir()) == [
        ".metadata", "__0_0.distcp", "checkpoint.json", "plan.json"
    ]  # fmt: skip


def test_a_view_does_not_drag_its_storage_along(tmp_path):
    big = torch.zeros(1 << 20)
    manifest = save(
        Store(tmp_path), "s", {("x",): big[10:20], ("y",): big.view(1024, 1024)[:, 3]}, {}, {}, OneRank(TO_SAVE)
    )
    assert manifest.files["__0_0.distcp"].size_bytes < 20_000


def test_torch_reads_the_whole_nested_state(tmp_path):
    state = a_state()
    save(Store(tmp_path), "s", state, {}, {}, OneRank(TO_SAVE))
    dcp_to_torch_save(tmp_path / "s", tmp_path / "whole.pt")
    nested = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(nested) == {"model", "optimizer", "run"}
    assert nested["run"] == {"epoch": 3, "note": "a word"}
    assert nested["optimizer"]["param_groups"]["0"]["lr"] == 0.1
    for path, value in state.items():
        found = nested
        for part in path:
            found = found[part]
        if isinstance(value, torch.Tensor):
            assert same(found, value.detach().resolve_conj().contiguous()), path


MESH = Mesh.of(a=2, b=2)
WHOLES = {
    "uneven": (torch.randn(7, 6), Layout.split(2, {0: ["a", "b"]})),
    "both": (torch.randn(5, 9), Layout.split(2, {0: ["b"], 1: ["a"]})),
    "one": (torch.randn(8, 3), Layout.split(2, {1: ["b"]})),
    "whole": (torch.randn(4, 4), Layout.replicated(2)),
    "tiny": (torch.randn(1, 2), Layout.split(2, {0: ["a"]})),
}


def _pieces_of(rank):
    state = {}
    for name, (whole, layout) in WHOLES.items():
        part = whole[layout.local_slice(whole.shape, MESH, rank)]
        path = ("model", name)
        state[path] = TensorShard(path, tuple(whole.shape), whole.dtype, layout, MESH, part)
    return {**state, ("run", "step"): 4 + rank}


def test_each_rank_writes_what_it_holds_and_replicas_are_spread(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "cut", lambda box, item: pieces_cut(box, item, 40))
    results = SimulatedRanks.run(4, lambda ranks: save(Store(tmp_path), "s", _pieces_of(ranks.rank), {}, {}, ranks))
    assert [r is None for r in results] == [False, True, True, True]
    manifest = Store(tmp_path).manifest("s")
    for name, (whole, _) in WHOLES.items():
        entry = manifest.entries[f"model.{name}"]
        assert isinstance(entry, TensorEntry)
        assert sum(chunk.box.numel for chunk in entry.chunks) == math.prod(entry.shape)
        assert torch.equal(elements(tmp_path / "s", manifest, entry.name), whole), name
    wrote = {file: record.size_bytes for file, record in manifest.files.items() if file.endswith(".distcp")}
    assert set(wrote) == {f"__{rank}_0.distcp" for rank in range(4)}
    dcp_to_torch_save(tmp_path / "s", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert found["run"]["step"] == 4
    for name, (whole, _) in WHOLES.items():
        assert torch.equal(found["model"][name], whole), name


pieces_cut = pieces.cut


def _two_real_ranks(directory):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    rank = torch.distributed.get_rank()
    whole = torch.arange(35.0).reshape(7, 5)
    cut = DTensor.from_local(whole.chunk(2)[rank].clone(), mesh, [Shard(0)], shape=(7, 5), stride=(5, 1))
    same_on_all = DTensor.from_local(whole, mesh, [Replicate()])
    state = {("model", "cut"): cut, ("model", "same"): same_on_all, ("model", "plain"): whole}
    save(Store(directory), "s", state, {"step": 1}, {}, ProcessRanks(TO_SAVE, timeout_s=60))
    zeros = [DTensor.from_local(torch.zeros_like(t.to_local()), mesh, t.placements, shape=t.shape, stride=t.stride())
             for t in (cut, same_on_all)]  # fmt: skip
    wanted = {"model": {"cut": zeros[0], "same": zeros[1], "plain": torch.zeros(7, 5)}}
    dcp.load(wanted, checkpoint_id=directory / "s")
    for name, tensor in wanted["model"].items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, whole), name
    torch.distributed.destroy_process_group()


def test_two_processes_save_and_dcp_loads_on_both(tmp_path):
    run_ranks(2, _two_real_ranks, tmp_path)
    assert json.loads((tmp_path / "s" / "checkpoint.json").read_text())["info"]["world_size"] == 2


def test_a_state_that_differs_between_ranks_is_refused_by_the_entry(tmp_path):
    def call(ranks):
        return save(Store(tmp_path), "s", {("x",): torch.zeros(3 + (ranks.rank == 2))}, {}, {}, ranks)

    for error in SimulatedRanks.run(3, call):
        assert isinstance(error, CheckpointError)
        assert "x is torch.float32 [3]" in str(error)
        assert "torch.float32 [4]" in str(error)
        assert "on rank 2" in str(error)
    assert Store(tmp_path).latest() is None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({("x",): object()}, "the entry x is a object, which cannot be read back"),
        ({("x",): torch.zeros(2, 2).to_sparse()}, "the entry x is a sparse tensor"),
        ({("a", "b.c"): 1, ("a.b", "c"): 2}, "two entries of the state have the same name: a.b.c"),
        ({(): 1}, "must be a tuple of strings"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        save(Store(tmp_path), "s", state, {}, {}, OneRank(TO_SAVE))
    assert not (tmp_path / "s").exists()


def test_a_partial_sum_is_refused(tmp_path):
    piece = TensorShard(("x",), (2,), torch.float32, Layout.split(1, {}, ["a"]), Mesh.of(a=1), torch.zeros(2))
    with pytest.raises(CheckpointError, match="partial sum over a"):
        save(Store(tmp_path), "s", {("x",): piece}, {}, {}, OneRank(TO_SAVE))
