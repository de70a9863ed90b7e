"""A flipped byte, a lost end, a file too many or too few: each is found, with the name of the file and of the entry."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.checkpoint.format.manifest import MANIFEST
from shardwright.checkpoint.inspection.verify import verify
from shardwright.checkpoint.loading.load import load
from shardwright.checkpoint.loading.source import open_source
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.store import Store
from shardwright.distributed.ranks import OneRank
from shardwright.errors import CheckpointError

STATE = {
    ("model", "w"): torch.arange(60, dtype=torch.float32).reshape(6, 10),
    ("model", "b"): torch.ones(7, dtype=torch.bfloat16),
    ("model", "none"): torch.empty(0, 3),
    ("model", "mask"): torch.ones(3, dtype=torch.bool),
    ("run", "epoch"): 3,
}
FILES = {"plan.json": b'{"mesh": {}}\n', "config.yaml": b"train:\n  epochs: 3\n"}
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # all examples share one folder


def save_step(directory, step):
    save(Store(directory), f"step-{step}", STATE, {"step": step}, FILES, OneRank(TO_SAVE))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_step(directory, 1)
    save_step(directory, 2)
    return directory


def damages(where):
    return [damage for verified in verify(where) for damage in verified.damage]


def load_all(where):
    wanted = {path: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for path, v in STATE.items()}
    loaded = load(where, wanted)
    for path, value in STATE.items():
        assert torch.equal(wanted[path], value) if isinstance(value, torch.Tensor) else loaded.values[path] == value


def entry_at(directory, position):
    """The entry in whose container a byte of the file of tensors lies."""
    for entry in open_source(directory).manifest.entries.values():
        for place in [chunk.place for chunk in entry.chunks] if hasattr(entry, "chunks") else [entry.place]:
            if place.start <= position < place.start + place.length:
                return entry.name
    raise AssertionError(position)


@pytest.mark.parametrize(
    "file", ["step-2/__0_0.distcp", "step-2/checkpoint.json", "step-2/.metadata", "step-2/plan.json",
             "step-2/config.yaml", "latest"]
)  # fmt: skip
@settings(max_examples=12, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data())
def test_one_byte_flipped_in_any_file_is_found(saved, file, data):
    path = saved / file
    before = path.read_bytes()
    at, bits = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(1, 255))
    entry = entry_at(saved / "step-2", at) if file.endswith(".distcp") else None
    flipped = bytearray(before)
    flipped[at] ^= bits
    path.write_bytes(flipped)
    name = path.name
    try:
        if name == "latest" and flipped == b"step-1\n":  # an honest pointer to another checkpoint
            assert "but step-2 was saved after it" in damages(saved)[0].what
            return
        [found] = damages(saved)
        assert (found.file, found.entry) == (name, entry)
        if name == "latest":
            with pytest.warns(UserWarning, match=f"{saved}/latest .*; reading the newest complete one, step-2"):
                load_all(saved)
        elif entry != "model.none":  # a tensor without elements is not read
            with pytest.raises(CheckpointError) as failure:
                load_all(saved / "step-2")
            assert f"{saved}/step-2 is damaged: {name}: " in str(failure.value)
            assert f"{saved}/step-1 is the newest other one that has all its bytes" in str(failure.value)
            assert f"`shardwright checkpoint verify {saved}` names all damage" in str(failure.value)
            assert entry is None or f"(entry {entry})" in str(failure.value)
    finally:
        path.write_bytes(before)


def test_only_what_is_needed_of_a_damaged_checkpoint_can_be_read(tmp_path):
    save_step(tmp_path, 1)
    path = tmp_path / "step-1" / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[open_source(tmp_path).manifest.entries["model.w"].chunks[0].place.start + 200] ^= 1
    path.write_bytes(raw)
    bias = torch.zeros(7, dtype=torch.bfloat16)
    load(tmp_path, {("model", "b"): bias}, strict=False)
    assert bias.all()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: (d / "plan.json").unlink(), [("plan.json", "the file is missing")]),
        (lambda d: (d / "__0_0.distcp").unlink(), [("__0_0.distcp", "the file is missing")]),
        (lambda d: (d / "more").mkdir(), [("more/", "does not belong to the checkpoint")]),
        (lambda d: (d / "other.bin").write_bytes(b"x"), [("other.bin", "does not belong to the checkpoint")]),
        (
            lambda d: (d / "config.yaml").write_bytes(b"train:\n  epochs: 4\n"),
            [("config.yaml", "is not what was written")],
        ),
        (lambda d: (d / MANIFEST).unlink(), [(MANIFEST, "No such file")]),
        (lambda d: (d / MANIFEST).write_text("{}"), [(MANIFEST, "was altered or is incomplete")]),
    ],
)
def test_files_that_lack_or_are_too_many_are_named(tmp_path, change, expected):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    change(tmp_path / "step-1")
    found = damages(tmp_path)
    assert [damage.file for damage in found] == [file for file, _ in expected]
    assert all(what in damage.what for damage, (_, what) in zip(found, expected, strict=True))


def test_a_truncated_file_names_what_it_lost(tmp_path):
    save_step(tmp_path, 1)
    path = tmp_path / "step-1" / "__0_0.distcp"
    raw = path.read_bytes()
    for length in (0, 1, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        short, lost = damages(tmp_path)
        assert f"has {length} bytes, {len(raw)} were written" in short.what
        assert entry_at(tmp_path / "step-1", len(raw) - 1) in lost.what
        with pytest.raises(CheckpointError, match=rf"__0_0.distcp: has {length} bytes, {len(raw)} were written"):
            load_all(tmp_path)


def test_a_manifest_that_leaves_bytes_uncovered_is_told(tmp_path):
    """Its own checksum is right, so that only looking at the whole of it helps."""
    save_step(tmp_path, 1)
    store = Store(tmp_path)
    manifest = store.manifest("step-1")
    less = {name: entry for name, entry in manifest.entries.items() if name != "model.w"}
    (tmp_path / "step-1" / MANIFEST).write_text(replace(manifest, entries=less).to_text())
    told = [str(damage) for damage in damages(tmp_path)]
    place = manifest.entries["model.w"].chunks[0].place
    assert told == [f"__0_0.distcp: no entry covers its bytes {place.start} to {place.start + place.length - 1}"]


def test_the_pointer_is_looked_at(tmp_path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    for text, what in [(None, "the file is missing; the newest complete checkpoint is step-2"),
                       ("", "is damaged: expected one line"), ("step-9\n", "names 'step-9', which is no complete"),
                       ("step-1\n", "names step-1, but step-2 was saved after it")]:  # fmt: skip
        (tmp_path / "latest").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "latest").write_text(text)
        [found] = damages(tmp_path)
        assert found.file == "latest"
        assert what in found.what


def test_where_there_is_no_checkpoint_it_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for where, has in ((tmp_path, "notes.txt"), (tmp_path / "nowhere", "nothing, or is not there")):
        with pytest.raises(CheckpointError, match=f"no checkpoint in {where}.*{has}"):
            verify(where)
        with pytest.raises(CheckpointError, match=f"no checkpoint in {where}.*{has}"):
            open_source(where)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint wrote it.*split FILE.pt --to DIR"):
        open_source(tmp_path)
