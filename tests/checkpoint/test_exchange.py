"""What others wrote is read, what we write others read, and what is written is whole or not there."""

import json
import subprocess
import sys
import textwrap
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import shardwright as sw
from ranks import run_ranks
from shardwright.checkpoint.exchange.exchange import load_state, read_state, split
from shardwright.checkpoint.exchange.merge import merge
from shardwright.checkpoint.inspection.verify import verify
from shardwright.checkpoint.loading.load import load
from shardwright.checkpoint.loading.source import open_source
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.store import Store
from shardwright.distributed.ranks import OneRank
from shardwright.errors import CheckpointError, UsageError

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def same(a, b):
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def same_states(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert same(a[name], b[name]), name


def a_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3)))


def tensors():
    torch.manual_seed(0)
    return {
        **{str(dtype)[6:]: (torch.arange(11) % 2).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "rows": torch.randn(7, 3),
    }  # fmt: skip


# Reading


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "optimizer": {"state": {}}, "epoch": 3},
        lambda state: {"loss": torch.ones(()), "model": state},
        lambda state: {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"model_state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {"checkpoint": 1, "model": {"state_dict": {f"_orig_mod.{n}": v for n, v in state.items()}}},
        lambda state: {name.replace(".", "._orig_mod.", 1): value for name, value in state.items()},
    ],
    ids=["plain", "model", "beside a tensor", "ddp", "ddp of compiled", "nested", "compiled parts"],
)
def test_the_files_of_training_scripts_are_read(tmp_path, wrap):
    model = a_model()
    path = tmp_path / "epoch_3.pth"
    for new in (False, True):  # files of torch before 1.6, and of today
        torch.save(wrap(model.state_dict()), path, _use_new_zipfile_serialization=new)
        same_states(read_state(path), dict(model.state_dict()))
    other = a_model(1)
    load_state(path, other)
    same_states(dict(other.state_dict()), dict(model.state_dict()))


def test_safetensors_are_read_from_files_and_folders(tmp_path):
    state = tensors()
    save_file(state, tmp_path / "a.safetensors")
    same_states(read_state(tmp_path / "a.safetensors"), state)

    folder = tmp_path / "folder"
    folder.mkdir()
    files = {name: f"model-0000{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    same_states(read_state(folder), state)
    same_states(read_state(f"file://{folder}"), state)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00000.safetensors"}}')
    with pytest.raises(CheckpointError, match="does not say in which file which tensor is: KeyError"):
        read_state(folder)


def test_a_url_is_read_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.pth"
    torch.save(a_model().state_dict(), path)
    same_states(read_state(f"file://{path}"), dict(a_model().state_dict()))
    with pytest.raises(CheckpointError, match=r"file:///nowhere/x.pth cannot be read: FileNotFoundError"):
        read_state("file:///nowhere/x.pth")


class Harmful:
    def __reduce__(self):
        return (print, ("code was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is damaged or is no file of torch\.save"),
        (b"PK\x03\x04 and no more", r"is damaged or is no file of torch\.save: PytorchStreamReader failed"),
        (b"some text", r"is damaged or is no file of torch\.save: pop from empty list"),
        ([1, 2], "has no state dict: expected names with tensors, or such a dict under model, state_dict, .* a list"),
        ({"epoch": 3, "weights": [1]}, "it has the keys epoch, weights"),
        ({"module.a": torch.ones(1), "module._orig_mod.a": torch.ones(1)}, "two names that are one"),
    ],
)
def test_files_without_a_state_are_refused(tmp_path, content, message):
    path = tmp_path / "x.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_state(path)


def test_no_code_in_a_file_is_run(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(1)}, "hook": Harmful()}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="cannot be read without running code that it brings along"):
        read_state(tmp_path / "x.pth")
    assert "code was run" not in capsys.readouterr().out


def test_files_that_are_not_there_or_damaged_are_named(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"there is no file .*b.pth; beside it are a.safetensors"):
        read_state(tmp_path / "b.pth")
    raw = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(raw[:-4])
    with pytest.raises(CheckpointError, match=r"a.safetensors is damaged or is no safetensors file"):
        read_state(tmp_path / "a.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"no model in the folder .*expected model.safetensors,.*it has nothing"):
        read_state(tmp_path / "folder")


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    save_file({"body.weight": torch.ones(6, 6), "more": torch.ones(1)}, tmp_path / "a.safetensors")
    model = a_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"model.body.weight is \[6, 6\] in the checkpoint, \[5, 6\] here"):
        load_state(tmp_path / "a.safetensors", model)
    found = load_state(tmp_path / "a.safetensors", model, strict=False)
    assert found.extra == ("model.more",)
    same_states(dict(model.state_dict()), before)


