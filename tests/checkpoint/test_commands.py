"""``shardwright checkpoint show | verify | merge | split``, as they are typed."""

import contextlib
import json
import re

import fsspec
import pytest
import torch
from click.testing import CliRunner

from mutated import mutations
from shardwright.checkpoint.exchange.exchange import read_state
from shardwright.checkpoint.format.manifest import MANIFEST, Manifest, checksum
from shardwright.checkpoint.format.pieces import TensorShard
from shardwright.checkpoint.inspection.show import show
from shardwright.checkpoint.inspection.verify import verify
from shardwright.checkpoint.loading.load import load
from shardwright.checkpoint.saving.save import save
from shardwright.checkpoint.storage.store import Store
from shardwright.cli import cli
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import CheckpointError
from simulated_ranks import SimulatedRanks


def state(rank):
    """Two ranks: a weight cut over both, the rest on each."""
    mesh, layout = Mesh.of(data=2), Layout.split(2, {0: ["data"]})
    whole = torch.arange(24.0).reshape(6, 4)
    weight = TensorShard(("model", "w"), (6, 4), torch.float32, layout, mesh, whole.chunk(2)[rank])
    moment = TensorShard(("optimizer", "state", "w", "exp_avg"), (6, 4), torch.float32, layout, mesh, weight.local)
    return {
        weight.path: weight,
        ("model", "scale[0]"): torch.ones((), dtype=torch.bfloat16),
        moment.path: moment,
        ("optimizer", "param_groups", "0"): {"lr": 0.1, "params": ["w"]},
        ("ema", "w"): weight.local
        if rank is None
        else TensorShard(("ema", "w"), (6, 4), torch.float32, layout, mesh, weight.local),
        ("run", "loader"): {"epoch": 1},
    }


@pytest.fixture
def run(tmp_path):
    for step, loss in ((100, 0.25), (200, 0.125)):
        about = {"step": step, "epoch": step // 100, "metrics": {"loss": loss}, "mesh": "data=2"}
        results = SimulatedRanks.run(
            2,
            lambda r, s=step, a=about: save(
                Store(tmp_path), f"step-{s:08d}", state(r.rank), a, {"plan.json": b"{}"}, r
            ),
        )
        assert None in results
    return tmp_path


def invoke(*arguments, code=0):
    """What the command prints; the columns of its tables are split by two spaces or more."""
    done = CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def rows(output):
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]


def test_show_of_a_directory_lists_all_and_shows_the_latest(run):
    found = rows(invoke("show", run))
    older, newer = found[1], found[2]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", newer[5])
    assert found[0][:3] == ["checkpoint", "step", "epoch"]
    assert [older[i] for i in (0, 1, 2, 3, 6)] == ["step-00000100", "100", "1", "2", "loss 0.25"]
    assert [newer[i] for i in (0, 1, 2, 3, 6, 7)] == ["step-00000200", "200", "2", "2", "loss 0.125", "latest"]
    assert [f"{run}/step-00000200"] in found
    assert ["step", "200"] in found
    assert ["mesh", "data=2"] in found
    assert ["world size", "2"] in found
    assert ["metrics", "loss 0.125"] in found
    assert ["model", "2", "25", "98 B", "bfloat16, float32", "0"] in found
    assert ["optimizer", "1", "24", "96 B", "float32", "1"] in found
    assert ["averages (ema)", "1", "24", "96 B", "float32", "0"] in found
    sizes = {path.name: f"{path.stat().st_size:,}" for path in (run / "step-00000200").iterdir()}
    for name in ("__0_0.distcp", "__1_0.distcp", "plan.json", ".metadata"):
        assert [name, sizes[name]] in found


def test_show_of_one_checkpoint_with_its_entries(run):
    found = rows(invoke("show", run / "step-00000100", "--entries"))
    assert found[0] == [f"{run}/step-00000100"]
    assert ["model.w", "float32", "6×4", "96", "2", "__0_0.distcp, __1_0.distcp"] in found
    assert any(row[:4] == ["model.scale[0]", "bfloat16", "scalar", "2"] for row in found)
    assert any(row[:3] == ["run.loader", "-", "value"] for row in found)


def test_verify_prints_one_line_per_damage(run):
    assert [line.split(":")[0] for line in invoke("verify", run).splitlines()] == [
        f"{run}/step-00000200", f"{run}/step-00000100"
    ]  # fmt: skip
    (run / "step-00000100" / "plan.json").write_bytes(b"[]")
    (run / "step-00000200" / "__1_0.distcp").unlink()
    (run / "latest").write_bytes(b"")
    lines = invoke("verify", run, code=1).splitlines()
    assert lines == [
        f"{run}/step-00000200/__1_0.distcp: the file is missing",
        f"{run}/step-00000100/plan.json: is not what was written: its checksum differs",
        f"{run}/latest: is damaged: expected one line with the name of a checkpoint; "
        "the newest complete checkpoint is step-00000200",
    ]
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        invoke("verify", run / "nowhere")


