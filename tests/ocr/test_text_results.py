"""What runs and networks leave for people: tables that go on after a resume, pages with the texts drawn on them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.ocr.reading import Network, Pages
from shardwright.ocr.results import ResultTable
from shardwright.ocr.samples.images import decode, encoded
from shardwright.ocr.samples.labels import read_icdar
from shardwright.ocr.settings import load_settings

REPOSITORY = Path(__file__).parents[2]


def epoch(table, number, losses, done=0, ends=True):
    """The steps of an epoch with these losses, ``done`` of which a run before had taken."""
    run = SimpleNamespace(
        epoch=number, step=done, steps=0, evaluation=None, evaluated=0, world=SimpleNamespace(rank=0),
        optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1),
    )  # fmt: skip
    table.on_epoch_begin(run)
    for loss in losses:
        run.loss = torch.tensor(loss)
        table.on_step_end(run)
    if ends:
        table.on_epoch_end(run)


def test_the_loss_of_an_epoch_is_that_of_all_its_steps_after_a_resume_too(tmp_path):
    first, again = ResultTable(tmp_path, "acc"), ResultTable(tmp_path, "acc")
    epoch(first, 1, [8.0, 4.0])
    epoch(first, 2, [5.0, 3.0], ends=False)
    again.load_state_dict(first.state_dict())
    epoch(again, 2, [1.0], done=2)
    epoch(again, 3, [2.0])
    assert [row["loss"] for row in again.rows] == [6.0, 3.0, 2.0]
    old = ResultTable(tmp_path, "acc")
    old.load_state_dict({"rows": first.rows})  # as checkpoints were before
    assert [row["loss"] for row in old.rows] == [6.0]


class Dark(nn.Module):
    """Finds texts where an image is dark."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(()))

    def forward(self, images):
        return (images.mean(1) < 0).to(images.dtype)


class Says(Dark):
    """Reads "ab" in images that are brighter left than right, and "ba" in others."""

    def forward(self, images):
        a, b, blank = 10, 11, 36
        bright = [image[..., :50].mean() > image[..., 50:].mean() for image in images]
        ids = [[a, a, blank, b] if left else [b, a, a, a] for left in bright]
        return 100.0 * nn.functional.one_hot(torch.tensor(ids), 37).to(images.dtype)


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    names = (("det/dbnet/db_r18_icdar15", Dark()), ("rec/crnn/crnn_vgg7", Says()))
    return [Network(load_settings(f"configs/{name}.yaml"), model, torch.device("cpu")) for name, model in names]


def test_texts_are_drawn_where_they_stand_and_written_as_they_are_read(networks, tmp_path):
    """Two dark rectangles, of which one is darker on its left; pages are resized to 736 x 1280 before."""
    page = np.full((368, 640, 3), 255, np.uint8)
    page[100:140, 100:300], page[100:140, 200:300] = 0, 60
    page[250:290, 400:600], page[250:290, 400:500] = 0, 60
    (tmp_path / "page.png").write_bytes(encoded(page))
    drawn, lines = Pages(*networks).write(tmp_path / "page.png", tmp_path / "out")
    assert [path.name for path in (drawn, lines)] == ["page.png", "page.txt"]
    found = {box.text: box.points for box in read_icdar(lines)}
    assert sorted(found) == ["ab", "ba"]
    grown = 200 * 40 * 1.5 / 480  # as a network finds texts shrunk
    for text, (left, top) in (("ab", (400, 250)), ("ba", (100, 100))):
        low, high = np.array([left, top]) - grown, np.array([left + 200, top + 40]) + grown
        assert np.abs(found[text].min(axis=0) - low).max() <= 4
        assert np.abs(found[text].max(axis=0) - np.minimum(high, (640, 368))).max() <= 4
    image = decode(np.frombuffer(drawn.read_bytes(), np.uint8), "drawn")
    assert image.shape == page.shape
    for points in found.values():
        x, y = np.rint((points[0] + points[2]) / 2).astype(int)
        bottom = round(points[:, 1].max())
        assert (image[bottom, x] == (0, 160, 0)).all()  # the line around it
        assert (image[y, x] == page[y, x]).all()
        above = image[round(points[:, 1].min()) - 20 : round(points[:, 1].min()) - 3]
        assert ((above[..., 2] > 150) & (above[..., 0] < 60)).any()  # its word in red
    assert (image[:50] == page[:50]).all()


def test_without_a_detector_an_image_is_a_word(networks, tmp_path):
    word = np.full((32, 100, 3), 20, np.uint8)
    word[:, :50] = 200
    (tmp_path / "word.png").write_bytes(encoded(word))
    _, lines = Pages(None, networks[1]).write(tmp_path / "word.png", tmp_path)
    assert lines.read_text() == "0,0,100,0,100,32,0,32,ab\n"
