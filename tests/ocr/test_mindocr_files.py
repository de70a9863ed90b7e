"""MindOCR's own files: each is read as it is, says all that it lacks at once, and trains on images that are drawn."""

import contextlib
import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy.io import savemat

from ranks import run_ranks
from rows import slow
from shardwright.errors import UsageError
from shardwright.ocr.options.parts import BACKBONES
from shardwright.ocr.samples.drawn import Drawing, write_images
from shardwright.ocr.samples.labels import read_detection_list
from shardwright.ocr.settings import ineffective, load_settings
from shardwright.ocr.training import make_model, prepare

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY.parent / "shared" / "reference" / "mindocr"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
pytestmark = pytest.mark.skipif(not FILES, reason="the files of MindOCR are not beside the repository")
DICTIONARY = "mindocr/utils/dict/ch_dict.txt"


def write_dictionary(folder):
    """The Chinese one of 6,623 characters is where a run in MindOCR's folder has it."""
    path = folder / DICTIONARY
    path.parent.mkdir(parents=True)
    path.write_text("\n".join("0123456789abcdefghijklmnopqrstuvwxyz" + "".join(map(chr, range(0x4E00, 0x4E00 + 6587)))))


def write_synthtext(folder):
    """The drawn images as SynthText labels them."""
    listed = read_detection_list(folder / "det/train/det_gt.txt")
    names, places, texts = (np.empty((1, len(listed)), dtype=object) for _ in range(3))
    for at, (name, boxes) in enumerate(listed):
        names[0, at] = np.array([name])
        corners = np.array([box.points for box in boxes]).transpose(2, 1, 0)
        places[0, at] = corners[:, :, 0] if len(boxes) == 1 else corners
        texts[0, at] = np.array([" \n".join(box.text for box in boxes)])
    savemat(folder / "gt_processed.mat", {"imnames": names, "wordBB": places, "txt": texts})


def write_published(hub, name):
    """A file in the cache of `torch.hub` that has names and shapes of torchvision's weights."""
    with torch.device("meta"):
        settings = load_settings(str(FILES[name]))
        row, model = BACKBONES.row(settings.model.backbone), make_model(settings)
    own, state = model.backbone.state_dict(), {}
    for ours, theirs in row.published.name_of(model.backbone).items():
        state[theirs] = torch.rand(own[ours].shape) if own[ours].is_floating_point() else torch.zeros(own[ours].shape)
    path = hub / "checkpoints" / row.published.file
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state | {"fc.weight": torch.rand(1000, 3), "fc.bias": torch.rand(1000)}, path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mindocr")
    write_images(folder, Drawing(count=5, words=5, size=96, seed=1, texts=3, longest=4))
    write_synthtext(folder)
    write_dictionary(folder)
    return folder


def overrides_of(name, drawn, side=64):
    """What a user types: where the images are, and to have them small and few at a time."""
    raw, said = yaml.safe_load(FILES[name].read_text()), []
    for section, part in (("train", "train"), ("eval", "test")):
        if section not in raw:
            continue
        dataset = f"{section}.dataset"
        data, labels = {
            "DetDataset": (f"det/{part}/images", f"det/{part}/{'gt' if 'r50' in name else 'det_gt.txt'}"),
            "SynthTextDataset": (f"det/{part}/images", "gt_processed.mat"),
            "RecDataset": (f"rec/{part}", f"rec/{part}/rec_gt.txt"),
            "LMDBDataset": (f"rec/{part}/lmdb", "null"),
        }[raw[section]["dataset"]["type"]]
        said += [f"{dataset}.dataset_root={drawn}", f"{dataset}.data_dir={data}", f"{dataset}.label_file={labels}"]
        said += [f"{section}.loader.batch_size=2", f"{section}.loader.num_workers=0"]
        for at, [(step, keys)] in enumerate(one.items() for one in raw[section]["dataset"]["transform_pipeline"]):
            for key, small in (("crop_size", [side, side]), ("target_size", [side, side]), ("limit_side_len", side)):
                if key in (keys or {}):
                    said.append(f"{dataset}.transform_pipeline[{at}].{step}.{key}={small}")
    return said


