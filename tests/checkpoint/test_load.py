"""Whatever was saved by some ranks is loaded by any others, each reading the blocks of its own parts alone."""

import contextlib
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from ranks import run_ranks
from shardwright.checkpoint.format import containers, manifest, pieces
from shardwright.checkpoint.format.manifest import Box
from shardwright.checkpoint.format.pieces import TensorShard
from shardwright.checkpoint.inspection.verify import verify
from shardwright.checkpoint.loading import source
from shardwright.checkpoint.loading.load import load, read_box
from shardwright.checkpoint.loading.source import Source, open_source
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.folders import LocalFolder
from shardwright.checkpoint.storage.store import Store
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.ranks import OneRank, ProcessRanks
from shardwright.errors import CheckpointError, DamageError, UsageError
from simulated_ranks import SimulatedRanks

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
MESHES = [Mesh(()), Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=6), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3)]
pieces_cut = pieces.cut
LOAD = sys.modules["shardwright.checkpoint.loading.load"]  # the package has a function of that name
VERIFY = sys.modules["shardwright.checkpoint.inspection.verify"]
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # all examples share one folder


@contextlib.contextmanager
def small_blocks(block_bytes, slab_bytes, chunk_bytes):
    """Files of a few bytes then have the seams of files of gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, containers, source, LOAD, VERIFY):
            patch.setattr(module, "BLOCK_BYTES", block_bytes)
        patch.setattr(LocalFolder, "piece_bytes", 3 * block_bytes)
        patch.setattr(LOAD, "SLAB_BYTES", slab_bytes)
        patch.setattr(pieces, "cut", lambda box, item: pieces_cut(box, item, chunk_bytes))
        yield


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape)


def same(a, b):
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def piece(path, whole, layout, mesh, rank):
    part = whole[layout.local_slice(whole.shape, mesh, rank)] if mesh.axes else whole
    return TensorShard(path, tuple(whole.shape), whole.dtype, layout, mesh, part.clone())


def save_as(directory, state, **files):
    return save(Store(directory), "step-1", state, {"step": 1}, files, OneRank(TO_SAVE))


@st.composite
def layouts(draw, ndim, mesh):
    """Any assignment of the axes to the dims, or to none."""
    dims = [draw(st.integers(-1, ndim - 1)) if ndim else -1 for _ in mesh.axes]
    return Layout.split(ndim, {d: [a for a, at in zip(mesh.names, dims, strict=True) if at == d] for d in range(ndim)})


@st.composite
def cases(draw):
    before, after = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    tensors = {}
    for i in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 5, 7, 12]), max_size=3))
        whole = values(shape, draw(st.sampled_from(DTYPES)), i)
        tensors["model", f"t{i}"] = (whole, draw(layouts(len(shape), before)), draw(layouts(len(shape), after)))
    sizes = draw(st.sampled_from([64, 4096])), draw(st.sampled_from([32, 100, 4096])), draw(st.sampled_from([48, 4096]))
    return before, after, tensors, sizes


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURES)
@given(cases())
def test_any_layout_is_loaded_as_any_other(tmp_path, case):
    before, after, tensors, sizes = case
    with small_blocks(*sizes):

        def save_part(ranks):
            state = {path: piece(path, whole, old, before, ranks.rank) for path, (whole, old, _) in tensors.items()}
            return save(Store(tmp_path), "s", state, {}, {}, ranks)

        assert None in SimulatedRanks.run(before.size, save_part) or before.size == 1
        for rank in range(after.size):
            wanted = {path: piece(path, torch.zeros_like(whole), new, after, rank)
                      for path, (whole, _, new) in tensors.items()}  # fmt: skip
            load(tmp_path / "s", wanted, rank=rank)
            for path, (whole, _, new) in tensors.items():
                part = whole[new.local_slice(whole.shape, after, rank)] if after.axes else whole
                assert same(wanted[path].local, part), (path, rank, new)


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURES)
@given(st.data())
def test_any_box_is_read_from_few_blocks(tmp_path, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))
    block = data.draw(st.sampled_from([32, 64, 4096]))
    with small_blocks(block, data.draw(st.sampled_from([16, 64, 4096])), 1 << 20):
        whole = values(shape, torch.int16, 0)
        save_as(tmp_path, {("x",): whole})
        read = Counting(tmp_path / "step-1")
        found = read_box(Source(read, open_source(tmp_path).manifest), read_entry(tmp_path, "x"), box)
        where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert same(found, whole[where])
        place = read_entry(tmp_path, "x").chunks[0].place
        needed = torch.arange(whole.numel()).reshape(shape)[where].flatten() * 2 + place.data
        blocks = {int(i) // block for i in [*needed, *(needed + 1)]}
        assert set(read.blocks(place.start, block)) == blocks
        straight = max(len(blocks), 1)
        assert len(read.reads) <= 2 * straight + len(needed)


@settings(max_examples=20, deadline=None, suppress_health_check=FIXTURES)
@given(st.data())
def test_a_byte_flipped_in_a_block_that_is_read_is_found(tmp_path, data):
    """And one in a block that is not read makes no difference to what is loaded."""
    block, slab, chunk = (data.draw(st.sampled_from(sizes)) for sizes in ([64, 256, 1024], [32, 500], [64, 4096]))
    shapes = data.draw(st.lists(st.lists(st.sampled_from([1, 5, 16, 33]), max_size=3), min_size=1, max_size=3))
    state = {("model", f"t{i}"): values(shape, torch.int32, i) for i, shape in enumerate(shapes)}
    with small_blocks(block, slab, chunk):
        saved = save_as(tmp_path, state)
        path = tmp_path / "step-1" / "__0_0.distcp"
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        entry, part = next((e, c) for e in saved.entries.values() for c in e.chunks
                           if c.place.start <= at < c.place.start + c.place.length)  # fmt: skip
        assert [(d.file, d.entry) for v in verify(tmp_path) for d in v.damage] == [("__0_0.distcp", entry.name)]
        first, last = part.place.data, part.place.data + part.box.numel * 4 - 1
        is_read = first // block <= (at - part.place.start) // block <= last // block
        wanted = {path: torch.zeros_like(tensor) for path, tensor in state.items()}
        with pytest.raises(DamageError, match=f"entry {entry.name}") if is_read else contextlib.nullcontext():
            load(tmp_path, wanted)
        assert is_read or all(torch.equal(wanted[path], tensor) for path, tensor in state.items())


class Counting(LocalFolder):
    """Notes what is read of the files of tensors."""

    def __init__(self, where):
        super().__init__(where)
        self.reads = []
        self.opened = 0

    def open(self, name):
        file = super().open(name)
        self.opened += 1

        def noted(start, buffers):
            self.reads.append((name, start, sum(map(len, buffers))))
            return file.read_into(start, buffers)

        return SimpleNamespace(read_into=noted)

    def blocks(self, start, block_bytes):
        return [
            i
            for _, at, n in self.reads
            for i in range((at - start) // block_bytes, (at - start + n - 1) // block_bytes + 1)
        ]


def read_entry(directory, name):
    return open_source(directory).manifest.entries[name]


def test_a_rank_reads_about_its_own_part(tmp_path):
    """An eighth of the rows of 64 MiB is 8 MiB: with the seams at most two blocks more; reads are long, and bounded."""
    whole = torch.arange(1 << 24, dtype=torch.float32).reshape(1 << 12, 1 << 12)
    save_as(tmp_path, {("w",): whole})
    mesh = Mesh.of(a=8)
    for dim, most in ((0, (8 << 20) + 2 * manifest.BLOCK_BYTES), (1, (64 << 20) + 2 * manifest.BLOCK_BYTES)):
        read = Counting(tmp_path / "step-1")
        part = piece(("w",), whole, Layout.split(2, {dim: ["a"]}), mesh, 3)
        part.local.zero_()
        load(Source(read, open_source(tmp_path).manifest), {("w",): part}, rank=3, threads=1)
        assert torch.equal(part.local, whole.chunk(8, dim)[3])
        assert sum(count for _, _, count in read.reads) <= most
        assert max(count for _, _, count in read.reads) <= 1.5 * LocalFolder.piece_bytes
        assert len(read.reads) <= 1 + most // LocalFolder.piece_bytes
        assert len({start for _, start, _ in read.reads}) == len(read.reads), "a block was read twice"
        assert read.opened == 1


def test_reads_that_come_in_parts_are_completed(tmp_path, monkeypatch):
    """A signal may end a read early, and some file systems give fewer bytes than were asked for."""
    whole = torch.randn(1 << 18)
    save_as(tmp_path, {("w",): whole})
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, start: preadv(file, [parts[0][:70_001]], start))
    wanted = {("w",): torch.zeros_like(whole)}
    load(tmp_path, wanted)
    assert torch.equal(wanted["w",], whole)


def test_a_file_that_ends_early_after_it_was_looked_at_is_refused(tmp_path, monkeypatch):
    save_as(tmp_path, {("w",): torch.randn(1 << 19), ("x",): torch.randn(3)})
    path, end = tmp_path / "step-1" / "__0_0.distcp", 300_000
    monkeypatch.setattr(Source, "check_files", lambda _: os.truncate(path, end))
    with pytest.raises(DamageError, match=rf"ends at byte {end}, where \d+ more were written \(entry w\)"):
        load(tmp_path, {("w",): torch.zeros(1 << 19), ("x",): torch.zeros(3)}, threads=1)


def test_memory_that_is_not_contiguous_is_filled_too(tmp_path):
    whole = torch.randn(6, 8)
    save_as(tmp_path, {("t",): whole, ("s",): whole[0]})
    into, strided = torch.zeros(8, 6).t(), torch.zeros(16)[::2]
    load(tmp_path, {("t",): into, ("s",): strided})
    assert torch.equal(into, whole)
    assert torch.equal(strided, whole[0])


def test_values_come_back_and_a_tensor_without_room_comes_whole(tmp_path):
    state = {("run", "epoch"): 3, ("run", "rng"): torch.arange(5), ("optimizer", "param_groups", "0"): {"lr": 0.5}}
    save_as(tmp_path, state)
    loaded = load(tmp_path, dict.fromkeys(state))
    assert loaded.values["run", "epoch"] == 3
    assert torch.equal(loaded.values["run", "rng"], torch.arange(5))
    assert loaded.values["optimizer", "param_groups", "0"] == {"lr": 0.5}
    assert loaded.manifest.info["step"] == 1


def test_autograd_sees_that_a_parameter_changed(tmp_path):
    save_as(tmp_path, {("w",): torch.ones(3)})
    weight = torch.nn.Parameter(torch.zeros(3))
    loss = (weight * weight).sum()
    load(tmp_path, {("w",): weight})
    assert torch.equal(weight, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# What does not fit


def model_state(*names, shape=(2, 3)):
    return {("model", name): torch.zeros(shape) for name in names}


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_changed(tmp_path):
    saved = {**model_state("encoder.0.weight", "encoder.1.weight"), ("model", "head"): torch.ones(4, 2),
             ("model", "half"): torch.ones(2), ("model", "same"): torch.ones(2), ("run", "epoch"): 1}  # fmt: skip
    save_as(tmp_path, saved)
    wanted = {**model_state("backbone.0.weight", "backbone.1.weight"), ("model", "head"): torch.zeros(5, 2),
              ("model", "half"): torch.zeros(2, dtype=torch.float64), ("model", "same"): torch.zeros(2)}  # fmt: skip
    with pytest.raises(CheckpointError) as failure:
        load(tmp_path, wanted)
    assert str(failure.value).splitlines() == [
        f"{tmp_path}/step-1 does not fit what it is to be loaded into:",
        "  2 wanted here, missing in the checkpoint: model.backbone.0.weight, model.backbone.1.weight",
        "  2 in the checkpoint, not known here: model.encoder.0.weight, model.encoder.1.weight",
        "  1 of another shape or kind: model.head is [4, 2] in the checkpoint, [5, 2] here",
        "  1 of another dtype: model.half is float32 in the checkpoint, float64 here",
        "Other names for the same? rename={'encoder.*': 'backbone.*'}",
        "strict=False loads what fits, converts dtypes, leaves the rest as it is and returns their names.",
    ]
    assert all(not tensor.any() for tensor in wanted.values())

    loaded = load(tmp_path, wanted, strict=False).match
    assert wanted["model", "half"].tolist() == [1, 1]
    assert wanted["model", "same"].tolist() == [1, 1]
    assert not wanted["model", "head"].any()
    assert loaded.missing == ("model.backbone.0.weight", "model.backbone.1.weight")
    assert loaded.extra == ("model.encoder.0.weight", "model.encoder.1.weight")
    assert len(loaded.differing) == len(loaded.converted) == 1


def test_the_suggested_rename_works_for_the_optimizer_too(tmp_path):
    saved = {
        ("model", "module.encoder.w"): torch.ones(2),
        ("optimizer", "state", "module.encoder.w", "m"): torch.ones(2),
    }
    save_as(tmp_path, saved)
    wanted = {("model", "encoder.w"): torch.zeros(2), ("optimizer", "state", "encoder.w", "m"): torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"rename=\{'module\.\*': '\*'\}"):
        load(tmp_path, wanted)
    load(tmp_path, wanted, rename={"module.*": "*"})
    assert all(tensor.all() for tensor in wanted.values())
    load(tmp_path, wanted, rename=lambda name: name.removeprefix("module."))


WRONG = {
    r"40 wanted here, missing .*model\.n9, and 30 more": (("a",), [f"n{i}" for i in range(40)], {}),
    "nothing at all under: model": ((), ["a"], {}),
    r"no entry of the checkpoint has a name that fits 'decodr\.\*'; near are: decoder.w": (
        ("decoder.w", "encoder.w"), ["decoder.w", "encoder.w"], {"rename": {"decodr.*": "x.*"}},
    ),
    "the new name has more": (("decoder.w",), ["decoder.w"], {"rename": {"decoder.w": "*"}}),
    "rename= makes one name of model.decoder.w and model.encoder.w: model.w": (
        ("decoder.w", "encoder.w"), ["w"], {"rename": {"decoder.*": "w", "encoder.*": "w"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_loaded_is_named(tmp_path, message):
    saved, wanted, options = WRONG[message]
    save_as(tmp_path, model_state(*saved) | {("run", "w"): 3})
    with pytest.raises((CheckpointError, UsageError), match=message):
        load(tmp_path, model_state(*wanted), **options)
    with pytest.raises(CheckpointError, match="w is no tensor in the checkpoint, but one here"):
        load(tmp_path, {("run", "w"): torch.zeros(())})


def test_places_that_cannot_be_filled_are_named(tmp_path):
    save_as(tmp_path, {("w",): torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"w is on the meta device.*model.to_empty"):
        load(tmp_path, {("w",): torch.zeros(2, device="meta")})
    partial = TensorShard(("w",), (2,), torch.float32, Layout.split(1, {}, ["a"]), Mesh.of(a=1), torch.zeros(2))
    with pytest.raises(CheckpointError, match="w is partial over a here"):
        load(tmp_path, {("w",): partial}, rank=0)


def test_chunks_that_do_not_cover_the_tensor_are_refused(tmp_path):
    found = save_as(tmp_path, {("w",): torch.ones(4)})
    entry = found.entries["w"]
    short = replace(entry, chunks=(replace(entry.chunks[0], box=Box((0,), (3,))),))
    broken = Source(LocalFolder(tmp_path / "step-1"), replace(found, entries={"w": short}))
    with pytest.raises(CheckpointError, match="have 3 of the 4 elements"):
        load(broken, {("w",): torch.zeros(4)})


# Real ranks


def _save_on_a_mesh(directory):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    wholes = [torch.randn(7, 6), torch.randn(5), torch.randn(3, 4).bfloat16()]
    placements = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]]
    state = {("model", f"w{i}"): distribute_tensor(whole, mesh, placed)
             for i, (whole, placed) in enumerate(zip(wholes, placements, strict=True))}  # fmt: skip
    save(Store(directory), "step-1", state, {}, {}, ProcessRanks(TO_SAVE, timeout_s=60))
    torch.distributed.destroy_process_group()
    return wholes


def _load_on_another(directory, wholes):
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3,))
    for placed in ([Shard(0)], [Replicate()]):
        state = {("model", f"w{i}"): distribute_tensor(torch.zeros_like(w), mesh, placed) for i, w in enumerate(wholes)}
        load(directory, state)
        for i, whole in enumerate(wholes):
            found = state["model", f"w{i}"]
            assert isinstance(found, DTensor)
            assert torch.equal(found.full_tensor(), whole), i
    torch.distributed.destroy_process_group()


def test_four_processes_save_and_three_load(tmp_path):
    wholes = run_ranks(4, _save_on_a_mesh, tmp_path)[0]
    run_ranks(3, _load_on_another, tmp_path, wholes)
