"""Where samples come from: several roots, shares of them, words left out, failures in loading processes."""

import re
import subprocess
import sys

import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import DataError, UsageError
from shardwright.ocr.options.sections import Dataset
from shardwright.ocr.samples.dataset import Limit, TextImages, word_database, word_images
from shardwright.ocr.samples.images import encoded
from shardwright.ocr.samples.pipeline import read_steps
from shardwright.ocr.samples.words import WordDatabase, write_words
from shardwright.ocr.tasks import text_images

STEPS = ("DecodeImage", {"RecCTCLabelEncode": {"max_text_len": 4}}, "RecResizeImg", "ToCHWImage")
BLACK = encoded(np.zeros((4, 8, 3), np.uint8))


def root_of(folder, words, broken=()):
    """A folder with an image and a line for each word; some of the images are no images."""
    folder.mkdir()
    for at, _ in enumerate(words):
        (folder / f"{at}.png").write_bytes(b"no image" if at in broken else BLACK)
    (folder / "words.txt").write_text("".join(f"{at}.png\t{word}\n" for at, word in enumerate(words)))
    return folder


def images_of(folder, limit=0):
    return TextImages(
        [word_images(folder, folder / "words.txt", 1.0)], read_steps(STEPS, "rec", "p", True),
        ("image", "text_seq", "text_length"), Limit(limit), "rec",
    )  # fmt: skip


@pytest.fixture
def listed(tmp_path):
    """What a configuration says of two folders, with three and ten words."""
    root_of(tmp_path / "a", ["a0", "a1", "a2"])
    root_of(tmp_path / "b", [f"b{at}" for at in range(10)])

    def read(training=True, **keys):
        given = {"data_dir": ("a", "b"), "label_file": ("a/words.txt", "b/words.txt"), **keys}
        options = Dataset(type="RecDataset", dataset_root=str(tmp_path), transform_pipeline=STEPS, **given)
        return text_images(options, "rec", "train.dataset", training)

    return read


def texts_of(images):
    return [images.source(at).text for at in range(len(images))]


def test_several_roots_are_read_one_after_the_other_by_their_shares(listed):
    both = listed()
    assert texts_of(both) == ["a0", "a1", "a2", *(f"b{at}" for at in range(10))]
    assert [int(column) for column in both.gather([2, 3])[1][:, 1]] == [2, 0]  # the digits of a2 and b0
    half = texts_of(listed(sample_ratio=(1.0, 0.5)))
    assert half[:3] == ["a0", "a1", "a2"]
    assert len(half) == 8
    assert half[3:] == sorted(set(half[3:]))
    assert half == texts_of(listed(sample_ratio=(1.0, 0.5)))
    assert len(listed(sample_ratio=0.5)) == 2 + 5


UNEVEN = [
    ({"label_file": ("a/words.txt",)}, "expected as many label_file and sample_ratio as data_dir, got 1, 2 and 2"),
    ({"sample_ratio": (1.0, 1.0, 1.0)}, "expected as many label_file and sample_ratio as data_dir, got 2, 3 and 2"),
    ({"sample_ratio": (1.0, 0.0)}, "train.dataset.sample_ratio: expected more than 0 and at most 1, got 0.0"),
    ({"sample_ratio": 1.5}, "train.dataset.sample_ratio: expected more than 0 and at most 1, got 1.5"),
    ({"label_file": None}, "label_file is missing: it says what the images show"),
]


@pytest.mark.parametrize(("keys", "message"), UNEVEN)
def test_lists_of_roots_that_do_not_fit_are_refused(listed, keys, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        listed(**keys)


WORDS = ["ab", "--", "abcde", "c", "ab-cd", "abcdef", "d", "e"]
FITTING = ["ab", "c", "ab-cd", "d", "e"]
LEFT_OUT = {"longer than max_text_len, 4": 2, "without a character of the dictionary": 1}


def test_words_that_do_not_fit_are_left_out_and_are_no_failures(tmp_path, listed):
    images = images_of(root_of(tmp_path / "words", WORDS))
    assert texts_of(images) == FITTING
    assert images.left_out == LEFT_OUT
    assert images.gather(range(5))[2].tolist() == [2, 1, 4, 1, 1]
    assert images.failed == 0
    root = {"data_dir": "words", "label_file": "words/words.txt"}
    assert texts_of(listed(training=False, **root)) == WORDS  # an evaluation counts every image
    assert len(listed(**root, sample_ratio=0.5)) + listed(**root, sample_ratio=0.5).left_out.total() == 4


def test_words_that_are_too_long_are_left_out_of_an_evaluation_too_where_that_is_asked_for(tmp_path, listed):
    root_of(tmp_path / "words", WORDS)
    root = {"data_dir": "words", "label_file": "words/words.txt", "filter_max_len": True, "max_text_len": 5}
    images = listed(training=False, **root)
    assert texts_of(images) == ["ab", "--", "abcde", "c", "ab-cd", "d", "e"]
    assert images.left_out == {"longer than max_text_len, 5": 1}
    assert texts_of(listed(**root)) == FITTING


def test_words_of_several_databases_are_left_out(tmp_path):
    for name, words in (("a", WORDS[:3]), ("b", WORDS[3:])):
        write_words(tmp_path / name, [(BLACK, word) for word in words], size_bytes=1 << 20)
    steps = read_steps(STEPS, "rec", "p", True)
    images = TextImages([word_database(tmp_path, 1.0)], steps, ("text_length",), Limit(0), "rec")
    assert texts_of(images) == FITTING
    assert images.left_out == LEFT_OUT


@pytest.mark.parametrize("limit", [3, 2])
def test_failures_in_loading_processes_are_counted_together(tmp_path, limit):
    """Each of two processes reads some of the three broken images."""
    images = images_of(root_of(tmp_path / "words", ["w"] * 12, broken=(1, 4, 8)), limit)
    batches = sw.loader(images, 2, shuffle=False, num_workers=2)
    if limit == 3:
        assert len(list(batches)) == 6
        assert images.failed == 3
        return
    with pytest.raises(DataError, match="3 samples have failed, max_failed_samples allows 2"):
        list(batches)


def test_a_database_that_is_cut_short_is_refused_by_name(tmp_path):
    """To read a page that the file lacks would end the process: this is asked of one of its own."""
    write_words(tmp_path / "words", [(bytes(5000), f"w{number}") for number in range(20)], size_bytes=1 << 22)
    path = tmp_path / "words" / "data.mdb"
    whole = path.read_bytes()
    assert WordDatabase(path.parent).size == 20
    asked = "import sys; from pathlib import Path; from shardwright.ocr.samples.words import WordDatabase as W\n"
    asked += (
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        found = W(Path(path)); [found._image(number + 1) for number in range(found.size)]\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    sizes = (len(whole) - 4096, len(whole) // 2, 8192, 8191, 4096, 100, 0)
    for size in sizes:
        (tmp_path / f"cut {size}").mkdir()
        (tmp_path / f"cut {size}" / "data.mdb").write_bytes(whole[:size])
    folders = [str(tmp_path / f"cut {size}") for size in sizes]
    done = subprocess.run([sys.executable, "-c", asked, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(sizes)
    for size, folder, line in zip(sizes, folders, lines, strict=True):
        assert line.startswith(f"DataError {folder}")
        assert size <= 4096 or f"data.mdb is cut short: it has {size} bytes of {len(whole)}; copy it again" in line