def begun(name):
    """What is typed of the weights of MindSpore, which a file names by their address."""
    model = yaml.safe_load(FILES[name].read_text())["model"]
    whole = ["model.pretrained=null"] * str(model.get("pretrained")).startswith("http")
    return whole + ["model.backbone.pretrained=False"] * str(model["backbone"]["pretrained"]).startswith("http")


def two_steps(name, overrides, folder, hub):
    """The losses of two steps and what was printed, of this rank alone."""
    import os

    import shardwright.training.callbacks as callbacks
    from shardwright.ocr.training import train

    os.chdir(folder)
    torch.hub.set_dir(str(hub))
    torch.set_num_threads(1)
    losses, line = [], callbacks.loss_line
    callbacks.loss_line = lambda epoch, step, loss: losses.append(loss) or line(epoch, step, loss)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = train(str(FILES[name]), [*overrides, f"train.ckpt_save_dir={folder}/{name}"])
    return losses, trainer.steps, trainer.evaluation, said.getvalue()


def trained(name, drawn, hub, *more):
    overrides = [*overrides_of(name, drawn), *begun(name), "train.steps=2", "system.log_interval=1", *more]
    # A CPU takes minutes for a ResNet's convolutions of float16.
    overrides += ["system.amp_dtype=bf16"] * name.startswith("crnn_res")
    overrides += ["system.amp_level=O0"] * (name == "crnn_icdar15")
    return run_ranks(1, two_steps, name, overrides, str(drawn), str(hub), timeout=400)[0]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of `torch.hub` with what the files ask for."""
    folder = tmp_path_factory.mktemp("hub")
    write_published(folder, "db_r18_icdar15")
    write_published(folder, "db_r50_icdar15")
    return folder


# What each file resolves to: the backbone, all parameters, and of the rest what differs.
RESOLVED = {
    "crnn_icdar15": ("rec_resnet34", 24_481_029, "lion", "RecDataset"),
    "crnn_resnet34": ("rec_resnet34", 24_481_029, "adamw", "LMDBDataset"),
    "crnn_resnet34_ch": ("rec_resnet34", 22_557_888, "adamw", "LMDBDataset"),
    "crnn_vgg7": ("rec_vgg7", 8_725_413, "adamw", "LMDBDataset"),
    "db_mobilenetv3_icdar15": ("det_mobilenet_v3", 1_844_136, "SGD", "DetDataset"),
    "db_mobilenetv3_icdar15_8p": ("det_mobilenet_v3", 1_844_136, "momentum", "DetDataset"),
    "db_mobilenetv3_ppocrv3": ("det_mobilenet_v3_enhance", 603_418, "Adam", "DetDataset"),
    "db_r18_ctw1500": ("det_resnet18", 12_340_930, "SGD", "DetDataset"),
    "db_r18_icdar15": ("det_resnet18", 12_340_930, "SGD", "DetDataset"),
    "db_r18_mlt2017": ("det_resnet18", 12_340_930, "SGD", "DetDataset"),
    "db_r18_synthtext": ("det_resnet18", 12_340_930, "SGD", "SynthTextDataset"),
    "db_r18_td500": ("det_resnet18", 12_340_930, "SGD", "DetDataset"),
    "db_r18_totaltext": ("det_resnet18", 12_340_930, "SGD", "DetDataset"),
    "db_r50_ctw1500": ("det_resnet50", 25_409_730, "SGD", "DetDataset"),
    "db_r50_icdar15": ("det_resnet50", 25_409_730, "SGD", "DetDataset"),
    "db_r50_icdar15_8p": ("det_resnet50", 25_409_730, "Adam", "DetDataset"),
    "db_r50_mlt2017": ("det_resnet50", 25_409_730, "SGD", "DetDataset"),
    "db_r50_synthtext": ("det_resnet50", 25_409_730, "SGD", "SynthTextDataset"),
    "db_r50_td500": ("det_resnet50", 25_409_730, "SGD", "DetDataset"),
    "db_r50_totaltext": ("det_resnet50", 25_409_730, "SGD", "DetDataset"),
    "dbpp_r50_icdar15": ("det_resnet50", 25_559_564, "momentum", "DetDataset"),
    "dbpp_r50_icdar15_8p": ("det_resnet50", 25_559_564, "momentum", "DetDataset"),
    "dbpp_r50_icdar15_910": ("det_resnet50", 25_559_564, "momentum", "DetDataset"),
}


def said_in(raw, settings, path=""):
    """The keys of a file whose values are other ones in the settings."""
    for key, value in raw.items():
        found = getattr(settings, key, None) if not isinstance(settings, dict) else settings.get(key)
        if isinstance(value, dict) and key not in ("common", "predict"):
            yield from said_in(value, found, f"{path}{key}.")
        elif isinstance(value, list):
            if list(found) != value:
                yield path + key
        elif found != value:
            yield path + key


def test_each_file_resolves_to_what_it_says(tmp_path, monkeypatch):
    """Every value of every file arrives, and makes the network that it describes."""
    assert sorted(FILES) == sorted(RESOLVED)
    write_dictionary(tmp_path)
    monkeypatch.chdir(tmp_path)
    sizes: dict[str, int] = {}
    for name, path in FILES.items():
        settings = load_settings(str(path))
        if repr(settings.model) not in sizes:  # several files have one network
            with torch.device("meta"):
                sizes[repr(settings.model)] = sum(p.numel() for p in make_model(settings).parameters())
        size = sizes[repr(settings.model)]
        found = settings.model.backbone.name, size, settings.optimizer.opt, settings.train.dataset.type
        assert found == RESOLVED[name]
        assert list(said_in(yaml.safe_load(path.read_text()), settings)) == [], name


@pytest.mark.slow
def test_keys_without_effect_are_said_in_one_list(tmp_path, monkeypatch):
    write_dictionary(tmp_path)
    monkeypatch.chdir(tmp_path)
    common = {
        "dataset_sink_mode", "dataset.output_columns", "dataset.net_input_column_index", "dataset.label_column_index",
    }  # fmt: skip
    for path in FILES.values():
        raw, found = yaml.safe_load(path.read_text()), set(ineffective(str(path)))
        assert found >= {f"{part}.{key}" for part in ("train", "eval") for key in common if part in raw}
        assert ("predict" in found) is ("predict" in raw)
        assert ("loss_scaler" in found) is (raw["system"]["amp_level"] == "O0")
        momentum = raw["optimizer"]["opt"] in ("lion", "adamw", "Adam") and "momentum" in raw["optimizer"]
        assert ("optimizer.momentum" in found) is momentum
    assert {"RecResizeImg.infer_mode", "optimizer.filter_bias_and_bn"} <= set(ineffective(str(FILES["crnn_icdar15"])))


def no_network(*_, **__):
    raise OSError("no network")


def test_a_file_alone_says_all_that_it_lacks(tmp_path, monkeypatch):
    """Weights, images, labels and characters, in one message; the same file with one more mistake says that, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(UsageError) as error:
        prepare(str(FILES["db_r50_icdar15"]), ["train.clip_nrom=5"])
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert [line.partition(": ")[0].partition(" is ")[0] for line in lines] == [
        "train.clip_nrom", "train.dataset", "eval.dataset", "model.backbone.pretrained",
    ]  # fmt: skip
    with pytest.raises(UsageError) as error:
        prepare(str(FILES["crnn_resnet34_ch"]))
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert [line.partition(": ")[0] for line in lines] == [
        "postprocess", "train.dataset.transform_pipeline[1].RecCTCLabelEncode", "train.dataset", "eval.dataset",
    ]  # fmt: skip


QUICK = ("db_r18_synthtext",)
OTHERS = sorted(set(FILES) - set(QUICK))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", [*QUICK, *slow(*OTHERS)])
def test_files_train_two_steps(name, drawn, hub):
    losses, steps, evaluation, said = trained(name, drawn, hub)
    system = yaml.safe_load(FILES[name].read_text())["system"]
    assert steps == 2
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert said.count("without effect here: ") == 1
    validated = system["val_while_train"] and system.get("val_start_epoch", 1) == 1
    assert (evaluation is not None and evaluation.samples == 1) is validated
