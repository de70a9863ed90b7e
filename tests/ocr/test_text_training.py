"""Training by configurations: the same on several ranks as on one, evaluated with each image counted once."""

import contextlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.ocr.networks.losses import recognition_loss
from shardwright.ocr.options.parts import BACKBONES
from shardwright.ocr.reading import Pages, draw, network
from shardwright.ocr.samples.dataset import word_database
from shardwright.ocr.samples.drawn import Drawing, write_images
from shardwright.ocr.samples.images import decode
from shardwright.ocr.samples.labels import read_icdar
from shardwright.ocr.samples.words import write_words
from shardwright.ocr.settings import is_text_configuration, load_settings
from shardwright.ocr.training import make_model, make_schedule, prepare

REPOSITORY = Path(__file__).parents[2]


CONFIGS = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "configs").rglob("*.yaml"))


VGG7, R18, R50 = "rec/crnn/crnn_vgg7", "det/dbnet/db_r18_icdar15", "det/dbnet/db_r50_icdar15"
# What makes a configuration small and its batches the same on any number of ranks.
SMALL = [
    "system.log_interval=1", "model.backbone.width=4", "train.loader.num_workers=0", "eval.loader.num_workers=0",
    "train.loader.batch_size=null", "eval.loader.batch_size=null", "train.loader.global_batch_size=5",
    "eval.loader.global_batch_size=7", "scheduler.warmup_epochs=0", "scheduler.num_epochs=2",
]  # fmt: skip
WORDS = ["train.dataset.data_dir=rec/train/lmdb", "eval.dataset.data_dir=rec/test/lmdb", "model.neck.hidden_size=6"]
SCENES = [
    "train.dataset.data_dir=det/train/images", "eval.dataset.data_dir=det/test/images", "model.neck.out_channels=16",
    "train.dataset.label_file=det/train/gt", "eval.dataset.label_file=det/test/det_gt.txt",
]  # fmt: skip


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_images(folder, Drawing(count=60, words=60, size=96, seed=1, texts=3, longest=4), force=True)
    return folder


def small_file(name, drawn, folder):
    """The configuration on the images drawn, with inputs that are small."""
    text = (REPOSITORY / f"configs/{name}.yaml").read_text()
    for large, little in (("[640, 640]", "[64, 64]"), ("[736, 1280]", "[96, 96]")):
        text = text.replace(large, little)
    path = folder / f"{Path(name).name}.yaml"
    path.write_text(text)
    roots = [f"{part}.dataset.dataset_root={drawn}" for part in ("train", "eval")]
    return str(path), [*SMALL, *roots, *(WORDS if name.startswith("rec") else SCENES)]


def run(name, overrides, output):
    """The losses of every step, and what the last validation found, on this rank."""
    import shardwright.training.callbacks as callbacks
    from shardwright.ocr.training import train

    torch.set_num_threads(1)
    losses, line = [], callbacks.loss_line
    callbacks.loss_line = lambda epoch, step, loss: losses.append(loss) or line(epoch, step, loss)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = train(name, [*overrides, f"train.ckpt_save_dir={output}"])
    finally:
        callbacks.loss_line = line
    splits = any(strategy.used for strategy in trainer.parallel.plan.strategies.values())
    return losses, trainer.evaluation, splits


def on_ranks(ranks, name, overrides, output, **options):
    return run_ranks(ranks, run, name, overrides, str(output), **options)


