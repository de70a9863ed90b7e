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
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
import shardwright.data.cifar_pickle as pickle_module
from shardwright.cli import cli
from shardwright.data.cifar import BINARY, PYTHON, VERSIONS, cifar_files, python_bytes
from shardwright.data.cifar_pickle import RefusedPickle, byte_array, pickle_bytes, read_pickle
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


# What a file of the python version looks like, from other writers than ours.
def by_python_3(protocol):
    entries = {b"data": IMAGES.reshape(23, 3072), b"labels": LABELS.tolist(), b"filenames": [b"a.png"] * 23}
    return pickle.dumps(entries, protocol=protocol)


@pytest.mark.parametrize("contents", [by_python_3(2), by_python_3(5)], ids=["2", "5"])
def test_files_written_by_python_3(tmp_path, contents):
    write(tmp_path)
    for number in range(1, 6):
        (tmp_path / "cifar-10-batches-py" / f"data_batch_{number}").write_bytes(contents)
    check(sw.CIFAR10(tmp_path), np.concatenate([IMAGES] * 5), np.concatenate([LABELS] * 5))


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


@pytest.mark.parametrize(
    ("function", "protocol"), [(os.mkdir, 0), (os.mkdir, 4), (eval, 2), (np.load, 4), (getattr, 2)]
)
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, protocol, function):
    marker = tmp_path / "ran"
    call = {os.mkdir: (str(marker),), eval: (f"__import__('os').mkdir({str(marker)!r})",)}.get(function, ("x", "y"))
    path = write(tmp_path) / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps({b"data": Runs(function, *call), b"labels": []}, protocol=protocol))
    message = message_of(tmp_path)
    assert not marker.exists()
    assert message.startswith(f"{path}: at offset ")
    assert "which could run code" in message
    assert function.__name__ in message


@pytest.mark.parametrize(
    "contents",
    [
        b"\x80\x02cnumpy\ndtype\n(U\x02u1tR(dU\x06__dict__K\x01ssb.",  # a state on an instance
        b"\x80\x02cnumpy\ndtype\n(NN\x86b.",  # on a class
        b"\x80\x02cnumpy\ndtype\n}U\x0b__setstate__K\x01s\x86b.",
        b"\x80\x02U\x03abc(U\x01xtR.",  # a call of a string
        b"\x80\x02(cnumpy\ndtype\nU\x02O8o.",
        b"\x80\x02cnumpy\nndarray\n(K\x01tR.",
        b"\x80\x02r\xff\xff\xff\x7f.",  # a place in the memo that would take gigabytes
        b"\x80\x02U\x01pQ.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x05\x97.",  # an outside buffer
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_odd_programs_are_refused(contents):
    with pytest.raises(RefusedPickle, match="at offset"):
        byte_array(read_pickle(contents)["data"])
    assert "__setstate__" in dir(pickle_module._Dtype)
    assert callable(pickle_module._Dtype.__setstate__)


def changed(**entries):
    good = {b"data": IMAGES.reshape(23, 3072), b"labels": LABELS.tolist()}
    return {k: v for k, v in (good | {k.encode(): v for k, v in entries.items()}).items() if v is not None}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (pickle.dumps([1, 2]), "expected a pickled dictionary, got: it holds a list"),
        (pickle.dumps({}), "expected the entries data and labels, got none"),
        (pickle.dumps(changed(labels=None)), "expected the entries data and labels, got data"),
        (pickle.dumps(changed(data=[1])), "expected an array of bytes, got a list"),
        (pickle.dumps(changed(data=IMAGES[0, 0])), r"expected data of shape (images, 3072), got (32, 32)"),
        (pickle.dumps(changed(data=IMAGES.astype(np.float32)), 2), "expected an array of unsigned bytes, got one of"),
        (pickle.dumps(changed(data=np.array([[]] * 2, dtype=object)), 2), "expected an array of unsigned bytes"),
        (pickle.dumps(changed(labels=[1, 2])), "expected 23 labels, one per image, got 2"),
        (pickle.dumps(changed(labels=b"abc")), "expected 23 labels, one per image, got bytes"),
        (pickle.dumps(changed(labels=[*[3] * 22, 10])), "expected labels from 0 to 9, got 10 for image 22"),
        (pickle.dumps(changed(labels=[*[3] * 22, None])), "expected labels from 0 to 9, got None for image 22"),
        (b"", "at offset 0: expected a pickled dictionary, got: the end of the file"),
        (b"not a pickle", "expected a pickled dictionary, got: "),
        (pickle_bytes(changed())[:5000], "expected a pickled dictionary, got: the end of the file"),
    ],
)
def test_a_pickle_with_something_else(tmp_path, contents, message):
    path = write(tmp_path) / "cifar-10-batches-py" / "data_batch_4"
    path.write_bytes(contents)
    assert message_of(tmp_path).startswith(f"{path}: ")
    assert message in message_of(tmp_path)


def test_an_array_that_says_another_shape():
    contents = pickle_bytes({b"data": IMAGES.reshape(23, 3072)})
    lying = contents.replace(b"K\x17M\x00\x0c", b"K\x18M\x00\x0c")  # (23, 3072), (24, 3072)
    assert lying != contents
    with pytest.raises(RefusedPickle, match="expected an array of bytes, got: cannot reshape"):
        byte_array(read_pickle(lying)["data"])


@settings(max_examples=50)
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


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "at offset 0: expected a record of 3073 bytes (label and image), got 0 bytes and the end of the file"),
        (3073 * 2 + 5, "at offset 6146: expected a record of 3073 bytes (label and image), got 5 bytes"),
    ],
)
def test_a_short_binary_file(tmp_path, length, message):
    path = write(tmp_path, BINARY) / "cifar-10-batches-bin" / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:length])
    assert message_of(tmp_path).startswith(f"{path}: {message}")


def test_a_label_that_is_none(tmp_path):
    path = write(tmp_path, BINARY) / "cifar-10-batches-bin" / "data_batch_5.bin"
    contents = bytearray(path.read_bytes())
    contents[3073] = 10
    path.write_bytes(contents)
    assert message_of(tmp_path) == f"{path}: at offset 3073: expected a label from 0 to 9, got 10"


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
