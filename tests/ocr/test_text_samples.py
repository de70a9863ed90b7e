"""Labels, databases and the steps that prepare images: what they read and make, and what they say of broken ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import DataError, UsageError
from shardwright.ocr.libraries import geometry
from shardwright.ocr.libraries.extra import library
from shardwright.ocr.samples.dataset import (
    Limit,
    TextImages,
    detection_images,
    synthetic_images,
    word_database,
    word_images,
)
from shardwright.ocr.samples.detection import DetResize
from shardwright.ocr.samples.dictionary import Dictionary
from shardwright.ocr.samples.drawn import Drawing, write_images
from shardwright.ocr.samples.labels import read_detection_list, read_icdar, read_word_list
from shardwright.ocr.samples.pipeline import read_steps
from shardwright.ocr.samples.sample import Sample, TextBox, corners, generator
from shardwright.ocr.samples.targets import BorderMap, ShrinkBinaryMap
from shardwright.ocr.samples.words import write_words

SQUARE = corners([[20, 20], [60, 20], [60, 60], [20, 60]])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    write_images(folder / "a", Drawing(count=5, words=10, size=128, seed=3))
    return folder / "a"


def detection_steps(size=64, training=True):
    listed = [
        {"DecodeImage": {"img_mode": "RGB"}}, "DetLabelEncode", {"RandomColorAdjust": {"brightness": 0.1}},
        {"RandomHorizontalFlip": {"p": 0.5}}, {"RandomRotate": {"degrees": [-10, 10], "expand_canvas": False}},
        {"RandomScale": {"scale_range": [0.5, 3.0]}}, {"RandomCropWithBBox": {"crop_size": [size, size]}},
        "ValidatePolygons", {"ShrinkBinaryMap": {"min_text_size": 4}}, "BorderMap",
        {"NormalizeImage": {"bgr_to_rgb": False, "mean": "imagenet", "std": "imagenet"}}, {"ToCHWImage": None},
    ]  # fmt: skip
    return read_steps(listed, "det", "train", training)


MAPS = ("image", "binary_map", "mask", "thresh_map", "thresh_mask")


def images_of(drawn, labels="det_gt.txt", limit=0, share=1.0):
    folder = drawn / "det" / "train"
    sources = [detection_images(folder / "images", folder / labels, share)]
    return TextImages(sources, detection_steps(), MAPS, Limit(limit), "det")


def test_drawn_images_have_the_same_labels_in_both_formats(drawn):
    lines, json = images_of(drawn, "gt"), images_of(drawn)
    assert len(lines) == len(json) == 4
    for index in range(4):
        for one, other in zip(lines.source(index).boxes, json.source(index).boxes, strict=True):
            assert one.text == other.text
            assert np.array_equal(one.points, other.points)
    words = drawn / "rec" / "train"
    listed, database = word_images(words, words / "rec_gt.txt", 1.0), word_database(words / "lmdb", 1.0)
    assert listed.size == database.size == 8
    assert [listed[n].text for n in range(8)] == [database[n].text for n in range(8)]
    assert listed[3].read() == database[3].read()


def test_samples_have_fixed_shapes_and_belong_to_their_place(drawn):
    """Whatever batch a sample is in it is the same, and another one in the next epoch."""
    images = images_of(drawn)
    together, alone = images.gather([0, 2, 3], seed=1, epoch=4), images.gather([2], seed=1, epoch=4)
    assert [tuple(t.shape) for t in together] == [(3, 3, 64, 64), *[(3, 64, 64)] * 4]
    assert all(torch.equal(many[1], one[0]) for many, one in zip(together, alone, strict=True))
    assert not torch.equal(alone[0], images.gather([2], seed=1, epoch=5)[0])
    assert together[1].sum() > 0
    assert together[3].min() == pytest.approx(0.3)


def sample_of(boxes, size=80):
    return Sample("made", np.zeros((size, size, 3), np.uint8), list(boxes))


def test_targets_of_a_square_are_those_worked_by_hand():
    """A square of 40: it shrinks and grows by 40² · 0.84 / 160 = 8.4."""
    sample = sample_of([TextBox(SQUARE, "x"), TextBox(SQUARE / 10, "small"), TextBox(SQUARE + 15, "###")])
    ShrinkBinaryMap()(sample, generator(0, 0, 0))
    BorderMap()(sample, generator(0, 0, 0))
    text, valid, border, near = (sample.columns[n] for n in MAPS[1:])
    assert 23.2**2 <= text.sum() <= 25.2**2  # the pixels on its border are inside
    assert text[40, 40] == 1
    assert text[25, 40] == 0  # 5 inside, less than 8.4
    assert valid[70, 70] == 0  # of the one that nobody can read
    assert valid[3, 3] == 0  # of the small one
    assert valid[30, 30] == 1
    assert border[20, 40] == pytest.approx(0.7, abs=0.01)
    assert border[24, 40] == pytest.approx(0.3 + 0.4 * (1 - 4 / 8.4), abs=0.01)
    assert border[40, 40] == pytest.approx(0.3)
    assert near[13, 40] == 1
    assert near[10, 40] == 0  # 10 outside


point = st.floats(-100, 200, allow_nan=False)
boxes = st.lists(
    st.builds(TextBox, st.lists(st.tuples(point, point), max_size=6).map(corners), st.sampled_from(["x", "###"])),
    max_size=4,
)


@given(boxes, st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_any_texts_pass_all_steps(found, seed):
    """Empty polygons, those that cross themselves and those outside of the image: fixed shapes, and maps in bounds."""
    sample = sample_of(found)
    for step in detection_steps()[1:]:
        step(sample, generator(seed, 0, 0))
    assert sample.image.shape == (3, 64, 64)
    for name in MAPS[1:]:
        assert sample.columns[name].shape == (64, 64)
        assert 0 <= sample.columns[name].min() <= sample.columns[name].max() <= 1
    assert not np.isnan(sample.image).any()


@given(st.integers(0, 500))
@settings(max_examples=30, deadline=None)
def test_crops_cut_no_text(seed):
    sample = sample_of([TextBox(SQUARE, "a"), TextBox(SQUARE / 8 + 65, "b")])
    area = {box.text: geometry.area(box.points) for box in sample.boxes}
    for step in read_steps([{"RandomCropWithBBox": {"crop_size": [64, 64]}}], "det", "p", True):
        step(sample, generator(seed, 0, 0))
    assert sample.boxes
    for box in sample.boxes:
        assert box.points.min() >= -1e-6
        assert box.points.max() <= 64 + 1e-6
        assert geometry.area(box.points) == pytest.approx(area[box.text] * math.prod(sample.ratio), rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({"target_size": [70, 130], "keep_ratio": False}, (64, 128)),
        ({"limit_type": "min", "limit_side_len": 100}, (96, 192)),
        ({"limit_type": "max", "limit_side_len": 60}, (32, 64)),
        ({"limit_type": "none"}, (64, 96)),
        ({"target_size": [64, 64], "keep_ratio": True, "padding": True}, (64, 64)),
        ({"target_size": [64, 96], "keep_ratio": True, "padding": True, "force_divisable": False}, (64, 96)),
        ({"target_size": [70, 60], "keep_ratio": True, "padding": True}, (64, 64)),
    ],
)
def test_images_are_resized_to_what_a_network_takes(keys, size):
    sample = Sample("made", np.zeros((50, 100, 3), np.uint8), [])
    DetResize(**keys)(sample, generator(0, 0, 0))
    assert sample.size == size


def test_failing_samples_are_counted_named_and_replaced(drawn, capsys, tmp_path):
    folder = drawn / "det" / "train"
    labels = folder / "broken.txt"
    good = (folder / "det_gt.txt").read_text().splitlines()
    labels.write_text("\n".join([good[0], good[1].replace("img_2", "img_9"), good[2]]))
    images = images_of(drawn, "broken.txt", limit=1)
    with_gap, without = images.gather([0, 1]), images.gather([0, 1])
    assert all(torch.equal(a, b) for a, b in zip(with_gap, without, strict=True))
    assert images.failed == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "sample 1 (img_9.jpg) failed and the next one takes its place, 1 of at most 1: there is no image" in told
    with pytest.raises(
        DataError, match=r"sample 1 \(img_9.jpg\) failed: there is no image .*img_9.jpg, which the labels name; c"
    ):
        images_of(drawn, "broken.txt").gather([1])


BROKEN = [
    (read_icdar, "1,2,3,4,5,6,7,8,ok\r\n\r\n1,2,3,4,5,6,7,x,no\r\n", "line 3: expected x1,y1,x2,y2,x3,y3,x4,y4,text"),
    (read_icdar, "1,2,3,4,5,6,7", "line 1: expected x1,y1"),
    (read_detection_list, "img.jpg [{}]", "line 1: expected image, tab, "),
    (read_detection_list, 'img.jpg\t[{"transcription": "a", "points": [[1, 2]]}]', "line 1: expected image, tab, "),
    (read_detection_list, "img.jpg\t[{]", "line 1: expected image, tab, "),
    (read_word_list, "a.png\tgood\nb.png bad", r"line 2: expected image, tab, text, got 'b.png bad'; correct the line"),
]


@pytest.mark.parametrize(("read", "text", "message"), BROKEN)
def test_broken_lines_are_named(read, text, message, tmp_path):
    (tmp_path / "labels.txt").write_text(text, encoding="utf-8-sig")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "labels.txt")


def test_label_files_and_databases_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"there is no label file .*gone.txt; give its path below dataset_root"):
        read_word_list(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes(b"a.png\t\xe9")
    with pytest.raises(DataError, match=r"byte 6 is no UTF-8; save the file as UTF-8"):
        read_word_list(tmp_path / "latin.txt")
    with pytest.raises(
        DataError, match=r"there is no database of LMDB in .*: it has no file data.mdb; give its path below"
    ):
        word_database(tmp_path, 1.0)
    write_words(tmp_path / "empty", [])
    with pytest.raises(
        DataError, match="says num-samples 0; expected image-%09d and label-%09d from 1 on; fill it, or take"
    ):
        word_database(tmp_path / "empty", 1.0)


def test_databases_are_read_by_each_worker_and_in_a_row(drawn):
    root = drawn / "rec"
    both = word_database(root, 1.0)  # test and train
    assert both.size == 10
    steps = read_steps(
        ["DecodeImage", "RecCTCLabelEncode", "RecResizeImg", "NormalizeImage", "ToCHWImage"], "rec", "p", True
    )
    images = TextImages([both], steps, ("image", "text_seq", "text_length"), Limit(0), "rec")
    expected = images.gather(range(10))
    assert expected[0].shape == (10, 3, 32, 100)
    found = list(torch.utils.data.DataLoader(_Rows(images), batch_size=None, num_workers=2))
    assert all(torch.equal(row[0], expected[0][at]) for at, row in enumerate(found))
    assert word_database(root, 0.5).size == 5


class _Rows(torch.utils.data.Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


def test_a_dictionary_that_lacks_characters(tmp_path, drawn):
    path = tmp_path / "dict.txt"
    path.write_text("a\nb\n")
    assert Dictionary.of(str(path)).classes == 3
    assert Dictionary.of(str(path), use_space_char=True).characters == "ab "
    folder = drawn / "rec" / "train"
    keys = {"character_dict_path": str(path)}
    (folder / "odd.txt").write_text("words/word_1.png\tXYZ\n")
    steps = read_steps(["DecodeImage", {"RecCTCLabelEncode": keys}], "rec", "p", True)
    words = word_images(folder, folder / "odd.txt", 1.0)
    with pytest.raises(
        DataError, match=r"odd.txt: not one of 1 labels fits: 1 without a character of the dictionary; correct the"
    ):
        TextImages([words], steps, ("text_seq",), Limit(0), "rec")
    path.write_text("a\nbc\n")
    with pytest.raises(DataError, match="line 2: expected one character, got 'bc'"):
        Dictionary.of(str(path))
    path.write_text("a\nb\na\n")
    with pytest.raises(DataError, match="the character 'a' stands there twice"):
        Dictionary.of(str(path))
    with pytest.raises(UsageError, match="character_dict_path: there is no file nowhere"):
        Dictionary.of("nowhere")


def test_steps_that_are_unknown_are_named():
    with pytest.raises(UsageError) as error:
        read_steps(
            [{"RandomRotat": None}, {"RandomScale": {"scale": [1, 2]}}, 7, {"RecResizeImg": {}}], "det", "t", True
        )
    assert [line.partition(";")[0] for line in str(error.value).splitlines()] == [
        "t[0]: RandomRotat is no step of det",
        "t[1].RandomScale.scale is unknown",
        "t[2]: expected one step with its keys, as RandomRotate: {degrees: [-10, 10]}, got 7",
        "t[3]: RecResizeImg is no step of det",
    ]
    assert "did you mean RandomRotate?" in str(error.value)


def test_a_library_that_is_missing_names_the_extra():
    with pytest.raises(UsageError, match=r"need no_such_library, which .*; type: pip install 'shardwright\[ocr\]'"):
        library("no_such_library")


@pytest.mark.parametrize(
    "keys", [{}, {"target_size": [64, 90], "padding": True}, {"target_size": [64, 96]}, {"limit_type": "none"}]
)
def test_sides_that_a_network_cannot_take_are_refused(keys):
    listed = [{"DetResize": {"force_divisable": False, **keys}}]
    with pytest.raises(
        UsageError, match=r"t\[0\].DetResize: force_divisable: False leaves sides that are no multiples of"
    ):
        read_steps(listed, "det", "t", False)


def test_images_are_turned_where_files_say_so_or_where_words_stand_upright():
    cv2, sample = library("cv2"), Sample("made", np.zeros(0, np.uint8), [])
    flat = np.zeros((20, 60, 3), np.uint8)
    flat[:, :20] = 255
    jpeg = cv2.imencode(".jpg", flat)[1].tobytes()
    turned = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # orientation 6
    jpeg = jpeg[:2] + b"\xff\xe1" + (len(turned) + 2).to_bytes(2, "big") + turned + jpeg[2:]
    for keys, size in (({}, (60, 20)), ({"ignore_orientation": True}, (20, 60))):
        sample.image = np.frombuffer(jpeg, np.uint8)
        [step] = read_steps([{"DecodeImage": keys}], "rec", "t", True)
        step(sample, generator(0, 0, 0))
        assert sample.size == sample.shape == size
    upright = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    for keys, expected in (
        ({"threshold": 2.5}, upright),
        ({"threshold": 2.0}, cv2.rotate(upright, cv2.ROTATE_90_COUNTERCLOCKWISE)),
        ({"threshold": 2.0, "direction": "clockwise"}, cv2.rotate(upright, cv2.ROTATE_90_CLOCKWISE)),
    ):
        sample.image = upright
        [step] = read_steps([{"Rotate90IfVertical": keys}], "rec", "t", True)
        step(sample, generator(0, 0, 0))
        assert np.array_equal(sample.image, expected)


def write_mat(path, rows):
    """A file of SynthText with (name, boxes (2, 4, n) or (2, 4), texts) for each image."""
    from scipy.io import savemat

    columns = [np.empty((1, len(rows)), dtype=object) for _ in range(3)]
    for at, (name, boxes, texts) in enumerate(rows):
        for column, value in zip(columns, (np.array([name]), boxes, np.array(texts)), strict=True):
            column[0, at] = value
    savemat(path, dict(zip(("imnames", "wordBB", "txt"), columns, strict=True)))


def test_the_labels_of_synthtext_are_words_with_their_corners(tmp_path):
    one, two = SQUARE, SQUARE + 3.5
    several = np.stack([one, two], axis=2).transpose(1, 0, 2)
    write_mat(
        tmp_path / "gt.mat",
        [("8/a.jpg", several, ["Lines \nof", ]), ("8/b.jpg", one.T, ["word "]), ("9/c.jpg", several, ["one"]),
         ("9/d.jpg", np.zeros((0, 0)), [""])],
    )  # fmt: skip
    images = synthetic_images(tmp_path, tmp_path / "gt.mat", 1.0)
    assert images.size == 4
    assert [box.text for box in images[0].boxes] == ["Lines", "of"]
    assert np.array_equal(images[0].boxes[1].points, two)
    assert np.array_equal(images[1].boxes[0].points, one)
    assert images[3].boxes == ()
    with pytest.raises(DataError, match=r"gt.mat: 9/c.jpg has 2 places in wordBB and 1 words in txt"):
        images[2]
    with pytest.raises(DataError, match=r"there is no image .*8/b.jpg, which the labels name"):
        images[1].read()


def test_files_of_synthtext_that_are_broken(tmp_path):
    from scipy.io import savemat

    with pytest.raises(DataError, match=r"there is no label file .*gt.mat; give its path below dataset_root"):
        synthetic_images(tmp_path, tmp_path / "gt.mat", 1.0)
    (tmp_path / "gt.mat").write_bytes(b"MATLAB 5.0" + bytes(200))
    with pytest.raises(DataError, match=r"gt.mat cannot be read as a file of MATLAB: "):
        synthetic_images(tmp_path, tmp_path / "gt.mat", 1.0)
    savemat(tmp_path / "gt.mat", {"imnames": np.zeros(2)})
    with pytest.raises(
        DataError, match=r"gt.mat has no wordBB and no txt; expected SynthText's gt.mat or gt_processed"
    ):
        synthetic_images(tmp_path, tmp_path / "gt.mat", 1.0)


def test_images_are_not_drawn_into_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="is not empty; name another folder, or type --force"):
        write_images(tmp_path, Drawing(count=1, size=64))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