def by_hand(name, overrides, steps):
    """The losses of the same run as plain PyTorch has it, with neither ranks nor a trainer."""
    experiment = prepare(name, overrides)
    settings = experiment.settings
    torch.manual_seed(settings.system.seed)
    model = make_model(settings).train()
    options = settings.train.loader
    batches = sw.loader(
        experiment.train, options.global_batch_size, seed=settings.system.seed, drop_last=options.drop_remainder
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.scheduler.lr, weight_decay=0.0)
    schedule = make_schedule(settings.scheduler, optimizer, len(batches))
    losses = []
    for batch in itertools.islice(batches, steps):
        loss = recognition_loss(model, tuple(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_words_train_on_two_ranks_as_on_one(drawn, tmp_path):
    """Three steps of uneven batches, and twelve images, of which each is counted once."""
    config, overrides = small_file(VGG7, drawn, tmp_path)
    overrides += ["system.dtype=float64", "train.steps=3", "train.ema=True", "optimizer.weight_decay=0"]
    two = on_ranks(2, config, overrides, tmp_path / "run", timeout=140)[0]
    expected = by_hand(config, overrides, 3)
    assert two[0] == pytest.approx(expected, rel=1e-10)
    assert two[2]
    assert two[1].samples == 12
    for name in ("best.pth", "curve.png", "config.yaml", "checkpoints/latest"):
        assert (tmp_path / "run" / name).is_file()
    table = [line.split("\t") for line in (tmp_path / "run/result.tsv").read_text().splitlines()]
    assert table[0] == ["epoch", "steps", "loss", "lr", "seconds", "acc", "norm_edit_distance"]
    assert float(table[1][2]) == pytest.approx(sum(expected) / 3, rel=1e-5)


def program(name, *words, before=(), **options):
    """A program of tools, as users type it."""
    command = [*before, sys.executable, str(REPOSITORY / f"tools/{name}.py"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, **options)


def evaluated(name, overrides):
    from shardwright.ocr.reading import evaluate

    torch.set_num_threads(1)
    return evaluate(name, overrides)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [VGG7, R18])
def test_an_evaluation_counts_each_image_once(name, tmp_path):
    write_images(tmp_path / "data", Drawing(count=250, words=250, size=96, seed=2, texts=2, longest=4))
    config, overrides = small_file(name, tmp_path / "data", tmp_path)
    on_ranks(1, config, [*overrides, "train.steps=2"], tmp_path / "run", timeout=300)
    overrides += [f"eval.ckpt_load_path={tmp_path}/run/best.pth"]
    one, three = (run_ranks(n, evaluated, config, overrides, timeout=200)[0] for n in (1, 3))
    assert one == three
    assert one.startswith("50 images | ")
    words = [word for override in overrides for word in ("-o", override)]
    done = program("eval", "--config", config, *words)
    assert done.stdout == one + "\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_the_middle_of_an_epoch(drawn, tmp_path):
    config, overrides = small_file(VGG7, drawn, tmp_path)
    overrides += ["system.dtype=float64", "train.ema=True", "train.gradient_accumulation_steps=2"]
    saving = ["train.ckpt_every_steps=3", "system.ckpt_save_policy=latest_k", "system.ckpt_max_keep=9"]
    whole, evaluation, _ = on_ranks(2, config, [*overrides, *saving], tmp_path / "whole", timeout=200)[0]
    assert len(whole) == 10
    again = f"model.resume={tmp_path}/whole/checkpoints/step-00000003"
    rest, again, _ = on_ranks(2, config, [*overrides, again], tmp_path / "rest", timeout=200)[0]
    assert rest == whole[3:]
    tables = [(tmp_path / name / "result.tsv").read_text().splitlines() for name in ("whole", "rest")]
    losses, again_losses = ([line.split("\t")[2] for line in table] for table in tables)
    assert len(losses) == 3
    assert again_losses == losses
    assert again.metrics == pytest.approx(evaluation.metrics)


def broken_words(drawn, folder):
    """A database of fifteen words that fit, of which one has a broken image, and one that is too long."""
    words = word_database(drawn / "rec/train/lmdb", 1.0)
    found = [(words[at].read(), words[at].text) for at in range(15)]
    found[7] = b"no image", "broken"
    write_words(folder, [*found, (found[0][0], 24 * "a")], size_bytes=1 << 24)


def read_page(det, rec, folder, image):
    """What the networks find in an image, and the image with that drawn."""
    torch.set_num_threads(1)
    weights = [f"{folder}/{Path(path).stem}/best.pth" for path in (det, rec)]
    found = Pages(network(det, weights[0], "det"), network(rec, weights[1], "rec")).read(image.read_bytes(), image.name)
    return [one.text for one in found], draw(decode(np.fromfile(image, np.uint8), image.name), found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_detection_under_mpirun_and_pages_read(drawn, tmp_path):
    """The command that users type; then its weights, and those of a recogniser, read an image."""
    (det, det_overrides), (rec, rec_overrides) = (small_file(name, drawn, tmp_path) for name in (R50, VGG7))
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    broken_words(drawn, tmp_path / "words")
    rec_overrides += [f"train.dataset.data_dir={tmp_path}/words"]
    for name, overrides, before in ((det, det_overrides, mpirun), (rec, rec_overrides, [])):
        settings = [f"train.ckpt_save_dir={tmp_path}/{Path(name).stem}", "train.steps=3"]
        words = [word for override in [*overrides, *settings] for word in ("-o", override)]
        done = program("train", "--config", name, *words, before=before, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step: 3, loss is" in done.stdout
        assert "val | epoch: 1 | " in done.stdout
    assert "left out for their labels: 1 of 16 samples to train on, 1 longer than max_text_len, 23\n" in done.stdout
    assert "rank 0: samples that failed and were replaced: 1\n" in done.stdout
    arguments = ["--out", str(tmp_path / "read")]
    for kind, name in (("det", det), ("rec", rec)):
        arguments += [f"--{kind}-config", name, f"--{kind}-weights", f"{tmp_path}/{Path(name).stem}/best.pth"]
    config = tmp_path / "db_r50_icdar15.yaml"  # what was overridden there has to stand in the file here
    config.write_text((tmp_path / "db_r50_icdar15/config.yaml").read_text())
    (tmp_path / "crnn_vgg7.yaml").write_text((tmp_path / "crnn_vgg7/config.yaml").read_text())
    image = drawn / "det/test/images/img_1.jpg"
    done = program("predict", *arguments, str(image))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [str(tmp_path / "read/img_1.png"), str(tmp_path / "read/img_1.txt")]
    texts, drawing = run_ranks(1, read_page, det, rec, tmp_path, image)[0]
    assert [box.text for box in read_icdar(tmp_path / "read/img_1.txt")] == texts
    assert np.array_equal(decode(np.fromfile(tmp_path / "read/img_1.png", np.uint8), "drawn"), drawing)


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configurations_are_as_users_know_them(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert is_text_configuration(name)
    settings = load_settings(name)
    assert BACKBONES.row(settings.model.backbone).task == settings.model.type
    assert settings.train.dataset.transform_pipeline[-1] == {"ToCHWImage": None}


WRONG = [
    ("model.backbon.name=x", "model.backbon is unknown; did you mean model.backbone?"),
    ("train.dataset.data_dri=x", "train.dataset.data_dri is unknown; did you mean train.dataset.data_dir?"),
    ("system.mode=fast", "system.mode: 'fast' is unknown; choose one of 0, 1, data, auto"),
    (
        "model.backbone.name=det_resnet18",
        "model.backbone.name: det_resnet18 is for det, model.type says rec; use rec_vgg7",
    ),
    ("model.head.out_channels=40", "model.head.out_channels: expected 37, the 36 characters of the dictionary and the"),
    (
        "postprocess.use_space_char=True",
        "train.dataset.transform_pipeline: RecCTCLabelEncode knows 36 characters, and postprocess not the same 37;",
    ),
    ("loss.pred_seq_len=26", "loss.pred_seq_len: the network gives 24 steps, got 26"),
    ("common.batch_size=8", "-o common.batch_size=8: the section common holds anchors, whose values are copied"),
    ("eval.loader.drop_remainder=True", "eval.loader.drop_remainder: true would leave images out"),
    (
        "train.loader.global_batch_size=8",
        "train.loader: expected batch_size (of each rank) or global_batch_size, got both",
    ),
    ("scheduler.min_lr=1", "scheduler.min_lr: expected less than lr, 0.0005"),
    ("model.resume=[1]", "model.resume: expected true or false or text, got [1]"),
    ("optimizer.beta1=1", "optimizer.beta1: expected a number of from 0 to below 1, got 1"),
    ("scheduler.warmup_epochs=10", "scheduler.warmup_epochs: expected less than num_epochs, 10, got 10"),
    ("eval=null", "the section eval is missing, on which a run is validated; type -o system.val_while_train=False"),
    (
        "train.dataset.type=DetDataset",
        "train.dataset.type: DetDataset has no samples of rec; use RecDataset or LMDBDataset",
    ),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[override for override, _ in WRONG])
def test_what_is_wrong_with_a_configuration_is_said_in_a_line(override, message):
    with pytest.raises(UsageError) as error:
        load_settings(str(REPOSITORY / f"configs/{VGG7}.yaml"), [override])
    assert any(line.strip().startswith(message) for line in str(error.value).splitlines()), error.value


def test_keys_of_one_step_are_overridden_by_its_place():
    name = str(REPOSITORY / f"configs/{R18}.yaml")
    settings = load_settings(name, ["train.dataset.transform_pipeline[6].RandomCropWithBBox.crop_size=[64,96]"])
    step = settings.train.dataset.transform_pipeline[6]["RandomCropWithBBox"]
    assert step == {"max_tries": 10, "min_crop_ratio": 0.1, "crop_size": [64, 96], "p": 1.0}
    with pytest.raises(UsageError, match=r"list index out of range full_key: train.dataset.transform_pipeline.99."):
        load_settings(name, ["train.dataset.transform_pipeline[99].RandomScale.p=1"])


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path, monkeypatch):
    """Unknown keys, values, parts that contradict each other, steps, weights and images, in one message."""
    monkeypatch.chdir(tmp_path)
    overrides = [
        "system.sead=1", "model.backbone.name=rec_vgg8", "model.pretrained=gone.pth", "optimizer.opt=lyon",
        "scheduler.min_lr=9", "postprocess.character_dict_path=gone.txt", "train.loader.num_workers=-1",
        "train.loader.global_batch_size=7", "train.dataset.filter_max_len=True",
        "train.dataset.transform_pipeline[2].RecResizeImg.pading=True",
        "train.dataset.transform_pipeline[1].RecCTCLabelEncode.character_dict_path=none.txt",
        "eval.loader.drop_remainder=True",
    ]  # fmt: skip
    with pytest.raises(UsageError) as error:
        prepare(str(REPOSITORY / f"configs/{VGG7}.yaml"), overrides)
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    beginnings = [
        "system.sead is unknown; did you mean system.seed?",
        "model.backbone.name: 'rec_vgg8' is unknown",
        "optimizer.opt: 'lyon' is unknown; choose one of sgd, ",
        "train.loader.num_workers: expected a whole number of at least 0, got -1",
        "train.loader: expected batch_size (of each rank) or global_batch_size, got both",
        "eval.loader.drop_remainder: true would leave images out",
        "scheduler.min_lr: expected less than lr, 0.0005",
        "postprocess: character_dict_path: there is no file gone.txt; null takes 0-9a-z",
        "train.dataset.transform_pipeline[1].RecCTCLabelEncode: character_dict_path: there is no file none.txt;",
        "train.dataset.transform_pipeline[2].RecResizeImg.pading is unknown; did you mean",
        "train.dataset.filter_max_len: true needs train.dataset.max_text_len, the longest word that is kept",
        f"train.dataset: there is no database of LMDB in {tmp_path}/path/to/data_lmdb_release/training: it has no ",
        f"eval.dataset: there is no database of LMDB in {tmp_path}/path/to/data_lmdb_release/validation: it has ",
        "model.pretrained: there are no weights gone.pth; name a file of torch's, or type -o model.pretrained=null",
    ]
    assert len(lines) == len(beginnings), lines
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)