def test_merge_and_split_say_what_they_wrote(run, tmp_path):
    target = tmp_path / "out" / "model.safetensors"
    assert invoke("merge", run, "--to", target) == f"{target}: 2 tensors, {target.stat().st_size} bytes\n"
    assert torch.equal(read_state(target)["w"], torch.arange(24.0).reshape(6, 4))
    lines = invoke(
        "merge", run / "step-00000100", "--to", tmp_path / "out" / "all.safetensors", "--what", "all"
    ).splitlines()
    assert lines[1] == "left out, as safetensors holds tensors only: 2 values: optimizer.param_groups.0, run.loader"
    assert invoke("split", target, "--to", tmp_path / "again", "--ranks", 2).startswith(
        f"{tmp_path}/again/step-00000000: 2 entries, 3 files, "
    )
    weight = torch.zeros(6, 4)
    load(tmp_path / "again", {("model", "w"): weight}, strict=False)
    assert torch.equal(weight, torch.arange(24.0).reshape(6, 4))


def test_all_of_it_reads_urls(run, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(run), "/bucket/run", recursive=True)
    url = "memory://bucket/run"
    try:
        assert [f"{url}/step-00000200"] in rows(invoke("show", url))
        memory.pipe_file("/bucket/run/step-00000300/.saving", b"x")  # a save under way is no damage
        memory.pipe_file("/bucket/run/step-00000300/__0_0.distcp", b"x")
        assert len(invoke("verify", url).splitlines()) == 2
        invoke("merge", url, "--to", tmp_path / "model.pt")
        for rank in range(3):
            mesh, layout = Mesh.of(a=3), Layout.split(2, {1: ["a"]})
            part = torch.arange(24.0).reshape(6, 4)[layout.local_slice((6, 4), mesh, rank)]
            piece = TensorShard(("model", "w"), (6, 4), torch.float32, layout, mesh, torch.zeros_like(part))
            load(url, {piece.path: piece}, rank=rank, strict=False)
            assert torch.equal(piece.local, part)
        memory.put(str(tmp_path / "model.pt"), "/bucket/model.pt")
        invoke("split", "memory://bucket/model.pt", "--to", "memory://bucket/again", "--ranks", 2)
        assert len(invoke("verify", "memory://bucket/again").splitlines()) == 1
        data = bytearray(memory.cat_file("/bucket/run/step-00000200/__0_0.distcp"))
        data[len(data) // 2] ^= 1
        memory.pipe_file("/bucket/run/step-00000200/__0_0.distcp", bytes(data))
        assert f"{url}/step-00000200/__0_0.distcp: bytes " in invoke("verify", url, code=1)
        with pytest.raises(CheckpointError, match=f"{url}/step-00000100 is the newest other one"):
            invoke("merge", url, "--to", tmp_path / "b.pt", "--what", "all")
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_store_that_refuses_is_named(run, monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.put(str(run), "/bucket/run", recursive=True)

    def refuse(*_, **__):
        raise LookupError("no credentials")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "ls", refuse)
            with pytest.raises(
                CheckpointError, match="memory://bucket/run cannot be read: LookupError: no credentials"
            ):
                invoke("show", "memory://bucket/run")
        with monkeypatch.context() as patch:
            patch.setattr(memory, "cat_file", refuse)
            with pytest.raises(CheckpointError, match=r"checkpoint.json cannot be read: LookupError: no credentials"):
                invoke("show", "memory://bucket/run/step-00000100")
    finally:
        memory.rm("/bucket", recursive=True)


def test_no_form_of_a_manifest_raises_another_error(tmp_path):
    """Behind a right checksum, too: it is refused when it is read, or the checkpoint is shown, verified and loaded."""
    about = {"step": 1, "metrics": {"loss": 0.5}}
    SimulatedRanks.run(2, lambda r: save(Store(tmp_path), "one", state(r.rank), about, {"plan.json": b"{}"}, r))
    path = tmp_path / "one" / MANIFEST
    whole = path.read_text()
    document = json.loads(whole)
    del document["checksum"]
    accepted, refused = [], []
    for name, changed in mutations(document, (None, "x", 10**40)):
        rest = json.dumps(changed)[1:] if isinstance(changed, dict) else f' "x": {json.dumps(changed)} }}'
        path.write_text(f'{{ "checksum": "{checksum(rest.encode())}",\n{rest}')
        try:
            Manifest.from_text(path.read_bytes(), "m")
        except CheckpointError as error:
            refused.append(str(error))
            continue
        accepted.append(name)
        show(tmp_path / "one", entries=True)
        verify(tmp_path / "one")
        with contextlib.suppress(CheckpointError):
            load(tmp_path / "one", state(0), rank=0)
    assert all(message.startswith("m ") and "\n" not in message for message in refused)
    assert "['info'] with one more" in accepted
    assert len(refused) > 10 * len([name for name in accepted if "['info']" not in name])
