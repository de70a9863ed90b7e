"""The handwritten digits are real images, divided fairly, with the same bytes every time."""

import builtins
import gzip
import hashlib

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import shardwright as sw
from shardwright.cli import cli
from shardwright.data.digits import FORMATS, load_digits, mnist_files, split, write_digits
from shardwright.data.mnist import idx_bytes
from shardwright.errors import DataError, UsageError

NAMES = ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "train-images-idx3-ubyte", "train-labels-idx1-ubyte"]


def run(*arguments):
    return CliRunner().invoke(cli, ["data", "digits", *map(str, arguments)])


def test_the_bytes_are_the_same_on_every_machine():
    digest = hashlib.sha256(b"".join(contents for _, contents in sorted(mnist_files().items()))).hexdigest()
    assert digest == "b3ff757967907d0863cf9fd1c0c5d21f27fa9da0584eb20fbeb6da7076de10a0"


def test_the_split_is_a_partition_in_equal_proportions():
    whole = load_digits()
    parts = split(whole)
    assert [len(part.labels) for part in parts] == [1437, 360]
    rows = np.concatenate([np.column_stack([p.images.reshape(-1, 64), p.labels]) for p in parts])
    before = np.column_stack([whole.images.reshape(-1, 64), whole.labels])
    assert np.array_equal(np.unique(rows, axis=0), np.unique(before, axis=0))
    assert len(np.unique(rows, axis=0)) == 1797
    train, test = (np.bincount(part.labels) for part in parts)
    assert (abs(test - (train + test) * 360 / 1797) < 1).all()


def test_the_command_writes_what_the_reader_reads(tmp_path):
    result = run("--format", "mnist", "--out", tmp_path / "digits")
    assert result.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == NAMES
    assert sorted(line.rsplit("/")[-1] for line in result.output.split()) == NAMES
    train, test = sw.MNIST(tmp_path / "digits"), sw.MNIST(tmp_path / "digits", train=False)
    assert (len(train), len(test)) == (1437, 360)
    nearest = torch.cdist(test.gather(range(360))[0].flatten(1), train.gather(range(1437))[0].flatten(1)).argmin(1)
    same = train.gather(nearest.tolist())[1] == test.gather(range(360))[1]
    assert same.float().mean() > 0.97  # real digits: the nearest neighbour tells nearly all of them


def test_writing_twice_changes_nothing(tmp_path):
    paths = write_digits(tmp_path, "mnist")
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert {path: path.stat().st_mtime_ns for path in write_digits(tmp_path, "mnist")} == before


@pytest.mark.parametrize("name", ["train-labels-idx1-ubyte", "train-labels-idx1-ubyte.gz"])
def test_another_data_set_is_replaced_only_by_force(tmp_path, name):
    contents = idx_bytes(np.array([1, 2, 3], dtype=np.uint8))
    (tmp_path / name).write_bytes(gzip.compress(contents) if name.endswith(".gz") else contents)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(DataError, match=rf"another data set is there already \({name}\).*--out.*--force"):
        write_digits(tmp_path, "mnist")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
    assert run("--out", tmp_path, "--force").exit_code == 0
    assert len(sw.MNIST(tmp_path)) == 1437


def test_a_format_that_is_not_there():
    with pytest.raises(UsageError, match="expected a format among cifar10, cifar10-binary, mnist, got 'lmdb'"):
        write_digits("anywhere", "lmdb")
    assert "mnist" in FORMATS


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the digits cannot be written: .*file/digits: Not a directory"):
        write_digits(tmp_path / "file" / "digits", "mnist")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path, contents):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(DataError, match="No space left"):
        write_digits(tmp_path, "mnist")
    assert list(tmp_path.iterdir()) == []


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'shardwright\[digits\]'"):
        load_digits()
