"""CIFAR-10's files are read exactly, pickles run nothing, and what is wrong with a file is said with its name."""

import io
import os
import pickle
import tarfile
import warnings

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.cli import cli
from shardwright.data.cifar import BINARY, PYTHON, VERSIONS, cifar_files, python_bytes
from shardwright.data.cifar_pickle import RefusedPickle, byte_array, read_pickle
from shardwright.errors import DataError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (23, 3, 32, 32), dtype=np.uint8)
LABELS = RANDOM.integers(0, 10, 23, dtype=np.uint8)
TEST_IMAGES, TEST_LABELS = IMAGES[::-1][:7], LABELS[::-1][:7]


def files_of(version):
    return cifar_files(version, (IMAGES, LABELS), (TEST_IMAGES, TEST_LABELS))


def write(root, version=PYTHON):
    for name, contents in files_of(version).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents)
    return root


def archive(root, version=PYTHON, leave_out=None):
    with tarfile.open(root / version.archive, "w:gz") as tar:
        for name, contents in files_of(version).items():
            if leave_out is None or leave_out not in name:
                member = tarfile.TarInfo(name)
                member.size = len(contents)
                tar.addfile(member, io.BytesIO(contents))
    return root


def message_of(root, **arguments):
    with pytest.raises(DataError) as caught:
        sw.CIFAR10(root, **arguments)
    return str(caught.value)


def check(dataset, images=IMAGES, labels=LABELS):
    assert len(dataset) == len(labels)
    x, y = dataset.gather(range(len(labels)))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x, torch.from_numpy(images.copy()).float() / 255)
    assert y.tolist() == labels.tolist()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.folder)
def test_both_versions_from_every_place(tmp_path, version):
    write(tmp_path, version)
    archive(tmp_path, version)
    for root in (tmp_path, tmp_path / version.folder, tmp_path / version.archive):
        check(sw.CIFAR10(root))
        check(sw.CIFAR10(root, train=False), TEST_IMAGES, TEST_LABELS)


def test_items_shards_and_loaders(tmp_path):
    dataset = sw.CIFAR10(write(tmp_path))
    image, label = dataset[4]
    assert (image.shape, label.shape, int(label)) == ((3, 32, 32), (), LABELS[4])
    assert torch.equal(image, torch.from_numpy(IMAGES[4]).float() / 255)
    assert torch.equal(dataset[-1][0], dataset[22][0])
    with pytest.raises(IndexError):
        dataset[23]
    shards = [sw.CIFAR10(tmp_path, num_shards=4, shard_id=i) for i in range(4)]
    assert [len(shard) for shard in shards] == [6, 6, 6, 5]
    assert [int(label) for shard in shards for _, label in (shard[i] for i in range(len(shard)))] == LABELS.tolist()
    batch = next(iter(sw.loader(dataset, 5, shuffle=False)))
    assert torch.equal(batch[0], dataset.gather(range(5))[0])
    doubled = sw.CIFAR10(tmp_path, transform=lambda image: image.flatten() * 2)
    assert torch.equal(doubled.gather([4])[0], image.flatten()[None] * 2)


def test_missing_files_say_where_to_get_them(tmp_path):
    message = message_of(tmp_path)
    for part in (
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        f"shardwright data digits --format cifar10 --out {tmp_path}",
    ):
        assert part in message
    write(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    assert "cifar-10-batches-py/data_batch_3: cannot be read: [Errno 2]" in message_of(tmp_path)


@pytest.mark.parametrize("encoding", ["bytes", "latin1"])
def test_our_files_are_read_by_pickle_itself(encoding):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2 has moved the function that Python 2's files name
        found = pickle.loads(python_bytes(IMAGES, LABELS, "training batch 1 of 5"), encoding=encoding)
    found = {key if isinstance(key, str) else key.decode(): value for key, value in found.items()}
    assert found["data"].dtype == np.uint8
    assert np.array_equal(found["data"], IMAGES.reshape(23, 3072))
    assert found["labels"] == LABELS.tolist()
    assert len(found["filenames"]) == 23


class Runs:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.mkdir, "posix.mkdir"), (eval, "builtins.eval"), (np.load, "numpy.load"), (getattr, "builtins.getattr")],
)
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, protocol, function, name):
    marker = tmp_path / "ran"
    call = {os.mkdir: (str(marker),), eval: (f"__import__('os').mkdir({str(marker)!r})",)}.get(function, ("x", "y"))
    path = write(tmp_path) / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps({b"data": Runs(function, *call), b"labels": []}, protocol=protocol))
    message = message_of(tmp_path)
    assert not marker.exists()
    assert message.startswith(f"{path}: at offset ")
    assert "which could run code" in message
    assert name.split(".")[1] in message


@given(st.data())
def test_a_damaged_pickle_raises_nothing_else(data):
    contents = bytearray(python_bytes(IMAGES[:1, :, :, :], LABELS[:1], "x"))
    ends = [*range(120), *range(len(contents) - 60, len(contents))]
    for _ in range(data.draw(st.integers(1, 3))):
        contents[data.draw(st.sampled_from(ends))] = data.draw(st.integers(0, 255))
    try:
        byte_array(read_pickle(bytes(contents))["data"])
    except (RefusedPickle, KeyError):
        pass


def test_a_damaged_archive(tmp_path):
    path = archive(tmp_path) / PYTHON.archive
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no archive"):
        path.write_bytes(damaged)
        assert message_of(tmp_path).startswith(f"{path}: cannot be read: ")
        assert "download it again from https://www.cs.toronto.edu/~kriz/" in message_of(tmp_path)
    archive(tmp_path, leave_out="data_batch_3")
    assert message_of(tmp_path).startswith(f"{path}: cifar-10-batches-py/data_batch_3 is not in it")


@pytest.mark.parametrize(("format", "version"), [("cifar10", PYTHON), ("cifar10-binary", BINARY)])
def test_the_digits_as_cifar10(tmp_path, format, version):
    result = CliRunner().invoke(cli, ["data", "digits", "--format", format, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert len(result.output.split()) == 7
    train, test = sw.CIFAR10(tmp_path), sw.CIFAR10(tmp_path, train=False)
    assert (len(train), len(test)) == (1437, 360)
    sw_mnist = tmp_path / "mnist"
    CliRunner().invoke(cli, ["data", "digits", "--out", str(sw_mnist)])
    for ours, theirs in ((train, sw.MNIST(sw_mnist)), (test, sw.MNIST(sw_mnist, train=False))):
        x, y = ours.gather(range(len(ours)))
        grey, labels = theirs.gather(range(len(theirs)))
        assert torch.equal(y, labels)
        for channel in range(3):
            assert torch.equal(x[:, channel, 2:30, 2:30], grey[:, 0])
        assert x.sum() == pytest.approx(3 * float(grey.double().sum()), rel=1e-5)
    folder = tmp_path / version.folder
    sizes = [len(version.read("", (folder / name).read_bytes())[1]) for name in version.file_names(True)]
    assert sizes == [288, 288, 287, 287, 287]
