"""MNIST files are read exactly, and whatever is wrong with one is said with its name and the offset."""

import gzip
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.data.mnist import file_names, idx_bytes, read_idx
from shardwright.errors import DataError, UsageError

IMAGES = np.random.default_rng(0).integers(0, 256, (11, 28, 28), dtype=np.uint8)
LABELS = (np.arange(11) % 10).astype(np.uint8)


def write_idx(path, array):
    contents = idx_bytes(array)
    path.write_bytes(gzip.compress(contents, mtime=0) if path.suffix == ".gz" else contents)


def write(root, images=IMAGES, labels=LABELS, train=True, suffix=""):
    for name, array in zip(file_names(train), (images, labels), strict=True):
        write_idx(root / f"{name}{suffix}", array)
    return root


def message_of(root, **arguments):
    with pytest.raises(DataError) as caught:
        sw.MNIST(root, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("train", [True, False])
def test_items_are_images_in_0_to_1_and_labels(tmp_path, train, suffix):
    dataset = sw.MNIST(write(tmp_path, train=train, suffix=suffix), train=train)
    assert len(dataset) == 11
    for index in range(11):
        image, label = dataset[index]
        assert (image.dtype, image.shape) == (torch.float32, (1, 28, 28))
        assert torch.equal(image[0], torch.from_numpy(IMAGES[index]).float() / 255)
        assert (label.dtype, label.shape, int(label)) == (torch.int64, (), LABELS[index])
    assert 0 <= dataset[0][0].min() <= dataset[0][0].max() <= 1


def test_the_header_is_the_one_of_the_format(tmp_path):
    write(tmp_path)
    assert (tmp_path / "train-images-idx3-ubyte").read_bytes()[:16].hex(" ", 4) == "00000803 0000000b 0000001c 0000001c"
    assert (tmp_path / "train-labels-idx1-ubyte").read_bytes()[:8].hex(" ", 4) == "00000801 0000000b"


def test_batches_and_torchs_loader_give_the_same_items(tmp_path):
    dataset = sw.MNIST(write(tmp_path))
    wanted = torch.utils.data.default_collate([dataset[i] for i in (3, 9, 0)])
    for got in (
        dataset.gather([3, 9, 0]),
        torch.utils.data.default_collate(dataset.__getitems__([3, 9, 0])),
        next(iter(torch.utils.data.DataLoader(dataset, batch_sampler=[[3, 9, 0]]))),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 4}, "num_shards=4, shard_id=None; for example MNIST"),
        ({"shard_id": 0}, "num_shards and shard_id go together"),
        ({"num_shards": 4, "shard_id": 4}, "shard_id from 0 to num_shards - 1, got num_shards=4, shard_id=4"),
        ({"num_shards": 4, "shard_id": -1}, "shard_id=-1"),
        ({"num_shards": 0, "shard_id": 0}, "expected num_shards of at least 1"),
    ],
)
def test_shards_that_do_not_exist(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        sw.MNIST(tmp_path, **arguments)


def test_missing_files_say_where_to_get_them(tmp_path):
    message = message_of(tmp_path / "nowhere")
    for part in (
        "found neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        f"shardwright data digits --format mnist --out {tmp_path / 'nowhere'}",
    ):
        assert part in message
    write(tmp_path, train=True)
    assert "t10k-images-idx3-ubyte.gz" in message_of(tmp_path, train=False)


def corrupt(path, start, replacement):
    contents = bytearray(path.read_bytes())
    contents[start : start + len(replacement)] = replacement
    path.write_bytes(contents)


@pytest.mark.parametrize(
    ("name", "start", "replacement", "message"),
    [
        ("images", 0, b"\0\0\x08\x01", "at offset 0: expected the magic number 2051 (images), got 2049"),
        ("labels", 0, b"\0\0\x08\x03", "at offset 0: expected the magic number 2049 (labels), got 2051"),
        ("images", 0, b"\x1f\x8b", "it is gzipped: let its name end in .gz"),
        ("images", 4, b"\0\0\0\x0c", "at offset 16: expected 9408 bytes of images (12 x 28 x 28), got 8624 bytes"),
        ("images", 4, b"\0\0\0\x0a", "at offset 7856: expected the end of the file, got more bytes"),
        ("images", 4, b"\0\0\0\0", "at offset 4: expected a length of at least 1, got 0"),
        ("images", 4, b"\xff" * 12, "expected 79228162458924105385300197375 bytes of images"),
        ("images", 8, b"\0\0\0\x0e\0\0\0\x38", "at offset 8: expected images of 28 x 28, got 14 x 56"),
        ("labels", 11, b"\x0a", "at offset 11: expected a label from 0 to 9, got 10"),
    ],
)
def test_a_corrupt_file_is_named_with_the_offset(tmp_path, name, start, replacement, message):
    path = write(tmp_path) / f"train-{name}-idx{3 if name == 'images' else 1}-ubyte"
    corrupt(path, start, replacement)
    said = message_of(tmp_path)
    assert said.startswith(f"{path}: ")
    assert message in said


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "at offset 0: expected the magic number, got 0 bytes and the end of the file"),
        (3, "at offset 0: expected the magic number, got 3 bytes"),
        (10, "at offset 4: expected 3 lengths of 4 bytes, got 6 bytes"),
        (1000, "at offset 16: expected 8624 bytes of images (11 x 28 x 28), got 984 bytes and the end of the file"),
    ],
)
def test_a_short_file(tmp_path, length, message):
    path = write(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:length])
    assert message_of(tmp_path).startswith(f"{path}: {message}")