def test_a_tied_tensor_is_taken_from_the_one_name_that_is_there():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    load_state({"0.weight": torch.ones(4, 4)}, model)
    assert model[1].weight.all()
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: model.0.weight, model.1.weight"):
        load_state({"other": torch.ones(4, 4)}, model)


def _load_into_a_parallel(path, wanted):
    sw.init()
    torch.manual_seed(1)
    model = nn.Sequential(OrderedDict(body=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3)))
    batch = torch.randn(8, 6)
    parallel = sw.parallelize(
        model, lambda module, x: module(x).square().mean(), batch, mode="semi-auto", batch="global", mesh="tp=2",
        pins={"body": ((1, 2), (1, 2), None)},
    )  # fmt: skip
    load_state(path, parallel)
    found = parallel.module.state_dict()
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, wanted[name]), name
    assert found["body.weight"].to_local().shape == (5, 3)
    assert torch.isfinite(parallel(batch))
    torch.distributed.destroy_process_group()


def test_two_processes_load_a_ddp_file_into_split_parameters(tmp_path):
    state = dict(a_model().state_dict())
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "epoch_3.pth")
    run_ranks(2, _load_into_a_parallel, tmp_path / "epoch_3.pth", state)


# Splitting and merging


@pytest.mark.parametrize(("ranks", "suffix"), [(3, ".safetensors"), (1, ".pt")])
def test_a_file_that_is_split_and_merged_is_the_same(tmp_path, ranks, suffix):
    state = tensors()
    path, again = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    manifest = split(path, tmp_path / "run", ranks)
    assert sum(name.endswith(".distcp") for name in manifest.files) == ranks
    assert [verified.damage for verified in verify(tmp_path / "run")] == [(), ()]
    merged = merge(tmp_path / "run", again)
    assert (merged.path, merged.tensors, merged.left_out) == (again, len(state), ())
    assert again.stat().st_size == merged.size_bytes
    same_states(load_file(again) if suffix == ".safetensors" else torch.load(again, weights_only=True), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([path.name, again.name, "run"])
    into = {("model", name): torch.zeros_like(tensor) for name, tensor in state.items()}
    load(tmp_path / "run", into)
    same_states({path[1]: tensor for path, tensor in into.items()}, state)


def test_a_directory_with_checkpoints_is_not_split_into(tmp_path):
    torch.save(tensors(), tmp_path / "a.pt")
    split(tmp_path / "a.pt", tmp_path / "run")
    with pytest.raises(UsageError, match=r"run has checkpoints already \(step-00000000\)"):
        split(tmp_path / "a.pt", tmp_path / "run")
    with pytest.raises(UsageError, match="--ranks 0: expected at least 1"):
        split(tmp_path / "a.pt", tmp_path / "other", 0)


def test_a_failure_on_one_part_ends_the_split_of_all(tmp_path):
    torch.save({"w": torch.ones(4), "sparse": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="sparse tensor"):
        split(tmp_path / "a.pt", tmp_path / "run", 2)
    assert Store(tmp_path / "run").complete() == {}


def a_run(directory, **files):
    state = {("model", name): value for name, value in a_model().state_dict().items()}
    state |= {("ema", name): value for name, value in a_model(2).state_dict().items()}
    state["model", "extra"] = {"note": "kept", "count": 3}
    state["optimizer", "state", "body.weight", "exp_avg"] = torch.randn(5, 6)
    state["optimizer", "param_groups", "0"] = {"lr": 0.1, "params": ["body.weight"]}
    state["run", "random"] = [{"torch": torch.arange(9), "python": (3, (1, 2), None)}]
    save(Store(directory), "step-1", state, {"step": 1, "epoch": 0, "metrics": {}}, files, OneRank(TO_SAVE))
    return state


def test_what_is_merged_can_be_chosen(tmp_path):
    a_run(tmp_path / "run")
    merged = merge(tmp_path / "run", tmp_path / "model.safetensors")
    assert merged.left_out == ("extra",)
    same_states(load_file(tmp_path / "model.safetensors"), dict(a_model().state_dict()))
    merge(tmp_path / "run", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.pop("extra") == {"note": "kept", "count": 3}
    a_model(1).load_state_dict(found)
    merge(tmp_path / "run", tmp_path / "ema.pt", "ema")
    same_states(torch.load(tmp_path / "ema.pt", weights_only=True), dict(a_model(2).state_dict()))


def test_all_is_what_torch_makes_of_the_checkpoint(tmp_path):
    state = a_run(tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "all.pt", "all")
    dcp_to_torch_save(tmp_path / "run" / "step-1", tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("all.pt", "theirs.pt"))
    for path, value in state.items():
        found = [ours, theirs]
        for part in path:
            found = [inner[part] for inner in found]
        if isinstance(value, torch.Tensor):
            assert same(found[0], value)
            assert same(found[1], value)
        elif path != ("run", "random"):
            assert found == [value, value]
    assert torch.equal(ours["run"]["random"][0]["torch"], torch.arange(9))
    assert ours["run"]["random"][0]["python"] == (3, (1, 2), None)
    assert merge(tmp_path / "run", tmp_path / "all.safetensors", "all").left_out == (
        "model.extra", "optimizer.param_groups.0", "run.random",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("to", "what", "error", "message"),
    [
        ("x.onnx", "model", UsageError, r"expected a name that ends in \.safetensors, \.pt or \.pth, or a folder"),
        ("there.pt", "model", UsageError, "it is there already; choose another name or remove it"),
        ("full/", "model", UsageError, "it is there already"),
        ("x.pt", "teacher", UsageError, "--what teacher: expected one of model, ema, all"),
        ("x.pt", "ema", CheckpointError, "has no ema; it has: model"),
    ],
)
def test_merges_that_cannot_be_are_refused(tmp_path, to, what, error, message):
    save(Store(tmp_path / "run"), "s", {("model", "w"): torch.ones(1)}, {}, {}, OneRank(TO_SAVE))
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(error, match=message):
        merge(tmp_path / "run", f"{tmp_path}/{to}", what)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "mine"


@pytest.mark.parametrize("to", ["a.pt", "folder/"])
def test_a_merge_of_a_damaged_checkpoint_leaves_nothing(tmp_path, to):
    a_run(tmp_path / "run")
    path = tmp_path / "run" / "step-1" / "__0_0.distcp"
    place = open_source(tmp_path / "run").manifest.entries["model.norm.bias"].chunks[0].place
    raw = bytearray(path.read_bytes())
    raw[place.start + place.data] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: .*\(entry model.norm.bias\)"):
        merge(tmp_path / "run", f"{tmp_path}/{to}")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path):
    save(
        Store(tmp_path / "run"), "s", {("model", "w"): torch.ones(2, dtype=torch.complex128)}, {}, {}, OneRank(TO_SAVE)
    )
    with pytest.raises(
        CheckpointError, match=r"safetensors cannot hold w, which is torch.complex128; write a .pt file"
    ):
        merge(tmp_path / "run", tmp_path / "a.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_gets_the_configuration_of_the_run(tmp_path):
    a_run(tmp_path / "run", **{"config.json": b'{"model_type": "gpt2"}'})
    (tmp_path / "empty").mkdir()
    for name in ("folder", "empty"):
        assert merge(tmp_path / "run", tmp_path / name).path == tmp_path / name / "model.safetensors"
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["config.json", "model.safetensors"]
        assert json.loads((tmp_path / name / "config.json").read_text()) == {"model_type": "gpt2"}
        same_states(read_state(tmp_path / name), dict(a_model().state_dict()))


@pytest.mark.slow
def test_a_merge_holds_no_more_than_a_slab(tmp_path):
    """The file of 256 MiB is written with less than half of that of memory."""
    big = torch.ones(1 << 14, 1 << 12)
    save(Store(tmp_path / "run"), "s", {("model", "w"): big}, {}, {}, OneRank(TO_SAVE))
    code = """
        import sys
        from shardwright.checkpoint.exchange.merge import merge
        def peak():
            with open("/proc/self/status") as status:
                return sum(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        before = peak()
        merge(sys.argv[1], sys.argv[2])
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run"), str(tmp_path / "a.safetensors")],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert int(done.stdout) < 100 << 10, done.stdout
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], big)


@pytest.mark.slow
def test_transformers_reads_a_merged_folder(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    state = {("model", name): value for name, value in model.state_dict().items()}
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    save(Store(tmp_path / "run"), "s", state, {}, files, OneRank(TO_SAVE))
    merge(tmp_path / "run", f"{tmp_path}/folder/")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "folder").eval()
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "theirs")  # lm_head is tied, and left out
    other = transformers.GPT2LMHeadModel(config).eval()
    load_state(tmp_path / "theirs", other)
    assert torch.equal(other(ids).logits, model(ids).logits)