def test_images_and_labels_that_do_not_match(tmp_path):
    write(tmp_path, labels=LABELS[:9])
    assert (
        "train-labels-idx1-ubyte: at offset 4: expected 11 labels, one per image of train-images-idx3-ubyte, got 9"
        in (message_of(tmp_path))
    )


def test_a_truncated_gz(tmp_path):
    path = write(tmp_path, suffix=".gz") / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    said = message_of(tmp_path)
    assert said.startswith(f"{path}: at offset ")
    assert "expected 8624 bytes of images (11 x 28 x 28), got: Compressed file ended" in said


def test_a_gz_that_is_none(tmp_path):
    path = write(tmp_path, suffix=".gz") / "train-images-idx3-ubyte.gz"
    path.write_bytes(idx_bytes(IMAGES))
    assert "expected the magic number, got: Not a gzipped file" in message_of(tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path):
    write(tmp_path, suffix=".gz")
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    assert "train-images-idx3-ubyte: cannot be read: [Errno 21] Is a directory" in message_of(tmp_path)


def read_bytes(contents, dims, suffix=""):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(contents)
        return read_idx(path, dims)


def reads_or_says_why(contents, dims, suffix):
    try:
        array = read_bytes(contents, dims, suffix)
    except DataError:
        return
    assert idx_bytes(array) == (gzip.decompress(contents) if suffix else contents)


@settings(max_examples=40)
@given(st.binary(max_size=64), st.sampled_from([1, 3]), st.sampled_from(["", ".gz"]), st.booleans())
def test_random_bytes_raise_nothing_but_data_errors(contents, dims, suffix, with_magic):
    if with_magic:
        contents = (2048 + dims).to_bytes(4) + contents
    reads_or_says_why(contents, dims, suffix)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["", ".gz"]))
def test_a_damaged_file_raises_nothing_but_data_errors(data, suffix):
    contents = bytearray(idx_bytes(IMAGES[:2, :3, :5]))
    if suffix:
        contents = bytearray(gzip.compress(bytes(contents), mtime=0))
    contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    contents = contents[: data.draw(st.integers(0, len(contents)))] + data.draw(st.binary(max_size=3))
    reads_or_says_why(bytes(contents), 3, suffix)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["", ".gz"]))
def test_what_is_written_is_read(shape, suffix):
    array = np.random.default_rng(len(shape)).integers(0, 256, shape, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        write_idx(Path(folder) / f"x{suffix}", array)
        assert np.array_equal(read_idx(Path(folder) / f"x{suffix}", len(shape)), array)
